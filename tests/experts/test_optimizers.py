"""Optimizers are fused where that works, and used as they are where they were given."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from weft.core.errors import UsageError
from weft.experts.optimizers import make_optimizer, make_schedule


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=dtype))]


@pytest.mark.parametrize(
    ("factory", "fused"),
    [
        (torch.optim.Adam, True),
        (partial(torch.optim.SGD, lr=0.1), True),
        (partial(torch.optim.AdamW, fused=False), False),
        (lambda given: torch.optim.Adam(list(given)), False),
        (torch.optim.RMSprop, False),
    ],
)
def test_a_factory_is_fused_where_it_can_be(factory: Any, fused: bool) -> None:
    made = make_optimizer(factory, parameters())
    assert bool(made.defaults.get("fused")) == fused


def test_an_option_without_a_fused_step_falls_back() -> None:
    made = make_optimizer(partial(torch.optim.Adam, foreach=True), parameters())
    assert not made.defaults["fused"] and made.defaults["foreach"]


def test_an_optimizer_that_was_given_stays() -> None:
    given = torch.optim.Adam(parameters())
    assert make_optimizer(given, []) is given


def test_what_makes_no_optimizer_or_no_schedule_is_told() -> None:
    wrong: Any = lambda given: 3  # noqa: E731
    with pytest.raises(UsageError, match="optimizer made a int"):
        make_optimizer(wrong, parameters())
    optimizer = torch.optim.Adam(parameters())
    with pytest.raises(UsageError, match="schedule made a int"):
        make_schedule(wrong, optimizer)
    with pytest.raises(UsageError, match="no optimizer"):
        make_schedule(wrong, None)
    with pytest.raises(UsageError, match="another optimizer"):
        make_schedule(StepLR(torch.optim.Adam(parameters()), 1), optimizer)
    schedule = StepLR(optimizer, 1)
    assert make_schedule(schedule, optimizer) is schedule and make_schedule(None, None) is None
