"""Which gradients are let at the weights."""

import math

import pytest
import torch

from weft.core.errors import UsageError
from weft.experts.errors import GradientError
from weft.experts.guards import Guards, norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_or_would_not_be_when_squared_is_refused(bad: float) -> None:
    gradients = [torch.ones(3), torch.tensor([0.0, bad])]
    with pytest.raises(GradientError, match="nothing was changed"):
        Guards().check_parameters(gradients)
    Guards(finite=False).check_parameters(gradients)
    Guards().check_parameters(gradients[:1])


def test_the_norm_is_that_of_all_together_and_sparse_ones_count() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    assert norm([torch.tensor([4.0]), sparse]) == pytest.approx(5.0)
    assert norm([]) == 0.0 and norm([torch.ones(2, dtype=torch.int64)]) == 0.0
    Guards(max_norm=5.0).check_parameters([torch.tensor([3.0, 4.0])])
    with pytest.raises(GradientError, match="have norm 5, wanted at most 4"):
        Guards(max_norm=4.0).check_parameters([torch.tensor([3.0, 4.0])])


def test_gradients_of_outputs_are_judged_by_task() -> None:
    guards = Guards(max_output_norm=1.0)
    assert guards.sound_outputs([torch.zeros(3)]) and not guards.sound_outputs([torch.ones(3)])
    assert guards.output_fault([torch.full((3,), 0.1)]) is None
    assert "norm 1.73" in str(guards.output_fault([torch.ones(3)]))
    assert "NaN or infinity" in str(guards.output_fault([torch.tensor(math.nan)]))
    assert Guards().output_fault([torch.full((2,), 3e38)]) is None  # each is finite: the batch's norm only asks
    with pytest.raises(UsageError) as caught:
        Guards(max_norm=0.0, max_output_norm=math.nan)
    assert len(str(caught.value).splitlines()) == 3
