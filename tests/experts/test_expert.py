"""An expert computes the same as plain PyTorch. Invalid arguments are rejected with all their faults."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.experts.expert_cases import (
    NESTED_SCHEMAS,
    WIDTH,
    Formula,
    Fussy,
    Nested,
    X,
    adam,
    double_layer,
    fussy_backend,
    good,
    rows,
    seeded,
    task,
    weights,
)
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.pytree import flatten
from torchweft.core.spec import TensorSpec
from torchweft.core.validation import Validator
from torchweft.experts import ExpertBackend, Guards, Runtime
from torchweft.experts.errors import StepError
from torchweft.experts.expert import _check_arguments


def nested_call(count: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = (rows(count, seed), [torch.arange(count) % 5, rows(count, seed + 1, 2)])
    return args, {"options": {"scale": rows(count, seed + 2, 1), "mode": "plain"}}


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 99))
def test_forward_and_backward_equal_plain_pytorch(sizes: list[int], seed: int) -> None:
    module = seeded(Nested)
    plain = copy.deepcopy(module)
    backend = ExpertBackend("nested", module, partial(torch.optim.SGD, lr=0.1, momentum=0.9), **NESTED_SCHEMAS)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        calls = [nested_call(count, seed + 10 * i) for i, count in enumerate(sizes)]
        seeds = [[rows(n, seed + i), rows(n, seed + i, 1)[:, 0], torch.zeros(n).long()] for i, n in enumerate(sizes)]
        forwards = good(backend.executor.forward([task(*tensors(call)) for call in calls]))
        tasks = [task(*tensors(call), *grads) for call, grads in zip(calls, seeds, strict=True)]
        backwards = good(backend.executor.backward(tasks))
        for (args, kwargs), grads, results, gradients in zip(calls, seeds, forwards, backwards, strict=True):
            leaves = tensors((args, kwargs))
            for leaf in leaves:
                leaf.requires_grad_(leaf.is_floating_point())
            outputs = tensors(plain(*args, **kwargs))
            assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(results, outputs, strict=True))
            torch.autograd.backward(outputs[:2], grads[:2])
            for leaf, gradient in zip(leaves, gradients, strict=True):
                expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                assert torch.allclose(gradient, expected, rtol=0, atol=1e-10)
        optimizer.step()
        optimizer.zero_grad()
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-10) and one.grad is None
        assert backend.steps == step + 1


def test_explicit_requires_grad_excludes_other_inputs() -> None:
    schema = (TensorSpec((None, WIDTH), torch.float64), TensorSpec((None, WIDTH), torch.float64, requires_grad=True))
    backend = ExpertBackend("pair", nn.Bilinear(WIDTH, WIDTH, 2, dtype=torch.float64), args_schema=schema)
    [[first, second]] = good(backend.executor.backward([task(rows(2, 0), rows(2, 1), rows(2, 2, 2))]))
    assert not first.any() and second.any()


HABITS: dict[str, Callable[[], nn.Module]] = {
    "returns its input": lambda: Formula(lambda _, x: x),
    "returns its weight": lambda: Formula(
        lambda self, x: self.weight[: x.shape[0]], weight=nn.Parameter(torch.ones(8, WIDTH, dtype=torch.float64))
    ),
    "writes its input": lambda: Formula(lambda _, x: x.mul_(2).tanh()),
}


@pytest.mark.parametrize("habit", HABITS)
def test_no_module_changes_results_or_inputs(habit: str) -> None:
    module = HABITS[habit]()
    optimizer = partial(torch.optim.SGD, lr=1.0) if list(module.parameters()) else None
    backend = ExpertBackend("habit", module, optimizer, args_schema=(X,))
    x, g = rows(2, 0), rows(2, 1)
    x_before, g_before = x.clone(), g.clone()
    [first] = good(backend.executor.forward([task(x)]))
    [gradients] = good(backend.executor.backward([task(x, g)]))
    kept = [tensor.clone() for tensor in (*first, *gradients)]
    good(backend.executor.forward([task(rows(2, 5))]))
    good(backend.executor.backward([task(rows(2, 5), rows(2, 6))]))
    assert torch.equal(x, x_before) and torch.equal(g, g_before)
    assert all(torch.equal(a, b) for a, b in zip(kept, (*first, *gradients), strict=True))
    if habit == "writes its input":
        leaf = x.clone().requires_grad_()
        (leaf * 2).tanh().backward(g)
        assert leaf.grad is not None and torch.allclose(gradients[0], leaf.grad, rtol=0, atol=1e-12)


def test_without_optimizer_backward_changes_nothing() -> None:
    backend = ExpertBackend("still", seeded(Fussy), args_schema=(X,))
    before = weights(backend)
    assert good(backend.executor.backward([task(rows(2, 0), rows(2, 1))]))[0][0].any()
    assert weights(backend) == before and backend.steps == 0
    with pytest.raises(UsageError, match="has no optimizer"):
        backend.commit("m")
    with pytest.raises(UsageError, match="does not accumulate gradients"):
        backend.backward_pool.submit_task(rows(2, 0), rows(2, 1), mini_batch="m")


def test_gradients_are_clipped_and_the_schedule_is_stepped() -> None:
    sgd, schedule = partial(torch.optim.SGD, lr=1.0), partial(StepLR, step_size=1, gamma=0.5)
    backend = fussy_backend(optimizer=sgd, schedule=schedule, clip_grad_norm=0.25)
    for step in range(2):
        before = [parameter.detach().clone() for parameter in backend.module.parameters()]
        good(backend.executor.backward([task(rows(2, 0), rows(2, 1))]))
        moved = [b - a for a, b in zip(before, backend.module.parameters(), strict=True)]
        assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(0.25 * 0.5**step, rel=1e-5)


def test_apply_gradients_can_be_overridden_and_raise() -> None:
    class FailingSecondStep(ExpertBackend):
        seen = 0

        def apply_gradients(self) -> None:
            FailingSecondStep.seen += all(parameter.grad is not None for parameter in self.module.parameters())
            if FailingSecondStep.seen == 2:
                raise ZeroDivisionError("mine")

    backend = FailingSecondStep("own", seeded(Fussy), adam, args_schema=(X,))
    before = copy.deepcopy(backend.module.state_dict())
    good(backend.executor.backward([task(rows(2, 0), rows(2, 1))]))
    answers = backend.executor.backward([task(rows(2, 0), rows(2, 1)), task(rows(1, 0), rows(1, 1))])
    assert all(isinstance(answer, StepError) and "ZeroDivisionError: mine" in str(answer) for answer in answers)
    assert FailingSecondStep.seen == 2 and backend.steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before.values(), backend.module.state_dict().values(), strict=True))
    assert all(parameter.grad is None for parameter in backend.module.parameters())


def test_expert_with_a_loaded_state_continues_alike() -> None:
    def make_trained(seed: int) -> ExpertBackend:
        torch.manual_seed(seed)
        backend = fussy_backend(dropout=0.3, norm=True, schedule=partial(StepLR, step_size=1))
        for parameter in backend.module.parameters():
            nn.init.normal_(parameter)
        return backend

    with torch.random.fork_rng(devices=[]):
        one, other = make_trained(1), make_trained(2)
    for step in range(3):
        good(one.executor.backward([task(rows(2, step), rows(2, step + 9))]))
    state = one.state_dict()
    good(one.executor.backward([task(rows(2, 5), rows(2, 6))]))  # must not change the state taken before
    other.load_state_dict(state)
    assert other.steps == 3
    good(other.executor.backward([task(rows(2, 5), rows(2, 6))]))
    assert weights(one) == weights(other)
    outputs = [good(backend.executor.forward([task(rows(3, 7))]))[0][0] for backend in (one, other)]
    assert torch.equal(*outputs)


def test_state_of_another_kind_is_rejected_with_all_reasons() -> None:
    state = ExpertBackend("still", seeded(Fussy), args_schema=(X,)).state_dict()
    del state["seed"]
    with pytest.raises(UsageError) as caught:
        fussy_backend().load_state_dict({**state, "more": 1})
    assert str(caught.value).splitlines() == [
        "this is not a state of expert 'fussy':",
        "  - 'seed' is missing",
        "  - 'more' is not known",
        "  - there is no state of the optimizer, but this expert has one",
    ]


def test_info_and_samples_describe_a_call() -> None:
    backend = ExpertBackend("nested", seeded(Nested), **NESTED_SCHEMAS)
    info = backend.get_info()
    assert info["keyword_names"] == ("options",) and info["name"] == "nested" and info["trained"] is False
    args, kwargs = backend.make_empty(2)
    value = backend.module(*args, **kwargs)
    assert info["outputs_schema"] == {
        "y": (TensorSpec((None, WIDTH), torch.float64), TensorSpec((None,), torch.float64)),
        "best": TensorSpec((None,), torch.int64),
        "none": None,
    }
    assert value["y"][0].shape == (2, WIDTH)
    assert backend.get_pools() == (backend.forward_pool, backend.backward_pool)


def test_both_spellings_of_arguments_work_but_not_together() -> None:
    module = seeded(Fussy)
    backend = ExpertBackend("old", expert=module, opt=torch.optim.SGD(module.parameters(), 0.1), args_schema=(X,))
    assert backend.module is module and isinstance(backend.optimizer, torch.optim.SGD)
    with pytest.raises(UsageError) as caught:
        ExpertBackend("", module, adam, expert=module, opt=adam, clip_grad_norm=-1.0, args_schema=(X,), max_batch=3)
    assert len(str(caught.value).splitlines()) == 6
    with pytest.raises(UsageError, match=r"wanted a torch\.nn\.Module"):
        ExpertBackend("none", args_schema=(X,))


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        ({}, "neither args_schema nor kwargs_schema"),
        ({"args_schema": X}, "args_schema is of type TensorSpec, wanted a tuple"),
        ({"args_schema": (TensorSpec((3, WIDTH), torch.float64),)}, r"args\[0\] has shape \(3, 4\), wanted None"),
        ({"kwargs_schema": {"x": 3}}, "no tensor"),
        ({"args_schema": (X,), "outputs_schema": (X,)}, "outputs_schema of expert 'e' does not match its module"),
        (
            {"args_schema": (X,), "module": Formula(lambda _, x: x.sum(0))},
            "axis 0 of all outputs of expert 'e' must be the batch",
        ),
    ],
)
def test_impossible_schemas_are_rejected(schemas: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, SpecError), match=message):
        ExpertBackend("e", **{"module": seeded(Fussy), **schemas})


def test_free_axes_are_inferred_and_lengths_batched_apart() -> None:
    spec = TensorSpec((None, None, WIDTH), torch.float64)
    backend = ExpertBackend("long", nn.Linear(WIDTH, 2, dtype=torch.float64), args_schema=(spec,))
    assert backend.get_info()["outputs_schema"] == TensorSpec((None, None, 2), torch.float64)
    x = rows(6, 0)
    with Runtime([backend]):
        futures = [backend.forward_pool.submit_task(x.view(*shape, WIDTH)) for shape in ((2, 3), (3, 2), (1, 6))]
        assert [future.result(30)[0].shape for future in futures] == [(2, 3, 2), (3, 2, 2), (1, 6, 2)]
        wrong = backend.backward_pool.submit_task(x.view(2, 3, WIDTH), torch.ones(2, 4, 2))
        with pytest.raises(SpecError, match=r"the gradient of output has shape \(2, 4, 2\), wanted \(2, 3, 2\)"):
            wrong.result(30)


def test_dummy_run_changes_neither_module_nor_generator() -> None:
    module = seeded(partial(Fussy, norm=True))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    ExpertBackend("new", module, adam, args_schema=(X,), guards=Guards(finite=False))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def check(name: Any, module: Any = None, optimizer: Any = None, *, clip_grad_norm: Any = None, **options: Any) -> None:
    """Check arguments as `ExpertBackend` does, without the run-time type checks of the tests."""
    known = {name: options.pop(name, None) for name in ("guards", "idempotency", "mini_batches", "keep_graphs")}
    with Validator("e") as validator:
        _check_arguments(validator, name, module, optimizer, {"clip_grad_norm": clip_grad_norm, **known}, options)


class StepsWithArguments(ExpertBackend):
    def apply_gradients(self) -> None:
        assert self.optimizer is not None and isinstance(self.schedule, ReduceLROnPlateau)
        self.optimizer.step(lambda: 1.0)
        self.schedule.step(1.0)


def make_expert(optimizer: Any, schedule: Any = None, kind: type[ExpertBackend] = ExpertBackend) -> ExpertBackend:
    return kind("e", seeded(double_layer), optimizer, args_schema=(X,), schedule=schedule)


def test_all_arguments_of_wrong_types_are_listed() -> None:
    wrong: dict[str, Any] = {
        "module": "layer",
        "optimizer": 3,
        "clip_grad_norm": "1",
        "guards": 5,
        "idempotency": 5,
        "mini_batches": 4,
        "keep_graphs": 1 << 20,
    }
    with pytest.raises(UsageError) as caught:
        check(5, **wrong, max_batch=3)
    faults = str(caught.value).splitlines()[1:]
    assert [fault.split()[1] for fault in faults] == ["name", *wrong, "ExpertBackend"]
    assert "  - keep_graphs is 1048576, wanted a GraphBudget, or None" in faults
    assert faults[-1].endswith("ExpertBackend has no argument 'max_batch'; did you mean 'max_batch_size'?")


@pytest.mark.parametrize("clip", [0, -1.0, True, math.nan, "1", [1.0]])
def test_invalid_clip_norm_is_rejected(clip: Any) -> None:
    layer = double_layer()
    with pytest.raises(UsageError, match="clip_grad_norm is"):
        check("e", layer, adam, clip_grad_norm=clip)
    with pytest.raises(UsageError, match="clip_grad_norm was given, but no optimizer"):
        check("e", layer, clip_grad_norm=1.0)


def test_steps_that_require_arguments_are_rejected() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(UsageError, match=r"optimizer is a LBFGS, whose step requires closure"):
        make_expert(torch.optim.LBFGS)
    with pytest.raises(UsageError, match=r"schedule is a ReduceLROnPlateau, whose step requires metrics"):
        make_expert(sgd, ReduceLROnPlateau)
    foreign = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught:
        make_expert(foreign, ReduceLROnPlateau(foreign))
    assert len(str(caught.value).splitlines()) == 3 and "none of the module's parameters" in str(caught.value)
    assert make_expert(sgd, lambda optimizer: StepLR(optimizer, 1)).schedule is not None
    backend = make_expert(sgd, partial(ReduceLROnPlateau, patience=0), StepsWithArguments)
    for seed in range(3):
        assert isinstance(backend.executor.backward([task(rows(2, seed), rows(2, 9))])[0], list)
    assert backend.steps == 3 and backend.optimizer is not None and backend.optimizer.param_groups[0]["lr"] < 0.1
