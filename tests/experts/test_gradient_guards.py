"""Guards reject gradients before they reach the weights."""

import math

import pytest
import torch
from torch import nn

from tests.experts.expert_cases import (
    Formula,
    X,
    adam,
    close,
    double_layer,
    fussy_backend,
    good,
    rows,
    seeded,
    task,
    weights,
)
from torchweft.experts import ExpertBackend
from torchweft.experts.errors import GradientError
from torchweft.experts.gradients import Guards, norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_gradient_without_finite_square_is_rejected(bad: float) -> None:
    gradients = [torch.ones(3), torch.tensor([0.0, bad])]
    with pytest.raises(GradientError, match="nothing was changed"):
        Guards().check_parameters(gradients)
    Guards(finite=False).check_parameters(gradients)
    Guards().check_parameters(gradients[:1])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # PyTorch 2.11's own
def test_norm_covers_all_gradients_and_sparse_values() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    assert norm([torch.tensor([4.0]), sparse]) == pytest.approx(5.0)
    assert norm([]) == 0.0 and norm([torch.ones(2, dtype=torch.int64)]) == 0.0
    Guards(max_norm=5.0).check_parameters([torch.tensor([3.0, 4.0])])
    with pytest.raises(GradientError, match="have norm 5, wanted at most 4"):
        Guards(max_norm=4.0).check_parameters([torch.tensor([3.0, 4.0])])
    for guards, wanted in ((Guards(), "a finite one"), (Guards(max_norm=4.0), "at most 4 and finite")):
        with pytest.raises(GradientError, match=f"have norm inf, wanted {wanted};") as caught:
            guards.check_parameters([torch.tensor([float("inf")])])
        assert "raise max_norm" not in str(caught.value)  # no limit would admit it


def test_output_gradients_are_judged_per_task() -> None:
    guards = Guards(max_output_norm=1.0)
    assert guards.accept_outputs([torch.zeros(3)]) and not guards.accept_outputs([torch.ones(3)])
    assert guards.output_fault([torch.full((3,), 0.1)]) is None
    assert "norm 1.73" in str(guards.output_fault([torch.ones(3)]))
    assert "NaN or infinity" in str(guards.output_fault([torch.tensor(math.nan)]))
    assert Guards().output_fault([torch.full((2,), 3e38)]) is None, "finite, although the batch's norm overflows"


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", NARROW)
def test_eight_bit_output_gradients_are_judged_too(dtype: torch.dtype) -> None:
    """PyTorch has no norms for these types, and not every version supports ``isfinite`` for them."""
    plain, copy = (seeded(lambda: Formula(lambda self, x: self.layer(x).to(dtype), layer=double_layer())) for _ in "ab")
    backend, x = ExpertBackend("e", copy, adam, args_schema=(X,)), rows(2, 0)
    ones, bad = torch.ones(2, 4).to(dtype), torch.full((2, 4), math.nan).to(dtype)
    answer, rejected = backend.executor.backward([task(x, ones), task(rows(2, 1), bad)])
    assert good([answer]) and isinstance(rejected, GradientError) and backend.steps == 1
    plain(x).backward(ones)
    adam(plain.parameters()).step()
    assert all(map(close, plain.parameters(), backend.module.parameters()))
    assert norm([ones]) == pytest.approx(math.sqrt(8))


def hidden_nan() -> nn.Module:
    """Batch norm whose NaN does not appear in outputs or gradients."""
    norm = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)
    return Formula(lambda self, x: self.layer(torch.nan_to_num(self.norm(x))), norm=norm, layer=double_layer())


def hidden_nan_expert(guards: Guards | None = None) -> ExpertBackend:
    return ExpertBackend("hides", seeded(hidden_nan), adam, args_schema=(X,), guards=guards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_input_that_spoils_running_statistics_fails_alone(bad: float) -> None:
    one, other = hidden_nan_expert(), hidden_nan_expert()
    spoiled = rows(2, 5)
    spoiled[1, 2] = bad
    fine = [task(rows(2, seed), rows(2, seed + 9)) for seed in range(2)]
    answers = one.executor.backward([fine[0], task(spoiled, rows(2, 7), client="eve"), fine[1]])
    expected = good(other.executor.backward(fine))
    rejected = answers.pop(1)
    assert isinstance(rejected, GradientError)
    assert "running_mean, running_var" in str(rejected) and "'eve'" in rejected.__notes__[0]
    assert all(torch.equal(one[0], two[0]) for one, two in zip(good(answers), expected, strict=True))
    assert weights(one) == weights(other) and one.statistics().refused_gradients == {"gradient": 1}


def test_statistics_spoiled_before_reject_no_task() -> None:
    backend = hidden_nan_expert()
    for buffer in (backend.module.norm.running_mean, backend.module.norm.running_var):
        buffer.fill_(math.inf)
    assert good(backend.executor.backward([task(rows(2, 0), rows(2, 1))])) and backend.steps == 1
    unguarded = hidden_nan_expert(Guards(finite=False))
    assert good(unguarded.executor.backward([task(torch.full((2, 4), math.nan).double(), rows(2, 1))]))
    assert unguarded.module.norm.running_mean.isnan().all()


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_without_optimizer_running_statistics_stay(value: float) -> None:
    backend = fussy_backend(norm=True, optimizer=None)
    before = weights(backend)
    assert good(backend.executor.backward([task(torch.full((2, 4), value).double(), rows(2, 1))]))
    assert weights(backend) == before
