"""CUDA streams without a GPU: happens-before between kernels, by vector clocks.

`Machine` stands in for `torch.cuda`. A stream's clock says which kernels of every stream have ended before its next
one starts. A tensor knows when it was written, which streams read it, and which it was recorded on. So a race shows in
any run, whatever the order of the threads:

    read too early    the reading stream's clock lacks the write
    freed too early   a read is in neither the clock of the owner nor in that of a recorded stream

What it cannot see are the streams of the autograd engine, and kernels that are not launched by `Machine.kernel`.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

Clock = dict["Stream", int]


class Stream:
    """A stream. Kernels are numbered in the order in which they are launched on it."""

    def __init__(self, device: Any, priority: int = 0) -> None:
        self.device = torch.device(device)
        self.clock: Clock = {self: 0}

    def launch(self) -> Clock:
        """Launch a kernel: all that has ended when it has."""
        self.clock[self] += 1
        return dict(self.clock)

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for stream, count in event.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def covers(self, stamp: Clock) -> bool:
        """Whether its next kernel starts after what is in the stamp."""
        return all(self.clock.get(stream, 0) >= count for stream, count in stamp.items())


class Memory:
    """A block of a device's memory. It is freed when no tensor has it any more."""

    def __init__(self, machine: "Machine", owner: Stream, strided: bool) -> None:
        self.machine, self.owner, self.strided = machine, owner, strided
        self.written = owner.launch()
        self.reads: list[tuple[Clock, str]] = []
        self.recorded = {owner}

    def read(self, stream: Stream, why: str) -> None:
        if not stream.covers(self.written):
            self.machine.faults.add(f"{why}: read before it is written")
        self.reads.append(({stream: stream.launch()[stream]}, why))

    def __del__(self) -> None:
        for stamp, why in self.reads:
            if not any(stream.covers(stamp) for stream in self.recorded):
                self.machine.faults.add(f"{why}: freed while it is read")


class OnGpu(Tensor):
    """A tensor in such memory; it has no numbers."""

    memory: Memory
    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(memory: Memory) -> "OnGpu":
        tensor = Tensor._make_subclass(OnGpu, torch.empty(0))
        tensor.memory = memory
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.memory.owner.device

    def detach(self) -> "OnGpu":
        return OnGpu.of(self.memory)

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.add(stream)

    def to(self, device: torch.device) -> "OnGpu":  # type: ignore[override]
        """Copy as PyTorch does: on the current stream of the source, between two barriers with that of the target."""
        machine = self.memory.machine
        source, target = machine.current_stream(self.device), machine.current_stream(device)
        if not machine.peers and self.memory.strided:
            self.memory.read(source, "contiguous() of a copy")
        source.wait_stream(target)
        self.memory.read(source, "copy")
        target.wait_stream(source)
        return OnGpu.of(Memory(machine, target, strided=False))


class Machine:
    """Stands in for `torch.cuda`. Without `peers`, devices cannot read each other's memory."""

    def __init__(self, patch: pytest.MonkeyPatch, *, peers: bool = True) -> None:
        self.peers = peers
        self.faults = set[str]()
        self._default: dict[torch.device, Stream] = {}
        self._thread = threading.local()
        patch.setattr(torch.cuda, "Stream", Stream)
        for name in ("current_stream", "stream", "device"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    def current_stream(self, device: Any = None) -> Stream:
        device = torch.device(device or getattr(self._thread, "device", "cuda:0"))
        default = self._default.setdefault(device, Stream(device))
        return getattr(self._thread, "streams", {}).get(device, default)

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before = self._thread.__dict__.setdefault("streams", {})
        self._thread.streams = before | {stream.device: stream}
        with self.device(stream.device):
            yield
        self._thread.streams = before

    @contextmanager
    def device(self, device: Any) -> Generator[None]:
        before = getattr(self._thread, "device", torch.device("cuda:0"))
        self._thread.device = torch.device(device)
        yield
        self._thread.device = before

    def kernel(self, name: str, device: torch.device, *reads: OnGpu, strided: bool = False) -> OnGpu:
        """Launch one on the current stream of a device."""
        for tensor in reads:
            tensor.memory.read(self.current_stream(device), name)
        return OnGpu.of(Memory(self, self.current_stream(device), strided))
