"""Transfers between GPUs: the streams on which they wait, and the thread that watches them.

    send       on the current stream, directly after the kernels that made the tensor
    receive    on a stream of its own, which waits for nothing else on this rank
    value      the current stream waits for its receive
    end        at the end of a walk, the current stream waits for the sends of the walk

A send of NCCL ends only when its receive runs. If a receive waited for the compute stream, and that stream for a send,
two ranks that send to each other would wait in a circle. Here a transfer waits only for kernels before its send, and
for earlier transfers of its pair. `transfer_order` derives from that why no schedule has a circle.

`work.wait()` of NCCL lets the *current stream of the calling thread* wait, and not the host. So only the thread that
computes calls it. The watching thread asks `is_completed()`.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from torchweft.core.segment import version
from torchweft.pipeline.processes.frames import TensorShape
from torchweft.pipeline.processes.lanes import Lane

LOOK_AHEAD = 4
"""Receives per rank that are posted before their values are needed. A kernel that waits for its sender holds SMs, and
a receive that is posted holds its memory."""
_POLL_SECONDS = 2e-3


class DeviceStreams:
    """The streams of one rank's transfers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._receiving = torch.cuda.Stream(device)

    def sending(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def receiving(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._receiving)

    def keep_for_reader(self, tensor: torch.Tensor) -> None:
        # The receiving stream allocated it, and must not reuse its memory before the current stream has read it.
        tensor.record_stream(torch.cuda.current_stream(self.device))


class Transfer:
    """One tensor on its way to or from `rank`. For a send: its walk, and the version that it must keep."""

    def __init__(self, work: Any, tensor: torch.Tensor, rank: int, walk: int | None = None) -> None:
        self.work, self.tensor, self.rank, self.walk = work, tensor, rank, walk
        self._version = version(tensor)

    @property
    def is_changed(self) -> bool:
        return version(self.tensor) != self._version


class Arrival:
    """The device tensors of one frame, in the order of `shapes`."""

    def __init__(self, receives: "ReceiveQueue", shapes: Sequence[TensorShape]) -> None:
        self.shapes = shapes
        self.transfers: list[Transfer] | None = None  # None: not posted
        self._receives = receives

    def take(self, streams: DeviceStreams) -> list[torch.Tensor]:
        """The tensors, for kernels that the current stream gets from now on."""
        transfers = self._receives.post(self)
        for transfer in transfers:
            transfer.work.wait()  # the current stream waits, not the host
            streams.keep_for_reader(transfer.tensor)
        return [transfer.tensor for transfer in transfers]


class ReceiveQueue:
    """Receives from one rank, posted in the order of their headers: some ahead, the others when they are needed."""

    def __init__(self, post: Callable[[TensorShape], Transfer]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._waiting: deque[Arrival] = deque()
        self._running = 0

    def add(self, shapes: Sequence[TensorShape]) -> Arrival:
        arrival = Arrival(self, shapes)
        with self._lock:
            self._waiting.append(arrival)
            self._look_ahead()
        return arrival

    def post(self, arrival: Arrival) -> list[Transfer]:
        # Those before it too: a lane pairs sends and receives by their order alone.
        with self._lock:
            while arrival.transfers is None:
                self._post_next()
        return arrival.transfers

    def end_one(self) -> None:
        with self._lock:
            self._running -= 1
            self._look_ahead()

    def _look_ahead(self) -> None:
        while self._waiting and self._running < LOOK_AHEAD:
            self._post_next()

    def _post_next(self) -> None:
        arrival = self._waiting.popleft()
        self._running += len(arrival.shapes)
        arrival.transfers = [self._post(shape) for shape in arrival.shapes]


class DeviceLane:
    """Transfers between the GPU of this rank and those of others. Nothing here makes the host wait for a GPU."""

    def __init__(self, lane: Lane, streams: DeviceStreams, timeout: float) -> None:
        self._lane, self._streams = lane, streams
        self._timeout = timeout
        self._watched: SimpleQueue[Transfer | None] = SimpleQueue()
        self._receives: dict[int, ReceiveQueue] = {}
        self._changed: dict[int, int] = {}  # by walk, a rank to which a tensor was sent that was written to meanwhile
        self._leaving: dict[int, list[Transfer]] = {}  # by walk, sends that had not ended when last looked at
        self._lock = threading.Lock()  # of the two tables above
        self._aborted = False

    def start(self, ranks: Sequence[int], stuck: Callable[[int], None]) -> None:
        """Prepare for these ranks. `stuck` gets a rank with which no transfer has ended for the time of the timeout."""
        # The thread must not keep the caller alive, which `stuck` refers to weakly.
        self._stuck = stuck
        for rank in ranks:
            self._receives[rank] = ReceiveQueue(partial(self._receive, rank))
        threading.Thread(target=self._watch_all, name="torchweft-transfers", daemon=True).start()

    def send(self, rank: int, tensor: torch.Tensor, walk: int) -> None:
        with self._streams.sending():
            transfer = Transfer(self._lane.send(rank, tensor), tensor, rank, walk)
        with self._lock:
            self._leaving.setdefault(walk, []).append(transfer)
        self._watched.put(transfer)

    def expect(self, rank: int, shapes: Sequence[TensorShape]) -> Arrival:
        return self._receives[rank].add(shapes)

    def take(self, arrival: Arrival) -> list[torch.Tensor]:
        return arrival.take(self._streams)

    def _receive(self, rank: int, shape: TensorShape) -> Transfer:
        with self._streams.receiving():
            tensor = torch.empty_strided(shape.dims, shape.strides, dtype=shape.dtype, device=self._streams.device)
            transfer = Transfer(self._lane.receive(rank, tensor), tensor, rank)
        self._watched.put(transfer)
        return transfer

    def end_walk(self, walk: int) -> int | None:
        """Let the current stream wait for the sends of a walk, so that later kernels can write into their tensors.
        Returns a rank to which a tensor was sent that was written to before it had left, or None."""
        with self._lock:
            leaving = self._leaving.pop(walk, [])
            changed = self._changed.pop(walk, None)
        for transfer in leaving:
            transfer.work.wait()
        return next((transfer.rank for transfer in leaving if transfer.is_changed), changed)

    def drop_walk(self, walk: int) -> None:
        with self._lock:
            self._leaving.pop(walk, None)
            self._changed.pop(walk, None)

    def _watch_all(self) -> None:
        """Main loop of the watching thread. It keeps tensors until their transfers have ended."""
        running: list[Transfer] = []
        progress = 0.0
        while True:
            if running:
                time.sleep(_POLL_SECONDS)
            else:
                progress = math.inf
            while not self._watched.empty() or not running:
                if (started := self._watched.get()) is None:
                    return
                # The time counts from the last transfer that ended, because the GPU can be a step behind the host.
                progress = min(progress, time.monotonic())
                running.append(started)
                del started
            left = [transfer for transfer in running if not self._has_ended(transfer)]
            if len(left) < len(running):
                progress = time.monotonic()
            elif time.monotonic() - progress > self._timeout:
                self._stuck(left[0].rank)
                left = []
            running = left
            del left

    def _has_ended(self, transfer: Transfer) -> bool:
        try:
            if not transfer.work.is_completed():
                return False
        except RuntimeError:  # of a lane that was aborted: the reader has reported why
            pass
        if transfer.walk is None:
            self._receives[transfer.rank].end_one()
            return True
        with self._lock:
            leaving = self._leaving.get(transfer.walk, [])
            # Not in the list if the walk has ended: it has looked at the version, and later writes are right.
            if transfer in leaving:
                leaving.remove(transfer)
                if transfer.is_changed:
                    self._changed[transfer.walk] = transfer.rank
        return True

    def abort(self) -> None:
        # NCCL never hears of a dead rank. Its kernels would wait for it on the GPU. In the reader's thread, whose
        # current device is another one.
        if not self._aborted:
            self._aborted = True
            with self._streams.sending():
                self._lane.abort()

    def close(self) -> None:
        self._watched.put(None)
        self._lane.close()
