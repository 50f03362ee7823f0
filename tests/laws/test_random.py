"""The fifth law: random numbers follow from the caller's seed, the layer and the micro-batch, and nothing else.

Therefore a recomputation draws the numbers of its forward, and concurrent stages do not disturb each other. A model
that draws nothing leaves the caller's generator unchanged.
"""

import threading
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from torchweft import Pipe, Recorder, is_recomputing
from torchweft.core.errors import RandomnessError

ONES = torch.ones(5, 8, dtype=torch.float64)


def model() -> nn.Sequential:
    """Two stages that both draw."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3)).double()


def pipe_over(layers: nn.Sequential, executor: Any, checkpoint: Any = "never", **options: Any) -> Pipe:
    """Two stages with two layers each."""
    return Pipe(
        layers, chunks=3, devices=["cpu"] * 2, balance=[2, 2], executor=executor, checkpoint=checkpoint, **options
    )


def step(pipe: Pipe, seed: int, x: Tensor = ONES) -> list[Tensor]:
    """The output and the gradients of one step, and the next numbers of the caller."""
    torch.manual_seed(seed)
    pipe.zero_grad()
    y = pipe(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in pipe.parameters()), torch.rand(2)]


class Meeting(nn.Module):
    """Draws only after another stage has begun to run, so that both draw at the same time."""

    def __init__(self, own: threading.Event, other: threading.Event) -> None:
        super().__init__()
        self.events = own, other
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        own, other = self.events
        own.set()
        other.wait(0.01)  # times out if the other stage waits for the generator
        return self.drop(x)


def test_concurrent_stages_do_not_mix_their_numbers() -> None:
    one, other = threading.Event(), threading.Event()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), Meeting(one, other), nn.Linear(8, 8), Meeting(other, one)).double()
    expected = step(pipe_over(layers, "serial"), 0)
    for checkpoint in ("never", "always"):
        one.clear()
        other.clear()
        assert all(map(torch.equal, expected, step(pipe_over(layers, "threads", checkpoint), 0)))


def assert_equal_everywhere(steps: Callable[[str, str], list[list[Tensor]]]) -> None:
    """Assert that steps agree between all executors, with and without recomputation.

    Bit for bit if executors walk the same cuts, to rounding otherwise.
    """
    expected = steps("serial", "never")
    for executor, checkpoint in product(("serial", "threads", "graph", "auto"), ("never", "always")):
        for number, (a, b) in enumerate(zip(expected, steps(executor, checkpoint), strict=True)):
            where = f"step {number} of {executor} {checkpoint}"
            assert torch.equal(a[-1], b[-1]), f"the caller's generator after {where}"
            if executor in ("serial", "threads"):
                assert all(map(torch.equal, a, b)), where
            else:
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=where)


def test_dropout_that_is_switched_on_later_is_detected() -> None:
    def steps(executor: str, checkpoint: str) -> list[list[Tensor]]:
        layers, results = model(), list[list[Tensor]]()
        pipe = pipe_over(layers, executor, checkpoint)
        for seed, (layers[1].p, layers[3].p) in enumerate([(0, 0)] * 2 + [(0, 0.5)] * 2 + [(0.5, 0.5)] * 3):
            results.append(step(pipe, seed))
        return results

    assert_equal_everywhere(steps)


class DrawsIfPositive(nn.Module):
    """Draws only for positive inputs: a branch on data, which no attribute reveals."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) if x.sum() > 0 else x


@pytest.mark.parametrize("other_draws", [False, True])
def test_stage_that_suddenly_draws_is_detected(other_draws: bool) -> None:
    def steps(executor: str, checkpoint: str) -> list[list[Tensor]]:
        torch.manual_seed(0)
        drop = nn.Dropout(0.5 if other_draws else 0.0)
        layers = nn.Sequential(DrawsIfPositive(), nn.Linear(8, 8), drop, nn.Linear(8, 8)).double()
        pipe = pipe_over(layers, executor, checkpoint)
        return [step(pipe, seed, sign * ONES) for seed, sign in enumerate((-1, -1, 1, 1, -1, 1))]

    assert_equal_everywhere(steps)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("executor", ["serial", "threads", "auto", "graph"])
def test_model_that_draws_nothing_keeps_the_generator_unchanged(executor: Any, checkpoint: Any) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.0)).double()
    pipe = pipe_over(layers, executor, checkpoint)
    before = torch.get_rng_state()
    for _ in range(3):
        pipe(ONES).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


def test_model_that_draws_advances_the_generator() -> None:
    pipe = pipe_over(model(), "threads")
    torch.manual_seed(0)
    assert not torch.equal(pipe(ONES), pipe(ONES))
    pipe.eval()
    before = torch.get_rng_state()
    assert torch.equal(pipe(ONES), pipe(ONES))
    assert torch.equal(torch.get_rng_state(), before)


def test_recorder_changes_no_random_number() -> None:
    pipe = pipe_over(model(), "threads", "always")
    expected = step(pipe, 0)
    with pipe.observed_by(Recorder(memory=True)):
        assert all(map(torch.equal, expected, step(pipe, 0)))


class PausedDropout(nn.Module):
    """Draws twice. In the second micro-batch, waits between the draws until another stage has drawn."""

    def __init__(self, own: threading.Event, other: threading.Event) -> None:
        super().__init__()
        self.events = own, other
        self.calls = 0
        # Seconds to wait. In a list, because a float attribute would be part of the configuration.
        self.timeouts: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5)
        self.calls += 1
        if self.calls % 3 == 2:
            self.events[0].set()
            self.events[1].wait(*self.timeouts or (0,))
        return nn.functional.dropout(x, 0.5)


class SuddenDropout(PausedDropout):
    """Draws nothing until it has a timeout. Then it draws in the first micro-batch, between the draws of the other."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.timeouts or self.calls % 3 != 1:
            return x
        self.events[1].wait(*self.timeouts)
        y = nn.functional.dropout(x, 0.5)
        self.events[0].set()
        return y


def step_with_sudden_draw(executor: Any, checkpoint: Any = "never") -> list[Tensor]:
    """One step in which the second stage begins to draw. With threads, the stages wait for each other."""
    one, other = threading.Event(), threading.Event()
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(8, 8), PausedDropout(one, other), nn.Linear(8, 8), SuddenDropout(other, one)
    ).double()
    pipe = pipe_over(layers, executor, checkpoint)
    step(pipe, 0)
    for layer in (layers[1], layers[3]):
        layer.calls = 0
        layer.timeouts.append(60.0 if executor == "threads" else 0.0)
    one.clear()
    return step(pipe, 1)


@pytest.mark.xfail(reason="one generator per process: a sudden draw during the draws of another stage leaves no trace")
def test_sudden_draw_during_other_draws_is_detected() -> None:
    assert all(map(torch.equal, step_with_sudden_draw("serial"), step_with_sudden_draw("threads")))


def test_recomputation_after_a_hidden_draw_raises() -> None:
    """The numbers can differ from those of other executors, but gradients are never silently wrong."""
    message = r"stage 0, micro-batch 1, did not draw the random numbers of its forward"
    with pytest.raises(RandomnessError, match=message):
        step_with_sudden_draw("threads", ["always", "never"])


class DrawsOnlyFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if is_recomputing() else nn.functional.dropout(x, 0.5)


def test_layer_that_recomputes_other_numbers_is_rejected() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), DrawsOnlyFirst(), nn.Linear(8, 8), nn.Tanh()).double()
    with pytest.raises(RandomnessError, match="twice"):
        step(pipe_over(layers, "serial", "always"), 0)


class Crowded(nn.Module):
    """Waits briefly for another instance before it draws, so that both draw at once unless a lock prevents it."""

    def __init__(self, door: threading.Condition, inside: list[int]) -> None:
        super().__init__()
        self.door, self.inside = door, inside

    def forward(self, x: Tensor) -> Tensor:
        with self.door:
            self.inside.append(1)
            self.door.notify_all()
            self.door.wait_for(lambda: len(self.inside) > 1, 0.02)  # times out under a lock
        x = nn.functional.dropout(x, 0.5)
        with self.door:
            self.inside.pop()
        return x


class Checkpointed(nn.Sequential):
    """Recomputes itself in backward, by `torch.utils.checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_of_torch(super().forward, x, use_reentrant=False)


TABLES = ("gpipe", "1f1b", "0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2\n1F0,1I0,1F1,1I1,1F2,1W0,1I2,1W1,1W2")


@pytest.mark.parametrize("schedule", TABLES, ids=["gpipe", "1f1b", "split"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_self_checkpointing_layers_repeat_their_numbers(checkpoint: str, schedule: str) -> None:
    results: list[list[Tensor]] = []
    for executor in ("serial", "threads"):
        torch.manual_seed(0)
        door, inside = threading.Condition(), list[int]()
        blocks = [Checkpointed(nn.Linear(8, 8), Crowded(door, inside), nn.Linear(8, 8)) for _ in range(2)]
        layers = nn.Sequential(blocks[0], nn.Identity(), blocks[1], nn.Identity()).double()
        options = {"schedule": schedule, "loss": lambda output, target: (output - target).square().sum()}
        pipe = pipe_over(layers, executor, checkpoint, loss_reduction="sum", **options)
        for seed in range(2):
            torch.manual_seed(seed)
            pipe.zero_grad()
            pipe(ONES, target=ONES).backward()
            results.append([p.grad.clone() for p in pipe.parameters()])
    assert all(map(torch.equal, results[0], results[2])) and all(map(torch.equal, results[1], results[3]))


class Disturbed(nn.Module):
    """In its first `times` recomputations, another thread draws from the shared generator."""

    def __init__(self, times: int, share: float) -> None:
        super().__init__()
        self.times, self.drop = times, nn.Dropout(share)

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing() and self.times:
            self.times -= 1
            other = threading.Thread(target=torch.rand, args=(3,))
            other.start()
            other.join()
        return self.drop(x)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_recomputation_that_a_thread_disturbed_is_repeated(executor: str, share: float) -> None:
    results: list[list[Tensor]] = []
    for times in (0, 2, 100):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8), Disturbed(times, share), nn.Linear(8, 8), nn.Tanh()).double()
        pipe = pipe_over(layers, executor, "always")
        if times < 100:
            results.append(step(pipe, 1))
            continue
        with pytest.raises(RandomnessError, match=r"give that thread a torch\.Generator of its own"):
            step(pipe, 1)
    assert all(map(torch.equal, results[0][:-1], results[1][:-1]))


class Noisy(nn.Module):
    """A loss that draws and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()
        self.drop = nn.Dropout(0.0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.drop(self.norm(output)) - target).square().mean()


def test_loss_that_draws_repeats_its_numbers() -> None:
    def steps(executor: str, checkpoint: str) -> list[list[Tensor]]:
        loss, layers, results = Noisy(), model(), list[list[Tensor]]()
        layers[3] = nn.Tanh()
        pipe, x = pipe_over(layers, executor, checkpoint, loss=loss), ONES[:1].expand(6, 8)
        for seed, loss.drop.p in enumerate((0.5, 0.5, 0.0, 0.3)):
            torch.manual_seed(seed)
            pipe.zero_grad()
            total = pipe(x, target=torch.zeros_like(x))
            total.backward()
            numbers = [total.detach(), loss.norm.running_var, loss.norm.num_batches_tracked.double()]
            gradients = [p.grad for p in pipe.parameters()]
            results.append([*(n.clone() for n in (*numbers, *gradients)), torch.rand(2)])
        return results

    assert_equal_everywhere(steps)


def test_loss_and_the_last_stage_draw_different_numbers() -> None:
    seen: list[Tensor] = []

    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.rand(3))
            return x

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(torch.rand(3))
        return output.sum()

    x = torch.ones(2, 8)
    Pipe(nn.Sequential(Keep()), chunks=1, devices=["cpu"], loss=loss)(x, target=x)
    assert not torch.equal(*seen)


class Dropping(nn.Module):
    """Draws in its dropout layer and in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.drop(x).tanh(), 0.5, self.training)


class Blocks(nn.Module):
    """A model whose own code draws between its blocks."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.1)
        return x


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_numbers_do_not_depend_on_where_the_model_is_cut(checkpoint: str, split: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), Dropping(), nn.Linear(8, 8), Dropping(), nn.Linear(8, 8), nn.Dropout(0.5))
    results: list[list[Tensor]] = []
    for executor, balance in (("serial", [6]), ("threads", [1, 5]), ("serial", [2, 3, 1]), ("graph", [4, 2])):
        options: dict[str, Any] = {"executor": executor, "checkpoint": checkpoint, "chunks": 3}
        if split:
            names = [f"layers.{end}" for end in accumulate(balance)][:-1] or ["layers.3"]
            pipe = Pipe(Blocks(layers).double(), split=names, devices=["cpu"] * (len(names) + 1), **options)
        else:
            pipe = Pipe(layers.double(), balance=balance, devices=["cpu"] * len(balance), **options)
        results.append([tensor for seed in range(2) for tensor in step(pipe, seed)])
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:3])
    torch.testing.assert_close(results[3], results[0], rtol=1e-12, atol=1e-12)
