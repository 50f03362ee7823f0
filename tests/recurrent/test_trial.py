"""Nobody sees that a cell was run for trial, and what a trial cannot show is refused."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.recurrent.recurrent_cases import by_plan, eagerly, equal, planned, run_by
from weft.recurrent import NoPlanWarning
from weft.recurrent.capture import CaptureError
from weft.recurrent.trial import drawing_nothing

CALLS, SEEN = 0, [0]
Pair = tuple[Tensor, Tensor]


def sequence() -> Pair:
    return torch.linspace(-1, 1, 24).view(4, 2, 3), torch.zeros(2, 3)


def step(x: Tensor, h: Tensor, factor: float) -> Pair:
    h = torch.tanh(x + h) * factor
    return h, h


def closing() -> Callable[..., Pair]:
    calls, seen = 0, []

    def cell(x: Tensor, h: Tensor) -> Pair:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return step(x, h, len(seen) + calls)

    return cell


def global_counter(x: Tensor, h: Tensor) -> Pair:
    global CALLS  # noqa: PLW0603
    CALLS += 1
    SEEN[0] += 1
    SEEN.append(1)
    return step(x, h, CALLS + SEEN[0] + len(SEEN))


def class_counter() -> nn.Module:
    class Base(nn.Module):
        calls, seen = 0, {"calls": 0}

    class Counter(Base):
        def forward(self, x: Tensor, h: Tensor) -> Pair:
            type(self).calls += 1
            self.seen["calls"] += 1
            return step(x, h, self.calls + self.seen["calls"])

    return Counter()


def fresh_globals() -> Callable[..., Pair]:
    global CALLS
    CALLS, SEEN[:] = 0, [0]
    return global_counter


COUNTERS = {"a closure": closing, "a module": fresh_globals, "a class": class_counter}


@pytest.mark.parametrize("make", COUNTERS.values(), ids=COUNTERS)
def test_a_cell_that_counts_its_calls_counts_no_trial(make: Callable[[], Any]) -> None:
    with pytest.warns(NoPlanWarning, match="changes what it reads"):
        seen = planned(make(), "auto")(*sequence())
    assert equal(tuple(seen), tuple(eagerly(make())(*sequence())))


DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: 1 - random.random(),
    "a function of random": lambda: random.uniform(0, 1),
    "numpy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_is_drawn_by_python_or_numpy_is_in_no_plan_and_not_drawn_for_trial(draw: Callable[[], float]) -> None:
    def cell(x: Tensor, h: Tensor) -> Pair:
        return step(torch.zeros_like(x) if draw() < 1e-3 else x, h, 1.0)  # a branch that a trial hardly takes

    def seeded(net: Any) -> Any:
        random.seed(1)
        np.random.seed(1)
        return tuple(net(*sequence()))

    net = planned(cell, "python")
    with pytest.warns(NoPlanWarning, match="draws from Python's `random` or from numpy"):
        seen = seeded(net)
    assert run_by(net) == {"eager"} and equal(seen, seeded(eagerly(cell)))


def test_what_is_drawn_before_another_error_is_drawn_again() -> None:
    random.seed(1)
    with pytest.raises(ZeroDivisionError), drawing_nothing(lambda: None):
        random.random()
        raise ZeroDivisionError
    after = random.random()
    random.seed(1)
    assert after == random.random()


def test_what_another_thread_draws_is_not_the_cell_s() -> None:
    random.seed(1)
    with drawing_nothing(lambda: None):
        first = random.random()  # as if by another: the step itself draws nothing
    assert random.random() != first
    with pytest.raises(CaptureError), drawing_nothing(random.random):
        random.random()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.mT


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        parametrize.register_parametrization(self.linear, "weight", Symmetric())

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        h = torch.tanh(self.linear(h) + x)
        return h, h


@by_plan
def test_a_plan_made_under_the_cache_of_parametrizations_has_all_gradients(backend: str) -> None:
    cell, (x, h) = Parametrized(), sequence()
    net = planned(cell, backend)

    def gradients(net: Any) -> tuple[Tensor, ...]:
        with parametrize.cached():
            return torch.autograd.grad(net(x, h).outputs.sum(), list(cell.parameters()))

    for seen, wanted in zip(gradients(net), gradients(eagerly(cell)), strict=True):
        torch.testing.assert_close(seen, wanted)
    assert run_by(net) == {backend}


@by_plan
def test_a_plan_can_be_made_in_anomaly_mode(backend: str) -> None:
    net, (x, h) = planned(Parametrized(), backend), sequence()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autograd.set_detect_anomaly(True):
            net(x, h).outputs.sum().backward()
            assert torch.is_anomaly_enabled()
    assert run_by(net) == {backend}
