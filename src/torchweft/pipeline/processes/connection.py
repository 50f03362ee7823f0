"""One connection to another rank: frames over a socket, large tensors over a lane.

    sending thread   small frame ──> socket                   the rest of a full socket: the thread `drain`
    reader thread    socket ──> frame ──> the owner of the links
    bodies           waits for tensors that arrive on the CPU lane, so that the reader goes on with the next frame
    releases         waits for tensors that leave on the CPU lane, and keeps them alive until then

Transfers between GPUs have a thread of their own, see `DeviceLane`.

A send never blocks, because the same thread receives: two ranks that send large values to each other would both wait.
All threads but the reader start at their first job.
"""

import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from torchweft.core.segment import version
from torchweft.pipeline.processes.device_lane import Arrival, DeviceLane
from torchweft.pipeline.processes.frames import (
    BYE,
    CPU_LANE,
    DATA,
    DEVICE_LANE,
    FRAME,
    HEADER_BYTES,
    FrameHeader,
    SentShapes,
    Shape,
    decode_header,
    decode_shape,
    join_value,
    memory_of,
)
from torchweft.pipeline.processes.lanes import Lane

_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()
# In a forked child: never freed, because gloo would wait for threads that are not there.
_inherited: list[Lane] = []


class Ways(NamedTuple):
    """The lanes of a rank, and the device of its stages. Without a lane for it, its tensors go through the CPU."""

    cpu_lane: Lane
    device_lane: DeviceLane | None
    device: torch.device


class ReceivedFrame(NamedTuple):
    """A frame as it arrives: tensors in CPU memory, of which the `works` are still receiving some, and the arrival of
    those that go to the device."""

    header: FrameHeader
    plain: bytes
    shape: Shape | None = None
    tensors: Sequence[torch.Tensor] = ()
    works: Sequence[Any] = ()
    arrival: Arrival | None = None

    def value(self, plain: Sequence[Any], ways: Ways) -> Any:
        assert self.shape is not None
        tensors = self.tensors
        if self.arrival is not None:
            assert ways.device_lane is not None
            of_device, of_host = iter(ways.device_lane.take(self.arrival)), iter(tensors)
            tensors = [next(of_device if leaf.way == DEVICE_LANE else of_host) for leaf in self.shape.tensors]
        return join_value(self.shape, plain, tensors, ways.device)


# In a forked child. An open copy of a socket would hide the death of the parent from its peers.
def _forget_sockets() -> None:
    for connection in list(_connections):
        connection.forget_socket()


os.register_at_fork(after_in_child=_forget_sockets)


class Worker:
    """A thread that runs jobs in order. It starts at the first one, and holds nothing while it is idle."""

    def __init__(self, name: str) -> None:
        self._name, self._thread = name, None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    @property
    def started(self) -> bool:
        return self._thread is not None

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> None:
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, seconds))


def _run_jobs(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


class FrameQueue:
    """The sending half of a socket. Frames leave in the order of `write`, which never blocks."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._frames: deque[tuple[memoryview, list[int]]] = deque()  # to be sent, with the bytes of each that are gone
        self._draining = self._finishing = False
        self._drain = Worker(name)

    def write(self, frame: bytes) -> None:
        """Send a frame as far as the socket takes it; a thread goes on with the rest. Raises OSError."""
        with self._lock:
            self._frames.append((memoryview(frame), []))
            if not self._draining and not self._advance():
                self._draining = True
                self._drain.submit(self._drain_frames)

    def finish(self) -> None:
        with self._lock:
            self._finishing = True
            if not self._draining:
                self.shut(socket.SHUT_WR)

    def _advance(self) -> bool:
        # Under the lock. Never blocks. Returns whether all frames are gone.
        while self._frames:
            frame, gone = self._frames[0]
            try:
                # One call of C sends and counts. Ctrl-C between the two would send the same bytes again.
                gone.extend(map(self._socket.send, (frame[sum(gone) :],), (socket.MSG_DONTWAIT,)))
            except BlockingIOError:
                return False
            if sum(gone) == len(frame):
                self._frames.popleft()
        return True

    def _drain_frames(self) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLOUT)
            while True:
                # Not under the lock: a full socket must not make the threads wait that append frames.
                poll.poll(1000)
                with self._lock:
                    if self._advance():
                        self._draining = False
                        if self._finishing:
                            self.shut(socket.SHUT_WR)
                        return
        except (OSError, ValueError):  # the reader reports it
            pass

    def shut(self, how: int) -> None:
        with suppress(OSError):
            self._socket.shutdown(how)

    def close(self, seconds: float) -> None:
        self._drain.close(seconds)


class Connection:
    def __init__(self, rank: int, sock: socket.socket, ways: Ways) -> None:
        self.rank = rank
        sock.settimeout(None)
        # A small frame must not wait until the one before it is acknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._ways = sock, ways
        self.outgoing = FrameQueue(sock, f"torchweft-drain-{rank}")
        # Held over the header and the posts of its tensors. It comes before the lock of the queue.
        self._sending = threading.Lock()
        self._changed: set[int] = set()  # walks
        self.sent_shapes = SentShapes()
        self.received_shapes: dict[int, Shape] = {}
        self._bodies, self._releases = (Worker(f"torchweft-{name}-{rank}") for name in ("bodies", "releases"))
        self._reader: threading.Thread | None = None
        _connections.add(self)

    def start(self, handle: "Handle") -> None:
        self._reader = threading.Thread(
            target=self._read_frames, args=(handle,), name=f"torchweft-reader-{self.rank}", daemon=True
        )
        self._reader.start()

    def send(
        self, walk: int, address: tuple[int, int, int], shape: Shape, plain: bytes, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Send a value. Its large tensors are kept until they have left, and must not be written to before."""
        ways = list(zip(shape.tensors, tensors, strict=True))
        inline = [memory_of(tensor) for leaf, tensor in ways if leaf.way == FRAME and tensor.numel()]
        on_lanes = [(leaf.way, tensor) for leaf, tensor in ways if leaf.way != FRAME]
        with self._sending:  # frames and sends of a lane keep one order
            slot, text = self.sent_shapes.find(shape)
            header = FrameHeader(DATA, walk, address, slot, len(text), len(plain))
            try:
                self.outgoing.write(b"".join([header.encode(), text, plain, *inline]))
                for way, tensor in on_lanes:
                    if way == DEVICE_LANE and (lane := self._ways.device_lane) is not None:
                        lane.send(self.rank, tensor, walk)
                    else:
                        work = self._ways.cpu_lane.send(self.rank, tensor)
                        self._releases.submit(partial(self._release, work, tensor, version(tensor), walk))
            except BaseException:
                # A header without its send would let the next tensor arrive in the wrong place.
                if on_lanes:
                    self.outgoing.shut(socket.SHUT_RDWR)
                raise

    def _release(self, work: Any, tensor: torch.Tensor, before: int, walk: int) -> None:
        with suppress(RuntimeError):  # the reader reports the lost rank
            work.wait()
        # Reported when the walk ends. The peer can have received the old bytes, the new ones, or some of both.
        if version(tensor) != before:
            self._changed.add(walk)

    def find_change(self, walk: int, seconds: float) -> bool | None:
        """Whether a tensor of a walk was written to before it had left. Waits for those that are leaving. None if some
        have not left within `seconds`."""
        if self._releases.started:
            done = threading.Event()
            self._releases.submit(done.set)
            if not done.wait(seconds):
                return None
        return walk in self._changed

    def _read_frames(self, handle: "Handle") -> None:
        reason = "its process ended, or its host is unreachable"
        try:
            # Buffered, because a frame is read in three parts, and each would be a system call.
            with self._socket.makefile("rb", 1 << 16) as file:
                frame = self._read_frame(file)
                while handle(self, frame, ""):
                    del frame  # nothing is held while the reader waits
                    frame = self._read_frame(file)
                return
        except (EOFError, OSError) as error:
            reason += f" ({error})" if str(error) else ""
        except Exception as error:
            reason = f"it sent what no member sends ({type(error).__name__}: {error})"
        handle(self, None, reason)

    def _read_frame(self, file: Any) -> ReceivedFrame:
        def read(count: int) -> bytes:
            if len(data := file.read(count)) < count:
                raise EOFError
            return data

        header = decode_header(read(HEADER_BYTES))
        text, plain = read(header.shape_bytes), read(header.plain_bytes)
        if header.kind != DATA:
            return ReceivedFrame(header, plain)
        if text:
            self.received_shapes[header.slot] = decode_shape(text)
        shape = self.received_shapes[header.slot]
        of_host = [leaf for leaf in shape.tensors if leaf.way != DEVICE_LANE]
        tensors = [torch.empty_strided(leaf.dims, leaf.strides, dtype=leaf.dtype) for leaf in of_host]
        works: list[Any] = []
        for leaf, tensor in zip(of_host, tensors, strict=True):
            # Posted at once, in the order of the headers: a lane pairs sends and receives by their order alone.
            if leaf.way == CPU_LANE:
                works.append(self._ways.cpu_lane.receive(self.rank, tensor))
            elif tensor.numel() and file.readinto(memory_of(tensor)) < tensor.nbytes:
                raise EOFError
        arrival = None
        if of_device := [leaf for leaf in shape.tensors if leaf.way == DEVICE_LANE]:
            if self._ways.device_lane is None:
                raise ValueError("a tensor for the GPU of a rank that has none")
            arrival = self._ways.device_lane.expect(self.rank, of_device)
        return ReceivedFrame(header, plain, shape, tensors, works, arrival)

    def deliver(self, frame: ReceivedFrame, put: Callable[[], None]) -> None:
        """Call `put` when the tensors of a frame are here; for the last frame, those of all frames before it."""
        if not frame.works and not (frame.header.kind == BYE and self._bodies.started):
            return put()

        def wait() -> None:
            # One thread waits for all frames of the connection, so that they are delivered in their order.
            try:
                for work in frame.works:
                    work.wait()
                put()
            except RuntimeError:  # the rank is gone, or its lane is broken: the reader reports it
                self.outgoing.shut(socket.SHUT_RDWR)

        return self._bodies.submit(wait)

    def close(self, deadline: float) -> None:
        """End all threads. The other end is expected to have answered the announced end before the deadline."""
        # Senders first. The reader ends when the peer has read all that was sent and closes its side.
        self._releases.close(deadline - time.monotonic())
        self.outgoing.close(deadline - time.monotonic())
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(max(0.0, deadline - time.monotonic()))
            self.outgoing.shut(socket.SHUT_RDWR)  # wakes a reader that still waits
            self._reader.join(1.0)
        self._bodies.close(deadline - time.monotonic())
        self._socket.close()

    def forget_socket(self) -> None:
        # The descriptor alone, because a shutdown in a child would end the connection of its parent.
        _inherited.append(self._ways.cpu_lane)
        os.close(self._socket.detach())


# Receives each frame, at last None with the reason why nothing more comes. Returns whether the reader goes on.
Handle = Callable[[Connection, ReceivedFrame | None, str], bool]
