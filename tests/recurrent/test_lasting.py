"""What code says of classes, objects and modules of code may change between calls; what is hidden is given up."""

import functools
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import eagerly, planned, run_by
from weft.recurrent.lasting import lasts, open_object
from weft.recurrent.owned import owned

RATE = 2.0
HERE = sys.modules[__name__]


class Settings:
    rate = 2.0


class Activation:
    """An activation with settings, as an object."""

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
    """Hands what it computes to a function that reads something."""

    def __init__(self, read: Callable[..., Tensor], **more: Any) -> None:
        super().__init__()
        self.read = read
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.read(self, torch.tanh(x + h))
        return h, h


class Parent(nn.Module):
    kept = 1.0

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h) * RATE
        return h, h


class Child(Parent):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, h)


class Inner(nn.Module):
    def scaled(self, z: Tensor) -> Tensor:
        return z * RATE


def of_class(module: nn.Module, z: Tensor) -> Tensor:
    return z * type(module).kept


class Typed(nn.Module):
    kept = 2.0

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = of_class(self, torch.tanh(x + h))
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
    "a class held": (lambda: Cell(lambda cell, z: z * cell.settings.rate, settings=Settings), "Settings.rate"),
    "a class of a module": (lambda: Cell(lambda cell, z: z * HERE.Settings.rate), "Settings.rate"),
    "a class by a helper": (Typed, "Typed.kept"),
    "a word": (lambda: Cell(lambda cell, z: z * getattr(HERE, "RATE")), "RATE"),  # noqa: B009
    "a global by its word": (lambda: Cell(lambda cell, z: z * globals()["RATE"]), "RATE"),
    "a function with a cache": (lambda: Cell(lambda cell, z: z * cached.__wrapped__(1)), "RATE"),
}


@pytest.mark.parametrize(("make", "what"), READERS.values(), ids=READERS)
def test_what_code_says_of_classes_and_objects_may_change(
    make: Callable[[], nn.Module], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, x, h = make(), torch.randn(3, 2, 3), torch.zeros(2, 3)
    net, loop = planned(cell, "python", verify="never"), eagerly(cell)
    before = net(x, h).outputs
    *owner, name = what.split(".")
    other = (lambda self, z: z * 5) if name == "__call__" else 5.0
    monkeypatch.setattr(getattr(HERE, owner[0]) if owner else HERE, name, other)
    after = net(x, h).outputs
    assert torch.allclose(after, loop(x, h).outputs) and not torch.allclose(after, before)
    assert run_by(net) == {"python"}


@pytest.mark.parametrize("name", ["inner", "scaled", "mean"])
def test_a_global_that_is_named_as_an_attribute_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(lambda cell, z: cell.inner.scaled(z) - z.mean(), inner=Inner())
    net, before = planned(cell, "python"), owned(cell).key
    monkeypatch.setattr(HERE, name, net, raising=False)  # as after `inner = Recurrent(cell)`
    net(torch.randn(3, 2, 3), torch.zeros(2, 3))
    assert run_by(net) == {"python"} and owned(cell).key == before


HIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a generator's method in C": (lambda: random.Random(0).random, "Random"),
    "a generator's method": (lambda: random.Random(0).uniform, "Random"),
    "a subclass of a class in C": (lambda: type("Line", (deque,), {})([1.0]), "Line"),
    "a compiled module": (lambda: torch.compile(nn.Linear(3, 3), backend="eager"), "a compiled or scripted module"),
    "the environment": (lambda: lambda: os.environ["HOME"], "environment"),
}


@pytest.mark.parametrize(("make", "words"), HIDDEN.values(), ids=HIDDEN)
def test_what_hides_its_state_is_given_up(make: Callable[[], Any], words: str) -> None:
    assert any(words in each for each in owned(Cell(of_class, thing=make())).unknown)


@pytest.mark.parametrize("thing", [Activation(), [1.0].index, {"a": 1.0}.get, torch.tanh, max, cached, Settings])
def test_what_shows_its_state_is_known(thing: Any) -> None:
    assert not owned(Cell(of_class, thing=thing)).unknown


def test_a_method_in_c_is_known_by_what_its_object_holds() -> None:
    table = {"a": 1.0}
    cell = Cell(of_class, look_up=table.get)
    before = owned(cell).key
    table["a"] = 2.0
    assert owned(cell).key != before


def test_only_torch_python_and_weft_last() -> None:
    assert all(lasts(each) for each in ("torch.nn", "numpy", "weft.recurrent", "random"))
    assert not any(lasts(each) for each in (__name__, None, "torchvision"))
    assert open_object(Activation()) and not open_object(random.Random(0)) and not open_object(iter("ab"))
