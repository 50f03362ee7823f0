"""The recorder: the times of actions, and the bytes that were alive for them. It only observes."""

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchweft.core.context import ExecutionContext
from torchweft.core.segment import Keep, MicroBatchContext, Segment
from torchweft.pipeline.executor import SerialExecutor, ThreadExecutor
from torchweft.pipeline.routing import OUTSIDE, Address, Message, Route, Wiring
from torchweft.pipeline.schedule import Action, gpipe
from torchweft.pipeline.step import StepState
from torchweft.pipeline.tracing import Recorder

CELLS = 1000
BYTES = 8 * CELLS
ROUTES = (
    Route("x", OUTSIDE, (0,)),
    Route("main 0", 0, (1,)),
    Route("main 1", 1, (2,)),
    Route("y", 2, (OUTSIDE,)),
    Route("skip", 0, (2,)),
)


def first_stage(context: MicroBatchContext, x: Tensor) -> tuple[Tensor, Tensor]:
    """Saves x, which belongs to the caller, and returns two values."""
    return x.sin(), x + 1


def second_stage(context: MicroBatchContext, x: Tensor) -> tuple[Tensor]:
    """Saves its output."""
    return (x.tanh(),)


def third_stage(context: MicroBatchContext, x: Tensor, skip: Tensor) -> tuple[Tensor]:
    """Saves both inputs."""
    return (x * skip,)


def record_step(executor: Any, keep: Keep, micro_batches: int, memory: bool = True) -> Recorder:
    """Record one step of three stages, with a skip over the middle one."""
    recorder, ambient = Recorder(memory=memory), ExecutionContext.capture(["cpu"])
    xs = [torch.ones(CELLS, dtype=torch.float64, requires_grad=True) for _ in range(micro_batches)]
    recorder.ignore(xs)
    contexts = [MicroBatchContext(i, ambient) for i in range(micro_batches)]
    segments = {stage: Segment(function) for stage, function in enumerate((first_stage, second_stage, third_stage))}
    run = StepState(Wiring(ROUTES, 3), segments, contexts, [[keep] * micro_batches] * 3, [None] * 3, recorder)
    schedule = gpipe(3, micro_batches)
    given = {0: {Address(0, 0, i): Message(x.detach().requires_grad_()) for i, x in enumerate(xs)}}
    executor.walk(schedule.forward_only, run.perform, given, ambient)
    if keep != "nothing":
        seed = torch.ones(CELLS, dtype=torch.float64)
        back = {2: {Address(3, OUTSIDE, i): Message([seed]) for i in range(micro_batches)}}
        executor.walk(schedule.backward_only, run.perform, back, ambient)
    return recorder


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("keep", ["graph", "inputs", "nothing"])
def test_every_piece_of_work_is_an_event_of_its_worker(threads: bool, keep: Keep) -> None:
    executor = ThreadExecutor("events") if threads else SerialExecutor()
    recorder = record_step(executor, keep, 2)
    kinds = {"graph": "FB", "inputs": "FRB", "nothing": "F"}[keep]
    expected = [(kind, stage, i) for kind in kinds for stage in range(3) for i in range(2)]
    assert sorted((e.kind, e.action.stage, e.action.micro_batch) for e in recorder.events) == sorted(expected)
    for event in recorder.events:
        assert event.start <= event.end
        caller = threading.current_thread().name
        assert event.thread == (f"torchweft-events-{event.action.stage}" if threads else caller)
    for stage in range(3):
        mine = sorted((e for e in recorder.events if e.action.stage == stage), key=lambda e: e.start)
        assert all(one.end <= other.start for one, other in pairwise(mine)), "a worker does one thing at a time"


@given(st.integers(1, 4))
def test_graphs_and_values_count_the_bytes_of_their_storages(micro_batches: int) -> None:
    recorder = record_step(SerialExecutor(), "graph", micro_batches)
    # Per micro-batch: two values of stage 0, and one of stage 1, which the graph of stage 1 saves.
    assert recorder.peak_bytes == 3 * BYTES * micro_batches
    assert [max(count for _, count in recorder.stage_bytes[stage]) for stage in range(2)] == [
        2 * BYTES * micro_batches,
        BYTES * micro_batches,
    ]
    assert recorder.bytes[-1][1] == 0, "everything is released at the end"
    assert all(curve[-1][1] == 0 for curve in recorder.stage_bytes.values())


def test_recomputation_keeps_the_values_and_one_graph() -> None:
    recorder = record_step(SerialExecutor(), "inputs", 3)
    # The same, but the graph of stage 1 saves a second copy of its output during recomputation.
    assert 3 * BYTES * 3 <= recorder.peak_bytes <= 3 * BYTES * 3 + BYTES
    assert recorder.bytes[-1][1] == 0


def test_without_backward_a_value_goes_with_its_last_reader() -> None:
    recorder = record_step(SerialExecutor(), "nothing", 4)
    assert recorder.peak_bytes <= 3 * BYTES
    assert recorder.bytes[-1][1] == 0


def test_bytes_are_counted_on_request_except_for_ignored_values() -> None:
    assert record_step(SerialExecutor(), "graph", 2, memory=False).bytes == []
    recorder, x = Recorder(memory=True), torch.ones(CELLS, requires_grad=True)
    recorder.ignore([x])
    with recorder.action_scope("F", Action(0, "F", 0)):
        y = x.sin()
    assert recorder.peak_bytes == 0
    with recorder.action_scope("F", Action(0, "F", 1)):
        y.sin()
    assert recorder.peak_bytes == 4 * CELLS


def test_storage_counts_once_for_all_its_views() -> None:
    recorder, x = Recorder(memory=True), torch.ones(CELLS, requires_grad=True).double()
    with recorder.action_scope("F", Action(0, "F", 0)):
        for piece in (x, x[:10], x.view(10, -1)):
            piece.sin()
    assert recorder.peak_bytes == BYTES
    recorder.released(Action(0, "F", 0))
    assert recorder.bytes[-1][1] == 0


def test_an_event_is_recorded_also_when_the_work_fails() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.action_scope("F", Action(0, "F", 0)):
        raise KeyError
    assert [event.kind for event in recorder.events] == ["F"]
