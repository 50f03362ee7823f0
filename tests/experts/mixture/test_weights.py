"""Weights and losses follow their formulas, and their gradients reach the router."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.mixture.mixture_cases import numbers
from torchweft.experts.mixture.routing import load_balancing_loss, weighted_mean, weights_of_answered


@given(st.integers(1, 5), st.integers(0, 4), st.data())
def test_weights_are_a_softmax_over_the_answers(samples: int, k: int, data: st.DataObject) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=samples * k, max_size=samples * k))
    alive = torch.tensor(flags, dtype=torch.bool).view(samples, k)
    scores = numbers(samples, k).requires_grad_()
    weights = weights_of_answered(scores, alive)
    (weights**2).sum().backward()
    assert scores.grad is not None and bool(scores.grad.isfinite().all())
    for row, mine, mask, gradient in zip(scores.detach(), weights.detach(), alive, scores.grad, strict=True):
        torch.testing.assert_close(mine[mask], row[mask].softmax(0))
        assert not mine[~mask].any() and not gradient[~mask].any()


@pytest.mark.parametrize("inner", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16])
def test_a_weighted_mean_keeps_shape_and_dtype(inner: tuple[int, ...], dtype: torch.dtype) -> None:
    outputs, weights = numbers(4, 3, *inner).to(dtype), numbers(4, 3, seed=1)
    seen = weighted_mean(outputs, weights)
    by_hand = (outputs * weights.to(dtype).view(4, 3, *[1] * len(inner))).sum(1)
    assert seen.dtype is dtype and seen.shape == (4, *inner)
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(seen, by_hand, **loose)


def test_balancing_loss_is_one_if_balanced() -> None:
    chosen = torch.arange(8)[:, None] % 4
    assert float(load_balancing_loss(torch.full((8, 4), 0.25, dtype=torch.float64), chosen)) == 1.0
    lonely = torch.zeros(8, 4, dtype=torch.float64)
    lonely[:, 2] = 1.0
    assert float(load_balancing_loss(lonely, torch.full((8, 1), 2))) == 4.0
    for dtype in (torch.float64, torch.float32):  # as exact as the probabilities
        probabilities, chosen = torch.rand(3, 3, dtype=dtype).softmax(1), torch.tensor([[0], [1], [0]])
        share = torch.tensor([2, 1, 0], dtype=dtype) / 3  # thirds have no exact float
        assert torch.equal(load_balancing_loss(probabilities, chosen), 3 * (share * probabilities.mean(0)).sum())


def test_balancing_loss_balances_experts() -> None:
    scores = (numbers(64, 4) + torch.tensor([3.0, 0.0, 0.0, 0.0], dtype=torch.float64)).requires_grad_()
    busiest: list[int] = []
    for _ in range(60):
        probabilities = scores.softmax(1)
        chosen = probabilities.detach().topk(1, dim=1).indices
        busiest.append(int(torch.bincount(chosen[:, 0], minlength=4).max()))
        (gradient,) = torch.autograd.grad(load_balancing_loss(probabilities, chosen), scores)
        assert bool(gradient.abs().sum() > 0)
        scores = (scores - 200 * gradient).detach().requires_grad_()
    assert busiest[0] > 50 and min(busiest) < 32
