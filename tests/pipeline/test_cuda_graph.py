"""Recorded steps have the bits of ordinary ones, and what they cannot do is left or named. On a stand-in for a GPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import Early, Late, rows, with_batch_norm
from tests.pipeline.recorded_launches import StandIn
from torchweft.core.errors import BackwardTwiceError, ModuleChangedError, UsageError
from torchweft.pipeline import recorded_step

pytestmark = with_batch_norm


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_step, "recorder_kind", lambda devices: StandIn)


class Tied(nn.Module):
    """A linear layer with the weight of another one."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Scaled(nn.Module):
    """Multiplies by a number that user code can change."""

    scale = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def model() -> nn.Sequential:
    """Four stages of two layers: a skip over stages, a norm with buffers, a tied weight."""
    torch.manual_seed(3)
    tied = nn.Linear(6, 6)
    layers = [Early(), tied, nn.Tanh(), nn.BatchNorm1d(6), Tied(tied), Late(), nn.Linear(6, 6), nn.Sigmoid()]
    return nn.Sequential(*layers).double()


Act = Callable[[weft.Pipe, int], Any]


def pipes(schedule: str = "gpipe", layers: nn.Sequential | None = None, **options: Any) -> list[weft.Pipe]:
    """The same model, recorded and by the serial executor."""
    layers = model() if layers is None else layers
    options = {"chunks": 4, "balance": [2] * (len(layers) // 2), "schedule": schedule, "loss": loss} | options
    options["devices"] = ["cpu"] * len(options["balance"])
    models = layers, copy.deepcopy(layers)
    return [weft.Pipe(m, executor=e, **options) for m, e in zip(models, ("cuda_graph", "serial"), strict=True)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(pipe: weft.Pipe, step: int, count: int = 8) -> list[Any]:
    value = pipe(rows(count, 6, seed=step), target=rows(count, 6, seed=step + 100))
    value.backward()
    return [value.detach()]


def state(pipe: weft.Pipe) -> list[Any]:
    return [*(p.grad for p in pipe.parameters()), *pipe.parameters(), *pipe.buffers()]


def assert_equal_steps(both: list[weft.Pipe], act: Act, steps: int = 12) -> dict[str, Any]:
    """Compare all bits of both pipes over some steps. Returns the figures of the recorded one."""
    optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5) for pipe in both]
    for step in range(steps):
        seen, expected = ([*act(pipe, step), *state(pipe)] for pipe in both)
        for k, (one, other) in enumerate(zip(seen, expected, strict=True)):
            same = one is other if one is None or other is None else torch.equal(one, other)
            assert same, f"step {step}, value {k}: {one} and not {other}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 3))
    return both[0].statistics()["cuda_graph"]


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [
        ("gpipe", "always"),
        ("gpipe", "except_last"),
        ("1f1b", "never"),
        ("interleaved", "always"),
        ("zero_bubble", "never"),
    ],
)
def test_recorded_steps_have_the_bits_of_ordinary_ones(schedule: str, checkpoint: str) -> None:
    figures = assert_equal_steps(pipes(schedule, checkpoint=checkpoint), train, steps=20)
    assert figures == {"replayed": 18, "ordinary": 2, "reason": "1 of 2 equal steps were seen"}


def outside(pipe: weft.Pipe, step: int, **more: Any) -> list[Any]:
    """A step whose loss is computed outside, and a gradient for the input."""
    x = rows(8, 6, seed=step).requires_grad_()
    output = pipe(x)
    output.square().sum().backward()
    return [output.detach(), x.grad]


def other_batch(pipe: weft.Pipe, step: int) -> list[Any]:
    return train(pipe, step, 12 if step in (6, 7) else 8)


def frozen(pipe: weft.Pipe, step: int) -> list[Any]:
    pipe[6].weight.requires_grad_(step not in (6, 7, 8))
    return train(pipe, step)


def evaluated(pipe: weft.Pipe, step: int) -> list[Any]:
    pipe.train(step % 9 < 5)
    return train(pipe, step)


def without_gradients(pipe: weft.Pipe, step: int) -> list[Any]:
    x = rows(8, 6, seed=step)
    with torch.no_grad():
        return [*train_with_gradients(pipe, step), pipe(x), pipe(x, target=x)]


def train_with_gradients(pipe: weft.Pipe, step: int) -> list[Any]:
    with torch.enable_grad():
        return train(pipe, step)


def moved(pipe: weft.Pipe, step: int) -> list[Any]:
    if step == 6:
        pipe[1].weight.data = pipe[1].weight.data.clone()
    return train(pipe, step)


def other_number(pipe: weft.Pipe, step: int) -> list[Any]:
    pipe[7].scale = 2 if step in (6, 7) else 1
    return train(pipe, step)


def hooked(pipe: weft.Pipe, step: int) -> list[Any]:
    seen: list[Any] = []
    handle = pipe[2].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    if step < 6 or step > 8:
        handle.remove()
    result = train(pipe, step)
    handle.remove()
    return [*result, *seen]


def repeated(pipe: weft.Pipe, step: int) -> list[Any]:
    value = pipe(rows(8, 6, seed=step), target=rows(8, 6))
    value.backward(retain_graph=step % 4 == 0)
    if step % 4 == 0:
        (value * 2).backward()
    return [value.detach()]


def accumulated(pipe: weft.Pipe, step: int) -> list[Any]:
    return train(pipe, step) + train(pipe, step + 50)


def together(pipe: weft.Pipe, step: int) -> list[Any]:
    """Two forwards before one backward, so that the second one finds the recording in use."""
    values = [pipe(rows(8, 6, seed=step + more), target=rows(8, 6)) for more in (0, 50)]
    (values[0] + 3 * values[1]).backward()
    return [value.detach() for value in values]


def asked(pipe: weft.Pipe, step: int) -> list[Any]:
    value = pipe(rows(8, 6, seed=step), target=rows(8, 6))
    return list(torch.autograd.grad(value, list(pipe.parameters())))


def strided(pipe: weft.Pipe, step: int) -> list[Any]:
    """A column of a wider input, and a target that is expanded."""
    value = pipe(rows(8, 9, seed=step)[:, 1:7], target=rows(1, 6, seed=step).expand(8, 6))
    value.backward()
    return [value.detach()]


ACTS: list[tuple[Act, str, int]] = [
    (other_batch, "gpipe", 8),
    (frozen, "1f1b", 8),
    (evaluated, "gpipe", 8),
    (without_gradients, "1f1b", 30),
    (moved, "gpipe", 8),
    (other_number, "1f1b", 8),
    (hooked, "gpipe", 7),
    (repeated, "gpipe", 7),
    (repeated, "1f1b", 7),
    (accumulated, "gpipe", 22),
    (together, "gpipe", 10),
    (together, "1f1b", 10),
    (asked, "gpipe", 10),
    (asked, "1f1b", 10),
    (strided, "gpipe", 10),
]
"""Things that users do in the course of 12 steps, and how many steps are replayed at least."""


@pytest.mark.parametrize(("act", "schedule", "least"), ACTS, ids=lambda value: getattr(value, "__name__", value))
def test_what_differs_is_left_and_taken_again(act: Act, schedule: str, least: int) -> None:
    layers = model()
    layers[7] = Scaled()
    if act is together:  # PyTorch does not allow two forwards of a batch norm before a backward
        layers[3] = nn.LayerNorm(6).double()
    figures = assert_equal_steps(pipes(schedule, layers), act)
    assert figures["replayed"] >= least, figures


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_loss_outside_and_a_gradient_of_the_input(chunks: int) -> None:
    assert assert_equal_steps(pipes(loss=None, chunks=chunks), outside)["replayed"] == 10


def test_results_of_earlier_steps_stay() -> None:
    """Outputs and gradients are copies, not the memory of the recording."""
    pipe, _ = pipes(loss=None, chunks=1)
    kept: list[Tensor] = []
    copies: list[Tensor] = []
    for step in range(6):
        x = rows(8, 6, seed=step).requires_grad_()
        output = pipe(x)
        kept += [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *pipe.parameters()])]
        copies += [tensor.clone() for tensor in kept[len(copies) :]]
    assert pipe.statistics()["cuda_graph"]["replayed"] == 4
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def sometimes_both(pipe: weft.Pipe, step: int) -> list[Any]:
    one, other = pipe(rows(8, 6, seed=step))
    (one.sum() + (other.square().sum() if step % 3 == 2 else 0)).backward()
    return [one.detach(), other.detach()]


def test_gradients_of_other_outputs_run_the_forward_again() -> None:
    """A parameter that is not reached has no gradient, and buffers are written to once."""
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), Pair()).double()
    figures = assert_equal_steps(pipes("gpipe", layers, loss=None), sometimes_both)
    assert figures["replayed"] >= 6, figures


def test_a_weight_written_before_backward_is_an_error() -> None:
    pipe, _ = pipes(loss=None)
    for step in range(4):
        outside(pipe, step)
    output = pipe(rows(8, 6).requires_grad_())
    with torch.no_grad():
        pipe[6].weight.mul_(2)
    with pytest.raises(ModuleChangedError, match="between the forward of a step and its backward"):
        output.sum().backward()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_second_backward_is_an_error(schedule: str) -> None:
    pipe, _ = pipes(schedule)
    for step in range(4):
        train(pipe, step)
    value = pipe(rows(8, 6), target=rows(8, 6))
    value.backward()
    with pytest.raises(BackwardTwiceError):
        (value * 1).backward()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class ReadingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(gradient.sum() < 1e9)


class ReadsBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ReadingBack.apply(x)


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1


class Hidden(nn.Module):
    """Has a parameter that it reads from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.list = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.list[0]


class Remote(nn.Module):
    steps_in_backward = ""

    def forward(self, x: Tensor) -> Tensor:
        return x


def with_hook() -> nn.Module:
    layer = nn.Tanh()
    layer.register_forward_hook(lambda *_: None)
    return layer


OBSTACLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "reading": (Reading, r"layer '2' \(Reading\) of stage 1.*reading a number on the host.*not permitted"),
    "reading back": (ReadsBack, "reading a number on the host"),
    "counting": (Counting, r"layer '2' \(Counting\) of stage 1 changes its 'calls' in every call"),
    "hidden": (Hidden, "parameters that are not attributes of its modules"),
    "remote": (Remote, r"layer '2' \(Remote\) of stage 1 calls another process"),
    "hook": (with_hook, r"layer '2' \(Tanh\) of stage 1 has hooks"),
    "dropout": (lambda: nn.Dropout(0.1), "stage 1 draws random numbers"),
    "deferred": (lambda: weft.DeferredBatchNorm(6).double(), "deferred batch norm"),
}


def obstructed(name: str, executor: str = "cuda_graph") -> weft.Pipe:
    torch.manual_seed(4)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Identity(), nn.Linear(6, 6)).double()
    layers[2] = OBSTACLES[name][0]()
    return weft.Pipe(layers, chunks=2, balance=[2, 2], devices=["cpu"] * 2, executor=executor, loss=loss)


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_is_named_in_one_sentence(name: str) -> None:
    pipe = obstructed(name)
    with pytest.raises(UsageError, match=f"cannot record the steps of this pipe: .*{OBSTACLES[name][1]}"):
        for step in range(6):
            train(pipe, step)


@pytest.mark.parametrize("name", ["reading back", "counting", "dropout"])
def test_auto_takes_another_way_and_says_why(name: str) -> None:
    pipe, plain = obstructed(name, "auto"), obstructed(name, "serial")
    for step in range(26):
        torch.manual_seed(step)
        seen = train(pipe, step)
        torch.manual_seed(step)
        assert torch.equal(seen[0], train(plain, step)[0])
    assert pipe.statistics()["cuda_graph"]["reason"]
    assert "cuda_graph" not in pipe.statistics()["chosen"].values()


def test_a_stage_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pipe, _ = pipes()
    with pytest.raises(UsageError, match="a stage is not on a CUDA device"):
        train(pipe, 0)


def test_a_loss_that_counts_its_targets_is_refused() -> None:
    """The host looks for ignored targets in every step, unless `loss_weight` is given."""

    def entropy(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def act(pipe: weft.Pipe, step: int) -> list[Any]:
        target = torch.randint(6, (8,), generator=torch.Generator().manual_seed(step))
        value = pipe(rows(8, 6, seed=step), target=target)
        value.backward()
        return [value.detach()]

    both = pipes(loss=entropy)
    with pytest.raises(UsageError, match="give Pipe loss_weight="):
        [act(both[0], step) for step in range(4)]
    assert assert_equal_steps(pipes(loss=entropy, loss_weight=len), act)["replayed"] == 10
    assert assert_equal_steps(pipes("1f1b", loss=nn.CrossEntropyLoss()), act)["replayed"] == 10
