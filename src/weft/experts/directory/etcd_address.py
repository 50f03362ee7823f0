"""A directory by its address, so that going to several machines changes one word of a configuration.

local                                          in this process
etcd://host:2379                               one etcd
etcd://one:2379,two:2379,three:2379/training   a cluster, and the namespace of the keys (weft, if none is given)
"""

from weft.core.errors import UsageError
from weft.experts.directory.etcd import EtcdDirectory
from weft.experts.directory.etcd_endpoints import EtcdTls
from weft.experts.directory.local import LocalDirectory
from weft.experts.directory.protocol import Directory

_SCHEME = "etcd://"


def open_directory(address: str, *, tls: EtcdTls | None = None, timeout: float = 5.0) -> Directory:
    """The directory at an address, to be closed by the caller. Nothing is connected yet.

    ``tls`` and ``timeout`` (seconds) are those of `EtcdDirectory`. Raises ``UsageError`` for an address that is none,
    and for ``tls`` where nothing is encrypted.
    """
    if address == "local":
        if tls is not None:
            raise UsageError("a directory in this process has no use for certificates; leave tls out")
        return LocalDirectory()
    if not address.startswith(_SCHEME):
        raise UsageError(
            f"a directory's address is {address!r}, wanted 'local' or etcd://host:port[,host:port][/namespace]"
        )
    members, _, namespace = address.removeprefix(_SCHEME).partition("/")
    endpoints = [member for member in members.split(",") if member]
    return EtcdDirectory(endpoints, namespace=namespace or "weft", tls=tls, timeout=timeout)
