"""State that the code between blocks reads besides its arguments: a change is seen in its own step."""

import copy
import os
import random
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close
from torchweft.core.errors import SplitError

pytestmark = pytest.mark.usefixtures("double")

SCALE = 1.0
TABLE: dict[str, Any] = {"scale": 1.0}
VARIABLE = ContextVar("VARIABLE", default=1.0)
Read = Callable[["Scaled"], Any]


class Settings:
    """A plain object with a nested object and a nested dictionary."""

    def __init__(self) -> None:
        self.inner = SimpleNamespace(alpha=1.0)
        self.table: dict[str, Any] = {"scales": [1.0, {"last": 1.0}]}


class Flags:
    alpha = 1.0

    def method(self) -> float:
        return self.alpha


@dataclass
class Options:
    alpha: float = 1.0


class Scaled(nn.Module):
    """Adds the result of each block times that of `read`."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0).eval()) for _ in range(4))
        self.read, self.args, self.settings = read, Namespace(alpha=1.0), Settings()
        self.array, self.long, self.tensor = np.array([1.0, 2.0]), list(range(100)), torch.tensor(2.0)
        self.tensors, self.queue, self.options = [torch.tensor(2.0)], deque([1.0]), Options()
        self.function, self.flags, self.scale = partial(float, 2), Flags(), lambda: 1.0
        for block in self.blocks:
            block.flag, block.tensor = True, torch.tensor(3.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.read(self) * block(x)
        return x


def cut(model: nn.Module, **settings: Any) -> weft.Pipe:
    return weft.Pipe(model, chunks=2, devices=["cpu"] * 2, split=["blocks.2"], **settings)


def set_global(_: Scaled) -> None:
    global SCALE  # noqa: PLW0603 - the state under test
    SCALE += 1.0


def global_scale() -> float:
    return SCALE


def setter(path: str, value: Any) -> Callable[[Scaled], None]:
    """A function that sets the attribute of a model at a path."""

    def change(model: Scaled) -> None:
        *parents, name = path.split(".")
        holder: Any = model
        for parent in parents:
            holder = getattr(holder, parent)
        setattr(holder, name, value)

    return change


def _imported() -> float:
    import random as module  # noqa: PLC0415 - the state under test

    return getattr(module, "weft_scale", 1.0)


# Changes of a tensor's own contents need no other program. Those of a new tensor with other contents do.
FOLLOWED = ("written tensor", "array as a tensor")

CHANGES: dict[str, tuple[Read, Callable[[Scaled], object]]] = {
    "namespace": (lambda m: m.args.alpha, setter("args.alpha", 0.5)),
    "object in an object": (lambda m: m.settings.inner.alpha, setter("settings.inner.alpha", 0.5)),
    "dict in a list in a dict": (
        lambda m: m.settings.table["scales"][1]["last"],
        lambda m: m.settings.table["scales"][1].update(last=0.5),
    ),
    "element of an array": (lambda m: float(m.array[0]), lambda m: m.array.__setitem__(0, 9.0)),
    "entry of a long list": (lambda m: m.long[80], lambda m: m.long.__setitem__(80, 3)),
    "replaced tensor": (lambda m: m.tensor, setter("tensor", torch.tensor(5.0))),
    "global": (lambda _: SCALE, set_global),
    "global behind a function": (lambda _: global_scale(), set_global),
    "entry of a global": (lambda _: TABLE["scale"], lambda _: TABLE.update(scale=TABLE["scale"] + 1)),
    "environment": (
        lambda _: float(os.environ.get("TORCHWEFT_TEST_SCALE", "1")),
        lambda _: os.environ.update(TORCHWEFT_TEST_SCALE="2.5"),
    ),
    "context variable": (lambda _: VARIABLE.get(), lambda _: VARIABLE.set(VARIABLE.get() + 1)),
    "array as a tensor": (lambda m: torch.from_numpy(m.array)[0], lambda m: m.array.__setitem__(0, 9.0)),
    "copy of an array": (lambda m: torch.tensor(m.array)[0], lambda m: m.array.__setitem__(0, 9.0)),
    "number as a tensor": (lambda m: torch.tensor(m.args.alpha), setter("args.alpha", 0.5)),
    "tensor in a list": (lambda m: m.tensors[0], lambda m: m.tensors.__setitem__(0, torch.tensor(5.0))),
    "written tensor": (lambda m: m.tensor, lambda m: m.tensor.mul_(3)),
    "queue": (lambda m: m.queue[-1], lambda m: m.queue.append(0.5)),
    "dataclass": (lambda m: m.options.alpha, setter("options.alpha", 0.5)),
    "partial": (lambda m: m.function(), setter("function", partial(float, 3))),
    "method of an object": (lambda m: m.flags.method(), setter("flags.alpha", 0.5)),
    "replaced method": (lambda m: m.flags.method(), setter("flags.method", lambda: 0.5)),
    "replaced function": (lambda m: m.scale(), setter("scale", lambda: 0.5)),
    "method of a class": (
        lambda _: Flags.method(Namespace(alpha=2.0)),
        lambda _: setattr(Flags, "method", lambda self: 3 * self.alpha),
    ),
    "attributes as a dict": (lambda m: vars(m.options)["alpha"], lambda m: vars(m.options).update(alpha=0.5)),
    "number of parameters": (
        lambda m: len(list(m.parameters())),
        lambda m: m.blocks[0].append(nn.LayerNorm(4)),
    ),
    "flag of a parameter": (
        lambda m: 1.0 if m.blocks[0][0].bias.requires_grad else 2.0,
        lambda m: m.blocks[0][0].bias.requires_grad_(False),
    ),
    "name that forward imports": (lambda _: _imported(), lambda _: setattr(random, "weft_scale", 3.0)),
    "class as a namespace": (lambda _: Flags.alpha, lambda _: setattr(Flags, "alpha", Flags.alpha + 1)),
    "flag of a block": (lambda m: 1.0 if m.blocks[1].flag else 2.0, setter("blocks.1.flag", False)),
    "probability in a block": (lambda m: 1.0 - m.blocks[1][1].p, setter("blocks.1.1.p", 0.5)),
    "mode of a block": (lambda m: 2.0 if m.blocks[1].training else 1.0, lambda m: m.blocks[1].eval()),
    "tensor of a block": (lambda m: m.blocks[1].tensor, setter("blocks.1.tensor", torch.tensor(7.0))),
}


@pytest.fixture
def _undo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore global state that a change of `CHANGES` writes."""
    monkeypatch.setenv("TORCHWEFT_TEST_SCALE", "1.0")
    monkeypatch.setattr(Flags, "method", Flags.method)
    monkeypatch.setattr(random, "weft_scale", 1.0, raising=False)


@pytest.mark.usefixtures("_undo")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_seen(name: str) -> None:
    """The pipe equals the model after any change of state that the code between blocks reads, with one recording."""
    read, change = CHANGES[name]
    pipe, x = cut(model := Scaled(read)), torch.randn(4, 4)
    for _ in range(2):
        before = pipe(x)
        assert_close(before, model(x))
    assert pipe.statistics()["recordings"] == 1
    change(model)
    for _ in range(2):
        assert_close(pipe(x), model(x))
    assert pipe.statistics()["recordings"] <= (1 if name in FOLLOWED else 2)
    assert name == "flag of a parameter" or not torch.allclose(pipe(x), before)


@pytest.mark.usefixtures("_undo")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_in_the_second_step_and_with_gradients(name: str) -> None:
    """Also if a program of the first step is not verified yet, because only one micro-batch has its size."""
    read, change = CHANGES[name]
    pipe, x = weft.Pipe(model := Scaled(read), chunks=3, devices=["cpu"] * 2, split=["blocks.2"]), torch.randn(7, 4)
    pipe(x)
    change(model)
    gradients: list[list[Tensor]] = []
    for net in (pipe, model):
        net(x).square().mean().backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        model.zero_grad()
    assert_close(*gradients)


def test_a_closure_that_changes_is_seen() -> None:
    scale = [1.0]
    pipe, x = cut(model := Scaled(lambda _: scale[0])), torch.randn(4, 4)
    assert_close(pipe(x), model(x))
    scale[0] = 2.0
    assert_close(pipe(x), model(x))


def test_counters_of_blocks_cause_no_new_recording() -> None:
    """Attributes that the code between blocks does not read can change freely."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input)

    model = Scaled(lambda _: 1.0)
    model.blocks[1] = Counting(4, 4)
    pipe, x = cut(model), torch.randn(4, 4)
    for _ in range(3):
        assert_close(pipe(x), model(x))
        model.array[0] += 1
    assert pipe.statistics()["recordings"] == 1


class Counts(nn.Module):
    """Stores a value in every run, in the way that `way` selects."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.way, self.steps, self.history, self.cache, self.length = way, 0, list[int](), {}, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "number":
            self.steps += 1
        elif self.way == "list":
            self.history.append(len(x))
        elif self.way == "once":
            self.cache.setdefault(len(x), torch.ones(()))
            self.length = len(x)
        elif self.way == "buffer":
            self.count += 1
            x = x * (self.count / 10).clamp(max=1)
        for block in self.blocks:
            x = x + min(1.0, 0.1 * self.steps) * block(x) + block(x)
        return x


@pytest.mark.parametrize("way", ["number", "list", "once", "buffer"])
def test_what_the_code_between_blocks_writes_is_written_once(way: str) -> None:
    """Counters, lists, caches and buffers are those of the undivided model, and what they are used for is exact."""
    model = Counts(way)
    plain = copy.deepcopy(model)
    pipe = cut(model)
    for _ in range(4):
        x = torch.randn(4, 4)
        assert_close(pipe(x), plain(x))
        for name in ("steps", "history", "length", "count"):
            assert getattr(model, name) == getattr(plain, name), name
        assert model.cache.keys() == plain.cache.keys()


class Config:
    def __init__(self) -> None:
        self.layerdrop, self.apply_spec_augment, self.hidden = 0.1, True, 4


class Drops(nn.Module):
    """Skips blocks at random."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.blocks, self.draw, self.config = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), draw, Config()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or self.draw() > self.config.layerdrop:
                x = block(x)
        return x


@pytest.mark.parametrize("draw", [lambda: torch.rand([]), random.random, np.random.random])
def test_random_decisions_name_their_setting(draw: Callable[[], Any]) -> None:
    with pytest.raises(SplitError, match=r"layerdrop=0\.0, apply_spec_augment=False in its config"):
        for _ in range(4):
            cut(Drops(draw))(torch.randn(4, 4))
    model = Drops(draw).eval()
    assert_close(cut(model)(x := torch.randn(4, 4)), model(x))
