"""A directory in etcd, for servers and clients on several machines.

    declare   lease grant, then one key for each expert under it        Directory                etcd
    renew     lease keep-alive                                          lease                    lease
    withdraw  lease revoke: etcd deletes the keys                       expert at an address     key
    get       one range                                                 snapshot's revision      store revision
    watch     one watch                                                 event                    put or delete
    claim     transaction: if it has no owner, or this address has it   token                    mod revision of its key
                                                                                                 and the epoch
Keys, each under its server's lease, but for the epoch:

    weft/ffn.3.17 0 a 10.0.0.5:7000      a server of the expert        value: nothing
    weft/ffn.3.17 0 o                    its owner                     value: the address 0 epoch; this epoch and the
                                                                              key's revision are the token
    weft/ 0 epoch                        the directory's epoch         drawn by the first declaration or claim

The byte 0 ends the name, so no name is a prefix of another's keys; and names stand first, so that one range, and one
watch, covers all that concerns the experts with a prefix, in the order in which it happened.

Leases count in whole seconds here, and etcd looks for ended ones twice a second: a ``ttl`` is rounded up, and a dead
server is seen up to half a second later.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from queue import SimpleQueue
from typing import Any

from weft.core.errors import UsageError
from weft.experts import extras as extras  # noqa: PLC0414  (says what is not installed)
from weft.experts.discovery.directory import Directory, Event, Lease, Ownership, Snapshot, Watch, check_declaration
from weft.experts.discovery.etcd_client import (
    CREATED,
    DELETE,
    EQUAL,
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    MESSAGES,
    MODIFIED,
    RANGE,
    TXN,
    VALUE,
    WATCH,
    EtcdClient,
    EtcdTls,
    RefusedByEtcdError,
    RpcError,
)
from weft.experts.discovery.fencing import new_epoch, number_of, token_of
from weft.experts.discovery.local import LocalDirectory
from weft.experts.errors import AwayError, LeaseLostError, OwnedError, WatchLostError

_SCHEME = "etcd://"
_PUTS = 100  # of one transaction; etcd takes 128 unless told otherwise
_TRIES = 100  # of a claim that others keep changing
_JOIN = 5.0  # seconds that `close` waits for the thread of a watch
_PAUSE = 0.02  # seconds between two rounds, for members that accept and then end the stream
_END = b"\0"
_DIGITS = 8  # more than an epoch has


def open_directory(address: str, *, tls: EtcdTls | None = None, timeout: float = 5.0) -> Directory:
    """The directory at an address, to be closed by the caller. Nothing is connected yet.

        local                                          in this process
        etcd://host:2379                               one etcd
        etcd://one:2379,two:2379,three:2379/training   a cluster, and the namespace of the keys (default: weft)

    ``tls`` and ``timeout`` (seconds) are those of `EtcdDirectory`. Raises ``UsageError`` for an invalid address, and
    for ``tls`` where nothing is encrypted.
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


class EtcdDirectory:
    """The protocol `Directory`, in etcd. A context manager.

    Args:
        endpoints: the members of the cluster, as host:port; one after the other is tried.
        namespace: of the keys; directories with different ones share an etcd.
        tls: certificates; None: nothing is encrypted.
        timeout: seconds for each call, over all members.
        history: events that may wait for the reader of a watch.

    Raises ``UsageError`` for invalid addresses and options. Nothing is connected before the first call.
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
        self._keys = EtcdKeys(namespace)
        self._client = EtcdClient([endpoints] if isinstance(endpoints, str) else endpoints, tls, timeout)
        self._history = history
        self._watches: list[EtcdWatch] = []
        self._epoch = 0  # as last seen; every claim compares it

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        """See `Directory.declare`. The lease's ``ttl`` is what etcd granted: whole seconds, at least its minimum."""
        names = check_declaration(uids, address, ttl)
        granted = self._client.call(LEASE_GRANT, LEASE_GRANT.request(TTL=ceil(ttl)))
        lease = Lease(granted.ID, names, address, float(granted.TTL))
        try:
            self._epoch = self._current_epoch()
            for start in range(0, len(names), _PUTS):
                request = TXN.request()
                for uid in names[start : start + _PUTS]:
                    put = request.success.add().request_put
                    put.key, put.lease = self._keys.entry(uid, address), lease.number
                self._txn(request, lease)
        except BaseException:
            with suppress(AwayError):  # then the lease ends by itself
                self.withdraw(lease)
            raise
        return lease

    def renew(self, lease: Lease) -> None:
        """See `Directory.renew`."""
        request = LEASE_KEEP_ALIVE.request(ID=lease.number)
        answer = self._client.call(LEASE_KEEP_ALIVE, request, lease.ttl / 3)  # else one slow answer takes all of it
        if answer.TTL <= 0:
            raise _ended(lease)

    def withdraw(self, lease: Lease) -> None:
        """See `Directory.withdraw`."""
        try:
            self._client.call(LEASE_REVOKE, LEASE_REVOKE.request(ID=lease.number))
        except RefusedByEtcdError as error:
            if not error.missing:
                raise

    def get(self, prefix: str = "") -> Snapshot:
        """See `Directory.get`."""
        start, end = self._keys.range(prefix)
        return self._keys.snapshot(self._client.call(RANGE, RANGE.request(key=start, range_end=end)))

    def watch(self, prefix: str = "", after: int | None = None) -> "EtcdWatch":
        """See `Directory.watch`. It has a thread, which ends with `close`."""
        made = EtcdWatch(self._client, self._keys, prefix, after, self._history)
        self._watches = [*(each for each in self._watches if not each.closed), made]
        return made

    def claim(self, uid: str, lease: Lease) -> Ownership:
        """See `Directory.claim`."""
        if uid not in lease.uids:
            raise UsageError(f"expert {uid!r} was not declared under the lease of {lease.address}: declare it first")
        key, seen = self._keys.owner(uid), 0
        for _ in range(_TRIES):
            epoch = self._epoch
            same = MESSAGES["Compare"](result=EQUAL, target=VALUE, key=self._keys.epoch, value=str(epoch).encode())
            request = TXN.request(compare=[_unchanged(key, seen), same])
            put = request.success.add().request_put
            put.key, put.value, put.lease = key, self._keys.owner_value(lease.address, epoch), lease.number
            request.failure.add().request_range.key = key
            answer = self._txn(request, lease)
            if answer.succeeded:
                return Ownership(uid, lease.address, token_of(epoch, answer.header.revision))
            self._epoch = self._current_epoch()
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
        self._client.call(TXN, request)

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
        request = TXN.request(compare=[_unchanged(key, 0)])
        put = request.success.add().request_put
        put.key, put.value = key, str(drawn).encode()
        request.failure.add().request_range.key = key
        answer = self._client.call(TXN, request)
        return drawn if answer.succeeded else _read_epoch(answer.responses[0].response_range.kvs[0].value)

    def _txn(self, request: Any, lease: Lease) -> Any:
        """A transaction that puts under a lease."""
        try:
            return self._client.call(TXN, request)
        except RefusedByEtcdError as error:
            if error.missing:
                raise _ended(lease) from None
            raise


def _unchanged(key: bytes, revision: int) -> Any:
    """A comparison: the key was last written at this revision; 0: it is not there."""
    if revision:
        return MESSAGES["Compare"](result=EQUAL, target=MODIFIED, key=key, mod_revision=revision)
    return MESSAGES["Compare"](result=EQUAL, target=CREATED, key=key, create_revision=0)


def _ended(lease: Lease) -> LeaseLostError:
    return LeaseLostError(
        f"the lease {lease.number} of {lease.address} ended: it was not renewed within {lease.ttl:g} s, or was "
        "withdrawn. Declare again"
    )


class EtcdKeys:
    """The keys below one namespace. Directories of different namespaces share an etcd without seeing each other."""

    def __init__(self, namespace: str) -> None:
        if not namespace or "\0" in namespace:
            raise UsageError(f"namespace is {namespace!r}, wanted a name without the character 0")
        self._root = namespace.encode() + b"/"

    def entry(self, uid: str, address: str) -> bytes:
        """The key of one server of an expert."""
        return self._root + uid.encode() + _END + b"a" + address.encode()

    def owner(self, uid: str) -> bytes:
        """The key of an expert's owner."""
        return self._root + uid.encode() + _END + b"o"

    @property
    def epoch(self) -> bytes:
        """The key of the directory's epoch; no expert's name is empty."""
        return self._root + _END + b"epoch"

    def owner_value(self, address: str, epoch: int) -> bytes:
        """The value of an owner's key. With the epoch, so that a reader knows the whole token."""
        return address.encode() + _END + str(epoch).encode()

    def ownership(self, uid: str, kv: Any) -> Ownership:
        """The owner, out of a KeyValue. An address that is not UTF-8, put there by others, is shown escaped."""
        address, _, epoch = kv.value.partition(_END)
        return Ownership(
            uid, address.decode("utf-8", "backslashreplace"), token_of(_read_epoch(epoch), kv.mod_revision)
        )

    def range(self, prefix: str) -> tuple[bytes, bytes]:
        """First key, and first key behind the last, of all experts whose name starts with ``prefix``."""
        start = self._root + prefix.encode()
        return start, start[:-1] + bytes([start[-1] + 1])  # UTF-8 has no byte 255

    def snapshot(self, found: Any) -> Snapshot:
        """The snapshot, out of a RangeResponse."""
        experts: dict[str, list[str]] = {}
        owners: dict[str, Ownership] = {}
        for each in found.kvs:
            uid, kind, address = self._read(each.key)
            if kind == "a":
                experts.setdefault(uid, []).append(address)
            elif kind == "o":
                owners[uid] = self.ownership(uid, each)
        lists = {uid: tuple(sorted(addresses)) for uid, addresses in experts.items()}
        return Snapshot(found.header.revision, lists, owners)

    def event(self, found: Any) -> Event | None:
        """The event, out of etcd's; ``None`` if nothing changed, such as for an entry that moved to another lease."""
        kv, gone = found.kv, found.type == DELETE
        uid, kind, address = self._read(kv.key)
        if kind == "a":
            if not gone and kv.create_revision != kv.mod_revision:
                return None
            return Event(kv.mod_revision, "left" if gone else "joined", uid, address)
        if kind != "o":
            return None
        if gone:
            before = self.ownership(uid, found.prev_kv)
            return Event(kv.mod_revision, "released", uid, before.address, before.token)
        now = self.ownership(uid, kv)
        return Event(kv.mod_revision, "owned", uid, now.address, now.token)

    def _read(self, key: bytes) -> tuple[str, str, str]:
        """Name, kind and address; all empty for a key that others put there."""
        uid, end, rest = key.removeprefix(self._root).partition(_END)
        try:
            return (uid.decode(), rest[:1].decode(), rest[1:].decode()) if end else ("", "", "")
        except UnicodeDecodeError:
            return "", "", ""


def _read_epoch(value: bytes) -> int:
    """The epoch in a value; 0 if there is none."""
    return int(value) if value.isdigit() and len(value) < _DIGITS else 0


class EtcdWatch(Watch):
    """The protocol `Watch`, over whichever member answers. Raises ``AwayError`` if none does in time.

        member 1 ── events 7, 8 ── gone          next() ──> 7, 8, 9 ...
        member 2 ── from 9 on ── events 9 ...    all gone: the events that came, then AwayError
        member 1 ── another epoch ── lost        revisions of an etcd that was emptied mean something else

    One thread reads the stream into a queue, since a stream of gRPC cannot be waited for with a timeout. A watch whose
    reader falls behind the queue's length is lost, instead of memory growing with the slowest reader.
    """

    def __init__(self, client: EtcdClient, keys: EtcdKeys, prefix: str, after: int | None, most: int) -> None:
        self._client, self._keys, self._prefix, self._most = client, keys, prefix, most
        self._next = 0 if after is None else after + 1
        self._epoch: bytes | None = None
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._end: Exception | None = None
        self._closed = False
        self._call: Any = None
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._read, name="weft-etcd-watch", daemon=True)
        self._thread.start()
        if not self._listening.wait(client.timeout):
            self._end = AwayError(f"etcd did not begin to be watched within {client.timeout:g} s")
        if isinstance(self._end, AwayError):
            self.close()
            raise self._end

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def next(self, timeout: float | None = None) -> Event | None:
        """See `Watch.next`."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._closed:
                    raise AwayError("the watch is closed")
                if self._events:
                    return self._events.popleft()
                if self._end is not None:
                    raise self._end
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def close(self) -> None:
        """See `Watch.close`. In a fork of its process it does nothing."""
        if not self._client.fork_guard.here:
            return
        with self._changed:
            self._closed = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _read(self) -> None:
        """The thread: one stream after the other, until one round over all members brought nothing."""
        try:
            alive, faults = True, list[str]()
            while alive:
                alive = False
                faults.clear()
                for index in self._client.order():
                    came, fault = self._follow(index)
                    if self._closed:
                        return
                    alive = alive or came
                    faults.append(fault)
                time.sleep(_PAUSE)
            raise AwayError(f"etcd cannot be watched any more: {'; '.join(faults)}")
        except Exception as error:
            with self._changed:
                self._end = error
                self._changed.notify_all()
        finally:
            self._listening.set()

    def _follow(self, index: int) -> tuple[bool, str]:
        """Read one member until its stream ends. Whether anything came, and why it ended.

        Raises ``WatchLostError``, and ``RefusedByEtcdError`` where others would refuse as well.
        """
        came = False
        requests: SimpleQueue[Any] = SimpleQueue()
        requests.put(self._wanted())
        call = self._client.watch(index, iter(requests.get, None))
        timer = threading.Timer(self._client.timeout, call.cancel)  # until the member says that it began
        timer.name, timer.daemon = "weft-etcd-watch-start", True
        timer.start()
        with self._changed:
            self._call = call
            if self._closed:
                call.cancel()
        try:
            for response in call:
                timer.cancel()
                came = True
                self._take(response)
        except (RpcError, ValueError) as error:
            if self._closed:
                return came, "closed"
            return came, self._client.fault(index, error)
        finally:
            timer.cancel()
            requests.put(None)
            call.cancel()
        return came, f"{self._client.addresses[index]}: the stream ended"

    def _wanted(self) -> Any:
        start, end = self._keys.range(self._prefix)
        made = WATCH.request()
        create = made.create_request
        create.key, create.range_end, create.start_revision = start, end, self._next
        create.progress_notify = create.prev_kv = True
        return made

    def _check_epoch(self) -> None:
        """Raise ``WatchLostError`` if this is not the etcd that was watched before: it lost its data."""
        found = self._client.call(RANGE, RANGE.request(key=self._keys.epoch))  # at least as new as any event so far
        epoch = found.kvs[0].value if found.kvs else b""
        if found.header.revision + 1 < self._next or self._epoch not in (None, epoch):
            raise WatchLostError(
                f"the watch stopped before revision {self._next}, and etcd has begun anew since, and is at "
                f"{found.header.revision}: get a new snapshot and watch from there"
            )
        self._epoch = epoch

    def _take(self, response: Any) -> None:
        if response.compact_revision:
            raise WatchLostError(
                f"the watch stopped before revision {self._next}, and etcd forgot what was before "
                f"{response.compact_revision}: get a new snapshot and watch from there"
            )
        if response.canceled:
            raise AwayError(f"etcd ended the watch: {response.cancel_reason or 'it gave no reason'}")
        found = [event for each in response.events if (event := self._keys.event(each)) is not None]
        if response.events:
            self._next = max(each.kv.mod_revision for each in response.events) + 1
        elif response.created:
            self._check_epoch()
            self._next = self._next or response.header.revision + 1
            self._listening.set()
        else:
            self._next = max(self._next, response.header.revision + 1)  # all events before it have come
        with self._changed:
            if len(self._events) + len(found) > self._most:
                raise WatchLostError(
                    f"more than {self._most} events wait for their reader: get a new snapshot and watch from there"
                )
            self._events.extend(found)
            self._changed.notify_all()
