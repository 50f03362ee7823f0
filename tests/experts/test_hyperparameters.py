"""Hyperparameters that are set while an expert lives, and those of a file that have precedence over a checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.experts.expert_cases import WIDTH, X
from torchweft.core.errors import UsageError
from torchweft.experts import ExpertBackend
from torchweft.experts.hyperparameters import HyperparameterSettings, set_hyperparameters
from torchweft.experts.server import Server

SCHEDULES: dict[str, Callable[[Any, float], Any]] = {
    "step": lambda o, rate: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "steps": lambda o, rate: lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.1),
    "exponential": lambda o, rate: lr_scheduler.ExponentialLR(o, 0.9),
    "lambda": lambda o, rate: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warmup": lambda o, rate: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=5),
    "polynomial": lambda o, rate: lr_scheduler.PolynomialLR(o, 20),
    "cosine": lambda o, rate: lr_scheduler.CosineAnnealingLR(o, 20),
}
CYCLIC: dict[str, Callable[[Any, float], Any]] = {
    "one cycle": lambda o, rate: lr_scheduler.OneCycleLR(o, max_lr=rate, total_steps=30),
    "cyclic": lambda o, rate: lr_scheduler.CyclicLR(o, base_lr=rate / 4, max_lr=rate, step_size_up=3),
}


def made(name: str | None, rate: float = 0.1, steps: int = 0) -> tuple[torch.optim.SGD, Any]:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=rate, momentum=0.9)
    schedule = None if name is None else {**SCHEDULES, **CYCLIC}[name](optimizer, rate)
    rates(optimizer, schedule, steps)
    return optimizer, schedule


def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    """The rate and momentum of each of the next steps."""
    seen: list[float] = []
    for _ in range(steps):
        seen += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_continues_from_a_rate_that_was_set(name: str) -> None:
    optimizer, schedule = made(name, steps=3)
    expected = rates(*made(name, steps=3), 12)[::2]
    set_hyperparameters("f", optimizer, schedule, {"lr": optimizer.param_groups[0]["lr"] * 0.25})
    assert rates(optimizer, schedule, 12)[::2] == pytest.approx([0.25 * rate for rate in expected])


@pytest.mark.parametrize("name", [None, *SCHEDULES, *CYCLIC])
def test_put_back_goes_on_as_if_configured_from_the_start(name: str | None) -> None:
    old, old_schedule = made(name, rate=0.1, steps=4)
    new, new_schedule = made(name, rate=0.3)
    configured = HyperparameterSettings(new, new_schedule)
    new.load_state_dict(old.state_dict())
    if new_schedule is not None:
        new_schedule.load_state_dict(old_schedule.state_dict())
    configured.put_back()
    expected = rates(*made(name, rate=0.3, steps=4), 12)
    assert rates(new, new_schedule, 12) == pytest.approx(expected)


def test_arguments_of_a_schedule_are_set() -> None:
    optimizer, schedule = made("step", steps=1)
    set_hyperparameters("f", optimizer, schedule, {"gamma": 0.9, "step_size": 1, "weight_decay": 0.5})
    assert (schedule.gamma, schedule.step_size, optimizer.param_groups[0]["weight_decay"]) == (0.9, 1, 0.5)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "none is given"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"lr": float("nan")}, "wanted a value like"),
        ({"lr": "fast"}, "wanted a value like"),
        ({"lr": True}, "wanted a value like"),
        ({"betas": [0.9]}, "wanted a value like"),
        ({"betas": [0.9, 2.0]}, "Invalid beta"),
        ({"learning_rate": 1.0}, "it has no 'learning_rate'"),
        ({"params": 1}, "it has no 'params'"),
        ({"fused": True}, "it has no 'fused'"),
        ({"amsgrad": True}, "amsgrad.* at the start only"),
    ],
)
def test_values_that_do_not_fit_change_nothing(values: dict[str, Any], told: str) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1)
    before = str(optimizer.state_dict())
    with pytest.raises(UsageError, match=told):
        set_hyperparameters("f", optimizer, None, {**values, **({"eps": 0.5} if values else {})})
    assert str(optimizer.state_dict()) == before


def test_groups_with_different_values_need_a_number() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "weight_decay": decay} for decay in (0.0, 0.1)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(UsageError, match="differs between the groups"):
        set_hyperparameters("f", optimizer, None, {"weight_decay": 0.2})
    set_hyperparameters("f", optimizer, None, {"weight_decay": 0.2}, group=1)
    set_hyperparameters("f", optimizer, None, {"lr": 0.2})
    assert [(one["weight_decay"], one["lr"]) for one in optimizer.param_groups] == [(0.0, 0.2), (0.2, 0.2)]
    with pytest.raises(UsageError, match=r"group is 2, wanted one of \[0, 1\]"):
        set_hyperparameters("f", optimizer, None, {"lr": 0.2}, group=2)


@pytest.mark.parametrize("name", CYCLIC)
def test_rate_of_a_cycle_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="lr is computed by the"):
        set_hyperparameters("f", *made(name, steps=2), {"lr": 0.2})


def test_tensor_rate_stays_a_tensor() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1), foreach=False)
    set_hyperparameters("f", optimizer, None, {"lr": 0.5})
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, Tensor) and rate.item() == 0.5


@pytest.mark.parametrize("prefers", [False, True])
def test_restore_prefers_the_file_on_request(prefers: bool, tmp_path: Path) -> None:
    def expert(rate: float) -> ExpertBackend:
        make = partial(torch.optim.SGD, lr=rate)
        module = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        return ExpertBackend("f", module, make, args_schema=(X,), prefer_configured=prefers)

    with Server([expert(0.1)], checkpoints=tmp_path):
        pass
    for _ in range(2):  # the second start finds the rate in the checkpoint
        backend = expert(0.5)
        with Server([backend], checkpoints=tmp_path) as server:
            assert backend.optimizer is not None
            assert backend.optimizer.param_groups[0]["lr"] == (0.5 if prefers else 0.1)
            (note,) = server.statistics().keeping["f"].notes or ("",)
            text = (
                "lr is 0.5, as configured, and not 0.1" if prefers else "lr is 0.1, as in its checkpoint, and not 0.5"
            )
            assert text in note or (prefers and not note)
    assert prefers == (note == "")
