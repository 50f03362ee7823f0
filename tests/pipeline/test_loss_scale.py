"""Loss scale: a backward that begins before the loss has a gradient uses the true scale, or is rescaled exactly."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.pipeline.pipe_cases import TABLE, assert_gradients_equal, chain, every_run, every_schedule, piped, rows
from torchweft import Pipe
from torchweft.core.errors import UsageError


class Half(nn.Module):
    """Product in half precision, where small gradients underflow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * self.weight.half()).float()


def tiny_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss with gradients that underflow in half precision unless they are scaled."""
    return (output - target).mean() * 1e-8


def half_precision_pipe(**options: Any) -> Pipe:
    return Pipe(nn.Sequential(Half(), Half()), chunks=3, balance=[1, 1], devices=["cpu"] * 2, loss=tiny_loss, **options)


def scaled_step(pipe: Pipe, scaler: torch.amp.GradScaler) -> list[float]:
    """The scaled gradients of one step."""
    pipe.zero_grad()
    scaler.scale(pipe(torch.ones(6, 1), target=torch.zeros(6, 1))).backward()
    return [parameter.grad.item() for parameter in pipe.parameters() if parameter.grad is not None]


@every_run
@every_schedule
def test_a_grad_scaler_keeps_gradients_from_vanishing(executor: str, schedule: str, checkpoint: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    pipe = half_precision_pipe(executor=executor, schedule=schedule, checkpoint=checkpoint, loss_scale=scaler.get_scale)
    for _ in range(3):
        assert scaled_step(pipe, scaler) == pytest.approx([1e-8 * 2**16] * 2, rel=1e-3)
        scaler.update(2.0**17)
        assert scaled_step(pipe, scaler) == pytest.approx([1e-8 * 2**17] * 2, rel=1e-3)
        scaler.update(2.0**16)


@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
@pytest.mark.parametrize("schedule", ["1f1b", TABLE], ids=["1f1b", "table"])
def test_first_step_warns_of_a_guess_and_later_ones_are_exact(executor: str, schedule: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    pipe = half_precision_pipe(executor=executor, schedule=schedule)
    with pytest.warns(UserWarning, match=r"assumed 1, but it is 65536(.|\n)*loss_scale=scaler.get_scale"):
        assert scaled_step(pipe, scaler) == [0, 0]
    pipe.chunks = 2  # a change of other settings keeps the known scale
    pipe.checkpoint = "always"
    for _ in range(2):
        assert scaled_step(pipe, scaler) == pytest.approx([1e-8 * 2**16] * 2, rel=1e-3)
    assert scaled_step(copy.deepcopy(pipe), scaler) == pytest.approx([1e-8 * 2**16] * 2, rel=1e-3)


def test_no_warning_without_a_guess() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_step(half_precision_pipe(schedule="gpipe"), scaler)
        scaled_step(half_precision_pipe(schedule="1f1b", loss_scale=2.0**16), scaler)
        pipe = half_precision_pipe(schedule="1f1b")
        (pipe(torch.ones(6, 1), target=torch.zeros(6, 1)) / 16).backward()


GRADIENTS = st.floats(-1e12, 1e12) | st.sampled_from([0.0, 1e-30, -(2.0**-40), 2.0**100, float("inf"), float("nan")])
SCALES = st.none() | st.floats(1e-12, 1e12) | st.integers(1, 9)


@given(factors=st.lists(GRADIENTS, min_size=1, max_size=4), scale=SCALES, callable_scale=st.booleans())
@pytest.mark.filterwarnings("ignore:backward started before")
def test_gradients_are_exact_under_any_loss_scale(factors: list[float], scale: Any, callable_scale: bool) -> None:
    given_scale: Callable[[], Any] | Any = (lambda: scale) if callable_scale and scale is not None else scale
    loss = nn.MSELoss()
    pipe, plain = piped(chain(3, 4, 2), executor="serial", schedule="1f1b", loss=loss, loss_scale=given_scale)
    x, y = rows(5, 3), rows(5, 2, seed=1)
    for factor in factors:
        pipe.zero_grad()
        plain.zero_grad()
        (factor * pipe(x, target=y)).backward()
        (factor * loss(plain(x), y)).backward()
        if abs(factor) < float("inf"):
            assert_gradients_equal(pipe, plain)
        else:
            gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
            assert not any(gradient.isfinite().any() for gradient in gradients)


@given(exponents=st.lists(st.integers(-20, 60), min_size=1, max_size=3))
@pytest.mark.filterwarnings("ignore:backward started before")
def test_powers_of_two_are_rescaled_to_the_last_bit(exponents: list[int]) -> None:
    pipe, _ = piped(chain(3, 4, 2), executor="serial", schedule="1f1b", loss=nn.MSELoss())
    unscaled, _ = piped(chain(3, 4, 2), executor="serial", schedule="1f1b", loss=nn.MSELoss())
    x, y = rows(5, 3), rows(5, 2, seed=1)
    unscaled(x, target=y).backward()
    for exponent in exponents:
        pipe.zero_grad()
        (2.0**exponent * pipe(x, target=y)).backward()
        for mine, theirs in zip(pipe.parameters(), unscaled.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad * 2.0**exponent)


def test_a_graph_that_is_kept_is_rescaled_for_every_backward() -> None:
    pipe, plain = piped(chain(3, 4, 2), schedule="1f1b", loss=nn.MSELoss(), loss_scale=8)
    x, y = rows(5, 3), rows(5, 2, seed=1)
    value, expected = pipe(x, target=y), nn.MSELoss()(plain(x), y)
    for factor in (3, 0.5):
        (factor * value).backward(retain_graph=True)
        (factor * expected).backward(retain_graph=True)
    assert_gradients_equal(pipe, plain)


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), True, torch.ones(2)])
def test_invalid_scale_is_refused(wrong: Any) -> None:
    if isinstance(wrong, int | float):
        with pytest.raises(UsageError, match=r"loss_scale is .*; give a finite number above 0"):
            half_precision_pipe(loss_scale=wrong)
    pipe = half_precision_pipe(loss_scale=lambda: wrong, schedule="1f1b", executor="serial")
    with pytest.raises(UsageError, match=r"loss_scale is .*; give a finite number above 0"):
        pipe(torch.ones(6, 1), target=torch.zeros(6, 1))
    with pytest.raises(UsageError, match=r"loss_scale is 2\.0, but there is no loss"):
        Pipe(chain(2, 2), chunks=2, loss_scale=2.0)
