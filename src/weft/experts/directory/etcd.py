"""A directory in etcd, for servers and clients on several machines. Nothing else changes but the address.

    declare   lease grant, then one key for each expert under it        Directory                etcd
    renew     lease keep-alive                                          lease                    lease
    withdraw  lease revoke: etcd deletes the keys                       expert at an address     key
    get       one range                                                 snapshot's revision      store revision
    watch     one watch                                                 event                    put or delete
    claim     transaction: if nobody owns it, or this address does      token                    mod revision of its key
                                                                                  and a number that etcd keeps

Thread-safe; needs the ``experts`` extra (grpcio, protobuf). Leases count in whole seconds here, and etcd looks for
ended ones twice a second: a ``ttl`` is rounded up, and a server that died is seen up to half a second later.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
from typing import Any

from weft.core.errors import UsageError, listed
from weft.experts import extras as extras  # noqa: PLC0414  (says what is not installed)
from weft.experts.checks import seconds_fault
from weft.experts.directory.etcd_endpoints import Endpoints, EtcdTls, RefusedByEtcdError
from weft.experts.directory.etcd_keys import Keys, life_told
from weft.experts.directory.etcd_messages import (
    CREATED,
    EQUAL,
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    MODIFIED,
    RANGE,
    TXN,
    VALUE,
    message,
)
from weft.experts.directory.etcd_watch import EtcdWatch
from weft.experts.directory.protocol import Lease
from weft.experts.directory.snapshot import Ownership, Snapshot
from weft.experts.directory.token import new_life, number_of, token_of
from weft.experts.errors import AwayError, LeaseLostError, OwnedError

_PUTS = 100  # of one transaction; etcd takes 128 unless told otherwise
_TRIES = 100  # of a claim that others keep changing
_Compare = message("Compare")


class EtcdDirectory:
    """The protocol `Directory`, in etcd. A context manager.

    Args:
        endpoints: the members of the cluster, as host:port; one after the other is tried.
        namespace: of the keys; directories with different ones share an etcd.
        tls: certificates; None: nothing is encrypted.
        timeout: seconds for each call, over all members.
        history: events that may wait for the reader of a watch.

    Raises ``UsageError`` for addresses that are none, and options that make no sense. Nothing is connected before the
    first call.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        namespace: str = "weft",
        tls: EtcdTls | None = None,
        timeout: float = 5.0,
        history: int = 65536,
    ) -> None:
        if history < 1:
            raise UsageError(f"history is {history}, wanted at least 1")
        self._keys = Keys(namespace)
        self._endpoints = Endpoints([endpoints] if isinstance(endpoints, str) else endpoints, tls, timeout)
        self._history = history
        self._watches: list[EtcdWatch] = []
        self._life = 0  # as last seen; every claim compares it

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        """See `Directory.declare`. The lease's ``ttl`` is what etcd granted: whole seconds, at least its minimum."""
        names = (uids,) if isinstance(uids, str) else tuple(dict.fromkeys(uids))
        _check_declaration(names, address, ttl)
        granted = self._endpoints.call(LEASE_GRANT, LEASE_GRANT.request(TTL=ceil(ttl)))
        lease = Lease(granted.ID, names, address, float(granted.TTL))
        try:
            self._life = self._begun()
            for some in _cut(names):
                request = TXN.request()
                for uid in some:
                    put = request.success.add().request_put
                    put.key, put.lease = self._keys.entry(uid, address), lease.number
                self._txn(request, lease)
        except BaseException:
            self._abandon(lease)
            raise
        return lease

    def renew(self, lease: Lease) -> None:
        """See `Directory.renew`."""
        request = LEASE_KEEP_ALIVE.request(ID=lease.number)
        answer = self._endpoints.call(LEASE_KEEP_ALIVE, request, lease.ttl / 3)  # else one slow answer takes all of it
        if answer.TTL <= 0:
            raise _ended(lease)

    def withdraw(self, lease: Lease) -> None:
        """See `Directory.withdraw`."""
        try:
            self._endpoints.call(LEASE_REVOKE, LEASE_REVOKE.request(ID=lease.number))
        except RefusedByEtcdError as error:
            if not error.missing:
                raise

    def get(self, prefix: str = "") -> Snapshot:
        """See `Directory.get`."""
        start, end = self._keys.range(prefix)
        return self._keys.snapshot(self._endpoints.call(RANGE, RANGE.request(key=start, range_end=end)))

    def watch(self, prefix: str = "", after: int | None = None) -> EtcdWatch:
        """See `Directory.watch`. It has a thread, which ends with `close`."""
        made = EtcdWatch(self._endpoints, self._keys, prefix, after, self._history)
        self._watches = [*(each for each in self._watches if not each.closed), made]
        return made

    def claim(self, uid: str, lease: Lease) -> Ownership:
        """See `Directory.claim`."""
        if uid not in lease.uids:
            raise UsageError(f"expert {uid!r} was not declared under the lease of {lease.address}: declare it first")
        key, seen = self._keys.owner(uid), 0
        for _ in range(_TRIES):
            life = self._life
            same = _Compare(result=EQUAL, target=VALUE, key=self._keys.life, value=str(life).encode())
            request = TXN.request(compare=[_unchanged(key, seen), same])
            put = request.success.add().request_put
            put.key, put.value, put.lease = key, self._keys.owned(lease.address, life), lease.number
            request.failure.add().request_range.key = key
            answer = self._txn(request, lease)
            if answer.succeeded:
                return Ownership(uid, lease.address, token_of(life, answer.header.revision))
            self._life = self._begun()
            found = answer.responses[0].response_range.kvs
            there = self._keys.ownership(uid, found[0]).address if found else lease.address
            if there != lease.address:
                raise OwnedError(f"expert {uid!r} is owned by {there}, and {lease.address} cannot claim it", there)
            seen = found[0].mod_revision if found else 0
        raise AwayError(f"the owner of expert {uid!r} changed {_TRIES} times while {lease.address} claimed it")

    def release(self, ownership: Ownership) -> None:
        """See `Directory.release`."""
        key = self._keys.owner(ownership.uid)
        request = TXN.request(compare=[_unchanged(key, number_of(ownership.token))])
        request.success.add().request_delete_range.key = key
        self._endpoints.call(TXN, request)

    def close(self) -> None:
        """See `Directory.close`. In a fork of its process it does nothing."""
        if not self._endpoints.fork_guard.here:
            return
        self._endpoints.close()
        for each in self._watches:
            each.close()
        self._watches = []
        self._endpoints.grpc_threads.wait()

    def __enter__(self) -> "EtcdDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begun(self) -> int:
        """Which life of the directory this is: what was drawn for it; or it begins now."""
        key, drawn = self._keys.life, new_life()
        request = TXN.request(compare=[_unchanged(key, 0)])
        put = request.success.add().request_put
        put.key, put.value = key, str(drawn).encode()
        request.failure.add().request_range.key = key
        answer = self._endpoints.call(TXN, request)
        return drawn if answer.succeeded else life_told(answer.responses[0].response_range.kvs[0].value)

    def _txn(self, request: Any, lease: Lease) -> Any:
        """A transaction that puts under a lease."""
        try:
            return self._endpoints.call(TXN, request)
        except RefusedByEtcdError as error:
            if error.missing:
                raise _ended(lease) from None
            raise

    def _abandon(self, lease: Lease) -> None:
        """Of a declaration that failed half-way nothing is to be seen; if etcd is away, it ends by itself."""
        try:
            self.withdraw(lease)
        except AwayError:
            return


def _unchanged(key: bytes, revision: int) -> Any:
    """A comparison: the key was last written at this revision; 0: it is not there."""
    if revision:
        return _Compare(result=EQUAL, target=MODIFIED, key=key, mod_revision=revision)
    return _Compare(result=EQUAL, target=CREATED, key=key, create_revision=0)


def _ended(lease: Lease) -> LeaseLostError:
    return LeaseLostError(
        f"the lease {lease.number} of {lease.address} ended: it was not renewed within {lease.ttl:g} s, or was "
        "withdrawn. Declare again"
    )


def _cut(names: Sequence[str]) -> Iterator[list[str]]:
    left = iter(names)
    while some := list(islice(left, _PUTS)):
        yield some


def _check_declaration(uids: Sequence[str], address: str, ttl: float) -> None:
    faults = [] if uids else ["there is no expert, wanted at least one"]
    faults += ["an expert's name is empty"] * any(not uid for uid in uids)
    faults += [f"the name {uid!r} holds the character 0" for uid in uids if "\0" in uid]
    faults += ["the address is empty"] * (not address)
    faults += seconds_fault("ttl", ttl)
    if faults:
        raise UsageError(listed("this cannot be declared:", faults))
