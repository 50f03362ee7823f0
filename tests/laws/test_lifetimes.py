"""The sixth law: what is alive, and for how long.

1F1B bounds the micro-batches that a stage holds, and a skip lives from its stash to its last reader.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weft import Pipe, Recorder, pop, skippable, stash
from weft.pipeline.schedule import Action

WIDTH = 32


class Counting(Recorder):
    """Also counts the tapes: from the start of F until they are released."""

    def __init__(self) -> None:
        super().__init__(memory=True)
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.guard = threading.Lock()

    @contextmanager
    def action_scope(self, kind: str, action: Action) -> Iterator[None]:
        if kind == "F":
            with self.guard:
                self.now[action.stage] += 1
                self.most[action.stage] = max(self.most[action.stage], self.now[action.stage])
        with super().action_scope(kind, action):
            yield

    def released(self, action: Action) -> None:
        with self.guard:
            self.now[action.stage] -= 1
        super().released(action)


def watched(schedule: str, executor: Any, stages: int, chunks: int, checkpoint: Any = "never") -> Counting:
    """One step of equal stages with one row per micro-batch, under a recorder."""
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)])
    pipe = Pipe(
        layers.double(),
        chunks=chunks,
        devices=["cpu"] * stages,
        balance=[1] * stages,
        schedule=schedule,
        executor=executor,
        checkpoint=checkpoint,
        loss=lambda y, t: (y - t).square().mean(),
    )
    recorder = Counting()
    x = torch.ones(chunks, WIDTH, dtype=torch.float64)
    recorder.ignore([*pipe.parameters(), x])
    with pipe.observed_by(recorder):
        pipe(x, target=torch.zeros_like(x)).backward()
    return recorder


@pytest.mark.parametrize("executor", ["serial", "threads"])
@given(stages=st.integers(1, 4), chunks=st.integers(1, 6))
def test_1f1b_holds_as_many_micro_batches_as_stages_lie_ahead(executor: Any, stages: int, chunks: int) -> None:
    recorder = watched("1f1b", executor, stages, chunks)
    whole = watched("gpipe", executor, stages, chunks)
    for stage in range(stages):
        bound = min(stages - stage, chunks)
        assert recorder.most[stage] == bound
        assert whole.most[stage] == chunks
        # Bytes say the same: all micro-batches of a stage weigh alike.
        peak = max(count for _, count in recorder.stage_bytes[stage])
        peak_of_all = max(count for _, count in whole.stage_bytes[stage])
        assert 0 < peak <= bound * peak_of_all // chunks
    assert not any(recorder.now.values())
    assert recorder.bytes[-1][1] == whole.bytes[-1][1] == 0


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_recomputation_keeps_no_graph_but_the_one_at_work(executor: Any) -> None:
    kept, again = (watched("gpipe", executor, 3, 6, mode) for mode in ("never", "always"))
    assert again.peak_bytes < kept.peak_bytes
    assert again.bytes[-1][1] == 0
    assert sum(event.kind == "R" for event in again.events) == 3 * 6
    assert not any(event.kind == "R" for event in kept.events)


class Made:
    """Weak references to the skips of one model, and what became of them. No tensor is held here."""

    def __init__(self) -> None:
        self.skips: list[weakref.ref[Any]] = []
        self.seen: list[tuple[str, int]] = []

    def note(self, where: str) -> None:
        """Whether the first skip's storage is alive at this place; a recomputation makes another one."""
        self.seen.append((where, int(bool(self.skips) and self.skips[0]() is not None)))


class Square(torch.autograd.Function):
    """A function whose backward tells when it runs, and which saves no tensor of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Made, name: str) -> Tensor:
        ctx.made, ctx.name = made, name
        made.note(f"F {name}")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.made.note(f"B {ctx.name}")
        return gradient * 2, None, None


class Plain(nn.Module):
    """A layer that neither stashes nor pops."""

    def __init__(self, made: Made, name: str) -> None:
        super().__init__()
        self.made, self.name = made, name

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x, self.made, self.name)


@skippable(stash=["skip"])
class Source(Plain):
    def forward(self, x: Tensor) -> Any:
        skip = x + 1
        self.made.skips.append(weakref.ref(skip.untyped_storage()))
        yield stash("skip", skip)
        return Square.apply(x, self.made, self.name)


@skippable(pop=["skip"])
class Reader(Plain):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return Square.apply(x + skip, self.made, self.name)


def skipping(made: Made, executor: Any, checkpoint: Any) -> Pipe:
    """Source, reader, and two stages behind them, one micro-batch."""
    layers = [nn.Linear(4, 4), Source(made, "0"), Plain(made, "1"), Reader(made, "2"), Plain(made, "3")]
    return Pipe(
        nn.Sequential(*layers, Plain(made, "4")),
        chunks=1,
        devices=["cpu"] * 5,
        balance=[2, 1, 1, 1, 1],
        executor=executor,
        checkpoint=checkpoint,
    )


@pytest.mark.parametrize("checkpoint", ["never", "always", ["always"] * 3 + ["never"] * 2], ids=str)
def test_a_skip_lives_from_its_stash_to_its_last_reader(checkpoint: Any) -> None:
    made = Made()
    pipe = skipping(made, "serial", checkpoint)  # threads would leave open who looks first
    pipe(torch.ones(3, 4)).sum().backward()
    alive = dict(made.seen)
    assert alive["B 3"] == 1, "the reader will need it"
    assert alive["B 1"] == 0, "the reader is done"
    assert not any(ref() is not None for ref in made.skips)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_skip_is_freed_at_once_where_no_backward_will_come(executor: Any) -> None:
    made = Made()
    pipe = skipping(made, executor, "never")
    with torch.no_grad():
        pipe(torch.ones(3, 4))
    assert dict(made.seen) == {"F 0": 1, "F 1": 1, "F 2": 1, "F 3": 0, "F 4": 0}
