"""One connection to another rank: frames over a socket, large tensors over the lanes.

    sending thread   small frame ──> socket                   the rest of a full socket: the thread `drain`
    reader thread    socket ──> frame ──> the owner of the links
    bodies           waits for tensors that arrive on the CPU lane, so that the reader goes on with the next frame
    releases         waits for tensors that leave, and keeps them alive until then

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
from torchweft.pipeline.processes.lanes import Lanes

_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_inherited: list[Lanes] = []
"""In a forked child: never freed, because gloo would wait for threads that are not there."""


class ReceivedFrame(NamedTuple):
    """A frame as it arrives. The works are receives of tensors that are still on their way."""

    header: FrameHeader
    plain: bytes
    shape: Shape | None = None
    tensors: Sequence[torch.Tensor] = ()
    works: Sequence[Any] = ()
    device_works: Sequence[Any] = ()

    def value(self, plain: Sequence[Any]) -> Any:
        """The value of a data frame, for the thread that uses it."""
        assert self.shape is not None
        if self.device_works:
            for leaf, tensor in zip(self.shape.tensors, self.tensors, strict=True):
                if leaf.way == DEVICE_LANE:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            for work in self.device_works:  # the current stream waits, not the host
                work.wait()
        return join_value(self.shape, plain, self.tensors)


def _forget_sockets() -> None:
    """In a forked child: an open copy of a socket would hide the death of the parent from its peers."""
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
        """Let the thread end after its jobs, and wait for it so long."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, seconds))


def _run_jobs(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Connection:
    """The connection to `rank`."""

    def __init__(self, rank: int, sock: socket.socket, lanes: Lanes) -> None:
        self.rank = rank
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lanes, self._lock, self._sending = sock, lanes, threading.Lock(), threading.Lock()
        self._frames: deque[tuple[memoryview, list[int]]] = deque()  # to be sent, with the bytes of each that are gone
        self._draining = self._finishing = False
        self._changed: set[int] = set()  # walks
        self.sent_shapes = SentShapes()
        self.received_shapes: dict[int, Shape] = {}
        self._drain, self._bodies, self._releases = (
            Worker(f"torchweft-{name}-{rank}") for name in ("drain", "bodies", "releases")
        )
        self._reader: threading.Thread | None = None
        _connections.add(self)

    def start(self, handle: "Handle") -> None:
        """Start the reader."""
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
        on_lanes = [tensor for leaf, tensor in ways if leaf.way != FRAME]
        with self._sending:  # frames and sends of a lane keep one order
            slot, text = self.sent_shapes.find(shape)
            header = FrameHeader(DATA, walk, address, slot, len(text), len(plain))
            try:
                self.write(b"".join([header.encode(), text, plain, *inline]))
                for tensor in on_lanes:
                    work = self._lanes.send(self.rank, tensor)
                    self._releases.submit(partial(self._release, work, tensor, _version_of(tensor), walk))
            except BaseException:
                # A header without its send would let the next tensor arrive in the wrong place.
                if on_lanes:
                    self._shut(socket.SHUT_RDWR)
                raise

    def _release(self, work: Any, tensor: torch.Tensor, version: int, walk: int) -> None:
        """Keep a tensor until it has left."""
        with suppress(RuntimeError):  # the reader reports the lost rank
            work.wait()
            while tensor.device.type != "cpu" and not work.is_completed():
                time.sleep(1e-3)  # wait() of NCCL is for the stream
        if _version_of(tensor) != version:
            self._changed.add(walk)

    def find_change(self, walk: int, seconds: float) -> bool:
        """Whether a tensor of a walk was written to before it had left. Waits for those that are leaving."""
        if self._releases.started:
            done = threading.Event()
            self._releases.submit(done.set)
            done.wait(seconds)
        return walk in self._changed

    def write(self, frame: bytes) -> None:
        """Send a frame as far as the socket takes it; a thread goes on with the rest. Raises OSError."""
        with self._lock:
            self._frames.append((memoryview(frame), []))
            if not self._draining and not self._advance():
                self._draining = True
                self._drain.submit(self._drain_frames)

    def finish(self) -> None:
        """Announce the end of this direction, after the frames that are still to be sent."""
        with self._lock:
            self._finishing = True
            if not self._draining:
                self._shut(socket.SHUT_WR)

    def _advance(self) -> bool:
        """Under the lock: send without blocking; whether all frames are gone."""
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
                poll.poll(1000)
                with self._lock:
                    if self._advance():
                        self._draining = False
                        if self._finishing:
                            self._shut(socket.SHUT_WR)
                        return
        except (OSError, ValueError):  # the reader reports it
            pass

    def _read_frames(self, handle: "Handle") -> None:
        reason = "its process ended, or its host is unreachable"
        try:
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
        places = {DEVICE_LANE: self._lanes.device}
        tensors = [torch.empty(leaf.dims, dtype=leaf.dtype, device=places.get(leaf.way)) for leaf in shape.tensors]
        works: dict[int, list[Any]] = {CPU_LANE: [], DEVICE_LANE: []}
        for leaf, tensor in zip(shape.tensors, tensors, strict=True):
            if leaf.way != FRAME:
                works[leaf.way].append(self._lanes.receive(self.rank, tensor))
            elif tensor.numel() and file.readinto(memory_of(tensor)) < tensor.nbytes:
                raise EOFError
        return ReceivedFrame(header, plain, shape, tensors, works[CPU_LANE], works[DEVICE_LANE])

    def deliver(self, frame: ReceivedFrame, put: Callable[[], None]) -> None:
        """Call `put` when the tensors of a frame are here; for the last frame, those of all frames before it."""
        if not frame.works and not (frame.header.kind == BYE and self._bodies.started):
            return put()

        def wait() -> None:
            try:
                for work in frame.works:
                    work.wait()
                put()
            except RuntimeError:  # the rank is gone, or its lane is broken: the reader reports it
                self._shut(socket.SHUT_RDWR)

        return self._bodies.submit(wait)

    def _shut(self, how: int) -> None:
        with suppress(OSError):
            self._socket.shutdown(how)

    def close(self, deadline: float) -> None:
        """End all threads. The other end is expected to have answered the announced end before the deadline."""
        for worker in (self._releases, self._drain):
            worker.close(deadline - time.monotonic())
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(max(0.0, deadline - time.monotonic()))
            self._shut(socket.SHUT_RDWR)  # wakes a reader that still waits
            self._reader.join(1.0)
        self._bodies.close(deadline - time.monotonic())
        self._socket.close()

    def forget_socket(self) -> None:
        """Close the descriptor alone: a shutdown in a child would end the connection of its parent."""
        _inherited.append(self._lanes)
        os.close(self._socket.detach())


Handle = Callable[[Connection, ReceivedFrame | None, str], bool]
"""Receiver of each frame, at last of None with the reason why nothing more comes; whether the reader goes on."""
