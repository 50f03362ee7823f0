"""Routes: the source of a value that crosses a cut, the stages that read it, and its way to their devices.

A value has an *address* (route, reader, micro-batch). In forward it travels from the route's source to the reader. Its
gradient has the same address and travels from the reader to the source. So a table of gradients to return is not
needed: it is the routes in reverse.

            route "x0"        route "x1"        route "x2"
    OUTSIDE ----------> stage 0 ------> stage 1 ------> OUTSIDE
                           |     route "skip"   ^
                           +--------------------+            any number of readers

A route with `delay` d is a *carry*: micro-batch (or time chunk) i reads the value of micro-batch i - d. The first d
values come from outside (the initial state), and the last d values go outside (the last state).

On the CPU, values need not be moved. On CUDA every worker has two streams, one to compute and one to copy, and a value
is passed on together with the event after which it is ready:

    producer:  compute --- y ready (event) -------------------------------
    consumer:  copy    -------- wait(event) -- copy y -- (event) ---------
               compute -- (previous micro-batch) ------- wait -- F -------

The caching allocator can reuse a block as soon as the stream that allocated it has passed the point of its release. So
a tensor that another stream reads is recorded there (`Tensor.record_stream`). At both ends of a walk the workers'
streams and the caller's stream wait for each other. So the next reader sees the weights that the optimizer wrote, and
the gradients that the workers wrote. Backward runs on the caller's streams of its forward (`CallerStreams`). Stages
that share buffers pass them on with an event (`StreamLock`).
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchweft.core.context import on_device
from torchweft.core.pytree import flatten, unflatten
from torchweft.core.segment import Gradients, detached_leaf
from torchweft.pipeline.microbatch import ELSEWHERE


class Message(NamedTuple):
    """A value on its way, with the `torch.cuda.Event` after which its tensors are ready. None: they are ready now."""

    value: Any
    ready: Any = None


OUTSIDE = -1


@dataclass(frozen=True)
class Route:
    """One value per micro-batch: from `source` (a stage, or OUTSIDE) to each of `readers`."""

    name: str
    source: int
    readers: tuple[int, ...]
    delay: int = 0


class Address(NamedTuple):
    """Address of one value: its route, the stage that reads it, and the micro-batch that made it (below 0: initial)."""

    route: int
    reader: int  # of several stages of one worker the first, because the value travels there once
    micro_batch: int


class Delivery(NamedTuple):
    """Readers of one route: one tuple of stages per worker, in the order of the workers; and that of each reader."""

    # Gradients are summed within a group first, and then over the groups. This order does not depend on the executor,
    # so all executors give the same bits.
    groups: tuple[tuple[int, ...], ...]
    group_of: dict[int, tuple[int, ...]]


class Addresses(NamedTuple):
    """All addresses of the values of one step, made once for all steps.

    `reads[stage][micro_batch]` are those that a stage reads, in the order of `Wiring.inputs`. `writes[route]
    [micro_batch]` are those to which the value of a route is sent, one per worker. Reader OUTSIDE: it leaves the run.
    `shared[route]` says whether several stages of one worker read it, and `deliveries[route]` which ones."""

    reads: tuple[tuple[tuple[Address, ...], ...], ...]
    writes: tuple[tuple[tuple[Address, ...], ...], ...]
    shared: tuple[bool, ...]
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True)
class Wiring:
    """All routes of a model. `inputs[s]` and `outputs[s]` are the numbers of the routes that stage s reads and writes,
    in the order in which its function takes and returns their values."""

    routes: tuple[Route, ...]
    stages: int
    inputs: tuple[tuple[int, ...], ...] = field(init=False)
    outputs: tuple[tuple[int, ...], ...] = field(init=False)
    _deliveries: dict[tuple[int, ...], tuple[Delivery, ...]] = field(
        init=False, compare=False, default_factory=dict[tuple[int, ...], tuple[Delivery, ...]]
    )

    _addresses: dict[tuple[tuple[int, ...], int], Addresses] = field(
        init=False, compare=False, default_factory=dict[tuple[tuple[int, ...], int], Addresses]
    )

    def __post_init__(self) -> None:
        def numbered(belongs: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(r for r, at in enumerate(belongs) if s in at) for s in range(self.stages))

        object.__setattr__(self, "inputs", numbered([route.readers for route in self.routes]))
        object.__setattr__(self, "outputs", numbered([(route.source,) for route in self.routes]))

    def deliveries(self, worker_of: tuple[int, ...]) -> tuple[Delivery, ...]:
        if worker_of not in self._deliveries:
            self._deliveries[worker_of] = tuple(_delivery(route.readers, worker_of) for route in self.routes)
        return self._deliveries[worker_of]

    def addresses(self, worker_of: tuple[int, ...], micro_batches: int) -> Addresses:
        key = worker_of, micro_batches
        if key not in self._addresses:
            self._addresses[key] = _addresses(self, self.deliveries(worker_of), micro_batches)
        return self._addresses[key]


def _addresses(wiring: Wiring, deliveries: Sequence[Delivery], micro_batches: int) -> Addresses:
    def writes(number: int, route: Route, index: int) -> tuple[Address, ...]:
        inside = not route.delay or index + route.delay < micro_batches
        firsts = [group[0] for group in deliveries[number].groups] if inside else [OUTSIDE]
        return tuple(Address(number, reader, index) for reader in firsts)

    def reads(stage: int, index: int) -> tuple[Address, ...]:
        return tuple(
            Address(route, deliveries[route].group_of[stage][0], index - wiring.routes[route].delay)
            for route in wiring.inputs[stage]
        )

    indices = range(micro_batches)
    return Addresses(
        tuple(tuple(reads(stage, i) for i in indices) for stage in range(wiring.stages)),
        tuple(tuple(writes(number, route, i) for i in indices) for number, route in enumerate(wiring.routes)),
        tuple(any(len(group) > 1 for group in delivery.groups) for delivery in deliveries),
        tuple(deliveries),
    )


def _delivery(readers: Sequence[int], worker_of: Sequence[int]) -> Delivery:
    by_worker: dict[int, list[int]] = {}
    for reader in sorted(readers):
        by_worker.setdefault(OUTSIDE if reader == OUTSIDE else worker_of[reader], []).append(reader)
    groups = tuple(tuple(by_worker[worker]) for worker in sorted(by_worker))
    return Delivery(groups, {reader: group for group in groups for reader in group})


Given = dict[int, dict[Address, Message]]  # the messages that a walk starts with, by the segment that takes them


class EntryPoint(NamedTuple):
    route: int
    segment: int


@dataclass(frozen=True)
class EntryPoints:
    """`entries` of the parts of the mini-batch, and the route `result` of the value that leaves segment `source`."""

    entries: tuple[EntryPoint, ...]
    result: int
    source: int

    def enter(self, micro_batches: Sequence[Sequence[Any]], *, streams: bool) -> Given:
        given: Given = {}
        for part, entry in enumerate(self.entries):
            for index, parts in enumerate(micro_batches):
                address = Address(entry.route, entry.segment, index)
                value = parts[part]
                if value is ELSEWHERE:
                    continue
                given.setdefault(entry.segment, {})[address] = message_of(value) if streams else Message(value)
        return given

    def results(self, left: Mapping[Address, Message], count: int) -> list[Any]:
        return [left[self._out(index)].value for index in range(count)]

    def seed(self, gradients: Sequence[Gradients], *, streams: bool) -> Given:
        messages = [message_of(of_result) if streams else Message(of_result) for of_result in gradients]
        return {self.source: {self._out(index): message for index, message in enumerate(messages)}}

    def gradients(self, left: Mapping[Address, Message], count: int, parts: Sequence[int]) -> list[Gradients]:
        entries = [self.entries[part] for part in parts]
        return [
            [leaf for route, segment in entries for leaf in left[Address(route, segment, index)].value]
            for index in range(count)
        ]

    def _out(self, index: int) -> Address:
        return Address(self.result, OUTSIDE, index)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    # The copy blocks if it is between CPU and CUDA. The caller can write to its pinned tensor as soon as the pipe
    # returns, and a reader on the CPU must find the complete result.
    return detached_leaf(tensor.detach().to(device), tensor.requires_grad)


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def record_stream(tensor: Tensor, stream: Any) -> None:
    """Keep the allocator from reusing the tensor's memory before `stream` has finished its present work."""
    # `Tensor.record_stream` has no kernel for sparse layouts, and wrappers such as DTensor reject it.
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        parts = [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]
    for part in parts:
        record_stream(part, stream)
    if not parts and tensor.is_cuda:
        tensor.record_stream(stream)


class StageDevice:
    """The device of one stage, for one worker. It moves values that arrive, and has no streams of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def receive(self, message: Message) -> Any:
        leaves, structure = flatten(message.value)
        return unflatten(structure, [self._arrive(x, message) if isinstance(x, Tensor) else x for x in leaves])

    def _arrive(self, tensor: Tensor, message: Message) -> Tensor:
        if message.ready is not None and tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).wait_event(message.ready)
            if self.device.type == "cpu":
                message.ready.synchronize()
        return _moved(tensor, self.device)

    @cached_property
    def copy(self) -> Any:
        return torch.cuda.Stream(self.device)

    def upload(self, tensor: Tensor) -> Tensor:
        """A tensor of a mini-batch on this device. The host does not wait for the copy; the current stream does."""
        # A copy per micro-batch would wait for the kernels of the micro-batch before it, and the host with it.
        if self.device.type != "cuda" or type(tensor) is not Tensor or not tensor.is_cpu:
            return tensor
        # In memory of our own, because the caller can write to its tensor as soon as the pipe returns.
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())
        with torch.cuda.stream(self.copy):
            moved = pinned.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.copy)
        record_stream(moved, current)
        return moved

    def send(self, value: Any) -> Message:
        return Message(value)

    def stream_context(self) -> AbstractContextManager[object]:
        return on_device(self.device)


class CudaStageDevice(StageDevice):
    """A CUDA device with streams of this worker: to compute, to copy, and to read from the devices of other stages."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute = torch.cuda.Stream(device)
        self._source = cache(torch.cuda.Stream)

    def _arrive(self, tensor: Tensor, message: Message) -> Tensor:
        if tensor.device == self.device:
            if message.ready is not None:
                self.compute.wait_event(message.ready)
            record_stream(tensor, self.compute)
            return tensor
        with ExitStack() as stack:
            if tensor.is_cuda:
                # PyTorch reads the source on the current stream of the source's device, so that stream must wait for
                # the value. PyTorch lets it wait for the copy stream too, but makes a strided source contiguous before.
                source = self._source(tensor.device)
                if message.ready is not None:
                    source.wait_event(message.ready)
                record_stream(tensor, source)
                stack.enter_context(torch.cuda.stream(source))
            stack.enter_context(torch.cuda.stream(self.copy))
            moved = _moved(tensor, self.device)
        self.compute.wait_stream(self.copy)
        record_stream(moved, self.compute)
        return moved

    def send(self, value: Any) -> Message:
        return Message(value, self.compute.record_event())

    @contextmanager
    def stream_context(self) -> Generator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.compute):
            yield


def join_walk(places: Iterable[StageDevice | None]) -> None:
    """Before a walk: make the streams of `places` wait for the work queued on the caller's streams."""
    for place in places:
        if isinstance(place, CudaStageDevice):
            for stream in (place.compute, place.copy):
                stream.wait_stream(torch.cuda.current_stream(place.device))


def leave_walk(places: Iterable[StageDevice | None], results: Iterable[Tensor | None]) -> None:
    """After a walk: make the caller's streams wait for `places`, and record the results there."""
    for place in places:
        if isinstance(place, CudaStageDevice):
            torch.cuda.current_stream(place.device).wait_stream(place.compute)
            torch.cuda.current_stream(place.device).wait_stream(place.copy)
    for tensor in results:
        if tensor is not None and tensor.is_cuda:
            record_stream(tensor, torch.cuda.current_stream(tensor.device))


def _cuda_devices(places: Iterable[StageDevice | None]) -> list[torch.device]:
    return list(dict.fromkeys(place.device for place in places if place is not None and place.device.type == "cuda"))


class CallerStreams:
    """The caller's current streams on the devices of `places`, at the forward of a step."""

    def __init__(self, places: Iterable[StageDevice | None]) -> None:
        # Autograd runs the backward of a node on the stream of its forward, but only on the device of its output. On
        # other devices, the thread of backward uses its default streams, which did not wait for those of the caller.
        self._streams: list[Any] = [torch.cuda.current_stream(device) for device in _cuda_devices(places)]

    @contextmanager
    def restored(self) -> Generator[None]:
        """Context in which work runs on these streams, joined at both ends with those of the thread."""
        if not self._streams:
            yield
            return
        # Autograd makes incoming gradients ready on the current stream of the current device, and readers wait for that
        # stream only. If the output is on the CPU, they wait for this thread's streams instead.
        current: Any = torch.cuda.current_stream()
        outside: set[Any] = {current, *(torch.cuda.current_stream(stream.device) for stream in self._streams)}
        with ExitStack() as stack:
            for inside in self._streams:
                for other in outside - {inside}:
                    inside.wait_stream(other)
                stack.enter_context(torch.cuda.stream(inside))
            stack.enter_context(torch.cuda.device(current.device))
            try:
                yield
            finally:
                for other in outside:
                    for inside in self._streams:
                        other.wait_stream(inside)


class StreamLock:
    """A lock for buffers that stages share. It also orders streams, because kernels outlive the lock on the host."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._released: dict[torch.device, Any] = {}

    @contextmanager
    def held(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> Generator[None]:
        """Hold the lock, for kernels on the current stream of `device` that use the buffers of `modules`."""
        with self._lock:
            if device.type != "cuda":
                yield
                return
            stream = torch.cuda.current_stream(device)
            if device in self._released:
                stream.wait_event(self._released[device])
            for buffer in [buffer for module in modules for buffer in module._buffers.values()]:
                # If another stage replaced the buffer, its memory belongs to the stream of that stage.
                if buffer is not None:
                    record_stream(buffer, stream)
            try:
                yield
            finally:  # after a failure too, because launched kernels still run
                self._released[device] = stream.record_event()


def bind_parameters(
    places: Sequence[StageDevice | None], parameters: Mapping[int, Sequence[Tensor]]
) -> dict[int, Tensor]:
    """Views of parameters, by the id() of each, for gradients that accumulate on the stream of their stage."""
    # AccumulateGrad runs on the stream on which its node was made, and walks and the step share that node. On the
    # caller's stream, every weight gradient of a walk would wait for that stream, and that stream for all stages. The
    # view moves the step's gradient to the right stream first, because PyTorch warns if AccumulateGrad gets a gradient
    # from another stream.
    views: dict[int, Tensor] = {}
    if len(_cuda_devices(places)) > 1 or any(isinstance(place, CudaStageDevice) for place in places):
        for stage, group in parameters.items():
            place = places[stage]
            if place is not None and place.device.type == "cuda":
                with place.stream_context():
                    views |= {id(p): torch.ops.aten.alias(p) for p in group if id(p) not in views}
    return views


def message_of(value: Any) -> Message:
    device = next((x.device for x in flatten(value)[0] if isinstance(x, Tensor) and x.is_cuda), None)
    return Message(value, None if device is None else torch.cuda.current_stream(device).record_event())
