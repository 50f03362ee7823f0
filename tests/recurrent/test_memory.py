"""What is kept: a byte budget takes the fastest way that fits, and what is predicted is what is taken."""

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
from weft.core.errors import UsageError
from weft.core.pytree import flatten
from weft.recurrent import cells
from weft.recurrent.cpp import workspace
from weft.recurrent.cpp.cpp_backend import CppBackend
from weft.recurrent.cpp.workspace import pool
from weft.recurrent.plan_backends import Chunk, MemoryPolicy, SequenceSize, choose_policy, chunk_bounds

TOLD = 0.1  # how far a prediction may be off


def size(steps: int = 1000, chunk: int = 10) -> SequenceSize:
    return SequenceSize(steps, chunk, 64, 32, 16, 8, 100, chunk * 1000)


def test_a_budget_takes_the_fastest_way_that_fits() -> None:
    full, states = (size().peak(MemoryPolicy(values=each)) for each in (True, False))
    assert choose_policy(full, size()) == MemoryPolicy(values=True)
    assert choose_policy(full - 1, size()) == choose_policy(states, size()) == MemoryPolicy(values=False)
    assert choose_policy(states - 1, size()) == choose_policy("sqrt", size()) != MemoryPolicy(values=False)


@given(steps=st.integers(1, 300), chunk=st.integers(8, 40), budget=st.integers(1, 400_000))
def test_a_budget_is_kept_or_refused_with_the_least_that_would_do(steps: int, chunk: int, budget: int) -> None:
    looks = size(steps, chunk)
    try:
        way = choose_policy(budget, looks)
    except UsageError as error:
        least = int(str(error).split("the least is ")[1].split()[0])
        assert least > budget
        assert looks.peak(choose_policy(least, looks)) == least
        with pytest.raises(UsageError):
            choose_policy(least - 1, looks)
    else:
        assert looks.peak(way) <= budget


def test_sqrt_is_the_way_that_takes_least_and_grows_slower_than_its_length() -> None:
    ways = [MemoryPolicy(values=False, segment=each) for each in range(1, 101)]
    assert choose_policy("sqrt", size()) == min(ways, key=size().peak)
    bare = [SequenceSize(steps, 10, 64, 64, 0, 0, 0, 10_000) for steps in (200, 20_000)]
    one, other = (each.peak(choose_policy("sqrt", each)) for each in bare)
    assert other < 20 * one


def test_a_way_says_what_it_is() -> None:
    ways = [MemoryPolicy(values=True), MemoryPolicy(values=False), MemoryPolicy(values=False, segment=3)]
    assert [str(each) for each in ways] == ["full", "states", "segments of 3 chunks"]


@given(st.integers(1, 500), st.integers(1, 50))
def test_chunks_cover_all_steps_in_as_few_of_one_length_as_can_be_and_a_rest(steps: int, chunk: int) -> None:
    marks = chunk_bounds(steps, chunk)
    *whole, rest = [b - a for a, b in pairwise(marks)]
    assert marks[0] == 0 and marks[-1] == steps
    assert len(set(whole)) <= 1 and 1 <= rest <= max([rest, *whole]) <= chunk
    assert len(marks) - 1 <= -(-steps // chunk)


# -- what is really taken ---------------------------------------------------------------------------------------------


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator had given out at a time, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        held = run()
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for each in sorted(events, key=lambda event: event.start_ns()):
        now += each.nbytes()
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
    """Bytes that a call with its backward takes, and what was predicted."""
    net = planned(cell, backend, memory=memory, verify="never")
    x = torch.randn(steps, 8, 24, requires_grad=True)
    told = net.forecast(steps, x[:2])
    pool.release()

    def run() -> list[Tensor]:
        outputs, last, _ = net(x)
        ends = [outputs, *flatten(last)[0]]
        seeds = [torch.ones((), dtype=each.dtype).expand_as(each) for each in ends]
        return [outputs, *torch.autograd.grad(ends, [x, *net.parameters()], seeds)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "_OWN_PAGES", 1 << 60)  # all by PyTorch's allocator, which is watched
        return peak(run), told.get(memory, memory)


def test_without_a_plan_there_is_no_forecast() -> None:
    net = planned(CELLS["LSTM"](), "eager")
    with pytest.raises(UsageError, match="run by the eager loop, because it was asked for"):
        net.forecast(10, torch.randn(1, 8, 24))
    with pytest.raises(UsageError, match="steps is 0, wanted at least 1"):
        net.forecast(0, torch.randn(1, 8, 24))


@needs_compiler
@grid(make=CELLS, memory=["full", "states", "sqrt"])
def test_the_predicted_peak_is_what_is_taken(make: Callable[[], nn.Module], memory: Any) -> None:
    taken, told = measured(make(), "c", memory, 2000)
    assert abs(taken - told) <= TOLD * told, f"{taken} bytes were taken, {told} were predicted"


@needs_compiler
def test_a_network_keeps_its_budget_and_uses_it() -> None:
    cell = nn.LSTMCell(24, 32)
    for memory in ("full", "states", "sqrt"):
        needed = measured(cell, "c", memory, 2000)
        taken, told = measured(cell, "c", needed[1], 2000)
        assert told == needed[1] and abs(taken - told) <= TOLD * told


@needs_compiler
def test_all_chunks_of_a_sequence_use_the_same_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would find its place taken by something small, and a long sequence would grow the process."""
    places: dict[int, set[int]] = {}
    forward = CppBackend.forward

    def noted(self: CppBackend, constants: Any, chunk: Chunk, keep: bool) -> Any:
        places.setdefault(int(keep), set()).add(chunk.states[1].data_ptr())
        return forward(self, constants, chunk, keep)

    monkeypatch.setattr(CppBackend, "forward", noted)
    net = planned(nn.LSTMCell(24, 32), "c", memory="sqrt", verify="never")
    x = torch.randn(9000, 1, 24, requires_grad=True)
    net(x).outputs.sum().backward()
    marks = len(chunk_bounds(9000, next(iter(net._plans._known.values())).engine.chunk_steps)) - 1
    assert marks > 3 and len(places[0]) == 1 and len(places[1]) < marks


@by_plan
def test_too_small_a_budget_says_the_least_that_would_do(backend: str) -> None:
    x = torch.randn(50, 2, 3)
    cell = nn.GRUCell(3, 4)
    with pytest.raises(UsageError, match="the least is") as caught:
        planned(cell, backend, memory=100)(x)
    least = int(str(caught.value).split("the least is ")[1].split()[0])
    assert planned(cell, backend, memory=least)(x).outputs.shape == (50, 2, 4)
    with torch.no_grad():
        planned(cell, backend, memory=100)(x)
