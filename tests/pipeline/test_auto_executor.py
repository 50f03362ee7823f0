"""Every layout that ``executor="auto"`` can choose behaves like the other executors."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchweft as weft
from tests.pipeline.pipe_cases import assert_gradients_equal, without_target
from torchweft.core.errors import BackwardTwiceError, DoubleBackwardError

MODES = [("gpipe", False), ("gpipe", True), ("1f1b", True)]


class Doubled(torch.autograd.Function):
    """Python function whose backward fails on request."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Doubled.fails:
            raise ArithmeticError("no gradient today")
        return gradient * 2

    fails = False


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 3)).double()


def settled_pipe(layers: nn.Sequential, schedule: str, inside: bool, candidate: int = 1, **options: Any) -> weft.Pipe:
    """A pipe with a fixed layout, as after the measurement. The default is "uncut" where that is a candidate."""
    loss = nn.functional.mse_loss if inside else None
    pipe = weft.Pipe(
        layers,
        chunks=3,
        balance=[2, 3],
        devices=["cpu"] * 2,
        checkpoint="never",
        schedule=schedule,
        loss=loss,
        **options,
    )
    layouts = pipe._current_runtime().layouts
    layouts.fixed = layouts.candidates[candidate if len(layouts.candidates) == 3 else 0]
    return pipe


def loss_of(pipe: nn.Module, inside: bool, x: Tensor, y: Tensor) -> Tensor:
    return pipe(x, target=y) if inside else nn.functional.mse_loss(pipe(x), y)


@pytest.mark.parametrize(("schedule", "inside"), MODES)
def test_gradients_are_those_of_the_model_and_hooks_fire_once(schedule: str, inside: bool) -> None:
    layers, x, y = model(), torch.randn(8, 4).double().requires_grad_(), torch.randn(8, 3).double()
    parameters = list(layers.parameters())
    expected = torch.autograd.grad(nn.functional.mse_loss(layers(x), y), [x, *parameters])
    pipe = settled_pipe(layers, schedule, inside)
    fired: list[int] = []
    for i, parameter in enumerate(parameters):
        parameter.register_hook(lambda _, i=i: fired.append(i))
    for _ in range(2):
        x.grad = None
        pipe.zero_grad()
        (2 * loss_of(pipe, inside, x, y)).backward()
    assert sorted(fired) == sorted([*range(len(parameters))] * 2)
    for one, tensor in zip(expected, [x, *parameters], strict=True):
        torch.testing.assert_close(tensor.grad, 2 * one, rtol=0, atol=1e-12)
    again = torch.autograd.grad(loss_of(pipe, inside, x, y), [x, *parameters])
    assert all(map(torch.allclose, expected, again))


@pytest.mark.parametrize(("schedule", "inside"), MODES)
def test_backward_twice_needs_a_retained_graph(schedule: str, inside: bool) -> None:
    pipe, x, y = settled_pipe(model(), schedule, inside), torch.randn(8, 4).double(), torch.randn(8, 3).double()
    for _ in range(2):  # the first step of a kind runs differently
        loss = pipe(x, target=y) if inside else pipe(x).sum()  # a sum saves no tensor that could be freed
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(BackwardTwiceError, match="retain_graph=True"):
            loss.backward()


@pytest.mark.parametrize(("schedule", "inside"), MODES)
def test_gradients_of_gradients_are_refused_under_any_choice(schedule: str, inside: bool) -> None:
    pipe, x, y = settled_pipe(model(), schedule, inside), torch.randn(8, 4).double(), torch.randn(8, 3).double()
    for _ in range(2):
        loss = loss_of(pipe, inside, x, y)
        with pytest.raises(DoubleBackwardError, match="executor='graph'"):
            torch.autograd.grad(loss, list(pipe.parameters()), create_graph=True)


def test_two_outputs_can_share_one_backward() -> None:
    class Fork(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin(), x.cos()

    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), Fork())
    one, other = settled_pipe(layers, "gpipe", False)(torch.randn(8, 4))
    (one.sum() + other.sum()).backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_backward_error_of_a_function_names_its_place() -> None:
    """An error in the backward of a Python function names its stage and micro-batch."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Double(), nn.Linear(4, 3))
    pipe, x = settled_pipe(layers, "gpipe", False), torch.randn(8, 4)
    pipe(x).sum().backward()  # the only uncut step
    pipe._current_runtime().layouts.fixed = None
    for _ in range(18):
        pipe(x).sum().backward()
    assert "uncut" not in pipe.statistics()["chosen"].values()
    loss = pipe(x).sum()
    Doubled.fails = True
    try:
        with pytest.raises(ArithmeticError) as caught:
            loss.backward()
    finally:
        Doubled.fails = False
    assert any("backward of stage 1, micro-batch 2" in note for note in caught.value.__notes__)
    pipe(x).sum().backward()


class Clock:
    """A clock that advances only in the backward of a step, by the given seconds of its layout."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs, self.layout, self.now = costs, "", 0.0

    def __call__(self) -> float:
        return self.now


class Timed(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.clock.costs[self.clock.layout] if torch.is_grad_enabled() else 0.0
        if x.requires_grad:
            x.register_hook(lambda _: setattr(self.clock, "now", self.clock.now + seconds))
        return x * 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("uncut", "serial", "threads", "winner"),
    [(1.0, 5.0, 2.0, "uncut"), (5.0, 1.0, 2.0, "serial"), (5.0, 5.0, 2.0, "threads"), (1.0, 9.0, 0.97, "uncut")],
)
def test_fastest_layout_is_kept_until_it_becomes_slow(
    uncut: float, serial: float, threads: float, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock({"uncut": uncut, "serial": serial, "threads": threads})
    layers = nn.Sequential(nn.Linear(4, 4), Timed(clock), nn.Linear(4, 4))
    pipe = weft.Pipe(layers, chunks=2, balance=[2, 1], devices=["cpu"] * 2, checkpoint="never")
    runtime = pipe._current_runtime()
    plans, layouts = runtime.plan, list[str]()

    def plan(layout: str, loss: bool) -> Any:
        clock.layout = layout
        layouts.append(layout)
        return plans(layout, loss)

    monkeypatch.setattr(runtime, "plan", plan)
    monkeypatch.setattr("torchweft.core.timing.time", SimpleNamespace(perf_counter=clock))

    def steps(count: int, x: Tensor) -> list[str]:
        for _ in range(count):
            pipe(x).sum().backward()
        return list(pipe.statistics()["chosen"].values())

    x = torch.randn(4, 4)
    assert steps(17, x) == [] and steps(1, x) == [winner]
    assert set(layouts) == {"serial", "threads", "uncut"}
    assert steps(100, x) == [winner]
    clock.costs[winner] *= 1.4  # not clearly slower
    assert steps(100, x) == [winner]
    clock.costs[winner] *= 10
    assert steps(48, x) == [] and winner not in steps(18, x)  # every eighth step is timed, and five must be slow
    assert len(steps(18, torch.randn(4, 3, 4))) == 2, "the same number of rows, but three times the work"


def test_anomaly_detection_runs_stages_as_segments() -> None:
    pipe, x = settled_pipe(model(), "gpipe", False), torch.randn(8, 4).double()
    pipe._current_runtime().layouts.fixed = None
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        for _ in range(18):
            pipe(x).sum().backward()
    assert [name.endswith(", cut") for name in pipe.statistics()["chosen"]] == [True]
    assert "uncut" not in pipe.statistics()["chosen"].values()


class Idle(nn.Linear):
    """Linear layer that does not use its weights."""

    def forward(self, input: Tensor) -> Tensor:
        return input


@without_target
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("inside", [False, True])
def test_data_parallel_sees_one_graph_under_auto(inside: bool) -> None:
    """This holds while "auto" measures, and after its choice."""
    layers, x, y = model().insert(2, Idle(6, 6)), torch.randn(8, 4).double(), torch.randn(8, 3).double()
    plain = DistributedDataParallel(copy.deepcopy(layers), static_graph=True)
    pipe = weft.Pipe(
        layers, chunks=2, devices=["cpu"] * 2, balance=[2, 4], checkpoint="never", loss=nn.functional.mse_loss
    )
    wrapped = DistributedDataParallel(pipe, static_graph=True)
    for _ in range(20):
        for net in (plain, wrapped):
            net.zero_grad()
        loss_of(plain, False, x, y).backward()
        loss_of(wrapped, inside, x, y).backward()
        assert_gradients_equal(pipe, plain.module)
    assert pipe.statistics()["chosen"]


def test_a_silent_step_needs_no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x = settled_pipe(model(), "gpipe", False), torch.randn(8, 4).double()
    expected = [pipe(x) for _ in range(2)][-1]  # the first step observes that nothing is drawn
    monkeypatch.setattr("torchweft.pipeline.stage.Stage.scan", None)
    assert torch.equal(pipe(x), expected)


def test_silent_step_that_draws_runs_again() -> None:
    """If a pipe that drew nothing so far suddenly draws, its result is that of the other executors."""
    layers, x, y = model(), torch.randn(8, 4).double(), torch.randn(8, 3).double()
    results: list[list[Tensor]] = []
    for candidate in (0, 1, 2):
        layers[3].p = 0.0
        pipe = settled_pipe(layers, "gpipe", False, candidate)
        for _ in range(3):
            loss_of(pipe, False, x, y).backward()
        layers[3].p = 0.5
        torch.manual_seed(3)
        steps = [torch.autograd.grad(loss_of(pipe, False, x, y), list(layers.parameters())) for _ in range(2)]
        results.append([*steps[0], *steps[1], torch.rand(1)])
    for one, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_deferred_batch_norms_are_served_in_every_step() -> None:
    layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    pipe, x = settled_pipe(layers, "gpipe", False, deferred_batch_norm=True), torch.randn(8, 4).double()
    for step in range(1, 4):
        pipe(x).sum().backward()
        assert pipe[1].num_batches_tracked == step
