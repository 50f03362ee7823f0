"""The fifth law: random numbers follow from the caller's seed, the layer and the micro-batch, and nothing else.

So a recomputation draws what its forward drew, stages that run at once do not disturb each other, and a model
that draws nothing leaves the caller's generator alone.
"""

import threading
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from weft import Pipe, Recorder, is_recomputing
from weft.core.errors import RandomnessError

SEEDS = range(20)
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


def step(pipe: Pipe, seed: int, x: Tensor) -> list[Tensor]:
    """The output and the gradients of one step, and what the caller would draw next."""
    torch.manual_seed(seed)
    pipe.zero_grad()
    y = pipe(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in pipe.parameters()), torch.rand(2)]


def test_dropout_is_bit_equal_between_serial_threads_and_recomputation() -> None:
    layers, x = model(), ONES
    # "never" under "serial" keeps its stages apart as well: only "auto" merges them.
    pipes = [pipe_over(layers, who, what) for who in ("serial", "threads") for what in ("never", "always")]
    seen: list[Tensor] = []
    for seed in SEEDS:
        wanted, *others = [step(pipe, seed, x) for pipe in pipes]
        for other in others:
            assert all(map(torch.equal, wanted, other)), seed
        seen.append(wanted[0])
    assert not any(torch.equal(a, b) for a, b in pairwise(seen))


class Meeting(nn.Module):
    """Draws only after another stage has begun to run too, so that both are at it at once."""

    def __init__(self, here: threading.Event, there: threading.Event) -> None:
        super().__init__()
        self.events = here, there
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        here, there = self.events
        here.set()
        there.wait(0.01)  # the other may be waiting for the generator; then there is nobody to meet
        return self.drop(x)


def test_stages_that_draw_at_the_same_time_do_not_mix_their_numbers() -> None:
    one, other = threading.Event(), threading.Event()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), Meeting(one, other), nn.Linear(8, 8), Meeting(other, one)).double()
    x = ONES
    wanted = step(pipe_over(layers, "serial"), 0, x)
    for checkpoint in ("never", "always"):
        one.clear()
        other.clear()
        assert all(map(torch.equal, wanted, step(pipe_over(layers, "threads", checkpoint), 0, x)))


def assert_alike_everywhere(steps: Callable[[str, str], list[list[Tensor]]]) -> None:
    """Steps with every executor, with and without recomputation, are bit-equal where executors walk the same cuts, and
    equal to rounding where they do not."""
    wanted = steps("serial", "never")
    for executor, checkpoint in product(("serial", "threads", "graph", "auto"), ("never", "always")):
        for number, (a, b) in enumerate(zip(wanted, steps(executor, checkpoint), strict=True)):
            where = f"step {number} of {executor} {checkpoint}"
            assert torch.equal(a[-1], b[-1]), f"the caller's generator after {where}"
            if executor in ("serial", "threads"):
                assert all(map(torch.equal, a, b)), where
            else:
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=where)


def test_a_dropout_that_is_switched_on_later_is_noticed() -> None:
    def steps(executor: str, checkpoint: str) -> list[list[Tensor]]:
        layers, found = model(), list[list[Tensor]]()
        pipe = pipe_over(layers, executor, checkpoint)
        for seed, (layers[1].p, layers[3].p) in enumerate([(0, 0)] * 2 + [(0, 0.5)] * 2 + [(0.5, 0.5)] * 3):
            found.append(step(pipe, seed, ONES))
        return found

    assert_alike_everywhere(steps)


class Moody(nn.Module):
    """Draws only for positive inputs: a branch on data, which no attribute tells of."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) if x.sum() > 0 else x


@pytest.mark.parametrize("other_draws", [False, True])
def test_a_stage_that_draws_after_it_was_seen_not_to_is_noticed(other_draws: bool) -> None:
    def steps(executor: str, checkpoint: str) -> list[list[Tensor]]:
        torch.manual_seed(0)
        drop = nn.Dropout(0.5 if other_draws else 0.0)
        layers = nn.Sequential(Moody(), nn.Linear(8, 8), drop, nn.Linear(8, 8)).double()
        pipe = pipe_over(layers, executor, checkpoint)
        return [step(pipe, seed, sign * ONES) for seed, sign in enumerate((-1, -1, 1, 1, -1, 1))]

    assert_alike_everywhere(steps)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("executor", ["serial", "threads", "auto", "graph"])
def test_a_model_that_draws_nothing_leaves_the_generator_alone(executor: Any, checkpoint: Any) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.0)).double()
    pipe = pipe_over(layers, executor, checkpoint)
    before = torch.get_rng_state()
    for _ in range(3):
        pipe(ONES).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_draws_moves_the_generator_on() -> None:
    pipe, x = pipe_over(model(), "threads"), ONES
    torch.manual_seed(0)
    assert not torch.equal(pipe(x), pipe(x))
    pipe.eval()
    before = torch.get_rng_state()
    assert torch.equal(pipe(x), pipe(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_watcher_changes_no_random_number() -> None:
    pipe, x = pipe_over(model(), "threads", "always"), ONES
    wanted = step(pipe, 0, x)
    with pipe.observed_by(Recorder(memory=True)):
        assert all(map(torch.equal, wanted, step(pipe, 0, x)))


class Holding(nn.Module):
    """Draws twice, and in the second micro-batch holds on in between until another stage has drawn."""

    def __init__(self, mine: threading.Event, others: threading.Event) -> None:
        super().__init__()
        self.events = mine, others
        self.calls = 0
        self.told: list[float] = []  # how long to wait; a number of its own would tell the stage of a change

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5)
        self.calls += 1
        if self.calls % 3 == 2:
            self.events[0].set()
            self.events[1].wait(*self.told or (0,))
        return nn.functional.dropout(x, 0.5)


class Bursting(Holding):
    """Draws nothing until it is told to; then in the first micro-batch, in the middle of the other's draws."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.told or self.calls % 3 != 1:
            return x
        self.events[1].wait(*self.told)
        y = nn.functional.dropout(x, 0.5)
        self.events[0].set()
        return y


def after_a_sudden_draw(executor: Any, checkpoint: Any = "never") -> list[Tensor]:
    """One step in which the second stage begins to draw. Only threads wait for each other, however long it takes."""
    one, other = threading.Event(), threading.Event()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), Holding(one, other), nn.Linear(8, 8), Bursting(other, one)).double()
    pipe = pipe_over(layers, executor, checkpoint)
    step(pipe, 0, ONES)
    for layer in (layers[1], layers[3]):
        layer.calls = 0
        layer.told.append(60.0 if executor == "threads" else 0.0)
    one.clear()
    return step(pipe, 1, ONES)


@pytest.mark.xfail(
    reason="one generator per process: a draw that nobody expected, inside another stage's draws, leaves no trace"
)
def test_a_sudden_draw_in_the_middle_of_another_stages_draws_is_noticed() -> None:
    assert all(map(torch.equal, after_a_sudden_draw("serial"), after_a_sudden_draw("threads")))


def test_but_no_recomputation_goes_wrong_in_silence() -> None:
    with pytest.raises(
        RandomnessError, match=r"stage 0, micro-batch 1, did not draw the random numbers of its forward"
    ):
        after_a_sudden_draw("threads", ["always", "never"])


def test_a_layer_that_draws_otherwise_when_it_is_recomputed_is_refused() -> None:
    class Fickle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if is_recomputing() else nn.functional.dropout(x, 0.5)

    layers = nn.Sequential(nn.Linear(8, 8), Fickle(), nn.Linear(8, 8), nn.Tanh()).double()
    with pytest.raises(RandomnessError, match="twice"):
        step(pipe_over(layers, "serial", "always"), 0, ONES)


class Crowded(nn.Module):
    """Draws with as many others as come within a moment, between the state that a checkpoint sets and its end."""

    def __init__(self, door: threading.Condition, inside: list[int]) -> None:
        super().__init__()
        self.door, self.inside = door, inside

    def forward(self, x: Tensor) -> Tensor:
        with self.door:
            self.inside.append(1)
            self.door.notify_all()
            self.door.wait_for(lambda: len(self.inside) > 1, 0.02)  # in vain if the others have to wait
        x = nn.functional.dropout(x, 0.5)
        with self.door:
            self.inside.pop()
        return x


class Checkpointed(nn.Sequential):
    """Computes itself again in backward, by PyTorch's own means."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_of_torch(super().forward, x, use_reentrant=False)


TABLES = ("gpipe", "1f1b", "0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2\n1F0,1I0,1F1,1I1,1F2,1W0,1I2,1W1,1W2")


@pytest.mark.parametrize("schedule", TABLES, ids=["gpipe", "1f1b", "split"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_layers_that_checkpoint_themselves_draw_again_what_they_drew(checkpoint: str, schedule: str) -> None:
    x, found = ONES, list[list[Tensor]]()
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
            pipe(x, target=x).backward()
            found.append([p.grad.clone() for p in pipe.parameters()])
    assert all(map(torch.equal, found[0], found[2])) and all(map(torch.equal, found[1], found[3]))


class Disturbed(nn.Module):
    """While it is recomputed, another thread draws from the generator that all share, so many times."""

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
def test_a_recomputation_that_a_thread_disturbed_is_made_again(executor: str, share: float) -> None:
    x, found = ONES, list[list[Tensor]]()
    for times in (0, 2, 100):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8), Disturbed(times, share), nn.Linear(8, 8), nn.Tanh()).double()
        pipe = pipe_over(layers, executor, "always")
        if times < 100:
            found.append(step(pipe, 1, x))
            continue
        with pytest.raises(RandomnessError, match=r"give that thread a torch\.Generator of its own"):
            step(pipe, 1, x)
    assert all(map(torch.equal, found[0][:-1], found[1][:-1]))


class Noisy(nn.Module):
    """A loss that draws, and keeps running statistics of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()
        self.drop = nn.Dropout(0.0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.drop(self.norm(output)) - target).square().mean()


def test_a_loss_that_draws_has_its_own_numbers_and_draws_them_again() -> None:
    def steps(executor: str, checkpoint: str) -> list[list[Tensor]]:
        loss, layers, found = Noisy(), model(), list[list[Tensor]]()
        layers[3] = nn.Tanh()
        pipe, x = pipe_over(layers, executor, checkpoint, loss=loss), ONES[:1].expand(6, 8)
        for seed, loss.drop.p in enumerate((0.5, 0.5, 0.0, 0.3)):
            torch.manual_seed(seed)
            pipe.zero_grad()
            total = pipe(x, target=torch.zeros_like(x))
            total.backward()
            numbers = [total.detach(), loss.norm.running_var, loss.norm.num_batches_tracked.double()]
            gradients = [p.grad for p in pipe.parameters()]
            found.append([*(n.clone() for n in (*numbers, *gradients)), torch.rand(2)])
        return found

    assert_alike_everywhere(steps)


def test_a_loss_and_the_last_stage_draw_different_numbers() -> None:
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
    """Draws by its own dropout, and once more between."""

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
    x, found = ONES, list[list[Tensor]]()
    for executor, balance in (("serial", [6]), ("threads", [1, 5]), ("serial", [2, 3, 1]), ("graph", [4, 2])):
        options: dict[str, Any] = {"executor": executor, "checkpoint": checkpoint, "chunks": 3}
        if split:
            names = [f"layers.{end}" for end in accumulate(balance)][:-1] or ["layers.3"]
            pipe = Pipe(Blocks(layers).double(), split=names, devices=["cpu"] * (len(names) + 1), **options)
        else:
            pipe = Pipe(layers.double(), balance=balance, devices=["cpu"] * len(balance), **options)
        found.append([each for seed in range(2) for each in step(pipe, seed, x)])
    assert all(all(map(torch.equal, found[0], each)) for each in found[1:3])
    torch.testing.assert_close(found[3], found[0], rtol=1e-12, atol=1e-12)
