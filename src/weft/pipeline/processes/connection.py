"""One connection to another rank: frames over a socket, large tensors over the lanes.

    sending thread   small frame ──> socket                   the rest of a full socket: the thread `drain`
    reader thread    socket ──> frame ──> the owner of the links
    bodies           waits for tensors that arrive on the CPU lane, so that the reader goes on with the next frame
    releases         waits for tensors that leave, and keeps them alive until then

A send never blocks: the thread that sends is also the one that takes what arrives, and two ranks that send large values
to each other would both wait. All threads but the reader start at their first job.
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

from weft.pipeline.processes.frames import (
    CPU_LANE,
    DATA,
    DEVICE_LANE,
    FRAME,
    Head,
    ReceivedShapes,
    SentShapes,
    Shape,
    allocate,
    decode_head,
    encode_tensors,
    join_value,
    memory_of,
)
from weft.pipeline.processes.lanes import Lanes

_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()


class Frame(NamedTuple):
    """A frame as it arrives. The works are receives of tensors that are still on their way."""

    head: Head
    plain: bytes
    shape: Shape | None = None
    tensors: Sequence[torch.Tensor] = ()
    works: Sequence[Any] = ()
    device_works: Sequence[Any] = ()

    def value(self, plain: Sequence[Any]) -> Any:
        """The value of a data frame, for the thread that uses it."""
        assert self.shape is not None
        for leaf, tensor in zip(self.shape.tensors, self.tensors, strict=True):
            if leaf.way == DEVICE_LANE:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        for work in self.device_works:  # the current stream waits, not the host
            work.wait()
        return join_value(self.shape, plain, self.tensors)


def _changes_until_sent(work: Any, tensor: torch.Tensor, version: int) -> bool:
    """Keep a tensor until it has left; whether it was written to before."""
    with suppress(RuntimeError):  # the reader reports the lost rank
        work.wait()
        while tensor.device.type != "cpu" and not work.is_completed():
            time.sleep(1e-3)  # NCCL's wait() is for the stream
    return tensor._version != version


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


class Connection:
    """The connection to `rank`. `handle` gets each frame, then None and the reason when nothing more can come."""

    def __init__(self, rank: int, sock: socket.socket, lanes: Lanes) -> None:
        self.rank, self.sending = rank, threading.Lock()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lanes, self._lock = sock, lanes, threading.Lock()
        self._frames: deque[tuple[memoryview, list[int]]] = deque()  # to be sent, with the bytes of each that are gone
        self._draining = self._finishing = self._changed = False
        self.sent_shapes, self._shapes = SentShapes(), ReceivedShapes()
        self._drain, self.bodies, self._releases = (
            Worker(f"weft-{name}-{rank}") for name in ("drain", "bodies", "releases")
        )
        self._reader: threading.Thread | None = None
        _connections.add(self)

    def start(self, handle: Callable[["Connection", Frame | None, str], bool]) -> None:
        """Start the reader. It ends when `handle` returns False."""
        self._reader = threading.Thread(
            target=self._read_frames, args=(handle,), name=f"weft-reader-{self.rank}", daemon=True
        )
        self._reader.start()

    def send(self, head: Head, shape: Shape, plain: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Send a value. Its large tensors are kept until they have left; nobody may write to them before."""
        with self.sending:  # the frames of the socket and the sends of a lane must keep one order
            slot, text = self.sent_shapes.number(shape)
            head = head._replace(slot=slot, shape_bytes=len(text), plain_bytes=len(plain))
            ways = list(zip(shape.tensors, tensors, strict=True))
            inline = [tensor for leaf, tensor in ways if leaf.way == FRAME]
            on_lanes = [tensor for leaf, tensor in ways if leaf.way != FRAME]
            frame = b"".join([head.encode(), text, plain, encode_tensors([tensor.cpu() for tensor in inline])])
            try:
                self.write(frame)
                for tensor in on_lanes:
                    work = self._lanes.send(self.rank, tensor)
                    self._releases.submit(partial(self._release, work, tensor, tensor._version))
            except BaseException:
                # A header without its send would let the next tensor arrive in the wrong place.
                if on_lanes:
                    self._shut(socket.SHUT_RDWR)
                raise

    def _release(self, work: Any, tensor: torch.Tensor, version: int) -> None:
        self._changed |= _changes_until_sent(work, tensor, version)

    def changed(self, seconds: float) -> bool:
        """Whether a tensor was written to before it had left. Waits for those that are leaving."""
        if self._releases.started:
            done = threading.Event()
            self._releases.submit(done.set)
            done.wait(seconds)
        return self._changed

    def write(self, frame: bytes) -> None:
        """Send a frame as far as the socket takes it; a thread goes on with the rest. Raises OSError."""
        with self._lock:
            self._frames.append((memoryview(frame), []))
            if not self._draining and not self._advance():
                self._draining = True
                self._drain.submit(self._drain_frames)

    def finish(self) -> None:
        """Announce to the other end that nothing more will come, after what is still to be sent."""
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

    def _read_frames(self, handle: Callable[["Connection", Frame | None, str], bool]) -> None:
        reason = "its process ended, or its host is unreachable"
        try:
            with self._socket.makefile("rb", 1 << 16) as file:
                while (frame := self._read_frame(file)) is not None:
                    if not handle(self, frame, ""):
                        return
                    del frame
        except OSError as error:
            reason = f"{reason} ({error})"
        except Exception as error:
            reason = f"it sent what no member sends ({type(error).__name__}: {error})"
        handle(self, None, reason)

    def _read_frame(self, file: Any) -> Frame | None:
        data = file.read(Head.SIZE)
        if len(data) < Head.SIZE:
            return None
        head = decode_head(data)
        text, plain = file.read(head.shape_bytes), file.read(head.plain_bytes)
        if head.kind != DATA:
            return Frame(head, plain)
        shape = self._shapes.find(head.slot, text)
        tensors = [allocate(leaf, self._lanes.device) for leaf in shape.tensors]
        works: dict[int, list[Any]] = {CPU_LANE: [], DEVICE_LANE: []}
        for leaf, tensor in zip(shape.tensors, tensors, strict=True):
            if leaf.way != FRAME:
                works[leaf.way].append(self._lanes.receive(self.rank, tensor))
            elif tensor.numel() and file.readinto(memory_of(tensor)) < tensor.nbytes:
                return None
        return Frame(head, plain, shape, tensors, works[CPU_LANE], works[DEVICE_LANE])

    def deliver(self, frame: Frame, put: Callable[[], None]) -> None:
        """Call `put` when the tensors of the frame are here, after those of earlier frames."""
        if not frame.works and not self.bodies.started:
            return put()

        def wait() -> None:
            try:
                for work in frame.works:
                    work.wait()
                put()
            except RuntimeError:  # the rank is gone, or its lane is broken: the reader reports it
                self._shut(socket.SHUT_RDWR)

        self.bodies.submit(wait)

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
        self.bodies.close(deadline - time.monotonic())
        self._socket.close()

    def forget_socket(self) -> None:
        """In a forked child: close the descriptor alone, since a shutdown would end the parent's connection."""
        os.close(self._socket.detach())
