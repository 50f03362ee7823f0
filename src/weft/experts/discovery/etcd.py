"""A directory in etcd, for servers and clients on several machines; and etcd's API over gRPC, with failover.

    declare   lease grant, then one key for each expert under it        Directory                etcd
    renew     lease keep-alive                                          lease                    lease
    withdraw  lease revoke: etcd deletes the keys                       expert at an address     key
    get       one range                                                 snapshot's revision      store revision
    watch     one watch, and a range when it has begun                  token                    mod revision of its key
    claim     transaction: if it has no owner, or this address has it                            and the epoch
Keys, each under its server's lease, but for the epoch:

    weft/ffn.3.17 0 a 10.0.0.5:7000      a server of the expert        value: nothing
    weft/ffn.3.17 0 o                    its owner                     value: the address 0 epoch; this epoch and the
                                                                              key's revision are the token
    weft/ 0 epoch                        the directory's epoch         drawn by the first declaration or claim

The byte 0 ends the name, so no name is a prefix of another's keys; and names stand first, so that one range, and one
watch, covers all that concerns the experts with a prefix, in the order in which it happened.

    call ── member 1 ── no answer ──> member 2 ── answer        from now on member 2 goes first

Every call has a deadline, of which each member gets its share. All calls of a directory may be sent twice: a second
lease ends by itself, and a compare-and-swap has compared before.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import ceil
from queue import SimpleQueue
from typing import Any, cast

from weft.experts import extras as extras  # noqa: PLC0414  (says what is not installed, before that is imported)

# isort: split
import grpc

from weft.core.errors import UsageError, listed
from weft.core.validation import Validator
from weft.experts.address import address_fault
from weft.experts.discovery.directory import (
    Directory,
    Entry,
    Lease,
    LocalDirectory,
    Ownership,
    Snapshot,
    Watch,
    check_claim,
    check_declaration,
    lease_lost_error,
    make_snapshot,
    owned_error,
)
from weft.experts.discovery.fencing import new_epoch, number_of, token_of
from weft.experts.errors import DirectoryUnavailableError
from weft.experts.fork_guard import ForkGuard, GrpcThreads, check_fork
from weft.experts.protobuf import load_messages
from weft.experts.tls import Certificates

_grpc = cast("Any", grpc)
_Code = _grpc.StatusCode
RpcError = _grpc.RpcError
_ELSEWHERE = {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.UNKNOWN, _Code.INTERNAL, _Code.CANCELLED}
_LEADER = (("hasleader", "true"),)  # a member that lost the others says so, instead of serving outdated reads
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 10_000),  # etcd allows one every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of any other ping, behind which the one for keepalive waits
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a watch may hear nothing for days, and must notice its end
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
]

MESSAGES = load_messages(__package__ or "", "etcd")
"""The classes of etcd's messages, by their names in its ``rpc.proto``."""

DELETE = 1  # type of an Event
MODIFIED, VALUE = 2, 3  # targets of a Compare, whose result is "equal" unless told otherwise


_SERVICES = {
    "Range": "KV",  # keys of a prefix, and their revision
    "Txn": "KV",  # compare and swap; puts and ranges of one moment
    "LeaseGrant": "Lease",
    "LeaseRevoke": "Lease",
    "LeaseKeepAlive": "Lease",
    "Watch": "Watch",  # changes from now on
}
_PATHS = {name: f"/etcdserverpb.{service}/{name}" for name, service in _SERVICES.items()}
_STREAMS = ("LeaseKeepAlive", "Watch")
_SCHEME = "etcd://"
_PUTS = 100  # of one transaction; etcd takes 128 unless told otherwise
_TRIES = 100  # of a claim that others keep changing
_JOIN = 0.5  # seconds that `close` waits for the thread of a watch; it ends with its call of etcd, at the latest
_RETRY = 0.25  # seconds between two rounds over all members, where the first brought nothing
_PAUSE = 0.02  # and where members accept a watch and then end it
_END = b"\0"
_DIGITS = 8  # more than an epoch has


class RefusedByEtcdError(DirectoryUnavailableError):
    """etcd answered with a refusal. ``missing``: what the call named, such as a lease, does not exist (any more)."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class EtcdTls(Certificates):
    """Certificates for the way to etcd, as PEM bytes or paths; a key if etcd asks for it (``--client-cert-auth``)."""


class EtcdClient:
    """Calls of the members of a cluster, given as host:port. Thread-safe.

    Raises ``UsageError`` that lists invalid addresses, and an invalid timeout.
    """

    def __init__(self, addresses: Sequence[str], tls: EtcdTls | None, timeout: float) -> None:
        with Validator("invalid options of an etcd client") as check:
            check.that(bool(addresses), "there is no endpoint, wanted at least one host:port")
            for one in addresses:
                check.add(*address_fault("an endpoint", one))
            check.seconds("timeout", timeout)
        check_fork("the way to etcd")
        self.addresses, self.timeout = tuple(addresses), timeout
        self.fork_guard, self.grpc_threads = ForkGuard(), GrpcThreads()
        self._first = 0
        self._closed = False
        secure = {} if tls is None else {"credentials": tls.credentials()}
        options = _OPTIONS if tls is None else [*_OPTIONS, *tls.options()]
        channel = _grpc.secure_channel if secure else _grpc.insecure_channel
        self._channels = [channel(address, options=options, **secure) for address in addresses]

    def call(self, name: str, /, *, within: float = float("inf"), **fields: Any) -> Any:
        """The response to a request of these fields, in ``within`` seconds or `timeout`, whichever is less.

        Raises ``DirectoryUnavailableError`` if no member answers, ``RefusedByEtcdError`` if one refuses.
        """
        request = MESSAGES[f"{name}Request"](**fields)
        timeout = min(within, self.timeout)
        end, faults = time.monotonic() + timeout, list[str]()
        for left, index in zip(range(len(self.addresses), 0, -1), self.order(), strict=True):
            seconds = (end - time.monotonic()) / left
            try:
                found = self._call_member(index, name, request, seconds)
                self._first = index
                return found
            except (RpcError, StopIteration, ValueError) as error:
                faults.append(self.fault(index, error))
        raise DirectoryUnavailableError(listed(f"etcd does not answer {_PATHS[name]} within {timeout:g} s:", faults))

    def watch(self, index: int, requests: Any) -> Any:
        """A stream of watch responses from one member; iterate it, and ``cancel`` it."""
        return self.grpc_threads.stream(self._callable(index, "Watch"), requests, metadata=_LEADER)

    def order(self) -> list[int]:
        """The members, in the order in which to try them. ``DirectoryUnavailableError`` after `close`, ``UsageError``
        in a fork.
        """
        check_fork("the way to etcd")
        if self._closed:
            raise DirectoryUnavailableError("the directory is closed")
        count, first = len(self.addresses), self._first
        return [(first + i) % count for i in range(count)]

    def fault(self, index: int, error: Any) -> str:
        """The error of a member in words. Raises ``RefusedByEtcdError`` if the others would refuse as well."""
        address = self.addresses[index]
        if self._closed:
            raise DirectoryUnavailableError("the directory is closed") from None
        if not isinstance(error, RpcError):
            return f"{address}: the connection ended"
        code, text = error.code(), error.details()
        if code not in _ELSEWHERE:
            missing = code is _Code.NOT_FOUND
            raise RefusedByEtcdError(f"etcd at {address} answers {code.name}: {text}", missing=missing) from None
        return f"{address}: {code.name}: {text}"

    def close(self) -> None:
        """End all calls. Again is no error."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _call_member(self, index: int, name: str, request: Any, seconds: float) -> Any:
        call = self._callable(index, name)
        if name not in _STREAMS:
            return call(request, timeout=seconds, metadata=_LEADER)
        answers = self.grpc_threads.stream(call, iter([request]), timeout=seconds, metadata=_LEADER)
        try:
            return next(answers)
        finally:
            answers.cancel()

    def _callable(self, index: int, name: str) -> Any:
        channel, request, response = self._channels[index], MESSAGES[f"{name}Request"], MESSAGES[f"{name}Response"]
        make = channel.stream_stream if name in _STREAMS else channel.unary_unary
        return make(_PATHS[name], request.SerializeToString, response.FromString)


def open_directory(address: str, *, tls: EtcdTls | None = None, timeout: float = 5.0) -> Directory:
    """The directory at an address, to be closed by the caller. Nothing is connected yet.

        local                                          in this process
        etcd://one:2379,two:2379,three:2379/training   members of a cluster, and the keys' namespace (default: weft)

    Raises ``UsageError`` for an invalid address, and for ``tls`` where nothing is encrypted.
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


class EtcdDirectory(Directory):
    """The protocol `Directory`, in etcd. A context manager.

    Leases count in whole seconds here, and etcd looks for ended ones twice a second: a ``ttl`` is rounded up, and a
    dead server is seen up to half a second later.

    Args:
        endpoints: the members of the cluster, as host:port; one after the other is tried.
        namespace: of the keys; directories with different ones share an etcd.
        tls: certificates; None: nothing is encrypted.
        timeout: seconds for each call, over all members.

    Raises ``UsageError`` for invalid addresses and options. Nothing is connected before the first call.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        namespace: str = "weft",
        tls: EtcdTls | None = None,
        timeout: float = 5.0,
    ) -> None:
        self._keys = EtcdKeys(namespace)
        self._client = EtcdClient([endpoints] if isinstance(endpoints, str) else endpoints, tls, timeout)
        self._watches: list[EtcdWatch] = []
        self._epoch = 0  # as last seen; every claim compares it

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        """See `Directory.declare`. The lease's ``ttl`` is what etcd granted: whole seconds, at least its minimum."""
        names = check_declaration(uids, address, ttl)
        granted = self._client.call("LeaseGrant", TTL=ceil(ttl))
        lease = Lease(granted.ID, names, address, float(granted.TTL))
        puts = [{"request_put": {"key": self._keys.entry(uid, address), "lease": lease.number}} for uid in names]
        try:
            self._epoch = self._current_epoch()
            for start in range(0, len(puts), _PUTS):
                self._put(lease, success=puts[start : start + _PUTS])
        except BaseException:
            with suppress(DirectoryUnavailableError):  # then the lease ends by itself
                self.withdraw(lease)
            raise
        return lease

    def renew(self, lease: Lease) -> None:
        answer = self._client.call("LeaseKeepAlive", ID=lease.number, within=lease.ttl / 3)  # else a slow one takes all
        if answer.TTL <= 0:
            raise lease_lost_error(lease)

    def withdraw(self, lease: Lease) -> None:
        try:
            self._client.call("LeaseRevoke", ID=lease.number)
        except RefusedByEtcdError as error:
            if not error.missing:
                raise

    def get(self, prefix: str = "") -> Snapshot:
        start, end = self._keys.range(prefix)
        found = self._client.call("Range", key=start, range_end=end)
        return make_snapshot(found.header.revision, filter(None, map(self._keys.read, found.kvs)))

    def watch(self, prefix: str = "") -> "EtcdWatch":
        """See `Directory.watch`. It has a thread, which ends with `close`."""
        made = EtcdWatch(self._client, self._keys, prefix)
        self._watches = [*(each for each in self._watches if not each.closed.is_set()), made]
        return made

    def claim(self, uid: str, lease: Lease) -> Ownership:
        check_claim(uid, lease)
        key, seen = self._keys.owner(uid), 0
        for _ in range(_TRIES):
            epoch = self._epoch
            same_epoch = {"target": VALUE, "key": self._keys.epoch, "value": str(epoch).encode()}
            put = {"key": key, "value": f"{lease.address}\0{epoch}".encode(), "lease": lease.number}
            answer = self._put(
                lease,
                compare=[_unchanged(key, seen), same_epoch],
                success=[{"request_put": put}],
                failure=[{"request_range": {"key": key}}],
            )
            if answer.succeeded:
                return Ownership(uid, lease.address, token_of(epoch, answer.header.revision))
            self._epoch = self._current_epoch()
            found = answer.responses[0].response_range.kvs
            there = self._keys.ownership(uid, found[0]).address if found else lease.address
            if there != lease.address:
                raise owned_error(uid, there, lease)
            seen = found[0].mod_revision if found else 0
        raise DirectoryUnavailableError(
            f"the owner of expert {uid!r} changed {_TRIES} times while {lease.address} claimed it"
        )

    def release(self, ownership: Ownership) -> None:
        key = self._keys.owner(ownership.uid)
        compare, delete = _unchanged(key, number_of(ownership.token)), {"request_delete_range": {"key": key}}
        self._client.call("Txn", compare=[compare], success=[delete])

    def close(self) -> None:
        """See `Directory.close`. In a fork of its process it does nothing."""
        if not self._client.fork_guard.here:
            return
        self._client.close()
        for each in self._watches:
            each.close()
        self._watches = []
        self._client.grpc_threads.wait()

    def __enter__(self) -> "EtcdDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _current_epoch(self) -> int:
        """The directory's epoch, drawn now if there is none."""
        key, drawn = self._keys.epoch, new_epoch()
        answer = self._client.call(
            "Txn",
            compare=[_unchanged(key, 0)],
            success=[{"request_put": {"key": key, "value": str(drawn).encode()}}],
            failure=[{"request_range": {"key": key}}],
        )
        return drawn if answer.succeeded else _read_epoch(answer.responses[0].response_range.kvs[0].value)

    def _put(self, lease: Lease, **fields: Any) -> Any:
        """A transaction that puts under a lease."""
        try:
            return self._client.call("Txn", **fields)
        except RefusedByEtcdError as error:
            if error.missing:
                raise lease_lost_error(lease) from None
            raise


def _unchanged(key: bytes, revision: int) -> dict[str, Any]:
    """A comparison: the key was last written at this revision; 0: it is not there."""
    return {"target": MODIFIED, "key": key, "mod_revision": revision}


class EtcdKeys:
    """The keys below one namespace. Directories of different namespaces share an etcd without seeing each other."""

    def __init__(self, namespace: str) -> None:
        if not namespace or "\0" in namespace:
            raise UsageError(f"namespace is {namespace!r}, wanted a name without the character 0")
        self._root = namespace.encode() + b"/"
        self.epoch = self._root + _END + b"epoch"  # no expert's name is empty

    def entry(self, uid: str, address: str) -> bytes:
        """The key of one server of an expert."""
        return self._root + uid.encode() + _END + b"a" + address.encode()

    def owner(self, uid: str) -> bytes:
        """The key of an expert's owner."""
        return self._root + uid.encode() + _END + b"o"

    def range(self, prefix: str) -> tuple[bytes, bytes]:
        """First key, and first key behind the last, of all experts whose name starts with ``prefix``."""
        start = self._root + prefix.encode()
        return start, start[:-1] + bytes([start[-1] + 1])  # UTF-8 has no byte 255

    def ownership(self, uid: str, kv: Any) -> Ownership:
        """The owner, out of a KeyValue. An address that is not UTF-8, put there by others, is shown escaped."""
        address, _, epoch = kv.value.partition(_END)
        token = token_of(_read_epoch(epoch), kv.mod_revision)
        return Ownership(uid, address.decode("utf-8", "backslashreplace"), token)

    def read(self, kv: Any) -> Entry | None:
        """What a KeyValue says; None for the epoch, and for a key that others put there."""
        uid, _, rest = kv.key.removeprefix(self._root).partition(_END)
        try:
            name, address = uid.decode(), rest[1:].decode()
        except UnicodeDecodeError:
            return None
        if rest[:1] == b"o":
            return name, self.ownership(name, kv)
        return (name, address) if rest[:1] == b"a" else None


def _read_epoch(value: bytes) -> int:
    """The epoch in a value; 0 if there is none."""
    return int(value) if value.isdigit() and len(value) < _DIGITS else 0


class EtcdWatch(Watch):
    """The protocol `Watch`, over whichever member answers.

        member 1 ── began ── range: snapshot 6 ── events 7, 8 ── gone        what happens between the two streams
        member 2 ── began ── range: snapshot 9 ── event 10 ...               is in the second snapshot
        all gone: the last snapshot, and a new round after a while

    A stream begins at the revision of now, and the range is asked for when it has begun, so no change is in neither; of
    those in both the older are skipped. So an etcd that forgot old revisions, or has lost its data, needs nothing more.
    """

    def __init__(self, client: EtcdClient, keys: EtcdKeys, prefix: str) -> None:
        self.closed = threading.Event()
        self._client, self._keys = client, keys
        start, end = keys.range(prefix)
        self._range: dict[str, Any] = {"key": start, "range_end": end}
        self._entries: dict[bytes, Entry] = {}
        self._snapshot = Snapshot()
        self._call: Any = None
        self._begun: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="weft-etcd-watch", daemon=True)
        self._thread.start()
        try:
            self._begun.result(client.timeout)
        except Exception as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise DirectoryUnavailableError(
                    f"etcd did not begin to be watched within {client.timeout:g} s"
                ) from None
            raise

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def close(self) -> None:
        """See `Watch.close`. In a fork of its process it does nothing."""
        if not self._client.fork_guard.here:
            return
        self.closed.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(_JOIN)

    def _run(self) -> None:
        """The thread: one stream after the other."""
        while not self.closed.is_set():
            before = self._snapshot
            try:
                faults = [self._follow(index) for index in self._client.order()]
                failure: Exception = DirectoryUnavailableError(f"etcd cannot be watched: {'; '.join(faults)}")
            except Exception as error:
                failure = error
            if self._snapshot is before:
                self._away_since = self._away_since or time.monotonic()
                if not self._begun.done():
                    self._begun.set_exception(failure)
            self.closed.wait(_RETRY if self._snapshot is before else _PAUSE)

    def _follow(self, index: int) -> str:
        """Read one member until its stream ends; returns why. Raises ``DirectoryUnavailableError`` if others would
        refuse as well.
        """
        requests: SimpleQueue[Any] = SimpleQueue()
        requests.put(MESSAGES["WatchRequest"](create_request=self._range))
        self._call = call = self._client.watch(index, iter(requests.get, None))
        timer = threading.Timer(self._client.timeout, call.cancel)  # until the member says that it began
        timer.daemon = True
        timer.start()
        try:
            if self.closed.is_set():
                return "closed"
            for response in call:
                timer.cancel()
                if response.canceled:
                    return f"etcd ended the watch: {response.cancel_reason or 'it gave no reason'}"
                self._apply(response)
                self._away_since = None
                if not self._begun.done():
                    self._begun.set_result(None)
        except (RpcError, ValueError) as error:
            return self._client.fault(index, error)
        finally:
            timer.cancel()
            requests.put(None)
            call.cancel()
        return f"{self._client.addresses[index]}: the stream ended"

    def _apply(self, response: Any) -> None:
        """Take the snapshot from a range when the stream has begun, and from the events that came after it."""
        if response.created:
            found = self._client.call("Range", **self._range)
            revision, before = found.header.revision, {}
            changes = {kv.key: self._keys.read(kv) for kv in found.kvs}
        else:
            later = [event for event in response.events if event.kv.mod_revision > self._snapshot.revision]
            revision, before = later[-1].kv.mod_revision if later else self._snapshot.revision, self._entries
            changes = {each.kv.key: None if each.type == DELETE else self._keys.read(each.kv) for each in later}
        self._entries = {key: entry for key, entry in (before | changes).items() if entry is not None}
        self._snapshot = make_snapshot(revision, self._entries.values())
