"""CUDA streams without a GPU: happens-before between kernels, by vector clocks.

`Machine` stands in for `torch.cuda`. The clock of a stream says which kernels of every stream end before its next one
starts. A block of memory knows its writes and reads, and the streams on which it was recorded. A race is detected in
every run, whatever the order of the threads:

    read too early      the clock of the reading stream lacks the write
    written too early   the clock of the writing stream lacks a read, or the last write
    freed too early     neither the owner nor a recorded stream has passed a read
    on another device   a kernel that takes the current device, as Triton's do, runs while another device is current
    on another stream   AccumulateGrad gets a gradient from another stream than its own

The last two follow from rules in the source of PyTorch's engine: a node runs on the stream that was current at its
creation, it waits for the streams of its gradients, and at the end the streams of the caller wait for it. The engine is
C++ and is not run here. `Node` and `Walk` reimplement these rules, so a change of the engine goes unnoticed.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

Clock = dict["Stream", int]
_turn = threading.RLock()  # serializes changes of the clocks


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a new thread, which like a worker has only default streams."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


class Stream:
    """Stream that numbers its kernels in launch order."""

    def __init__(self, device: Any, priority: int = 0) -> None:
        self.device = torch.device(device)
        self.clock: Clock = {self: 0}

    def launch(self) -> Clock:
        """Launch a kernel, and return its stamp: the stream and the number of the kernel."""
        with _turn:
            self.clock[self] += 1
            return {self: self.clock[self]}

    def record_event(self) -> Clock:
        with _turn:
            return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        with _turn:
            for stream, count in event.items():
                self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def covers(self, stamp: Clock) -> bool:
        """Whether the next kernel of this stream starts after all kernels of the stamp."""
        with _turn:
            return all(self.clock.get(stream, 0) >= count for stream, count in stamp.items())


class Memory:
    """Block of device memory, freed with the last tensor that uses it."""

    def __init__(self, machine: "Machine", owner: Stream, strided: bool = False) -> None:
        self.machine, self.owner, self.strided = machine, owner, strided
        self.written = owner.launch()
        self.uses: list[tuple[Clock, str]] = []
        self.recorded = {owner}

    def read(self, stream: Stream, why: str) -> None:
        if not stream.covers(self.written):
            self.machine.faults.add(f"{why}: read before it is written")
        self.uses.append((stream.launch(), why))

    def write(self, stream: Stream, why: str) -> None:
        if not all(stream.covers(stamp) for stamp in (self.written, *(stamp for stamp, _ in self.uses))):
            self.machine.faults.add(f"{why}: written while it is used")
        self.written = stream.launch()
        self.uses.append((self.written, why))

    def __del__(self) -> None:
        for stamp, why in self.uses:
            if not any(stream.covers(stamp) for stream in self.recorded):
                self.machine.faults.add(f"{why}: freed while it is used")


class OnGpu(Tensor):
    """Tensor in blocks of `Memory`, without values. A sparse one has two blocks: values and indices."""

    memories: tuple[Memory, ...]
    gradient: "OnGpu | None" = None
    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, *memories: Memory, requires_grad: bool = False) -> Any:
        tensor = Tensor._make_subclass(cls, torch.empty(0), requires_grad)
        tensor.memories = memories
        return tensor

    @property
    def memory(self) -> Memory:
        return self.memories[0]

    @property
    def machine(self) -> "Machine":
        return self.memory.machine

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.memory.owner.device

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return len(self.memories) > 1

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.sparse_coo if self.is_sparse else torch.strided

    def _values(self) -> "OnGpu":
        return OnGpu.of(self.memories[0])

    def _indices(self) -> "OnGpu":
        return OnGpu.of(self.memories[1])

    def detach(self) -> "OnGpu":
        return OnGpu.of(*self.memories)

    def clone(self) -> "OnGpu":  # type: ignore[override]
        return self.machine.kernel("clone", self.device, self)

    def record_stream(self, stream: Any) -> None:
        if self.is_sparse:
            self.machine.faults.add("record_stream: not implemented for sparse tensors")
        self.memory.recorded.add(stream)

    def read(self, stream: Stream, why: str) -> None:
        for memory in self.memories:
            memory.read(stream, why)

    def to(self, device: torch.device) -> "OnGpu":  # type: ignore[override]
        """Copy as PyTorch does: on the current stream of the source, between two barriers with the target's."""
        if device == self.device:
            return self
        source, target = self.machine.current_stream(self.device), self.machine.current_stream(device)
        if not self.machine.peers and self.memory.strided:
            self.read(source, "contiguous() of a copy")
        source.wait_stream(target)
        self.read(source, "copy")
        target.wait_stream(source)
        return OnGpu.of(Memory(self.machine, target))

    def __add__(self, other: Any) -> "OnGpu":
        return self.machine.kernel("add", self.device, self, other, sparse=self.is_sparse and other.is_sparse)

    def __mul__(self, other: Any) -> "OnGpu":
        return self.machine.kernel("mul", self.device, self, other)


class AccumulateGrad:
    """Node that accumulates into a parameter. It runs on the stream that is current at its creation."""

    def __init__(self, parameter: "Parameter") -> None:
        self.stream = parameter.machine.current_stream(parameter.device)


class Parameter(OnGpu):
    """Weight whose AccumulateGrad node lives as long as a graph that leads to it."""

    _node: "weakref.ref[AccumulateGrad] | None" = None

    def node(self) -> AccumulateGrad:
        node = self._node and self._node()
        if node is None:
            node = AccumulateGrad(self)
            self._node = weakref.ref(node)
        return node


class View(OnGpu):
    """View of a parameter. Its node runs on the stream of its creation, and leads to AccumulateGrad."""

    stream: Stream
    leads_to: AccumulateGrad


class Machine:
    """Stand-in for `torch.cuda`. Without `peers`, devices cannot read each other's memory."""

    def __init__(self, patch: pytest.MonkeyPatch, *, peers: bool = True) -> None:
        self.peers = peers
        self.faults = set[str]()
        self._default: dict[torch.device, Stream] = {}
        self._thread = threading.local()
        patch.setattr(torch.cuda, "Stream", Stream)
        for name in ("current_stream", "stream", "device", "current_device"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch, "_foreach_add_", self._add_into)
        patch.setattr(torch.ops.aten, "alias", self._alias)

    def current_device(self) -> int:
        return getattr(self._thread, "device", torch.device("cuda:0")).index

    def current_stream(self, device: Any = None) -> Stream:
        device = torch.device(device or f"cuda:{self.current_device()}")
        with _turn:
            default = self._default.setdefault(device, Stream(device))
        return getattr(self._thread, "streams", {}).get(device, default)

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before = self._thread.__dict__.setdefault("streams", {})
        self._thread.streams = before | {stream.device: stream}
        try:
            with self.device(stream.device):
                yield
        finally:
            self._thread.streams = before

    @contextmanager
    def device(self, device: Any) -> Generator[None]:
        before = self.current_device()
        self._thread.device = torch.device(device)
        try:
            yield
        finally:
            self._thread.device = torch.device("cuda", before)

    def kernel(
        self, name: str, device: torch.device, *reads: OnGpu, strided: bool = False, sparse: bool = False
    ) -> OnGpu:
        """Launch a kernel on the current stream of a device, and return its result."""
        stream = self.current_stream(device)
        for tensor in reads:
            tensor.read(stream, name)
        return OnGpu.of(*(Memory(self, stream, strided) for _ in range(1 + sparse)))

    def write(self, name: str, tensor: OnGpu, *reads: OnGpu) -> None:
        """Launch a kernel that writes into a tensor."""
        stream = self.current_stream(tensor.device)
        for source in reads:
            source.read(stream, name)
        with torch.no_grad():
            tensor.zero_()  # counts as a write: see `Tensor._version`
        for memory in tensor.memories:
            memory.write(stream, name)

    def parameter(self, device: torch.device) -> Parameter:
        """Create a weight on the current stream."""
        return Parameter.of(Memory(self, self.current_stream(device)), requires_grad=True)

    def hand_over(self, gradient: OnGpu, producer: Stream, consumer: Stream, *, accumulates: bool = False) -> None:
        """Pass a gradient from one node to the next, as the engine does."""
        if consumer is producer:
            return
        if accumulates:
            self.faults.add("AccumulateGrad: gets a gradient from another stream")
        consumer.wait_stream(producer)
        if consumer.device == gradient.device:
            for memory in gradient.memories:
                memory.recorded.add(consumer)

    def _add_into(self, totals: Sequence[OnGpu], gradients: Sequence[OnGpu]) -> None:
        for total, gradient in zip(totals, gradients, strict=True):
            self.write("add into", total, gradient)

    def _alias(self, parameter: Parameter) -> View:
        view = View.of(*parameter.memories)
        view.stream, view.leads_to = self.current_stream(parameter.device), parameter.node()
        return view


class Walk:
    """Backward of one forward by the engine, in the calling thread and on the stream of that forward."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self._machine, self._device = machine, device
        self._forward = machine.current_stream(device)

    @contextmanager
    def back(self, *seeds: OnGpu) -> Generator[Callable[[OnGpu, Parameter], None]]:
        """Context for the kernels of the graph. Call its value with the gradient of every parameter."""
        machine, caller = self._machine, self._machine.current_stream(self._device)
        leaves = {self._forward}

        def capture(gradient: OnGpu, parameter: Parameter) -> None:
            node = parameter.node()
            machine.hand_over(gradient, self._forward, node.stream, accumulates=True)
            leaves.add(node.stream)

        for seed in seeds:
            machine.hand_over(seed, caller, self._forward)
        with machine.stream(self._forward):
            yield capture
        for stream in leaves:
            caller.wait_stream(stream)


class Node:
    """Autograd node of a step. As in autograd, `backward` runs in a separate thread."""

    def __init__(self, machine: Machine, step: Any) -> None:
        self._machine, self._step = machine, step
        self._paths = [self._path(tensor) for tensor in step.node_inputs()]
        (self.output,), _ = step.forward()
        self._stream = machine.current_stream(self.output.device)

    def _path(self, tensor: OnGpu) -> list[AccumulateGrad | Stream]:
        """The path of its gradient: to a view and AccumulateGrad, to AccumulateGrad, or to a node of the caller."""
        if isinstance(tensor, View):
            return [tensor.stream, tensor.leads_to]
        return [tensor.node() if isinstance(tensor, Parameter) else self._machine.current_stream(tensor.device)]

    def backward(self, gradient: OnGpu) -> None:
        """Backward of the caller's loss. At its end, the caller's streams wait for all accumulation."""
        machine = self._machine
        machine.hand_over(gradient, machine.current_stream(gradient.device), self._stream)
        for stream in in_a_thread(lambda: self._run(gradient)):
            machine.current_stream(stream.device).wait_stream(stream)

    def _run(self, seed: OnGpu) -> set[Stream]:
        machine, leaves = self._machine, set[Stream]()
        with machine.stream(self._stream):
            gradients = self._step.backward([seed], retain=False)
            for tensor, path, gradient in zip(self._step.tensors, self._paths, gradients, strict=True):
                before = self._stream
                for node in path:
                    stream = node.stream if isinstance(node, AccumulateGrad) else node
                    machine.hand_over(gradient, before, stream, accumulates=node is not stream)
                    before = stream
                gradient.read(before, "accumulation")
                leaves.add(before)
                tensor.gradient = gradient
        return leaves
