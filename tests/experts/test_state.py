"""A state is loaded completely or not at all, and unfrozen layers are trained, also after a load."""

import copy
from functools import partial, reduce
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from tests.experts.expert_cases import (
    X,
    assert_same_state,
    double_layer,
    fussy_backend,
    good,
    rows,
    seeded,
    send_step,
    task,
    weights,
)
from torchweft.core.errors import UsageError
from torchweft.experts import ExpertBackend, TensorSpec
from torchweft.experts.serialization import deserialize, serialize


class EagerStateSgd(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(self.state[parameter]["sum"].add_(parameter.grad), alpha=0.1)


FACTORIES = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, weight_decay=0.1),
    "state made at once": EagerStateSgd,
}


def layers() -> nn.Module:
    return nn.Sequential(double_layer(), double_layer())


def half_frozen(factory: Any) -> ExpertBackend:
    module = seeded(layers)
    module[0].requires_grad_(False)
    return ExpertBackend("e", module, factory, args_schema=(X,))


def step_plain(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int, mini_batch: bool) -> None:
    """The step of `send_step` in plain PyTorch."""
    optimizer.zero_grad()
    for part in range(1 + mini_batch):
        module(rows(2, seed + part)).backward(rows(2, seed + part + 50))
    optimizer.step()


@pytest.mark.parametrize("mini_batch", [False, True])
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_unfrozen_layer_is_trained(factory: Any, mini_batch: bool) -> None:
    backend = half_frozen(factory)
    plain = copy.deepcopy(backend.module)
    optimizer = factory(plain.parameters())
    for parameter in backend.module[0].parameters():
        parameter.grad = torch.ones_like(parameter)  # left over from earlier code
    frozen = copy.deepcopy(backend.module[0])
    assert all(isinstance(answer, list) for answer in send_step(backend, 0, mini_batch))
    step_plain(plain, optimizer, 0, mini_batch)
    assert_same_state(backend.module[0], frozen)
    for module in (backend.module, plain):
        module[0].requires_grad_(True)
    for seed in (1, 2):
        assert all(isinstance(answer, list) for answer in send_step(backend, seed, mini_batch))
        step_plain(plain, optimizer, seed, mini_batch)
    assert_same_state(backend.module, plain)


def test_state_of_fewer_parameters_is_rejected() -> None:
    backend = half_frozen(torch.optim.Adam)
    trained = torch.optim.Adam(backend.module[1].parameters())
    with pytest.raises(UsageError, match=r"groups of \[2\] parameters, but this expert's has \[4\]"):
        backend.load_state_dict({**backend.state_dict(), "optimizer": trained.state_dict()})


CHANGES: list[tuple[tuple[Any, ...], Any]] = [
    (("optimizer", "param_groups", 0, "params"), [0]),
    (("optimizer", "state", 0, "exp_avg"), torch.zeros(3, dtype=torch.float64)),
    (("schedule",), [1]),
    (("module", "last.bias"), torch.zeros(99)),
    (("module", "last.bias"), None),  # it is missing
]


@pytest.mark.parametrize(
    ("place", "value", "steps"),
    [*[(*each, 7) for each in CHANGES], *[(*CHANGES[3], steps) for steps in ("many", True, -1, 1.5, None)]],
)
def test_rejected_state_changes_nothing(place: tuple[Any, ...], value: Any, steps: Any) -> None:
    fused = partial(torch.optim.Adam, lr=0.05)
    backend, twin = [fussy_backend(norm=True, optimizer=fused, schedule=lambda o: StepLR(o, 2)) for _ in range(2)]
    for seed in range(3):
        for one in (backend, twin):
            good(one.executor.backward([task(rows(2, seed), rows(2, seed + 9))]))
    bad = backend.state_dict()
    for tensor in bad["module"].values():
        tensor.add_(1)
    bad["schedule"]["last_epoch"] = 77
    bad["optimizer"]["state"][0]["exp_avg"].add_(1)
    bad["steps"] = steps
    within = reduce(getitem, place[:-1], bad)
    within[place[-1]] = value
    if value is None:
        del within[place[-1]]
    before = weights(backend)
    with pytest.raises(Exception) as caught:
        backend.load_state_dict(bad)
    assert steps == 7 or (isinstance(caught.value, UsageError) and f"steps is {steps!r}" in str(caught.value))
    assert weights(backend) == before
    good(backend.executor.backward([task(rows(2, 3), rows(2, 4))]))
    good(twin.executor.backward([task(rows(2, 3), rows(2, 4))]))
    assert weights(backend) == weights(twin)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_loaded_state_steps_with_another_memory_layout(factory: Any) -> None:
    def make_backend() -> ExpertBackend:
        module = seeded(lambda: nn.Conv2d(3, 5, 3, dtype=torch.float64)).to(memory_format=torch.channels_last)
        return ExpertBackend("e", module, factory, args_schema=(TensorSpec((None, 3, 6, 6), torch.float64),))

    def image(seed: int) -> tuple[Tensor, Tensor]:
        return rows(2, seed, 108).view(2, 3, 6, 6), rows(2, seed, 80).view(2, 5, 4, 4)

    one, other = make_backend(), make_backend()
    good(one.executor.backward([task(*image(0))]))
    other.load_state_dict(deserialize(serialize(one.state_dict())))
    for backend in (one, other):
        for seed in (1, 2):
            good(backend.executor.backward([task(*image(seed))]))
    assert_same_state(other.module, one.module)
