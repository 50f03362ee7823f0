"""The key of a plan covers everything that its cell reads. A cell that reads something unknowable is rejected."""

import copy
import enum
import functools
import logging
import os
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.recurrent.recurrent_cases import at_once, by_plan, close, eagerly, equal, planned, run_by
from torchweft.recurrent import NoPlanWarning
from torchweft.recurrent.capture import CaptureError
from torchweft.recurrent.guards import CellGuards, no_foreign_draws

HERE = sys.modules[__name__]
RATE = 2.0
Pair = tuple[Tensor, Tensor]


class Mode(enum.Enum):
    SUM = 1
    DIFFERENCE = 2


@dataclass
class Settings:
    scale: float = 1.0
    more: list[float] = field(default_factory=lambda: [1.0])


def times_rate(x: Tensor) -> Tensor:
    return x * RATE


class Reader(nn.Module):
    """Reads every kind of attribute that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.inner = nn.Dropout(0.0)
        self.flag, self.number, self.word, self.mode = True, 2, "tanh", Mode.SUM
        self.listed, self.pair, self.table = [1.0, 2.0], (1.0, [3.0]), {"a": 1.0}
        self.settings = Settings()
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.part: Callable[..., Tensor] = functools.partial(torch.mul, other=2.0)
        self.loose = torch.ones(3).double()
        self.register_buffer("kept", torch.ones(3).double())

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        h = self.act(self.linear(x) + h) * (self.loose if self.flag else self.kept) * self.number
        h = h * self.listed[0] * self.pair[1][0] * self.table["a"] * self.settings.scale * self.settings.more[0]
        h = self.part(h) if self.mode is Mode.SUM else -h
        return self.inner(h) + len(self.word), h


CHANGES: dict[str, Callable[[Reader], Any]] = {
    "a flag": lambda cell: setattr(cell, "flag", False),
    "a number": lambda cell: setattr(cell, "number", 5),
    "a number's type": lambda cell: setattr(cell, "number", 2.0),
    "a word": lambda cell: setattr(cell, "word", "sinus"),
    "an enum": lambda cell: setattr(cell, "mode", Mode.DIFFERENCE),
    "an item of a list": lambda cell: cell.listed.__setitem__(0, 7.0),
    "an item of a list in a tuple": lambda cell: cell.pair[1].__setitem__(0, 7.0),
    "a value in a dict": lambda cell: cell.table.update(a=7.0),
    "an attribute of an object": lambda cell: setattr(cell.settings, "scale", 7.0),
    "a list of an object": lambda cell: cell.settings.more.__setitem__(0, 7.0),
    "another function": lambda cell: setattr(cell, "act", torch.relu),
    "a function of the user's": lambda cell: setattr(cell, "act", times_rate),
    "an argument of a partial": lambda cell: setattr(cell, "part", functools.partial(torch.mul, other=3.0)),
    "another tensor": lambda cell: setattr(cell, "loose", torch.full((3,), 5.0).double()),
    "another parameter": lambda cell: setattr(cell.linear, "weight", nn.Parameter(torch.ones(3, 3).double())),
    "a frozen parameter": lambda cell: cell.linear.bias.requires_grad_(False),
    "another module": lambda cell: setattr(cell, "linear", nn.Linear(3, 3, bias=False).double()),
    "evaluation": lambda cell: cell.eval(),
    "a child's attribute": lambda cell: setattr(cell.inner, "inplace", True),
    "an instance's forward": lambda cell: setattr(cell.inner, "forward", times_rate),
}


@at_once("change", CHANGES.values(), ids=CHANGES)
def test_any_change_in_a_module_changes_the_key(change: Callable[[Reader], Any]) -> None:
    cell = Reader()
    before, again = CellGuards(cell).key, CellGuards(cell).key
    assert before == again and hash(tuple(before)) == hash(tuple(again))
    assert CellGuards(cell).rejection is None
    change(cell)
    assert CellGuards(cell).key != before


def closure(weight: Tensor, rate: list[float], inner: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def cell(x: Tensor, h: Tensor, scale: float = 1.0) -> Pair:
        h = inner(x @ weight + h) * rate[0] * scale
        return h, next(h for _ in range(1))

    return cell


def test_key_of_a_function_covers_its_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rate = torch.randn(3, 3, requires_grad=True), [1.0]
    cell = closure(weight, rate, times_rate)
    guards = CellGuards(cell)
    assert guards.parameters == [weight] and guards.rejection is None
    keys = [guards.key]
    rate[0] = 2.0
    keys.append(CellGuards(cell).key)
    monkeypatch.setattr(HERE, "RATE", 3.0)  # a global of a function that the cell calls
    keys.append(CellGuards(cell).key)
    cell.__defaults__ = (2.0,)
    keys.append(CellGuards(cell).key)
    keys.append(CellGuards(closure(weight, rate, torch.tanh)).key)
    assert len({str(key) for key in keys}) == 5


class Scaler:
    def __init__(self) -> None:
        self.scale = 1.0

    def cell(self, x: Tensor, h: Tensor) -> Pair:
        return x * self.scale, h


def test_key_of_a_method_covers_its_object() -> None:
    """This holds for methods in Python and in C."""
    scaler, table = Scaler(), {"a": 1.0}
    cells = (scaler.cell, Cell(scaled_by_class, look_up=table.get))
    before = [CellGuards(cell).key for cell in cells]
    scaler.scale = table["a"] = 2.0
    for cell, key in zip(cells, before, strict=True):
        assert CellGuards(cell).key != key and CellGuards(cell).rejection is None


UNKNOWN: dict[str, tuple[Callable[[Reader], Any], str]] = {
    "a generator": (lambda cell: setattr(cell, "word", iter("abcd")), "word of Reader"),
    "a logger": (lambda cell: setattr(cell, "log", logging.getLogger("cell")), "log of Reader"),
    "a random generator": (lambda cell: setattr(cell, "draw", torch.Generator()), "draw of Reader"),
    "a forward hook": (lambda cell: cell.inner.register_forward_hook(lambda *a: None), "the hooks of Dropout"),
    "a forward pre-hook": (lambda cell: cell.register_forward_pre_hook(lambda *a: None), "the hooks of Reader"),
    "a generator's method in C": (lambda cell: setattr(cell, "thing", random.Random(0).random), "Random"),
    "a generator's method": (lambda cell: setattr(cell, "thing", random.Random(0).uniform), "Random"),
    "a subclass of a class in C": (lambda cell: setattr(cell, "thing", type("Line", (deque,), {})([1.0])), "Line"),
    "a compiled module": (
        lambda cell: setattr(cell, "thing", torch.compile(nn.Linear(3, 3), backend="eager")),
        "a compiled or scripted module",
    ),
    "the environment": (lambda cell: setattr(cell, "act", lambda z: os.environ["HOME"]), "environment"),
    "a backward hook": (lambda cell: cell.register_full_backward_hook(lambda *a: None), "the hooks of Reader"),
}


@at_once(("change", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknowable_parts_are_named_and_change_the_key(change: Callable[[Reader], Any], words: str) -> None:
    cell = Reader()
    before = CellGuards(cell).key
    change(cell)
    guards = CellGuards(cell)
    assert guards.rejection is not None and words in guards.rejection
    assert guards.key != before


def test_cyclic_references_are_walked_once() -> None:
    cell = Reader()
    cell.listed.append(cell.listed)  # type: ignore[arg-type]
    cell.table["self"] = cell  # type: ignore[assignment]
    cell.settings.more = cell.settings  # type: ignore[assignment]
    assert CellGuards(cell).rejection is None


class Counting(nn.Module):
    """Changes its own attributes in every step, so a plan cannot represent it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.cache = 0, [], None

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        self.calls += 1
        self.seen.append(x)
        if self.cache is None:
            self.cache = torch.ones(3)
            self.late = 1
        return x + h * self.cache, h + 1


@pytest.mark.filterwarnings("ignore::torchweft.recurrent.NoPlanWarning")
@pytest.mark.parametrize("backend", ["auto", "python"])
def test_trial_run_of_a_rejected_cell_leaves_no_trace(backend: str) -> None:
    cell = Counting()
    net = planned(cell, backend)
    for number in (1, 2):
        net(torch.randn(4, 2, 3), torch.zeros(2, 3))
        assert cell.calls == len(cell.seen) == 4 * number
    assert all(type(x) is Tensor for x in cell.seen)


def test_trial_run_restores_buffers_and_attributes() -> None:
    """This includes changed, deleted and new attributes, and changes within lists, dicts and objects."""
    cell = Reader()
    before = {name: copy.copy(value) for name, value in vars(cell).items()}
    with pytest.raises(ZeroDivisionError), CellGuards(cell).restore_state():
        cell.kept.add_(1)
        cell.another, cell.number, cell.settings.scale = 1, 7, 9.0
        del cell.word
        cell.listed.append(3.0)
        cell.table["b"] = 4.0
        cell.settings.more.append(5.0)
        raise ZeroDivisionError
    assert cell.kept.tolist() == [1, 1, 1] and cell.loose._version == 0
    assert vars(cell).keys() == before.keys() and cell.settings == Settings()
    assert all(vars(cell)[name] == before[name] for name in ("word", "number", "listed", "table"))


# -- classes, objects and modules of code


class Shared:
    rate = 2.0


class Activation:
    """A callable object with settings."""

    slope = 2.0

    def __call__(self, z: Tensor) -> Tensor:
        return z * RATE * self.slope

    def halved(self, z: Tensor) -> Tensor:
        return z * RATE * self.share

    @property
    def share(self) -> float:
        return 0.5

    def __mul__(self, other: float) -> float:
        return RATE * other


class Cell(nn.Module):
    """Passes its result to a function that reads something."""

    def __init__(self, read: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.read = read
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        h = self.read(self, torch.tanh(x + h))
        return h, h


class Parent(nn.Module):
    kept = 1.0

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        h = torch.tanh(x + h) * RATE
        return h, h


class Child(Parent):
    def forward(self, x: Tensor, h: Tensor) -> Pair:
        return super().forward(x, h)


class Inner(nn.Module):
    def scaled(self, z: Tensor) -> Tensor:
        return z * RATE


def scaled_by_class(module: nn.Module, z: Tensor) -> Tensor:
    return z * type(module).kept


class Typed(nn.Module):
    kept = 2.0

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        h = scaled_by_class(self, torch.tanh(x + h))
        return h, h


@functools.lru_cache
def cached(number: int) -> float:
    return number * RATE


def with_default(cell: Cell, z: Tensor, activation: Activation = Activation()) -> Tensor:  # noqa: B008
    return activation(z)


READERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an object's __call__": (lambda: Cell(lambda cell, z: cell.act(z), act=Activation()), "RATE"),
    "a method of an object": (lambda: Cell(lambda cell, z: cell.act.halved(z), act=Activation()), "RATE"),
    "an object's operator": (lambda: Cell(lambda cell, z: z * (cell.act * 1.0), act=Activation()), "RATE"),
    "an object's class": (lambda: Cell(lambda cell, z: cell.act(z), act=Activation()), "Activation.slope"),
    "an object in a default": (lambda: Cell(with_default), "Activation.slope"),
    "another method": (lambda: Cell(lambda cell, z: cell.act(z), act=Activation()), "Activation.__call__"),
    "a parent's forward": (Child, "RATE"),
    "a child's method": (lambda: Cell(lambda cell, z: cell.inner.scaled(z), inner=Inner()), "RATE"),
    "a class held": (lambda: Cell(lambda cell, z: z * cell.settings.rate, settings=Shared), "Shared.rate"),
    "a class by its name": (lambda: Cell(lambda cell, z: z * Shared.rate), "Shared.rate"),
    "a class of a module": (lambda: Cell(lambda cell, z: z * HERE.Shared.rate), "Shared.rate"),
    "a class by a helper": (Typed, "Typed.kept"),
    "a word": (lambda: Cell(lambda cell, z: z * getattr(HERE, "RATE")), "RATE"),  # noqa: B009
    "a global by its word": (lambda: Cell(lambda cell, z: z * globals()["RATE"]), "RATE"),
    "a function with a cache": (lambda: Cell(lambda cell, z: z * cached.__wrapped__(1)), "RATE"),
}


@pytest.mark.parametrize(("make", "path"), READERS.values(), ids=READERS)
def test_changes_of_classes_and_globals_make_a_new_plan(
    make: Callable[[], nn.Module], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, x, h = make(), torch.randn(3, 2, 3), torch.zeros(2, 3)
    net, loop = planned(cell, "python", verify="never"), eagerly(cell)
    before = net(x, h).outputs
    *owner, name = path.split(".")
    other = (lambda self, z: z * 5) if name == "__call__" else 5.0
    monkeypatch.setattr(getattr(HERE, owner[0]) if owner else HERE, name, other)
    after = net(x, h).outputs
    assert torch.allclose(after, loop(x, h).outputs) and not torch.allclose(after, before)
    assert run_by(net) == {"python"}


@pytest.mark.parametrize("name", ["inner", "scaled", "mean"])
def test_global_named_like_an_attribute_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(lambda cell, z: cell.inner.scaled(z) - z.mean(), inner=Inner())
    net, before = planned(cell, "python"), CellGuards(cell).key
    monkeypatch.setattr(HERE, name, net, raising=False)  # as after `inner = Recurrent(cell)`
    net(torch.randn(3, 2, 3), torch.zeros(2, 3))
    assert run_by(net) == {"python"} and CellGuards(cell).key == before


@at_once("thing", [Activation(), [1.0].index, {"a": 1.0}.get, torch.tanh, max, cached, Shared])
def test_objects_with_visible_state_are_accepted(thing: Any) -> None:
    assert CellGuards(Cell(scaled_by_class, thing=thing)).rejection is None


# -- running a cell without a trace

CALLS = 0


def sequence() -> Pair:
    return torch.linspace(-1, 1, 24).view(4, 2, 3), torch.zeros(2, 3)


def scaled_step(x: Tensor, h: Tensor, factor: float) -> Pair:
    h = torch.tanh(x + h) * factor
    return h, h


def counting_closure() -> Callable[..., Pair]:
    calls, seen = 0, []

    def cell(x: Tensor, h: Tensor) -> Pair:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return scaled_step(x, h, len(seen) + calls)

    return cell


def test_cell_that_counts_calls_does_not_count_trials() -> None:
    with pytest.warns(NoPlanWarning, match="changes what it reads"):
        seen = planned(counting_closure(), "auto")(*sequence())
    assert equal(tuple(seen), tuple(eagerly(counting_closure())(*sequence())))


def test_cell_that_writes_globals_has_no_plan() -> None:
    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor, h: Tensor) -> Pair:
            global CALLS  # noqa: PLW0603
            CALLS += 1
            type(self).calls += 1
            return scaled_step(x, h, self.calls + CALLS)

    net = planned(Counter(), "python")
    with pytest.warns(NoPlanWarning, match="changes what it reads"):
        net(*sequence())
    assert run_by(net) == {"eager"}


DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: 1 - random.random(),
    "numpy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_by_python_or_numpy_prevent_a_plan(draw: Callable[[], float]) -> None:
    """The trial does not advance the generators."""

    def cell(x: Tensor, h: Tensor) -> Pair:
        return scaled_step(torch.zeros_like(x) if draw() < 1e-3 else x, h, 1.0)  # a trial rarely takes this branch

    def run_seeded(net: Any) -> Any:
        random.seed(1)
        np.random.seed(1)
        return tuple(net(*sequence()))

    net = planned(cell, "python")
    with pytest.warns(NoPlanWarning, match="draws from Python's `random` or from numpy"):
        seen = run_seeded(net)
    assert run_by(net) == {"eager"} and equal(seen, run_seeded(eagerly(cell)))


def test_draws_of_another_thread_are_tolerated() -> None:
    random.seed(1)
    with no_foreign_draws(lambda: None):
        first = random.random()  # as if by another thread: the step itself draws nothing
    assert random.random() != first
    with pytest.raises(CaptureError), no_foreign_draws(random.random):
        random.random()


def test_generators_are_restored_on_an_error() -> None:
    random.seed(1)
    with pytest.raises(ZeroDivisionError), no_foreign_draws(lambda: None):
        random.random()
        raise ZeroDivisionError
    after = random.random()
    random.seed(1)
    assert after == random.random()


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
def test_cached_parametrizations_and_anomaly_mode(backend: str) -> None:
    """With cached weights the eager loop runs, so that no gradient is lost. Anomaly mode allows a plan."""
    cell, (x, h) = Parametrized(), sequence()
    net = planned(cell, backend)

    def gradients(net: Any) -> tuple[Tensor, ...]:
        with parametrize.cached():
            return torch.autograd.grad(net(x, h).outputs.sum(), list(cell.parameters()))

    close(gradients(net), gradients(eagerly(cell)), 1e-5)
    assert run_by(net) == {"eager"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autograd.set_detect_anomaly(True):
            net(x, h).outputs.sum().backward()
            assert torch.is_anomaly_enabled()
    assert run_by(net) == {"eager", backend}
