"""A parameter that a segment reads and does not have is told, not lost."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import CHECKPOINTS, CUTS, assert_gradients_equal, backward, chain, piped, rows
from weft import Pipe
from weft.core.errors import UsageError

every_cut = pytest.mark.parametrize(("executor", "checkpoint"), [(e, c) for e in (*CUTS, "auto") for c in CHECKPOINTS])


class Reads(nn.Module):
    """Adds what somebody else has, without registering it."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.others[0].sum()


@every_cut
def test_a_parameter_of_another_stage_is_an_error_that_names_it(executor: str, checkpoint: str) -> None:
    model = chain(4, 5, 3)
    model.append(Reads(model[0].bias))
    pipe, _ = piped(model, executor=executor, checkpoint=checkpoint, balance=[2, 2])
    with pytest.raises(UsageError, match=r"stage 1 .*\n  - 0\.bias of stage 0"):
        backward(pipe, rows(7, 4))


@every_cut
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_penalty_on_weights_inside_the_loss_is_an_error(executor: str, checkpoint: str, schedule: str) -> None:
    model = chain(4, 5, 3)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + sum(each.square().sum() for each in model.parameters())

    pipe = Pipe(
        model, chunks=3, devices=["cpu"] * 2, executor=executor, checkpoint=checkpoint, schedule=schedule, loss=loss
    )
    with pytest.raises(UsageError, match="penalty on weights"):
        pipe(rows(7, 4), target=rows(7, 3)).backward()


@pytest.mark.parametrize(("executor", "balance"), [("graph", [2, 2]), ("serial", [4]), ("threads", [4])])
def test_where_nothing_is_lost_nothing_is_said(executor: str, balance: list[int]) -> None:
    model = chain(4, 5, 3)
    model.append(Reads(model[0].bias))
    pipe = Pipe(model, chunks=3, devices=["cpu"] * len(balance), executor=executor, balance=balance)
    plain = chain(4, 5, 3)
    plain.append(Reads(plain[0].bias))
    backward(pipe, rows(7, 4))
    backward(plain, rows(7, 4))
    assert_gradients_equal(pipe, plain)


@pytest.mark.parametrize("executor", CUTS)
def test_a_parameter_that_nobody_has_is_warned_of_once(executor: str) -> None:
    hidden = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model = chain(4, 5, 3)
    model.append(Reads(hidden))
    pipe, _ = piped(model, executor=executor, balance=[2, 2])
    with pytest.warns(UserWarning, match=r"stage 1 .*\(2,\).*requires_grad_\(False\)"):
        backward(pipe, rows(7, 4))
    backward(pipe, rows(7, 4))
    frozen, _ = piped(nn.Sequential(*chain(4, 5), Reads(hidden.requires_grad_(False))), executor=executor)
    with warnings.catch_warnings(action="error"):
        backward(frozen, rows(7, 4))
