"""No kernel of a step reads memory before it is written, or uses memory after it is freed, in any order of streams.

Steps, walks, stage devices and locks are real. Each mutant breaks one of them, and the simulation must detect it. It
does not cover the engine of autograd (`tests.pipeline.streams` reimplements its rules from PyTorch's source) and the
allocator of CUDA. `test_device.py` tests those on a GPU.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.pipeline.stream_steps import Pipeline, ShuffledExecutor, with_own_streams
from tests.pipeline.streams import Machine, OnGpu, Stream, in_a_thread
from torchweft.core.context import ExecutionContext
from torchweft.core.segment import MicroBatchContext
from torchweft.pipeline import recompute, routing, step
from torchweft.pipeline.autotune import _micro_batch
from torchweft.pipeline.executor import SerialExecutor, ThreadExecutor
from torchweft.pipeline.pipe_runtime import Plans
from torchweft.pipeline.pipeline_plan import PipelinePlan, build_stages
from torchweft.pipeline.routing import (
    OUTSIDE,
    CallerStreams,
    CudaStageDevice,
    EntryPoint,
    EntryPoints,
    Message,
    Route,
    StageDevice,
    StreamLock,
    Wiring,
    join_walk,
    leave_walk,
    record_stream,
)
from torchweft.pipeline.schedule import Action, Schedule, gpipe, one_f_one_b
from torchweft.pipeline.step import CutStep, StepState

MICRO_BATCHES = 3
DEVICES = {
    "one": [torch.device("cuda", 0)] * 3,
    "two": [torch.device("cuda", number) for number in (0, 1, 0)],
    "three": [torch.device("cuda", number) for number in (0, 1, 1, 2)],
    "four": [torch.device("cuda", number) for number in range(4)],
}
A, B = DEVICES["two"][:2]


def two_workers(schedule: Schedule) -> Schedule:
    """The same order as a custom table: two workers with every other stage, and weight gradients at the end."""
    order = [action for _, action in schedule.order]
    late = [Action(stage, "W", i) for stage, kind, i in order if kind == "B"]
    order = [Action(stage, "I" if kind == "B" else kind, i) for stage, kind, i in order] + late
    return Schedule(tuple(tuple(action for action in order if action.stage % 2 == worker) for worker in range(2)))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "gpipe by hand": lambda stages, count: two_workers(gpipe(stages, count)),
    "1f1b by hand": lambda stages, count: two_workers(one_f_one_b(stages, count)),
}


class Case(NamedTuple):
    """Settings of a pipeline. With `own`, the caller uses streams other than the default ones."""

    devices: str = "two"
    schedule: str = "gpipe"
    executor: Callable[[], SerialExecutor] = lambda: ShuffledExecutor(0)
    own: bool = False
    peers: bool = True
    options: Mapping[str, Any] = MappingProxyType({})

    def faults(self, patch: pytest.MonkeyPatch) -> set[str]:
        machine, devices, executor = Machine(patch, peers=self.peers), DEVICES[self.devices], self.executor()
        with ExitStack() as stack:
            if isinstance(executor, ThreadExecutor):
                stack.callback(executor.close)
            if self.own:
                with_own_streams(machine, devices, stack)
            pipeline = Pipeline(machine, patch, devices, executor, **self.options)
            pipeline.train(SCHEDULES[self.schedule](len(devices), MICRO_BATCHES))
            del pipeline
            gc.collect()
        return machine.faults


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_have_no_race(monkeypatch: pytest.MonkeyPatch, devices: str, schedule: str) -> None:
    """The hardest case: recomputation, strided and sparse gradients, no peers, streams of the caller."""
    options = {"keep": "inputs", "strided": True, "sparse": True}
    executor = ShuffledExecutor(len(devices + schedule))
    assert not Case(devices, schedule, lambda: executor, own=True, peers=False, options=options).faults(monkeypatch)


EASIER = {
    "graphs are kept": Case(options={"keep": "graph", "strided": True}),
    "peers": Case(options={"strided": True}),
    "the caller's default streams": Case(peers=False, schedule="1f1b"),
    "buffers are replaced": Case("one", options={"keep": "inputs", "replaced": True}),
    "threads": Case("three", "1f1b", ThreadExecutor, options={"sparse": True}),
    "serial": Case("three", executor=SerialExecutor, own=True, options={"keep": "inputs"}),
    "serial 1f1b": Case("two", "1f1b", SerialExecutor, own=True),
    "serial on one device": Case("one", executor=SerialExecutor, own=True),
    "one launching thread": Case("three", executor=partial(SerialExecutor, by_time=True), own=True),
    "one launching thread 1f1b": Case("two", "1f1b", partial(SerialExecutor, by_time=True), options={"strided": True}),
}


@pytest.mark.parametrize("case", EASIER)
def test_steps_in_other_surroundings_have_no_race(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    assert not EASIER[case].faults(monkeypatch)


@pytest.mark.parametrize(("second", "launches"), [("cuda:0", False), ("cuda:1", True), ("cpu", False)])
def test_one_thread_uses_streams_on_several_gpus(monkeypatch: pytest.MonkeyPatch, second: str, launches: bool) -> None:
    Machine(monkeypatch)
    monkeypatch.setattr(recompute, "generators_of", lambda _: [])
    devices = [torch.device("cuda:0"), torch.device(second)]
    stages, crossing = build_stages([("0", nn.Identity()), ("1", nn.Identity())], [1, 1], devices)
    plan = Plans(stages, crossing, None).plan("serial", with_loss=False)
    assert plan.executor.by_time is launches
    assert [isinstance(place, CudaStageDevice) for place in plan.places] == [launches] * 2


def test_the_order_of_threads_makes_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        case = Case("one", "1f1b", lambda seed=seed: ShuffledExecutor(seed), options={"keep": "inputs"})
        assert not case.faults(monkeypatch), f"seed {seed}"


def do_nothing(*_: Any) -> None: ...


def only_the_target_waits(place: CudaStageDevice, tensor: Any, message: Message) -> Any:
    """Mutant of `_arrive`. Without peers, PyTorch makes a strided source contiguous before its barrier, on the current
    stream of the source. The worker's default stream did not wait for the value."""
    if tensor.device == place.device:
        return ARRIVE(place, tensor, message)
    place.copy.wait_event(cast("Any", message.ready))
    with torch.cuda.stream(place.copy):
        moved = tensor.to(place.device)
    tensor.record_stream(place.copy)
    place.compute.wait_stream(place.copy)
    moved.record_stream(place.compute)
    return moved


@contextmanager
def without_event(lock: StreamLock, *_: Any) -> Generator[None]:
    with lock._lock:
        yield


@contextmanager
def without_waits(streams: CallerStreams) -> Iterator[None]:
    with ExitStack() as stack:
        for stream in streams._streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


ARRIVE, HELD = CudaStageDevice._arrive, StreamLock.held
TOO_EARLY, IN_USE, FREED = "read before it is written", "written while it is used", "freed while it is used"

OWN = Case(schedule="1f1b", own=True)
RECOMPUTES = Case(executor=SerialExecutor, own=True, options={"keep": "inputs"})


class Mutant(NamedTuple):
    """The replacement of an attribute, a case that needs the original, and words of the expected fault."""

    owner: Any
    name: str
    replacement: Any
    case: Case
    fault: str


MUTANTS = {
    "memory is not recorded": Mutant(routing, "record_stream", do_nothing, Case("one"), FREED),
    "sparse memory is recorded like dense memory": Mutant(
        routing, "record_stream", lambda x, stream: x.record_stream(stream), Case(options={"sparse": True}), "sparse"
    ),
    "streams do not wait": Mutant(Stream, "wait_event", do_nothing, Case("one"), TOO_EARLY),
    "messages have no event": Mutant(CudaStageDevice, "send", lambda _, value: Message(value), Case("one"), TOO_EARLY),
    "the source of a copy does not wait": Mutant(
        CudaStageDevice,
        "_arrive",
        only_the_target_waits,
        Case(peers=False, options={"strided": True}),
        "contiguous() of a",
    ),
    "a walk is not joined": Mutant(step, "join_walk", do_nothing, Case(), TOO_EARLY),
    "a walk is not left": Mutant(step, "leave_walk", do_nothing, Case("one"), TOO_EARLY),
    "a lock orders threads alone": Mutant(StreamLock, "held", without_event, Case("one"), IN_USE),
    "a lock orders threads alone, recomputing": Mutant(
        StreamLock, "held", without_event, Case("three", options={"keep": "inputs"}), IN_USE
    ),
    "a lock does not record": Mutant(
        StreamLock, "held", lambda lock, device, _: HELD(lock, device), Case("one", options={"replaced": True}), FREED
    ),
    "gradients accumulate on the caller's stream": Mutant(
        step, "bind_parameters", lambda *_: {}, Case("one"), "AccumulateGrad"
    ),
    "gradients of several devices too": Mutant(
        step, "bind_parameters", lambda *_: {}, Case(executor=SerialExecutor), "AccumulateGrad"
    ),
    "backward has other streams": Mutant(CallerStreams, "restored", lambda _: nullcontext(), OWN, TOO_EARLY),
    "backward has other streams, serial": Mutant(
        CallerStreams, "restored", lambda _: nullcontext(), RECOMPUTES, TOO_EARLY
    ),
    "backward does not wait for its streams": Mutant(CallerStreams, "restored", without_waits, OWN, TOO_EARLY),
    "the current device is not set": Mutant(
        StageDevice, "stream_context", lambda _: nullcontext(), Case(executor=SerialExecutor), "on another device"
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_wait_or_record_is_seen(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """This tests the simulation, which must detect every mutant."""
    owner, name, replacement, case, fault = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, replacement)
    assert any(fault in text for text in case.faults(monkeypatch))


def test_a_walk_that_fails_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's stream waits for all launched kernels, because a layer can have written to a buffer."""
    machine = Machine(monkeypatch)
    place, late = CudaStageDevice(A), list[OnGpu]()

    def failing(*_: Any) -> Any:
        for stream in (place.compute, place.copy):
            with torch.cuda.stream(stream):
                late.append(machine.kernel("buffer", A))
        raise KeyError

    plan = SimpleNamespace(places=[place], executor=SimpleNamespace(walk=failing))
    failed: Any = SimpleNamespace(step=SimpleNamespace(plan=plan, ambient=None))
    with pytest.raises(KeyError):
        CutStep._walk(failed, StepState(Wiring((), 0), {}, [], [], [place]), gpipe(1, 1), {})
    assert all(machine.current_stream(A).covers(tensor.memory.written) for tensor in late)


def test_both_streams_of_a_place_wait_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the stream for copies."""
    machine, place = Machine(monkeypatch), CudaStageDevice(A)
    tensor = machine.kernel("optimizer", A)
    join_walk([place])
    assert all(stream.covers(tensor.memory.written) for stream in cast("Any", [place.compute, place.copy]))


def test_a_lock_hands_over_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer can launch kernels before it raises."""
    machine, lock = Machine(monkeypatch), StreamLock()
    with pytest.raises(KeyError), torch.cuda.stream(Stream(A)), lock.held(A):  # type: ignore[arg-type]
        buffer = machine.kernel("buffer", A)
        raise KeyError
    with lock.held(A):
        assert machine.current_stream(A).covers(buffer.memory.written)


def test_readers_of_gradients_wait_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd makes them wait for the current stream of the output's device."""
    machine, places = Machine(monkeypatch), [CudaStageDevice(A), CudaStageDevice(B)]
    with torch.cuda.stream(Stream(B)):  # type: ignore[arg-type]
        caller, of_forward = CallerStreams(places), machine.current_stream(B)

    def backward() -> None:
        with torch.cuda.stream(Stream(A)):  # type: ignore[arg-type]
            with caller.restored():
                assert machine.current_stream(B) is of_forward and machine.current_device() == A.index
                with places[1].stream_context():
                    gradient = machine.kernel("backward", B)
                leave_walk(places, [gradient])
                total = machine.kernel("sum", B, gradient)
            assert machine.current_stream().device == A
            assert machine.current_stream().covers(total.memory.written)

    in_a_thread(backward)


def test_graph_runs_stages_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels run on the current device."""
    machine, current = Machine(monkeypatch), list[int]()

    def function(_: MicroBatchContext, value: OnGpu) -> tuple[OnGpu]:
        current.append(machine.current_device())
        return (value,)

    wiring = Wiring((Route("in", OUTSIDE, (0,)), Route("main", 0, (1,)), Route("out", 1, (OUTSIDE,))), 2)
    entry_points = EntryPoints((EntryPoint(0, 0),), 2, 1)
    plan = PipelinePlan(
        (function,) * 2, (), wiring, (StageDevice(A), StageDevice(B)), SerialExecutor(), entry_points, ()
    )
    context = MicroBatchContext(0, ExecutionContext.capture(["cpu"]))
    assert _micro_batch(plan, None, context, [machine.kernel("input", A)]).device == B
    assert current == [0, 1] and machine.current_device() == 0


def parts_of(layout: torch.layout) -> tuple[Tensor, list[Tensor]]:
    """A tensor with the layout, and the tensors that hold its memory."""
    dense = torch.eye(4)
    if layout is torch.strided:
        return dense, [dense]
    if layout is torch.sparse_coo:
        sparse = dense.to_sparse()
        return sparse, [sparse._indices(), sparse._values()]
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    sparse = dense.to_sparse(layout=layout, **blocks)
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse, [sparse.crow_indices(), sparse.col_indices(), sparse.values()]
    return sparse, [sparse.ccol_indices(), sparse.row_indices(), sparse.values()]


LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_memory_of_a_layout_is_recorded(monkeypatch: pytest.MonkeyPatch, layout: torch.layout) -> None:
    """This includes wrapper tensors, such as those of distributed models."""
    tensor, parts = parts_of(layout)
    recorded: list[int] = []
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "record_stream", lambda part, _: recorded.append(part.data_ptr()))
    record_stream(tensor, None)
    assert sorted(recorded) == sorted(part.data_ptr() for part in parts)
    if layout is torch.strided:
        recorded.clear()
        other = torch.ones(4, 4)
        record_stream(TwoTensor(tensor, other), None)
        assert sorted(recorded) == sorted([tensor.data_ptr(), other.data_ptr()])
