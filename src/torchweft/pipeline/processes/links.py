"""Links: the connections between the ranks of a pipeline, and the walks over them.

    walk.send(rank, address, value)  ── connection ──>  inbox of the same walk  ──>  walk.receive(address, source)

Each message names its walk by number and its place in it by an address, so nothing depends on the order of arrival. A
rank that is ahead sends into walks that its peers have not opened yet. Messages of a walk that has ended are dropped.

A walk fails on all ranks or on none: an exception is broadcast, a dead process is noticed by its closed socket, and a
process that hangs by a question to all ranks, after `timeout` seconds without progress.
"""

import json
import os
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from torchweft.core import errors
from torchweft.core.errors import InPlaceError, RankFailedError, RankLostError, UsageError, WeftError, text_of
from torchweft.pipeline.processes.connection import Connection, Handle, ReceivedFrame, Ways
from torchweft.pipeline.processes.device_lane import DeviceLane, DeviceStreams
from torchweft.pipeline.processes.frames import (
    BYE,
    DATA,
    DONE,
    FAILED,
    PING,
    PONG,
    encode_control,
    encode_plain,
    split_value,
)
from torchweft.pipeline.processes.lanes import Lane, has_nccl, store_of, timeout_of
from torchweft.pipeline.processes.membership import RankProcess, Rendezvous
from torchweft.pipeline.processes.rank_states import RankState, describe_culprit, late_text

_ANSWER_SECONDS, _CLOSE_SECONDS = 1.5, 2.0
_CPU = torch.device("cpu")
_LONGEST_REPORT = 32_000  # characters of a traceback
BACKWARD = "the backward"  # the start of the name of a walk back
Address = tuple[int, int, int]
Failure = tuple[type[WeftError], str]
# Errors that every rank raises as such, so that `except UsageError` works on all of them.
_SHARED_ERRORS: dict[str, type[WeftError]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WeftError)
}


class WalkInbox:
    """The messages to this rank in one walk. Readers put; the thread of the walk takes."""

    def __init__(self) -> None:
        self.walks: dict[int, str] = {}  # the name of this walk at each rank that has told it
        self._waiting: int | None = None
        self._sending = False
        self.failure: Failure | None = None
        self._arriving: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._shelf: dict[Any, Any] = {}

    def name_walk(self, rank: int, what: str) -> bool:
        """Note which walk this is for a rank; whether all ranks are in the same one."""
        self.walks[rank] = what
        return len(set(self.walks.values())) == 1

    def put(self, key: Any, item: Any) -> None:
        self._arriving.put((key, item))

    def fail(self, kind: type[WeftError], text: str) -> bool:
        """Let the walk raise; whether this is its first failure."""
        first = self.failure is None
        self.failure = self.failure or (kind, text)
        self.put(None, None)
        return first

    def check(self) -> None:
        if self.failure is not None:
            kind, text = self.failure
            raise kind(text)

    def wait_for(self, rank: int | None, *, sending: bool = False) -> None:
        self._waiting, self._sending = rank, sending

    def state_of(self, rank: int) -> RankState:
        """The state of this rank, for the others."""
        return RankState(self.walks.get(rank), self._waiting, self._sending)

    def receive(self, key: Any, timeout: float, has_left: Callable[[], bool]) -> Any:
        """The item of a key. Raises the failure of the walk; Empty after the timeout, or if the source has left."""
        deadline = time.monotonic() + timeout
        while key not in self._shelf:
            self.check()
            # Asked before the queue is read: all that the source has sent is in the queue once it has left. If it were
            # asked afterwards, its last message could arrive between the two, and would be taken for missing.
            left = has_left()
            rest = 0.0 if left else max(0.0, deadline - time.monotonic())
            arrived, item = self._arriving.get(timeout=rest)
            self._shelf[arrived] = item
        return self._shelf.pop(key)


class WalkTable:
    """The walks of this rank that are open, and those that only its peers have opened so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._inboxes: dict[int, WalkInbox] = {}
        self.lost: dict[int, str] = {}  # ranks that are gone, with the reason
        self.parted: set[int] = set()  # ranks that have left in peace

    def open(self) -> tuple[int, WalkInbox]:
        """The number and the inbox of the next walk. It has failed already if a rank is lost."""
        with self._lock:
            self._number += 1
            inbox = self._inboxes.setdefault(self._number, WalkInbox())
            # Also a walk that opens after the loss: its peer will never send.
            for text in self.lost.values():
                inbox.fail(RankLostError, text)
            return self._number, inbox

    def close(self, number: int) -> None:
        with self._lock:
            self._inboxes.pop(number, None)

    def inbox_of(self, number: int) -> WalkInbox:
        """The inbox for a message of a peer. Messages of a walk that has ended are dropped with it."""
        with self._lock:
            # A peer that is ahead sends into a walk that this rank has yet to open.
            if number <= self._number:
                return self._inboxes.get(number) or WalkInbox()
            return self._inboxes.setdefault(number, WalkInbox())

    def latest(self) -> WalkInbox:
        return self._inboxes.get(self._number) or WalkInbox()

    def part(self, rank: int) -> None:
        with self._lock:
            self.parted.add(rank)
            for inbox in self._inboxes.values():
                inbox.put(None, None)  # wakes a thread that waits for this rank

    def lose(self, rank: int, text: str) -> None:
        with self._lock:
            self.lost.setdefault(rank, text)
            for inbox in self._inboxes.values():
                inbox.fail(RankLostError, text)


class Links:
    """The connections of this rank to all others of `group`. Making them is collective. After `timeout` seconds without
    progress a rank looks for one that hangs. Default: the timeout of the group. The stages of this rank are on
    `device`."""

    def __init__(self, group: ProcessGroup, timeout: float | None = None, device: torch.device = _CPU) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.timeout = timeout_of(group) if timeout is None else timeout
        deadline = time.monotonic() + self.timeout
        rendezvous = Rendezvous(store_of(group), get_process_group_ranks(group), self.rank, deadline)
        try:
            members, sockets, address = rendezvous.connect()
        except BaseException as error:
            rendezvous.tell_failure(error)
            raise
        self._members: list[RankProcess] = members
        # The sockets come first: the lanes connect through a backend that cannot name a rank which is missing.
        cpu_lane = Lane.of_gloo(group, rendezvous.store, address, self.timeout)
        device_lane = _device_lane(group, rendezvous, device, self.timeout)
        ways = self.ways = Ways(cpu_lane, device_lane, device)
        self._connections = {rank: Connection(rank, socket, ways) for rank, socket in sorted(sockets.items())}
        self.walks = WalkTable()
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._bytes: Counter[tuple[int, int]] = Counter()
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _part, list(self._connections.values()), ways, self._process)
        # Threads must not keep the links alive, or a dropped pipe would never part from its peers.
        handle = _handler(weakref.ref(self))
        if device_lane is not None:
            device_lane.start(list(self._connections), _stuck_handler(weakref.ref(self)))
        for connection in self._connections.values():
            connection.start(handle)

    def name_of(self, rank: int) -> str:
        return str(self._members[rank])

    def open_walk(self, what: str) -> "Walk":
        """Start the next walk. All ranks open the same walks in the same order; `what` names it in messages."""
        # A child shares the sockets with its parent. Its frames would mix with those of the parent.
        if os.getpid() != self._process:
            raise UsageError("this process was forked from a rank of a pipeline; only the rank itself can run the Pipe")
        number, inbox = self.walks.open()
        self._name_walk(number, inbox, self.rank, what)
        return Walk(self, number, what, inbox)

    @staticmethod
    def fail_to_connect(group: ProcessGroup, error: BaseException) -> None:
        """In the place of `Links(group)`, for a rank that failed before. The others raise, and can connect again."""
        rendezvous = Rendezvous(store_of(group), get_process_group_ranks(group), group.rank(), time.monotonic())
        rendezvous.tell_failure(error)

    def open_unnamed_walk(self) -> "Walk":
        """The next walk, for a rank that fails before it knows which one it is."""
        number, inbox = self.walks.open()
        return Walk(self, number, "the next walk", inbox)

    def close(self) -> None:
        """Part from the others in peace. They notice only when they next wait for this rank."""
        self._finalizer()

    def statistics(self) -> dict[str, dict[str, int]]:
        """Bytes of tensors that were sent, by destination rank and by route, the first number of the address."""
        counts: dict[str, dict[str, int]] = {}
        for (rank, route), count in sorted(self._bytes.items()):
            counts.setdefault(str(rank), {})[str(route)] = count
        return counts

    def send_value(
        self, number: int, rank: int, address: Address, value: Any, greeting: str | None, *, through_cpu: bool = False
    ) -> None:
        """Send the value of a walk; `greeting` tells which walk it is, in the first message to a rank."""
        shape, plain, tensors = split_value(value, device_lane=not through_cpu and self.ways.device_lane is not None)
        # Most messages are tensors alone; nothing is encoded for them.
        text = encode_plain([greeting, *plain]) if plain or greeting else b""
        try:
            self._connections[rank].send(number, address, shape, text, tensors)
        except OSError as error:
            raise RankLostError(self.walks.lost.get(rank) or f"{self.name_of(rank)} is gone: {error}") from error
        self._bytes[rank, address[0]] += sum(tensor.nbytes for tensor in tensors)

    def broadcast(self, kind: int, number: int, content: Any) -> None:
        frame = encode_control(kind, number, content)
        for connection in self._connections.values():
            with suppress(OSError):  # its reader reports it
                connection.outgoing.write(frame)

    def receive(self, number: int, inbox: WalkInbox, key: Any, source: int) -> Any:
        """Wait for an item. A rank that has left or hangs makes the walk fail, on all ranks."""
        inbox.wait_for(source)
        try:
            return inbox.receive(key, self.timeout, lambda: source in self.walks.parted)
        except Empty:
            if source in self.walks.parted:
                text = f"{self.name_of(source)} has closed its connections: its script ended, or it dropped the Pipe"
            else:
                text = self._find_culprit(inbox.walks[self.rank], source)
            self._fail_walk(number, inbox, text)
        finally:
            inbox.wait_for(None)

    def check_sent(self, number: int, inbox: WalkInbox) -> None:
        """Raise if a tensor of a walk was written to while it was sent, so that other values may have arrived. Waits
        for those that leave from the CPU. A rank that does not take them makes the walk fail, on all ranks."""
        changed: int | None = None
        if self.ways.device_lane is not None:
            try:
                changed = self.ways.device_lane.end_walk(number)
            except RuntimeError:  # as in `Walk.receive`
                inbox.check()
                raise
        deadline = time.monotonic() + self.timeout
        for rank, connection in self._connections.items():
            inbox.wait_for(rank, sending=True)
            found = connection.find_change(number, max(0.0, deadline - time.monotonic()))
            if found is None:
                self._fail_walk(number, inbox, late_text(self.name_of(rank), self.name_of(self.rank), self.timeout))
            elif found:
                changed = rank
        inbox.wait_for(None)
        if changed is not None:
            raise InPlaceError(
                f"a tensor was written to in place while it was sent to {self.name_of(changed)}; use the "
                "out-of-place form of the operation, or let it write into a clone"
            )

    def _fail_walk(self, number: int, inbox: WalkInbox, text: str) -> None:
        # Only the first failure is sent. Otherwise ranks would answer each other failures without end.
        if inbox.fail(RankLostError, text):
            self.broadcast(FAILED, number, [RankLostError.__name__, text])
        inbox.check()

    def lose_stuck(self, rank: int) -> None:
        """Handle a rank with which no transfer has ended for too long, in the thread that watches them."""
        self.walks.lose(rank, late_text(self.name_of(rank), self.name_of(self.rank), self.timeout))
        self._abort_transfers()

    def _find_culprit(self, what: str | None, source: int) -> str:
        """Ask all ranks for their state; return which of them keeps the others waiting, in words."""
        # A number, because answers to an earlier question can still arrive.
        question = time.monotonic_ns()
        self.broadcast(PING, 0, question)
        answers = {self.rank: RankState(what, source, sending=False)}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while len(answers) < self.size and (rest := deadline - time.monotonic()) > 0:
            try:
                rank, (number, *answer) = self._answers.get(timeout=rest)
            except Empty:
                break
            if number == question:
                answers[rank] = RankState(*answer)
        names = [*map(self.name_of, range(self.size))]
        return describe_culprit(answers, names, self.walks.parted, self.rank, self.timeout)

    def lost_ranks(self) -> list[str]:
        """The ranks that are gone or have left, in words."""
        left = [f"{self.name_of(rank)} has closed its connections" for rank in sorted(self.walks.parted)]
        return [*self.walks.lost.values(), *left]

    def _name_walk(self, number: int, inbox: WalkInbox, rank: int, what: str) -> None:
        if not inbox.name_walk(rank, what):
            walks = sorted(inbox.walks.copy().items())  # a copy, because other readers add to it
            names = ", ".join(f"{self.name_of(rank)} in {what}" for rank, what in walks)
            text = f"the ranks are in different walks: {names}; call the Pipe in the same way on all ranks"
            missed = [self.name_of(rank) for rank, what in walks if not what.startswith(BACKWARD)]
            if 0 < len(missed) < len(walks):
                text = f"{' and '.join(missed)} did not call backward() where other ranks did; {text}"
            if inbox.fail(RankFailedError, text):
                self.broadcast(FAILED, number, [RankFailedError.__name__, text])

    def handle(self, connection: Connection, frame: ReceivedFrame | None, reason: str) -> None:
        """Handle a frame, in the reader's thread; without one, the connection has ended."""
        rank = connection.rank
        if frame is None:
            return self._lose(rank, reason)
        content: Any = json.loads(frame.plain) if frame.plain else [None]
        kind, number = frame.header.kind, frame.header.walk
        if kind in (DATA, DONE, FAILED):
            inbox = self.walks.inbox_of(number)
            if kind == FAILED:
                inbox.fail(_SHARED_ERRORS.get(content[0], RankFailedError), content[1])
            else:
                if content[0] is not None:
                    self._name_walk(number, inbox, rank, content[0])
                key = frame.header.address if kind == DATA else ("done", rank)
                # The walk gets the frame when its tensors have arrived, and the reader goes on with the next frame.
                connection.deliver(frame, lambda: inbox.put(key, (frame, content[1:])))
        elif kind == PING:
            inbox = self.walks.latest()
            connection.outgoing.write(encode_control(PONG, 0, [content, *inbox.state_of(self.rank)]))
        elif kind == PONG:
            self._answers.put((rank, content))
        elif kind == BYE:
            # After the frames on their way: a walk that only waits for this rank may still end well.
            connection.outgoing.finish()
            connection.deliver(frame, lambda: self.walks.part(rank))

    def _lose(self, rank: int, reason: str) -> None:
        text = f"{self.name_of(rank)} is gone: {reason}. Start the ranks again, from the last checkpoint"
        self.walks.lose(rank, text)
        self._abort_transfers()

    def _abort_transfers(self) -> None:
        # The host does not notice the end of a rank in a receive of NCCL, so a stream would wait for ever.
        if self.ways.device_lane is not None:
            self.ways.device_lane.abort()


def _device_lane(
    group: ProcessGroup, rendezvous: Rendezvous, device: torch.device, timeout: float
) -> DeviceLane | None:
    # Only if all ranks have one, because a transfer has two ends.
    if not (has_nccl(group) and all(rendezvous.exchange("device", device.type == "cuda"))):
        return None
    return DeviceLane(Lane.of_nccl(group, rendezvous.store, timeout), DeviceStreams(device), timeout)


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-_LONGEST_REPORT:]
    except Exception:
        return "".join(traceback.format_tb(error.__traceback__))[-_LONGEST_REPORT:]


def _handler(links: "weakref.ref[Links]") -> Handle:
    """Handle frames for links that are dropped while a reader waits for the next one."""

    def handle(connection: Connection, frame: ReceivedFrame | None, reason: str) -> bool:
        if (alive := links()) is not None:
            alive.handle(connection, frame, reason)
        return alive is not None and frame is not None and frame.header.kind != BYE

    return handle


def _stuck_handler(links: "weakref.ref[Links]") -> Callable[[int], None]:
    def stuck(rank: int) -> None:
        if (alive := links()) is not None:
            alive.lose_stuck(rank)

    return stuck


def _part(connections: Sequence[Connection], ways: Ways, process: int) -> None:
    # The finalizer also runs at the end of a forked child, which must not end the connections of its parent.
    if os.getpid() != process:
        return
    deadline = time.monotonic() + _CLOSE_SECONDS
    # All peers are told before the first wait. Otherwise two ranks that close one another would wait in turn.
    for connection in connections:
        with suppress(OSError):
            connection.outgoing.write(encode_control(BYE, 0, None))
        connection.outgoing.finish()
    for connection in connections:
        connection.close(deadline)
    ways.cpu_lane.close()
    if ways.device_lane is not None:
        ways.device_lane.close()


class Walk:
    """The messages of one walk: all ranks see it end well, or all see it fail."""

    def __init__(self, links: Links, number: int, what: str, inbox: WalkInbox) -> None:
        self._links, self._number, self._what, self._inbox = links, number, what, inbox
        self._greeted: set[int] = set()

    def send(self, rank: int, address: Address, value: Any, *, through_cpu: bool = False) -> None:
        """Send a value to its reader. Rare values go `through_cpu`, because each pair of GPUs that exchanges a tensor
        takes time and memory for a communicator of its own."""
        self._inbox.check()
        greeting = None if rank in self._greeted else self._what
        self._links.send_value(self._number, rank, address, value, greeting, through_cpu=through_cpu)
        self._greeted.add(rank)

    def receive(self, address: Address, source: int) -> Any:
        frame, plain = self._links.receive(self._number, self._inbox, address, source)
        try:
            return frame.value(plain, self._links.ways)
        except RuntimeError:
            # A transfer that was aborted raises an error of its backend. The reason is the rank that was lost.
            self._inbox.check()
            raise

    def agree(self, report: Any) -> list[Any]:
        """End the walk well: the plain reports of all ranks, by rank. Raises if the walk failed on any of them."""
        self._inbox.check()
        links = self._links
        # Before DONE is sent, because the peers may use the values as soon as they have it.
        links.check_sent(self._number, self._inbox)
        links.broadcast(DONE, self._number, [self._what, report])
        reports: list[Any] = [json.loads(encode_plain(report))] * links.size  # as the others see it
        for rank in range(links.size):
            if rank != links.rank:
                _, (reports[rank],) = links.receive(self._number, self._inbox, ("done", rank), rank)
        self.close()
        return reports

    def fail(self, error: BaseException) -> None:
        """End the walk on all ranks. They raise the same error if it is one of torchweft's own checks, or else
        RankFailedError with its words and its traceback."""
        links, known = self._links, self._inbox.failure
        name, kind = links.name_of(links.rank), type(error).__name__
        if known is not None and known[0] is RankLostError:
            # A peer can see this rank leave before it notices the loss itself, and would then blame this rank.
            links.broadcast(FAILED, self._number, [RankLostError.__name__, known[1]])
        if kind in _SHARED_ERRORS:
            text = f"{text_of(error)[:_LONGEST_REPORT]}\n(raised on {name})"
        else:
            text = f"{name} raised {kind}: {text_of(error)[:_LONGEST_REPORT]}\n\n{_traceback_of(error)}"
        if self._inbox.fail(RankFailedError, text):
            links.broadcast(FAILED, self._number, [kind, text])
        self.close()

    def check(self) -> None:
        if self._inbox.failure is not None:  # before each action, so it is spared a call
            self._inbox.check()

    def close(self) -> None:
        self._links.walks.close(self._number)
        if (lane := self._links.ways.device_lane) is not None:
            lane.drop_walk(self._number)
