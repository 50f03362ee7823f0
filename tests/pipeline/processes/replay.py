"""Replay of a pipe over processes on model GPUs: which stream waits for which, if its tensors went over NCCL.

    run      the code of the library over gloo, with `NotedBackend` and `NotedStreams` in the places of NCCL and CUDA
    note     each kernel, send, receive and wait of a stream, in the order of the host, with the current stream
    play     a graph: a stream runs its entries in order, a transfer starts when both of its ends have their turn

A circle in the graph is a deadlock of real GPUs. Gloo would not show it, because its transfers wait for no stream.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from graphlib import CycleError, TopologicalSorter
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft
from torchweft.core.errors import ScheduleError
from torchweft.pipeline.processes import links
from torchweft.pipeline.processes.device_lane import DeviceLane
from torchweft.pipeline.processes.frames import DEVICE_LANE, split_value
from torchweft.pipeline.processes.lanes import Lane
from torchweft.pipeline.schedule import build

Entry = tuple[Any, ...]  # kind, stream, and for transfers: sender, receiver, number
HOST_SECONDS = 1e-3
log: list[Entry] = []
_thread = threading.local()


def note(kind: str, *what: Any) -> None:
    log.append((kind, getattr(_thread, "stream", "compute"), *what))


class NotedStreams:
    device = torch.device("cpu")

    def sending(self) -> Any:
        return nullcontext()

    @contextmanager
    def receiving(self) -> Iterator[None]:
        _thread.stream = "receiving"
        try:
            yield
        finally:
            del _thread.stream

    def keep_for_reader(self, tensor: Tensor) -> None:
        pass


class NotedWork:
    def __init__(self, work: Any, *key: int) -> None:
        self._work, self._key = work, key
        self._waiting, self._ended = threading.Lock(), False

    def wait(self) -> None:
        note("wait", *self._key)
        with self._waiting:
            if not self._ended:  # the second wait for a send of gloo never returns
                self._work.wait()
            self._ended = True

    def is_completed(self) -> bool:
        return self._ended or self._work.is_completed()


class NotedBackend:
    """Gloo for one direction. It is called under the lock of the lane, so the numbers are those of the lane."""

    def __init__(self, gloo: Any, rank: int) -> None:
        self._gloo, self._rank = gloo, rank
        self._numbers = {(role, other): count() for role in ("send", "recv") for other in range(gloo.size())}

    def send(self, tensors: Any, rank: int, tag: int) -> NotedWork:
        return self._post("send", self._rank, rank, tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int) -> NotedWork:
        return self._post("recv", rank, self._rank, tensors, rank, tag)

    def abort(self) -> None:
        pass

    def _post(self, role: str, sender: int, receiver: int, tensors: Any, rank: int, tag: int) -> NotedWork:
        key = sender, receiver, next(self._numbers[role, rank])
        note(role, *key)
        return NotedWork(getattr(self._gloo, role)(tensors, rank, tag), *key)


def noted_lane(group: Any, rendezvous: Any, device: Any, timeout: float) -> DeviceLane:
    store = dist.PrefixStore("noted", rendezvous.store)
    lane = Lane.of_gloo(group, store, "127.0.0.1", timeout)
    lane._backends = [NotedBackend(gloo, group.rank()) for gloo in lane._backends]
    return DeviceLane(lane, NotedStreams(), timeout)  # type: ignore[arg-type]


def split_for_device(value: Any, *, device_lane: bool) -> Any:
    shape, plain, tensors = split_value(value, device_lane=device_lane)
    if not device_lane:
        return shape, plain, tensors
    leaves = [leaf and leaf._replace(way=DEVICE_LANE) if leaf and 0 not in leaf.dims else leaf for leaf in shape.leaves]
    return shape._replace(leaves=tuple(leaves)), plain, tensors


def noting_read(read: Any) -> Any:
    """A method of a tensor that makes the host wait for its value."""

    def noting(tensor: Tensor, *args: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            note("read")
        return read(tensor, *args)

    return noting


@contextmanager
def noted(former_wait: bool = False) -> Iterator[None]:
    """Links that note what NCCL and CUDA would get. `former_wait`: as the code was once, the stream that computes waits
    for each send, and receives are posted on it. The thread that waited then is as fast as it can be: the wait follows
    its send at once."""
    log.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(links, "_device_lane", noted_lane))
        stack.enter_context(patch.object(links, "split_value", split_for_device))
        for name in ("item", "tolist", "cpu", "__float__", "__bool__", "__int__"):
            stack.enter_context(patch.object(Tensor, name, noting_read(getattr(Tensor, name))))
        if former_wait:
            send = DeviceLane.send

            def send_and_wait(lane: DeviceLane, rank: int, tensor: Tensor, walk: int) -> None:
                send(lane, rank, tensor, walk)
                note("wait", *lane._leaving[walk][-1].work._key)

            stack.enter_context(patch.object(DeviceLane, "send", send_and_wait))
            stack.enter_context(patch.object(NotedStreams, "receiving", NotedStreams.sending))
        yield


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        note("kernel")
        time.sleep(HOST_SECONDS * random.random())
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        note("kernel")
        time.sleep(HOST_SECONDS * random.random())
        return gradient * ctx.saved_tensors[0], gradient.sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return Kernel.apply(x, self.w)


def run_noted(schedule: str, seed: int, steps: int, micro_batches: int, former_wait: bool) -> tuple[list[Entry], float]:
    """The entries of this rank in all steps, and the last loss."""
    random.seed(f"{seed} {dist.get_rank()}")
    size = dist.get_world_size()
    stages = size
    for number in (size, 2 * size):
        try:
            if len(build(schedule, number, micro_batches).workers) == size:
                stages = number
        except ScheduleError:
            pass
    model = nn.Sequential(*(Block() for _ in range(stages)))
    model[-1].w = model[0].w  # lent, so that ranks exchange copies and gradients too
    with noted(former_wait):
        pipe = weft.Pipe(
            model, group=dist.group.WORLD, balance=[1] * stages, chunks=micro_batches, schedule=schedule,
            loss=nn.functional.mse_loss,
        )  # fmt: skip
        x = torch.ones(2 * micro_batches, 3)
        for _ in range(steps):
            note("step")
            loss = pipe(x, target=x)
            loss.backward()
        pipe._layout._channel.links.close()
        return list(log), loss.item()


def run_all(schedules: list[str], *args: Any) -> list[tuple[list[Entry], float]]:
    return [run_noted(schedule, *args) for schedule in schedules]


def count_reads(entries: list[Entry]) -> int:
    """Reads of values by the host between the first and the last kernel of each step."""
    kinds = [kind for kind, *_ in entries]
    starts = [place for place, kind in enumerate(kinds) if kind == "step"]
    reads = 0
    for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True):
        kernels = [place for place in range(start, end) if kinds[place] == "kernel"]
        reads += kinds[kernels[0] : kernels[-1]].count("read")
    return reads


def find_deadlock(logs: list[list[Entry]]) -> list[Any]:
    """Play the entries of all ranks. Returns a circle of waits, or an empty list."""
    graph: dict[Any, list[Any]] = {}
    ends: dict[Any, set[str]] = {}
    for rank, entries in enumerate(logs):
        last: dict[str, Any] = {}
        for place, (kind, stream, *transfer) in enumerate(entries):
            before = [last[stream]] if stream in last else []
            if kind in ("send", "recv"):
                sender, receiver, number = transfer
                node = sender, receiver, number
                # NCCL runs it on a stream of the pair, which waits for the current stream.
                earlier = [(sender, receiver, number - 1)] if number else []
                graph.setdefault(node, []).extend([*before, *earlier])
                ends.setdefault(node, set()).add(kind)
                continue
            if kind in ("read", "step"):
                continue
            node = kind, rank, place
            graph[node] = before + ([tuple(transfer)] if kind == "wait" else [])
            last[stream] = node
    assert all(of_one == {"send", "recv"} for of_one in ends.values()), "a transfer with one end"
    assert ends, "nothing was sent"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []
