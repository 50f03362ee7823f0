"""The sixth law: lifetimes of activations and skips.

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

from torchweft import Pipe, Recorder, pop, skippable, stash
from torchweft.pipeline.schedule import Action

WIDTH = 32


class TapeCounter(Recorder):
    """A recorder that also counts tapes, from the start of F to their release."""

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


def record_step(schedule: str, executor: Any, stages: int, chunks: int, checkpoint: Any = "never") -> TapeCounter:
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
    recorder = TapeCounter()
    x = torch.ones(chunks, WIDTH, dtype=torch.float64)
    recorder.ignore([*pipe.parameters(), x])
    with pipe.observed_by(recorder):
        pipe(x, target=torch.zeros_like(x)).backward()
    return recorder


@pytest.mark.parametrize("executor", ["serial", "threads"])
@given(stages=st.integers(1, 4), chunks=st.integers(1, 6))
def test_1f1b_holds_one_micro_batch_per_remaining_stage(executor: Any, stages: int, chunks: int) -> None:
    recorder = record_step("1f1b", executor, stages, chunks)
    gpipe = record_step("gpipe", executor, stages, chunks)
    for stage in range(stages):
        bound = min(stages - stage, chunks)
        assert recorder.most[stage] == bound
        assert gpipe.most[stage] == chunks
        # The bytes agree, because all micro-batches of a stage have the same size.
        peak = max(count for _, count in recorder.stage_bytes[stage])
        peak_of_all = max(count for _, count in gpipe.stage_bytes[stage])
        assert 0 < peak <= bound * peak_of_all // chunks
    assert not any(recorder.now.values())
    assert recorder.bytes[-1][1] == gpipe.bytes[-1][1] == 0


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_recomputation_keeps_one_graph_at_a_time(executor: Any) -> None:
    kept, again = (record_step("gpipe", executor, 3, 6, mode) for mode in ("never", "always"))
    assert again.peak_bytes < kept.peak_bytes
    assert again.bytes[-1][1] == 0
    assert sum(event.kind == "R" for event in again.events) == 3 * 6
    assert not any(event.kind == "R" for event in kept.events)


class SkipLog:
    """Weak references to the skips of one model, and the observations of them. Keeps no tensor alive."""

    def __init__(self) -> None:
        self.skips: list[weakref.ref[Any]] = []
        self.seen: list[tuple[str, int]] = []

    def note(self, where: str) -> None:
        """Record whether the storage of the first skip is alive. A recomputation creates another storage."""
        self.seen.append((where, int(bool(self.skips) and self.skips[0]() is not None)))


class LoggedDouble(torch.autograd.Function):
    """Doubles its input, logs forward and backward, and saves no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: SkipLog, name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.note(f"F {name}")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.note(f"B {ctx.name}")
        return gradient * 2, None, None


class Plain(nn.Module):
    """A layer that neither stashes nor pops."""

    def __init__(self, log: SkipLog, name: str) -> None:
        super().__init__()
        self.log, self.name = log, name

    def forward(self, x: Tensor) -> Tensor:
        return LoggedDouble.apply(x, self.log, self.name)


@skippable(stash=["skip"])
class Source(Plain):
    def forward(self, x: Tensor) -> Any:
        skip = x + 1
        self.log.skips.append(weakref.ref(skip.untyped_storage()))
        yield stash("skip", skip)
        return LoggedDouble.apply(x, self.log, self.name)


@skippable(pop=["skip"])
class Reader(Plain):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return LoggedDouble.apply(x + skip, self.log, self.name)


def skipping(log: SkipLog, executor: Any, checkpoint: Any) -> Pipe:
    """Source, reader, and two stages after them, with one micro-batch."""
    layers = [nn.Linear(4, 4), Source(log, "0"), Plain(log, "1"), Reader(log, "2"), Plain(log, "3")]
    return Pipe(
        nn.Sequential(*layers, Plain(log, "4")),
        chunks=1,
        devices=["cpu"] * 5,
        balance=[2, 1, 1, 1, 1],
        executor=executor,
        checkpoint=checkpoint,
    )


@pytest.mark.parametrize("checkpoint", ["never", "always", ["always"] * 3 + ["never"] * 2], ids=str)
def test_skip_lives_from_its_stash_to_its_last_reader(checkpoint: Any) -> None:
    log = SkipLog()
    pipe = skipping(log, "serial", checkpoint)  # with threads, the order of observations is undefined
    pipe(torch.ones(3, 4)).sum().backward()
    alive = dict(log.seen)
    assert alive["B 3"] == 1, "backward of the reader still needs it"
    assert alive["B 1"] == 0, "backward of the reader is done"
    assert not any(ref() is not None for ref in log.skips)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_skip_is_freed_at_once_without_backward(executor: Any) -> None:
    log = SkipLog()
    pipe = skipping(log, executor, "never")
    with torch.no_grad():
        pipe(torch.ones(3, 4))
    assert dict(log.seen) == {"F 0": 1, "F 1": 1, "F 2": 1, "F 3": 0, "F 4": 0}
