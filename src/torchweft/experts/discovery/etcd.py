"""A directory in etcd, for servers and clients on several machines; and etcd's API over gRPC, with failover.

    declare   lease grant, then one key for each expert under it        Directory                etcd
    renew     lease keep-alive                                          lease                    lease
    withdraw  lease revoke: etcd deletes the keys                       expert at an address     key
    get       one range                                                 snapshot's revision      store revision
    watch     one watch, and a range when it has begun                  token                    mod revision of its key
    claim     transaction: if it has no owner, or this address has it                            and the epoch
Keys, each under its server's lease, except for the epoch:

    torchweft/ffn.3.17 0 a 10.0.0.5:7000   a server of the expert   value: empty
    torchweft/ffn.3.17 0 o                 its owner                value: the address 0 epoch; this epoch and the
                                                                    key's revision are the token
    torchweft/ 0 epoch                     the directory's epoch    drawn by the first declaration or claim

The byte 0 ends the name, so that a name is never a prefix of another's keys. Names come first, so that one range and
one watch cover all keys of the experts with a prefix, in the order of their changes.

gRPC's own load balancing cannot replace the loop over members, because it does not move a call from a member that
hangs. Every call has a deadline, of which each member gets a share. All calls can be sent twice: a second lease ends by
itself, and a compare-and-swap succeeds only once.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import ceil
from queue import SimpleQueue
from typing import Any, cast

from torchweft.experts import extras as extras  # noqa: PLC0414  (reports missing packages, before they are imported)

# isort: split
import grpc

from torchweft.core.errors import UsageError, join_faults
from torchweft.core.validation import Validator
from torchweft.experts.address import address_fault
from torchweft.experts.discovery.directory import (
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
from torchweft.experts.discovery.fencing import new_epoch, number_of, token_of
from torchweft.experts.errors import DirectoryUnavailableError
from torchweft.experts.fork_guard import ContextManager, ForkGuard, GrpcThreads, check_fork
from torchweft.experts.protobuf import load_messages
from torchweft.experts.tls import Certificates

_grpc = cast("Any", grpc)
_Code = _grpc.StatusCode
RpcError = _grpc.RpcError
_ELSEWHERE = {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.UNKNOWN, _Code.INTERNAL, _Code.CANCELLED}
_LEADER = (("hasleader", "true"),)  # an isolated member then returns an error instead of stale data
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 10_000),  # etcd allows one every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # for gRPC's other pings, which delay those for keepalive
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a watch can be idle for days, and must still notice its end
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
]

# The classes of etcd's messages, by their names in its ``rpc.proto``.
MESSAGES = load_messages(__package__ or "", "etcd")

DELETE = 1  # type of an Event
MODIFIED, VALUE = 2, 3  # targets of a Compare, whose default result is "equal"

_CALLS = {"KV": ("Range", "Txn"), "Lease": ("LeaseGrant", "LeaseRevoke", "LeaseKeepAlive"), "Watch": ("Watch",)}
_PATHS = {name: f"/etcdserverpb.{service}/{name}" for service, names in _CALLS.items() for name in names}
_STREAMS = ("LeaseKeepAlive", "Watch")
_SCHEME = "etcd://"
_PUTS = 100  # in one transaction; etcd's default limit is 128
_TRIES = 100  # of a claim while others change the owner
_JOIN = 0.5  # longest wait of `close` for the thread of a watch, which ends with its call of etcd at the latest
_RETRY = 0.25  # seconds between two rounds over all members, if the first brought no snapshot
_PAUSE = 0.02  # otherwise, e.g. if members accept a watch and then end it
_END = b"\0"
_DIGITS = 8  # more than an epoch has


class RefusedByEtcdError(DirectoryUnavailableError):
    """etcd answered with an error. ``missing``: the lease (or another object) of the call does not exist any more."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class EtcdTls(Certificates):
    """Certificates for connections to etcd, as PEM bytes or paths. etcd's ``--client-cert-auth`` requires a key."""


class EtcdClient:
    """Calls of the members of a cluster, given as host:port. Thread-safe. Raises ``UsageError`` for invalid options."""

    def __init__(self, addresses: Sequence[str], tls: EtcdTls | None, timeout: float) -> None:
        with Validator("invalid options of an etcd client") as check:
            check.require(bool(addresses), "the list of endpoints is empty, wanted at least one host:port")
            for address in addresses:
                check.add(*address_fault("an endpoint", address))
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
        """The response to a request with these fields. Raises ``DirectoryUnavailableError`` if all members fail."""
        request = MESSAGES[f"{name}Request"](**fields)
        timeout = min(within, self.timeout)
        end, faults = time.monotonic() + timeout, list[str]()
        for remaining, index in zip(range(len(self.addresses), 0, -1), self.member_order(), strict=True):
            seconds = (end - time.monotonic()) / remaining
            try:
                response = self._call_member(index, name, request, seconds)
                # Without a lock: with a stale value, another thread only tries the members in a worse order.
                self._first = index
                return response
            except (RpcError, StopIteration, ValueError) as error:
                faults.append(self.explain_error(index, error))
        raise DirectoryUnavailableError(join_faults(f"{_PATHS[name]} had no answer within {timeout:g} s:", faults))

    def watch(self, index: int, requests: Any) -> Any:
        return self.grpc_threads.stream(self._callable(index, "Watch"), requests, metadata=_LEADER)

    def member_order(self) -> list[int]:
        """The order in which to try members. Raises ``DirectoryUnavailableError`` after `close`."""
        check_fork("the way to etcd")
        if self._closed:
            raise DirectoryUnavailableError("the directory is closed")
        count, first = len(self.addresses), self._first
        return [(first + i) % count for i in range(count)]

    def explain_error(self, index: int, error: Any) -> str:
        """The error of a member in words. Raises ``RefusedByEtcdError`` if other members would return it too."""
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
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _call_member(self, index: int, name: str, request: Any, seconds: float) -> Any:
        call = self._callable(index, name)
        if name not in _STREAMS:
            return call(request, timeout=seconds, metadata=_LEADER)
        # etcd offers renewals as a stream only. One stream for each renewal moves to another member like any call.
        answers = self.grpc_threads.stream(call, iter([request]), timeout=seconds, metadata=_LEADER)
        try:
            return next(answers)
        finally:
            answers.cancel()

    def _callable(self, index: int, name: str) -> Any:
        channel, request, response = self._channels[index], MESSAGES[f"{name}Request"], MESSAGES[f"{name}Response"]
        make_callable = channel.stream_stream if name in _STREAMS else channel.unary_unary
        return make_callable(_PATHS[name], request.SerializeToString, response.FromString)


def open_directory(address: str, *, tls: EtcdTls | None = None, timeout: float = 5.0) -> Directory:
    """The directory at an address, without connecting. The caller closes it. Raises ``UsageError``.

    local                                          in this process
    etcd://one:2379,two:2379,three:2379/training   members of a cluster, the keys' namespace (default: torchweft)
    """
    if address == "local":
        if tls is not None:
            raise UsageError("a directory in this process does not use certificates; leave tls out")
        return LocalDirectory()
    if not address.startswith(_SCHEME):
        raise UsageError(f"a directory is {address!r}, wanted 'local' or etcd://host:port[,host:port][/namespace]")
    members, _, namespace = address.removeprefix(_SCHEME).partition("/")
    endpoints = [member for member in members.split(",") if member]
    return EtcdDirectory(endpoints, namespace=namespace or "torchweft", tls=tls, timeout=timeout)


class EtcdDirectory(ContextManager, Directory):
    """The protocol `Directory`, in etcd. A context manager. The first call connects.

    Args:
        endpoints: the members of the cluster, as host:port, tried one after the other.
        namespace: of the keys; directories with different namespaces can share an etcd.
        timeout: seconds for each call, over all members.

    Raises ``UsageError`` for invalid addresses and options.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        namespace: str = "torchweft",
        tls: EtcdTls | None = None,
        timeout: float = 5.0,
    ) -> None:
        self._keys = EtcdKeys(namespace)
        self._client = EtcdClient([endpoints] if isinstance(endpoints, str) else endpoints, tls, timeout)
        self._watches: list[EtcdWatch] = []
        self._epoch = 0  # the last known one; every claim compares it

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        names = check_declaration(uids, address, ttl)
        # Whole seconds, and at least etcd's minimum. etcd looks for expired leases twice a second.
        granted = self._client.call("LeaseGrant", TTL=ceil(ttl))
        lease = Lease(granted.ID, names, address, float(granted.TTL))
        puts = [{"request_put": {"key": self._keys.entry_key(uid, address), "lease": lease.number}} for uid in names]
        try:
            self._epoch = self._current_epoch()
            for start in range(0, len(puts), _PUTS):
                self._put_under_lease(lease, success=puts[start : start + _PUTS])
        except BaseException:  # also Ctrl-C: part of the experts must not stay listed
            with suppress(DirectoryUnavailableError):  # then the lease ends by itself
                self.withdraw(lease)
            raise
        return lease

    def renew(self, lease: Lease) -> None:
        # A third of the lease, so that a slow renewal leaves time for another one.
        answer = self._client.call("LeaseKeepAlive", ID=lease.number, within=lease.ttl / 3)
        if answer.TTL <= 0:
            raise lease_lost_error(lease)

    def withdraw(self, lease: Lease) -> None:
        try:
            self._client.call("LeaseRevoke", ID=lease.number)
        except RefusedByEtcdError as error:
            if not error.missing:
                raise

    def get(self, prefix: str = "") -> Snapshot:
        start, end = self._keys.key_range(prefix)
        response = self._client.call("Range", key=start, range_end=end)
        return make_snapshot(response.header.revision, filter(None, map(self._keys.read_entry, response.kvs)))

    def watch(self, prefix: str = "") -> "EtcdWatch":
        watch = EtcdWatch(self._client, self._keys, prefix)
        self._watches = [*(other for other in self._watches if not other.closed.is_set()), watch]
        return watch

    def claim(self, uid: str, lease: Lease) -> Ownership:
        check_claim(uid, lease)
        # The transaction compares the owner's revision and the epoch, both as last seen: it fails if another server
        # claims in between, or if etcd has lost its data, so that a token never has the epoch of lost data.
        key, seen_revision = self._keys.owner_key(uid), 0
        for _ in range(_TRIES):
            epoch = self._epoch
            same_epoch = {"target": VALUE, "key": self._keys.epoch, "value": str(epoch).encode()}
            put = {"key": key, "value": f"{lease.address}\0{epoch}".encode(), "lease": lease.number}
            answer = self._put_under_lease(
                lease,
                compare=[_compare_revision(key, seen_revision), same_epoch],
                success=[{"request_put": put}],
                failure=[{"request_range": {"key": key}}],
            )
            if answer.succeeded:
                return Ownership(uid, lease.address, token_of(epoch, answer.header.revision))
            self._epoch = self._current_epoch()
            owners = answer.responses[0].response_range.kvs
            owner_address = self._keys.read_ownership(uid, owners[0]).address if owners else lease.address
            if owner_address != lease.address:
                raise owned_error(uid, owner_address, lease)
            seen_revision = owners[0].mod_revision if owners else 0
        raise DirectoryUnavailableError(f"the owner of expert {uid!r} changed {_TRIES} times during one claim")

    def release(self, ownership: Ownership) -> None:
        key = self._keys.owner_key(ownership.uid)
        compare, delete = _compare_revision(key, number_of(ownership.token)), {"request_delete_range": {"key": key}}
        self._client.call("Txn", compare=[compare], success=[delete])

    def close(self) -> None:
        # Does nothing in a fork, where gRPC must not be touched.
        if not self._client.fork_guard.here:
            return
        self._client.close()
        for watch in self._watches:
            watch.close()
        self._watches = []
        self._client.grpc_threads.wait()

    def _current_epoch(self) -> int:
        # Drawn now if there is none. The comparison lets only one of several first servers draw it.
        key, drawn = self._keys.epoch, new_epoch()
        answer = self._client.call(
            "Txn",
            compare=[_compare_revision(key, 0)],
            success=[{"request_put": {"key": key, "value": str(drawn).encode()}}],
            failure=[{"request_range": {"key": key}}],
        )
        return drawn if answer.succeeded else _read_epoch(answer.responses[0].response_range.kvs[0].value)

    def _put_under_lease(self, lease: Lease, **fields: Any) -> Any:
        try:
            return self._client.call("Txn", **fields)
        except RefusedByEtcdError as error:
            if error.missing:
                raise lease_lost_error(lease) from None
            raise


def _compare_revision(key: bytes, revision: int) -> dict[str, Any]:
    # Revision 0 means that the key does not exist.
    return {"target": MODIFIED, "key": key, "mod_revision": revision}


class EtcdKeys:
    def __init__(self, namespace: str) -> None:
        if not namespace or "\0" in namespace:
            raise UsageError(f"namespace is {namespace!r}, wanted a name without the character 0")
        self._root = namespace.encode() + b"/"
        self.epoch = self._root + _END + b"epoch"  # unique, because experts' names are not empty

    def entry_key(self, uid: str, address: str) -> bytes:
        return self._root + uid.encode() + _END + b"a" + address.encode()

    def owner_key(self, uid: str) -> bytes:
        return self._root + uid.encode() + _END + b"o"

    def key_range(self, prefix: str) -> tuple[bytes, bytes]:
        start = self._root + prefix.encode()
        return start, start[:-1] + bytes([start[-1] + 1])  # UTF-8 has no byte 255

    def read_ownership(self, uid: str, kv: Any) -> Ownership:
        # Bytes that are not UTF-8 come from other programs, and are escaped.
        address, _, epoch = kv.value.partition(_END)
        token = token_of(_read_epoch(epoch), kv.mod_revision)
        return Ownership(uid, address.decode("utf-8", "backslashreplace"), token)

    def read_entry(self, kv: Any) -> Entry | None:
        uid, _, rest = kv.key.removeprefix(self._root).partition(_END)
        try:
            name, address = uid.decode(), rest[1:].decode()
        except UnicodeDecodeError:
            return None
        if rest[:1] == b"o":
            return name, self.read_ownership(name, kv)
        return (name, address) if rest[:1] == b"a" else None


def _read_epoch(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) < _DIGITS else 0


class EtcdWatch(Watch):
    """The protocol `Watch`, over any member that answers.

        member 1 ── began ── range: snapshot 6 ── events 7, 8 ── gone        changes between the two streams
        member 2 ── began ── range: snapshot 9 ── event 10 ...               are in the second snapshot
        all gone: the last snapshot, and a new round after a pause

    The range is requested after the stream has begun. Every change is therefore in the range or in the stream; changes
    in both are skipped. Resuming at the last revision would be less work, but fails if etcd has compacted that
    revision.
    """

    def __init__(self, client: EtcdClient, keys: EtcdKeys, prefix: str) -> None:
        self.closed = threading.Event()
        self._client, self._keys = client, keys
        start, end = keys.key_range(prefix)
        self._range: dict[str, Any] = {"key": start, "range_end": end}
        self._entries: dict[bytes, Entry] = {}
        self._snapshot = Snapshot()
        self._call: Any = None
        self._begun: Future[None] = Future()
        self._thread = threading.Thread(target=self._follow_members, name="torchweft-etcd-watch", daemon=True)
        self._thread.start()
        try:
            self._begun.result(client.timeout)
        except Exception as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise DirectoryUnavailableError(f"etcd did not start a watch within {client.timeout:g} s") from None
            raise

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def close(self) -> None:
        if not self._client.fork_guard.here:
            return
        self.closed.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(_JOIN)

    def _follow_members(self) -> None:
        while not self.closed.is_set():
            before = self._snapshot
            try:
                faults = [self._follow_member(index) for index in self._client.member_order()]
                failure: Exception = DirectoryUnavailableError(f"etcd cannot be watched: {'; '.join(faults)}")
            except Exception as error:
                failure = error
            if self._snapshot is before:
                self._away_since = self._away_since or time.monotonic()
                if not self._begun.done():
                    self._begun.set_exception(failure)
            self.closed.wait(_RETRY if self._snapshot is before else _PAUSE)

    def _follow_member(self, index: int) -> str:
        """Read one member until its stream ends, and return the reason. Raises as `EtcdClient.explain_error`."""
        requests: SimpleQueue[Any] = SimpleQueue()
        requests.put(MESSAGES["WatchRequest"](create_request=self._range))
        self._call = call = self._client.watch(index, iter(requests.get, None))
        timer = threading.Timer(self._client.timeout, call.cancel)  # until the member reports that the watch began
        timer.daemon = True
        timer.start()
        try:
            # After the call was stored, and `close` sets the event first: it cancels this call, or it is seen here.
            if self.closed.is_set():
                return "closed"
            for response in call:
                timer.cancel()
                if response.canceled:
                    return f"etcd ended the watch: {response.cancel_reason or 'without a reason'}"
                self._apply_response(response)
                self._away_since = None
                if not self._begun.done():
                    self._begun.set_result(None)
        except (RpcError, ValueError) as error:
            return self._client.explain_error(index, error)
        finally:
            timer.cancel()
            requests.put(None)
            call.cancel()
        return f"{self._client.addresses[index]}: the stream ended"

    def _apply_response(self, response: Any) -> None:
        if response.created:
            contents = self._client.call("Range", **self._range)
            revision, before = contents.header.revision, {}
            changes = {kv.key: self._keys.read_entry(kv) for kv in contents.kvs}
        else:
            later = [event for event in response.events if event.kv.mod_revision > self._snapshot.revision]
            revision, before = later[-1].kv.mod_revision if later else self._snapshot.revision, self._entries
            changes = {e.kv.key: None if e.type == DELETE else self._keys.read_entry(e.kv) for e in later}
        self._entries = {key: entry for key, entry in (before | changes).items() if entry is not None}
        self._snapshot = make_snapshot(revision, self._entries.values())
