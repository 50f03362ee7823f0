"""Follows etcd from a revision on, over whichever member answers.

    member 1 ── events 7, 8 ── gone          next() ──> 7, 8, 9 ...
    member 2 ── from 9 on ── events 9 ...    all gone: next() tells what came, then AwayError
    member 1 ── another life ── lost         revisions of an etcd that was emptied mean something else

One thread reads the stream into a queue, since a stream of gRPC cannot be waited for with a timeout. A watch whose
reader falls behind the queue's length is lost, instead of memory growing with the slowest reader.
"""

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any, cast

import grpc

from weft.experts.directory.etcd_endpoints import Endpoints
from weft.experts.directory.etcd_keys import Keys
from weft.experts.directory.etcd_messages import RANGE, WATCH
from weft.experts.directory.protocol import Event, Watch
from weft.experts.errors import AwayError, WatchLostError

_grpc = cast("Any", grpc)
_JOIN = 5.0
_PAUSE = 0.02  # seconds between two rounds, for members that accept and then end the stream


class EtcdWatch(Watch):
    """The protocol `Watch`. Made by `EtcdDirectory.watch`; raises ``AwayError`` if no member answers in time."""

    def __init__(self, endpoints: Endpoints, keys: Keys, prefix: str, after: int | None, most: int) -> None:
        self._endpoints, self._keys, self._prefix, self._most = endpoints, keys, prefix, most
        self._next = 0 if after is None else after + 1
        self._life: bytes | None = None
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._end: Exception | None = None
        self._closed = False
        self._call: Any = None
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._read, name="weft-etcd-watch", daemon=True)
        self._thread.start()
        if not self._listening.wait(endpoints.timeout):
            self._end = AwayError(f"etcd did not begin to be watched within {endpoints.timeout:g} s")
        if (fault := self._fault()) is not None:
            self.close()
            raise fault

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
        if not self._endpoints.fork_guard.here:
            return
        with self._changed:
            self._closed = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _fault(self) -> AwayError | None:
        """Why nothing can be told any more, if that is for want of etcd."""
        return self._end if isinstance(self._end, AwayError) else None

    def _read(self) -> None:
        """The thread: one stream after the other, until one round over all members brought nothing."""
        try:
            alive, faults = True, list[str]()
            while alive:
                alive = False
                faults.clear()
                for index in self._endpoints.order():
                    came, fault = self._follow(index)
                    if self._closed:
                        return
                    alive = alive or came
                    faults.append(fault)
                time.sleep(_PAUSE)
            raise AwayError(f"etcd is not to be watched any more: {'; '.join(faults)}")
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
        call = self._endpoints.watch(index, iter(requests.get, None))
        timer = threading.Timer(self._endpoints.timeout, call.cancel)  # until the member says that it began
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
        except (_grpc.RpcError, ValueError) as error:
            if self._closed:
                return came, "closed"
            return came, self._endpoints.fault(index, error)
        finally:
            timer.cancel()
            requests.put(None)
            call.cancel()
        return came, f"{self._endpoints.addresses[index]}: the stream ended"

    def _wanted(self) -> Any:
        start, end = self._keys.range(self._prefix)
        made = WATCH.request()
        create = made.create_request
        create.key, create.range_end, create.start_revision = start, end, self._next
        create.progress_notify = create.prev_kv = True
        return made

    def _check_life(self) -> None:
        """Raise ``WatchLostError`` if what answers is not the etcd that was watched before: it lost what it knew."""
        found = self._endpoints.call(RANGE, RANGE.request(key=self._keys.life))  # as new as anything that was told
        life = found.kvs[0].value if found.kvs else b""
        if found.header.revision + 1 < self._next or self._life not in (None, life):
            raise WatchLostError(
                f"the watch stopped before revision {self._next}, and etcd has begun anew since, and is at "
                f"{found.header.revision}: get a new snapshot and watch from there"
            )
        self._life = life

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
            self._check_life()
            self._next = self._next or response.header.revision + 1
            self._listening.set()
        else:
            self._next = max(self._next, response.header.revision + 1)  # all before it was told
        with self._changed:
            if len(self._events) + len(found) > self._most:
                raise WatchLostError(
                    f"more than {self._most} events wait for their reader: get a new snapshot and watch from there"
                )
            self._events.extend(found)
            self._changed.notify_all()
