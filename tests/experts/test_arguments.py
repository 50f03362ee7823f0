"""What can never work is refused when an expert is made, with all its faults at once."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.experts.expert_cases import X, adam, rows, seeded, task
from weft.core.errors import UsageError
from weft.core.validation import Validator
from weft.experts import ExpertBackend, GraphBudget, Guards, Journal
from weft.experts.expert import _OPTIONS, _check_arguments


def layer() -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.float64)


def check(name: Any, module: Any = None, optimizer: Any = None, *, clip_grad_norm: Any = None, **options: Any) -> None:
    """As `ExpertBackend` does, past the types that tests enforce."""
    known = {name: options.pop(name, None) for name in _OPTIONS}
    with Validator("e") as validator:
        _check_arguments(validator, name, module, optimizer, {"clip_grad_norm": clip_grad_norm, **known}, options)


def made(optimizer: Any, schedule: Any = None, kind: type[ExpertBackend] = ExpertBackend) -> ExpertBackend:
    return kind("e", seeded(layer), optimizer, args_schema=(X,), schedule=schedule)


def test_all_arguments_of_a_wrong_kind_are_told_at_once() -> None:
    wrong: dict[str, Any] = {
        "module": "layer",
        "optimizer": 3,
        "clip_grad_norm": "1",
        "guards": 5,
        "records": 5,
        "mini_batches": 4,
        "keep_graphs": 1 << 20,
        "journal": "path",
    }
    with pytest.raises(UsageError) as caught:
        check(5, **wrong, max_batch=3)
    faults = str(caught.value).splitlines()[1:]
    assert [fault.split()[1] for fault in faults] == ["name", *wrong, "ExpertBackend"]
    assert "  - keep_graphs is 1048576, wanted a GraphBudget, or None" in faults
    assert "has 'max_batch', known are max_batch_delay" in faults[-1]


@pytest.mark.parametrize("clip", [0, -1.0, True, math.nan, "1", [1.0]])
def test_what_is_no_norm_to_clip_to_is_refused(clip: Any) -> None:
    with pytest.raises(UsageError, match="clip_grad_norm is"):
        check("e", layer(), adam, clip_grad_norm=clip)


def test_a_norm_to_clip_to_without_an_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="clip_grad_norm was given, but no optimizer"):
        check("e", layer(), clip_grad_norm=1.0)


def test_what_fits_passes() -> None:
    module = layer()
    fine: dict[str, Any] = {"clip_grad_norm": 1.0, "guards": Guards(), "journal": Journal(), "max_rows": 4096}
    backend = ExpertBackend("e", module, opt=adam, args_schema=(X,), keep_graphs=GraphBudget(1), **fine)
    assert backend.module is module and isinstance(backend.optimizer, torch.optim.Optimizer)


def test_steps_that_want_what_nobody_gives_are_refused_with_both_reasons() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(UsageError, match=r"optimizer is a LBFGS, whose step wants closure"):
        made(torch.optim.LBFGS)
    with pytest.raises(UsageError, match=r"schedule is a ReduceLROnPlateau, whose step wants metrics"):
        made(sgd, ReduceLROnPlateau)
    foreign = torch.optim.SGD(layer().parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught:
        made(foreign, ReduceLROnPlateau(foreign))
    assert len(str(caught.value).splitlines()) == 3 and "none of the module's parameters" in str(caught.value)
    assert made(sgd, lambda optimizer: StepLR(optimizer, 1)).schedule is not None


class Gives(ExpertBackend):
    """Steps with arguments of its own."""

    def apply_gradients(self) -> None:
        assert self.optimizer is not None and isinstance(self.schedule, ReduceLROnPlateau)
        self.optimizer.step(lambda: 1.0)
        self.schedule.step(1.0)


def test_who_gives_it_may_take_any_optimizer_and_schedule() -> None:
    backend = made(partial(torch.optim.SGD, lr=0.1), partial(ReduceLROnPlateau, patience=0), Gives)
    for seed in range(3):
        assert isinstance(backend.executor.backward([task(rows(2, seed), rows(2, 9))])[0], list)
    assert backend.steps == 3 and backend.optimizer is not None
    assert backend.optimizer.param_groups[0]["lr"] < 0.1
