"""Optimizers are fused where that works, and used as they are where they were given."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.experts.expert_cases import work
from weft.core.errors import UsageError
from weft.experts import ExpertBackend, TensorSpec
from weft.experts.optimizer_step import make_optimizer, make_schedule


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


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3,), torch.complex64), ((), torch.complex64), ((3, 4), torch.float32), ((3,), torch.int64)]
)
def test_what_no_fused_step_can_walk_is_not_fused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = nn.Parameter(torch.ones(2))
    strange = torch.ones(*shape, 4, dtype=dtype)[..., ::2] if dtype is torch.float32 else torch.ones(shape, dtype=dtype)
    made = make_optimizer(torch.optim.Adam, [plain, nn.Parameter(strange, requires_grad=False)])
    assert bool(made.defaults["fused"]) == (dtype is torch.int64), "a frozen parameter of integers is never stepped"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("factory", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adagrad])
def test_at_the_first_sparse_gradient_the_step_is_fused_no_more_and_right(factory: Any) -> None:
    dense = torch.tensor([[0.0, 3.0], [0.0, -1.0]], dtype=torch.float64)
    stepped: list[list[nn.Parameter]] = []
    for make in (make_optimizer, lambda made, given: made(given)):
        given = [nn.Parameter(torch.ones(2, 2, dtype=torch.float64)) for _ in range(2)]
        optimizer = make(factory, given)
        for sparse in (False, True, False):
            given[0].grad, given[1].grad = dense.clone(), dense.to_sparse(1) if sparse else dense.clone()
            optimizer.step()
        assert not optimizer.param_groups[0]["fused"]
        stepped.append(given)
    for one, other in zip(*stepped, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_momentum_may_begin_later_for_some_and_the_step_is_fused_again() -> None:
    stepped: list[list[nn.Parameter]] = []
    for make in (make_optimizer, lambda made, given: made(given)):
        given = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
        optimizer = make(partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1), given)
        for used in (1, 2, 2):
            for parameter in given[:used]:
                parameter.grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
            optimizer.step()
        stepped.append(given)
        assert bool(optimizer.param_groups[0]["fused"]) == (make is make_optimizer)
    for one, other in zip(*stepped, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factory", [torch.optim.Adam, partial(torch.optim.SGD, lr=0.1), torch.optim.Adagrad])
def test_an_expert_with_complex_parameters_steps(factory: Any) -> None:
    module = nn.Linear(4, 4, dtype=torch.complex128)
    spec = TensorSpec((None, 4), torch.complex128)
    plain = copy.deepcopy(module)
    backend = ExpertBackend("complex", module, factory, args_schema=(spec,))
    x, gradient = torch.randn(3, 4, dtype=torch.complex128), torch.randn(3, 4, dtype=torch.complex128)
    answered = backend.backward_pool.submit_task(x, gradient)
    work(backend)
    assert answered.result(0)
    plain(x).backward(gradient)
    factory(plain.parameters()).step()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


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
