"""A state goes in whole or not at all; layers that were frozen are trained once they are freed, also after a load."""

import copy
from functools import partial, reduce
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from tests.experts.expert_cases import X, fussy_backend, good, rows, seeded, task, weights, work
from weft.core.errors import UsageError
from weft.experts import ExpertBackend, TensorSpec
from weft.experts.serialization import deserialize, serialize


class AtOnce(torch.optim.Optimizer):
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
    "state made at once": AtOnce,
}


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)])


def half_frozen(factory: Any) -> ExpertBackend:
    module = seeded(layers)
    module[0].requires_grad_(False)
    return ExpertBackend("e", module, factory, args_schema=(X,))


def stepped(backend: ExpertBackend, seed: int, mini_batch: bool = False) -> None:
    name = f"m{seed}" if mini_batch else None
    answers = [backend.backward_pool.submit_task(rows(2, seed), rows(2, seed + 9), client="ann", mini_batch=name)]
    work(backend)
    answers += [backend.commit(f"m{seed}", client="ann")] if mini_batch else []
    work(backend)
    assert all(answer.result(0) for answer in answers)


def plainly(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    module(rows(2, seed)).backward(rows(2, seed + 9))
    optimizer.step()


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mini_batch", [False, True])
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_unfrozen_layer_is_trained(factory: Any, mini_batch: bool) -> None:
    backend = half_frozen(factory)
    plain = copy.deepcopy(backend.module)
    optimizer = factory(plain.parameters())
    for parameter in backend.module[0].parameters():
        parameter.grad = torch.ones_like(parameter)  # left there by who had the module before
    frozen = copy.deepcopy(backend.module[0])
    stepped(backend, 0, mini_batch)
    plainly(plain, optimizer, 0)
    assert_same_weights(backend.module[0], frozen)
    for module in (backend.module, plain):
        module[0].requires_grad_(True)
    for seed in (1, 2):
        stepped(backend, seed, mini_batch)
        plainly(plain, optimizer, seed)
    assert_same_weights(backend.module, plain)


def test_a_state_of_an_optimizer_of_fewer_parameters_is_refused() -> None:
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
def test_a_state_that_is_refused_leaves_nothing_of_itself(place: tuple[Any, ...], value: Any, steps: Any) -> None:
    fused = partial(torch.optim.Adam, lr=0.05)
    backend, twin = [fussy_backend(norm=True, optimizer=fused, schedule=lambda o: StepLR(o, 2)) for _ in range(2)]
    for seed in range(3):
        for one in (backend, twin):
            good(one.executor.backward([task(rows(2, seed), rows(2, seed + 9))]))
    bad = backend.state_dict()
    for each in bad["module"].values():
        each.add_(1)
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
    assert_same_weights(other.module, one.module)
