"""The proof holds for the demo's net, and would notice a net for which it does not."""

import pytest
import torch
from torch import nn

from weft.demo.exactness import CHECKPOINTS, LIMIT, SCHEDULES, largest_differences
from weft.demo.unet import BALANCE, unet


def test_the_gradients_of_the_net_are_exact_in_every_mode() -> None:
    torch.manual_seed(0)
    found = largest_differences(
        unet(4), BALANCE, torch.rand(5, 1, 8, 8), torch.rand(5, 1, 8, 8), nn.functional.mse_loss, 3
    )
    assert set(found) == {(schedule, mode) for schedule in SCHEDULES for mode in CHECKPOINTS}
    assert max(found.values()) < LIMIT


def test_a_net_that_depends_on_how_the_batch_is_cut_is_found_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    found = largest_differences(model, (1, 2), torch.rand(8, 4), torch.rand(8, 2), nn.functional.mse_loss, 2)
    assert min(found.values()) > LIMIT


@pytest.mark.parametrize("trained", [True, False])
def test_a_gradient_that_only_one_side_has_is_no_match(trained: bool) -> None:
    from weft.demo.exactness import _distance  # noqa: PLC0415

    one = torch.ones(2) if trained else None
    assert _distance(one, None) == (float("inf") if trained else 0.0)


def test_the_model_itself_is_left_alone() -> None:
    model = unet(4)
    before = [parameter.clone() for parameter in model.parameters()]
    largest_differences(model, BALANCE, torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8), nn.functional.mse_loss, 2)
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert parameter.dtype == torch.float32 and parameter.grad is None and torch.equal(parameter, was)
