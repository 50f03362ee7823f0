"""Memory policies: a byte budget selects the fastest one that fits, and the predicted peak equals the measured one."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.recurrent.recurrent_cases import by_plan, grid, needs_compiler, planned
from torchweft.core.errors import UsageError
from torchweft.core.pytree import flatten
from torchweft.recurrent import cells
from torchweft.recurrent.cpp import workspace
from torchweft.recurrent.cpp.cpp_backend import CppBackend
from torchweft.recurrent.cpp.workspace import pool
from torchweft.recurrent.plan_backends import Chunk, MemoryPolicy, SequenceSize, choose_policy, chunk_bounds

TOLERANCE = 0.1  # relative error of a prediction


def size(steps: int = 1000, chunk: int = 10) -> SequenceSize:
    return SequenceSize(steps, chunk, 64, 32, 16, 8, 100, chunk * 1000)


def test_budget_selects_the_fastest_policy_that_fits() -> None:
    full, states = (size().peak(MemoryPolicy(values=values)) for values in (True, False))
    assert choose_policy(full, size()) == MemoryPolicy(values=True)
    assert choose_policy(full - 1, size()) == choose_policy(states, size()) == MemoryPolicy(values=False)
    assert choose_policy(states - 1, size()) == choose_policy("sqrt", size()) != MemoryPolicy(values=False)


@given(steps=st.integers(1, 300), chunk=st.integers(8, 40), budget=st.integers(1, 400_000))
def test_budget_is_kept_or_rejected_with_the_minimum(steps: int, chunk: int, budget: int) -> None:
    sequence = size(steps, chunk)
    try:
        policy = choose_policy(budget, sequence)
    except UsageError as error:
        least = int(str(error).split("the least is ")[1].split()[0])
        assert least > budget
        assert sequence.peak(choose_policy(least, sequence)) == least
        with pytest.raises(UsageError):
            choose_policy(least - 1, sequence)
    else:
        assert sequence.peak(policy) <= budget


def test_sqrt_has_the_lowest_peak() -> None:
    """The peak grows more slowly than the length of the sequence."""
    policies = [MemoryPolicy(values=False, segment=segment) for segment in range(1, 101)]
    assert choose_policy("sqrt", size()) == min(policies, key=size().peak)
    bare = [SequenceSize(steps, 10, 64, 64, 0, 0, 0, 10_000) for steps in (200, 20_000)]
    one, other = (sequence.peak(choose_policy("sqrt", sequence)) for sequence in bare)
    assert other < 20 * one


def test_policies_have_readable_names() -> None:
    policies = [MemoryPolicy(values=True), MemoryPolicy(values=False), MemoryPolicy(values=False, segment=3)]
    assert [str(policy) for policy in policies] == ["full", "states", "segments of 3 chunks"]


@given(st.integers(1, 500), st.integers(1, 50))
def test_chunk_bounds_are_few_and_of_equal_length(steps: int, chunk: int) -> None:
    marks = chunk_bounds(steps, chunk)
    *whole, rest = [b - a for a, b in pairwise(marks)]
    assert marks[0] == 0 and marks[-1] == steps
    assert len(set(whole)) <= 1 and 1 <= rest <= max([rest, *whole]) <= chunk
    assert len(marks) - 1 <= -(-steps // chunk)


# -- measured memory --------------------------------------------------------------------------------------------------


def peak(run: Callable[[], Any]) -> int:
    """The peak of the bytes of PyTorch's allocator, relative to the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        held = run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del held
    return most


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTMCell(24, 32),
    "GRU": lambda: cells.GRUCell(24, 32),
    "layer norm LSTM": lambda: cells.LayerNormLSTMCell(24, 32),
    "LSTM that draws": lambda: cells.LSTMCell(24, 32, recurrent_dropout=0.2),
}


def measured(cell: nn.Module, backend: str, memory: Any, steps: int) -> tuple[int, int]:
    """The peak bytes of a call with its backward, and the prediction."""
    net = planned(cell, backend, memory=memory, verify="never")
    x = torch.randn(steps, 8, 24, requires_grad=True)
    predicted = net.forecast(steps, x[:2])
    pool.release()

    def run() -> list[Tensor]:
        outputs, last, _ = net(x)
        ends = [outputs, *flatten(last)[0]]
        seeds = [torch.ones((), dtype=end.dtype).expand_as(end) for end in ends]
        return [outputs, *torch.autograd.grad(ends, [x, *net.parameters()], seeds)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "_OWN_PAGES", 1 << 60)  # allocate everything by PyTorch, which is profiled
        return peak(run), predicted.get(memory, memory)


def test_no_forecast_without_a_plan() -> None:
    net = planned(CELLS["LSTM"](), "eager")
    with pytest.raises(UsageError, match="run by the eager loop, because it was asked for"):
        net.forecast(10, torch.randn(1, 8, 24))
    with pytest.raises(UsageError, match="steps is 0, wanted at least 1"):
        net.forecast(0, torch.randn(1, 8, 24))


@pytest.mark.long
@needs_compiler
@grid(make=CELLS, memory=["full", "states", "sqrt"])
def test_predicted_peak_equals_the_measured_one(make: Callable[[], nn.Module], memory: Any) -> None:
    taken, predicted = measured(make(), "c", memory, 2000)
    assert abs(taken - predicted) <= TOLERANCE * predicted, f"{taken} bytes were taken, {predicted} were predicted"


@pytest.mark.long
@needs_compiler
def test_network_keeps_its_budget_and_uses_it() -> None:
    cell = nn.LSTMCell(24, 32)
    for memory in ("full", "states", "sqrt"):
        needed = measured(cell, "c", memory, 2000)
        taken, predicted = measured(cell, "c", needed[1], 2000)
        assert predicted == needed[1] and abs(taken - predicted) <= TOLERANCE * predicted


@needs_compiler
def test_all_chunks_of_a_sequence_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each chunk would have its own memory, and a long sequence would grow the process."""
    places: dict[int, set[int]] = {}
    forward = CppBackend.forward

    def noted(self: CppBackend, constants: Any, chunk: Chunk, keep: bool) -> Any:
        places.setdefault(int(keep), set()).add(chunk.states[1].data_ptr())
        return forward(self, constants, chunk, keep)

    monkeypatch.setattr(CppBackend, "forward", noted)
    net = planned(nn.LSTMCell(24, 32), "c", memory="sqrt", verify="never")
    x = torch.randn(9000, 1, 24, requires_grad=True)
    net(x).outputs.sum().backward()
    marks = len(chunk_bounds(9000, net._plans.choices()[0].engine.chunk_steps)) - 1
    assert marks > 3 and len(places[0]) == 1 and len(places[1]) < marks


@by_plan
def test_too_small_a_budget_reports_the_minimum(backend: str) -> None:
    x = torch.randn(50, 2, 3)
    cell = nn.GRUCell(3, 4)
    with pytest.raises(UsageError, match="the least is") as caught:
        planned(cell, backend, memory=100)(x)
    least = int(str(caught.value).split("the least is ")[1].split()[0])
    assert planned(cell, backend, memory=least)(x).outputs.shape == (50, 2, 4)
    with torch.no_grad():
        planned(cell, backend, memory=100)(x)
