"""Which gradients are let at the weights."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import X, adam, close, fussy_backend, good, rows, seeded, task, weights
from weft.experts import ExpertBackend
from weft.experts.errors import GradientError
from weft.experts.gradients import Guards, norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_or_would_not_be_when_squared_is_refused(bad: float) -> None:
    gradients = [torch.ones(3), torch.tensor([0.0, bad])]
    with pytest.raises(GradientError, match="nothing was changed"):
        Guards().check_parameters(gradients)
    Guards(finite=False).check_parameters(gradients)
    Guards().check_parameters(gradients[:1])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # PyTorch 2.11's own
def test_the_norm_is_that_of_all_together_and_sparse_ones_count() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    assert norm([torch.tensor([4.0]), sparse]) == pytest.approx(5.0)
    assert norm([]) == 0.0 and norm([torch.ones(2, dtype=torch.int64)]) == 0.0
    Guards(max_norm=5.0).check_parameters([torch.tensor([3.0, 4.0])])
    with pytest.raises(GradientError, match="have norm 5, wanted at most 4"):
        Guards(max_norm=4.0).check_parameters([torch.tensor([3.0, 4.0])])


def test_gradients_of_outputs_are_judged_by_task() -> None:
    guards = Guards(max_output_norm=1.0)
    assert guards.accept_outputs([torch.zeros(3)]) and not guards.accept_outputs([torch.ones(3)])
    assert guards.output_fault([torch.full((3,), 0.1)]) is None
    assert "norm 1.73" in str(guards.output_fault([torch.ones(3)]))
    assert "NaN or infinity" in str(guards.output_fault([torch.tensor(math.nan)]))
    assert Guards().output_fault([torch.full((2,), 3e38)]) is None  # each is finite: the batch's norm only asks


class Narrow(nn.Module):
    """Its outputs are of a dtype, and so are their gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(4, 4, dtype=torch.float64), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).to(self.dtype)


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_of_outputs_of_eight_bits_are_judged_as_others_are(dtype: torch.dtype) -> None:
    """PyTorch has no norms of them, and not every version says which of them are finite."""
    plain, x = seeded(lambda: Narrow(dtype)), rows(2, 0)
    backend = ExpertBackend("e", seeded(lambda: Narrow(dtype)), adam, args_schema=(X,))
    ones, bad = torch.ones(2, 4).to(dtype), torch.full((2, 4), math.nan).to(dtype)
    answer, refused = backend.executor.backward([task(x, ones), task(rows(2, 1), bad)])
    assert good([answer]) and isinstance(refused, GradientError) and backend.steps == 1
    plain(x).backward(ones)
    adam(plain.parameters()).step()
    assert all(map(close, plain.parameters(), backend.module.parameters()))
    assert norm([ones]) == pytest.approx(math.sqrt(8))


class Hides(nn.Module):
    """A batch norm whose NaN nobody sees outside: neither outputs nor gradients have any."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.nan_to_num(self.norm(x)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_input_that_would_spoil_running_statistics_for_good_is_refused_alone(bad: float) -> None:
    one, other = [ExpertBackend("hides", seeded(Hides), adam, args_schema=(X,)) for _ in range(2)]
    spoiled = rows(2, 5)
    spoiled[1, 2] = bad
    fine = [task(rows(2, seed), rows(2, seed + 9)) for seed in range(2)]
    answers = one.executor.backward([fine[0], task(spoiled, rows(2, 7), client="eve"), fine[1]])
    wanted = good(other.executor.backward(fine))
    refused = answers.pop(1)
    assert isinstance(refused, GradientError)
    assert "running_mean, running_var" in str(refused) and "'eve'" in refused.__notes__[0]
    assert all(torch.equal(one[0], two[0]) for one, two in zip(good(answers), wanted, strict=True))
    assert weights(one) == weights(other) and one.statistics().refused_gradients == {"gradient": 1}


def test_statistics_that_are_not_finite_already_refuse_nobody() -> None:
    backend = ExpertBackend("hides", seeded(Hides), adam, args_schema=(X,))
    for buffer in (backend.module.norm.running_mean, backend.module.norm.running_var):
        buffer.fill_(math.inf)
    assert good(backend.executor.backward([task(rows(2, 0), rows(2, 1))])) and backend.steps == 1


def test_whoever_lets_everything_pass_gets_everything() -> None:
    backend = ExpertBackend("hides", seeded(Hides), adam, args_schema=(X,), guards=Guards(finite=False))
    assert good(backend.executor.backward([task(torch.full((2, 4), math.nan).double(), rows(2, 1))]))
    assert backend.module.norm.running_mean.isnan().all()


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_without_an_optimizer_not_even_running_statistics_change(value: float) -> None:
    backend = fussy_backend(norm=True, optimizer=None)
    before = weights(backend)
    assert good(backend.executor.backward([task(torch.full((2, 4), value).double(), rows(2, 1))]))
    assert weights(backend) == before
