"""State that the code between blocks reads besides its arguments: a change is detected, or is an error."""

import os
import random
from argparse import Namespace
from collections.abc import Callable
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
Read = Callable[["Scaled"], Any]


class Settings:
    """A plain object with a nested object and a nested dictionary."""

    def __init__(self) -> None:
        self.inner = SimpleNamespace(alpha=1.0)
        self.table: dict[str, Any] = {"scales": [1.0, {"last": 1.0}]}


class Flags:
    alpha = 1.0


class Scaled(nn.Module):
    """Adds the result of each block times that of `read`."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0).eval()) for _ in range(4))
        self.read, self.args, self.settings = read, Namespace(alpha=1.0), Settings()
        self.array, self.long, self.tensor = np.array([1.0, 2.0]), list(range(100)), torch.tensor(2.0)
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
    "class as a namespace": (lambda _: Flags.alpha, lambda _: setattr(Flags, "alpha", Flags.alpha + 1)),
    "flag of a block": (lambda m: 1.0 if m.blocks[1].flag else 2.0, setter("blocks.1.flag", False)),
    "probability in a block": (lambda m: 1.0 - m.blocks[1][1].p, setter("blocks.1.1.p", 0.5)),
    "mode of a block": (lambda m: 2.0 if m.blocks[1].training else 1.0, lambda m: m.blocks[1].eval()),
    "tensor of a block": (lambda m: m.blocks[1].tensor, setter("blocks.1.tensor", torch.tensor(7.0))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_seen(name: str) -> None:
    """The pipe equals the model after any change of state that the code between blocks reads."""
    read, change = CHANGES[name]
    pipe, x = cut(model := Scaled(read)), torch.randn(4, 4)
    for recordings in (1, 1, 2, 2):
        if recordings == 2 and pipe.statistics()["recordings"] == 1:
            before = pipe(x)
            change(model)
        assert_close(pipe(x), model(x))
        assert pipe.statistics()["recordings"] == recordings
    assert not torch.allclose(pipe(x), before)


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


def test_hidden_state_is_found_at_rarer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden state is compared at the steps 10, 100, 1,000."""
    monkeypatch.setenv("TORCHWEFT_TEST_SCALE", "1.0")
    pipe, x = cut(Scaled(lambda _: float(os.environ["TORCHWEFT_TEST_SCALE"]))), torch.randn(4, 4)
    pipe(x)
    monkeypatch.setenv("TORCHWEFT_TEST_SCALE", "2.0")
    for _ in range(8):
        pipe(x)
    with pytest.raises(SplitError, match="compute different values") as seen:
        pipe(x)
    assert "found at step 10" in seen.value.__notes__[0]
    pipe(x)  # recorded again, with the new value


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


@pytest.mark.parametrize(("way", "words"), [("number", r"self\.steps \(.*\.py:\d+\)"), ("list", r"self\.history \(")])
def test_counters_between_blocks_are_refused_by_name(way: str, words: str) -> None:
    """A counter would keep its recorded value, so it is an error that names attribute and line."""
    model = Counts(way)
    for _ in range(2):
        with pytest.raises(SplitError, match=rf"changes these in the code between blocks(.|\n)*{words}"):
            cut(model)(torch.randn(4, 4))
    assert model.steps == 0


@pytest.mark.parametrize("way", ["once", "buffer"])
def test_caches_and_counters_in_buffers_are_exact(way: str) -> None:
    """A cache that is filled once is not a counter. A counter in a buffer is updated by the stage that owns it."""
    pipe, plain = cut(Counts(way)), Counts(way)
    plain.load_state_dict(pipe.state_dict())
    for _ in range(3):
        x = torch.randn(4, 4)
        assert_close(pipe(x), torch.cat([plain(piece) for piece in x.split(2)]))
    assert_close(pipe.count, plain.count)


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
