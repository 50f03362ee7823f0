"""What a cell reads is the key of its plan: whatever changes makes another, and what cannot be known is told."""

import copy
import enum
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import eagerly, planned
from weft.recurrent.owned import Owned, owned
from weft.recurrent.trial import put_back

RATE = 2.0


class Mode(enum.Enum):
    SUM = 1
    DIFFERENCE = 2


@dataclass
class Settings:
    scale: float = 1.0
    more: list[float] = field(default_factory=lambda: [1.0])


def twice(x: Tensor) -> Tensor:
    return x * RATE


class Reader(nn.Module):
    """Reads everything that a module may have."""

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

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
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
    "a function of the user's": lambda cell: setattr(cell, "act", twice),
    "an argument of a partial": lambda cell: setattr(cell, "part", functools.partial(torch.mul, other=3.0)),
    "another tensor": lambda cell: setattr(cell, "loose", torch.full((3,), 5.0).double()),
    "another parameter": lambda cell: setattr(cell.linear, "weight", nn.Parameter(torch.ones(3, 3).double())),
    "a frozen parameter": lambda cell: cell.linear.bias.requires_grad_(False),
    "another module": lambda cell: setattr(cell, "linear", nn.Linear(3, 3, bias=False).double()),
    "evaluation": lambda cell: cell.eval(),
    "a child's attribute": lambda cell: setattr(cell.inner, "inplace", True),
    "an instance's forward": lambda cell: setattr(cell.inner, "forward", twice),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_in_a_module_is_another_key(change: Callable[[Reader], Any]) -> None:
    cell = Reader()
    before, again = owned(cell).key, owned(cell).key
    assert before == again and hash(tuple(before)) == hash(tuple(again))
    assert not owned(cell).unknown
    change(cell)
    assert owned(cell).key != before


def test_a_network_follows_every_change_of_its_cell() -> None:
    cell = Reader()
    net = planned(cell, "python", verify="never")
    x, h = torch.randn(3, 2, 3).double(), torch.zeros(2, 3).double()
    for name in ("an item of a list", "another function", "an attribute of an object", "another tensor"):
        net(x, h)
        CHANGES[name](cell)
        torch.testing.assert_close(net(x, h).outputs, eagerly(cell)(x, h).outputs, rtol=1e-12, atol=1e-12)
    assert len(net.why()) == 5


def test_values_of_tensors_are_no_part_of_the_key() -> None:
    cell = Reader()
    before = owned(cell).key
    with torch.no_grad():
        for each in (*cell.parameters(), cell.loose):
            each.mul_(2)
    assert owned(cell).key == before
    assert {id(each) for each in owned(cell).tensors} >= {id(cell.loose), id(cell.kept), id(cell.linear.weight)}


def closure(weight: Tensor, rate: list[float], inner: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def cell(x: Tensor, h: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        h = inner(x @ weight + h) * rate[0] * scale
        return h, next(h for _ in range(1))

    return cell


def test_what_a_function_closes_over_is_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rate = torch.randn(3, 3, requires_grad=True), [1.0]
    cell = closure(weight, rate, twice)
    found = owned(cell)
    assert found.parameters == [weight] and not found.unknown
    keys = [found.key]
    rate[0] = 2.0
    keys.append(owned(cell).key)
    monkeypatch.setitem(globals(), "RATE", 3.0)  # what a function names, that this one calls
    keys.append(owned(cell).key)
    cell.__defaults__ = (2.0,)
    keys.append(owned(cell).key)
    keys.append(owned(closure(weight, rate, torch.tanh)).key)
    assert len({str(key) for key in keys}) == 5


def test_methods_are_known_by_their_object() -> None:
    class Holder:
        def __init__(self) -> None:
            self.scale = 1.0

        def cell(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scale, h

    holder = Holder()
    before = owned(holder.cell).key
    holder.scale = 2.0
    assert owned(holder.cell).key != before and not owned(holder.cell).unknown


UNKNOWN: dict[str, tuple[Callable[[Reader], Any], str]] = {
    "a generator": (lambda cell: setattr(cell, "word", iter("abcd")), "word of Reader"),
    "a logger": (lambda cell: setattr(cell, "log", logging.getLogger("cell")), "log of Reader"),
    "a random generator": (lambda cell: setattr(cell, "draw", torch.Generator()), "draw of Reader"),
    "a forward hook": (lambda cell: cell.inner.register_forward_hook(lambda *a: None), "the hooks of Dropout"),
    "a forward pre-hook": (lambda cell: cell.register_forward_pre_hook(lambda *a: None), "the hooks of Reader"),
    "a backward hook": (lambda cell: cell.register_full_backward_hook(lambda *a: None), "the hooks of Reader"),
}


@pytest.mark.parametrize(("change", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_known_is_named_and_is_another_key(change: Callable[[Reader], Any], words: str) -> None:
    cell = Reader()
    before = owned(cell).key
    change(cell)
    found = owned(cell)
    assert any(words in each for each in found.unknown)
    assert found.key != before


def test_what_holds_itself_is_looked_at_once() -> None:
    cell = Reader()
    cell.listed.append(cell.listed)  # type: ignore[arg-type]
    cell.table["self"] = cell  # type: ignore[assignment]
    cell.settings.more = cell.settings  # type: ignore[assignment]
    assert not owned(cell).unknown


def test_a_trial_run_leaves_buffers_as_they_were() -> None:
    kept, other = torch.ones(3), torch.ones(3)
    with pytest.raises(ZeroDivisionError), put_back(Owned(tensors=[kept, other])):
        kept.add_(1)
        raise ZeroDivisionError
    assert kept.tolist() == [1, 1, 1] and other._version == 0


class Rates:
    """What a user's module of code may hold settings in."""

    scale = 2.0
    steps = (1.0,)

    @staticmethod
    def more(x: Tensor) -> Tensor:
        return x * Rates.steps[0]


def by_rates(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(Rates.more(x) * Rates.scale + h)
    return h, h


@pytest.mark.parametrize(("name", "value"), [("scale", 5.0), ("steps", (3.0,)), ("more", staticmethod(torch.neg))])
def test_what_a_function_reads_of_a_class_may_change(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, loop = planned(by_rates, "python"), eagerly(by_rates)
    x, h = torch.randn(3, 2, 3), torch.zeros(2, 3)
    before = net(x, h).outputs
    monkeypatch.setattr(Rates, name, value)
    assert torch.allclose(net(x, h).outputs, loop(x, h).outputs) and not torch.allclose(net(x, h).outputs, before)


class Counting(nn.Module):
    """Changes attributes of its own in every step, so no plan can stand for it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.cache = 0, [], None

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.seen.append(x)
        if self.cache is None:
            self.cache = torch.ones(3)
            self.late = 1
        return x + h * self.cache, h + 1


@pytest.mark.filterwarnings("ignore::weft.recurrent.NoPlanWarning")
@pytest.mark.parametrize("backend", ["auto", "python"])
def test_a_refused_cell_was_run_for_trial_without_a_trace(backend: str) -> None:
    cell = Counting()
    net = planned(cell, backend)
    for number in (1, 2):
        net(torch.randn(4, 2, 3), torch.zeros(2, 3))
        assert cell.calls == len(cell.seen) == 4 * number
    assert all(type(each) is Tensor for each in cell.seen)


@pytest.mark.parametrize("change", ["new", "gone", "other", "within"])
def test_a_trial_run_leaves_attributes_as_they_were(change: str) -> None:
    cell = Reader()
    before = {name: copy.copy(value) for name, value in vars(cell).items()}
    with put_back(owned(cell)):
        if change == "new":
            cell.another = 1
        elif change == "gone":
            del cell.word
        elif change == "other":
            cell.number, cell.settings.scale = 7, 9.0
        else:
            cell.listed.append(3.0)
            cell.table["b"] = 4.0
            cell.settings.more.append(5.0)
    assert vars(cell).keys() == before.keys() and cell.settings == Settings()
    assert all(vars(cell)[name] == before[name] for name in ("word", "number", "listed", "table"))
