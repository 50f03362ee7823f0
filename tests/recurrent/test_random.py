"""A cell draws the same numbers under a plan as in the eager loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import (
    BACKENDS,
    as_the_loop,
    by_plan,
    close,
    eagerly,
    grid,
    outcome,
    planned,
    run_by,
)
from torchweft.core.errors import UsageError
from torchweft.recurrent.plan_cache import NoPlanWarning


class Drawing(nn.Module):
    """Adds random numbers of a function to its state."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = 0.5 * state + x * self.draw(x)
        return after, after


def _strided_buffers(x: Tensor) -> Tensor:
    table = torch.zeros(9, 8, dtype=x.dtype)
    table[:, :4].normal_()  # large contiguous tensors are drawn in another way
    table[:4].t().uniform_()
    return table[3 : 3 + len(x), : x.shape[1]]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "rand": lambda x: torch.rand(x.shape[1], dtype=x.dtype),
    "rand like, twice": lambda x: torch.rand_like(x) - torch.rand_like(x),
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randint": lambda x: torch.randint(5, x.shape),
    "normal": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "uniform": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "dropout, transposed": lambda x: (
        nn.functional.dropout(x.t(), 0.5).t() * nn.functional.dropout(x.t().contiguous()).t()
    ),
    "bernoulli, transposed": lambda x: torch.bernoulli(x.detach().t(), 0.5).t(),
    "strided buffers": _strided_buffers,
    "a draw within a draw's reach": lambda x: nn.functional.dropout(torch.randn_like(x).exp(), 0.3),
}


@grid(draw=DRAWS, backend=BACKENDS)
def test_same_seed_gives_the_numbers_of_the_eager_loop(draw: Callable[[Tensor], Tensor], backend: str) -> None:
    cell = Drawing(draw)
    x, state = torch.randn(5, 2, 3).double().requires_grad_(), torch.zeros(2, 3).double()
    net, results = planned(cell, backend), []
    for network in (eagerly(cell), net, net):  # the second call reuses its plan, without draws to make one
        results.append((outcome(network, x, state), torch.get_rng_state()))
    assert run_by(net) == {backend}
    for seen in results[1:]:
        close(seen[0], results[0][0])
        assert torch.equal(seen[1], results[0][1])


@pytest.mark.parametrize("training", [False, True])
def test_attention_and_rrelu_draw_only_in_training(training: bool) -> None:
    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        heads = [tensor.view(2, 1, 3, 4) for tensor in (x, x * h, h)]
        z = nn.functional.scaled_dot_product_attention(*heads, dropout_p=0.1 * training).view_as(h)
        after = nn.functional.rrelu(z, training=training) - 0.5 * h
        return after, after

    x, h = torch.randn(5, 2, 12).double(), torch.randn(2, 12).double().requires_grad_()
    if not training:
        as_the_loop(step, "python", x, h, 1e-12)
        return
    with pytest.warns(NoPlanWarning, match="draws random numbers"):
        planned(step, "python")(x, h)


@by_plan
def test_new_dropout_rate_or_mode_makes_a_new_plan(backend: str) -> None:
    cell = Drawing(nn.Dropout(0.5))
    net, x, state = planned(cell, backend), torch.randn(3, 2, 3).double(), torch.zeros(2, 3).double()
    for change in (lambda: None, lambda: setattr(cell.draw, "p", 0.1), cell.eval):
        change()
        close(outcome(net, x, state), outcome(eagerly(cell), x, state))
    assert len(net.why()) == 3 and run_by(net) == {backend}


@grid(rows=[1, 2], backend=BACKENDS)
def test_draws_follow_the_memory_layout(rows: int, backend: str) -> None:
    """Numbers are drawn in memory order, so a plan for row-major tensors would draw others for transposed ones."""
    weight = torch.randn(4, 4).double()

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        after = (
            nn.functional.dropout(h, 0.3) @ weight + nn.functional.dropout(x)
        ).tanh()  # has the layout of the product
        return after, after

    net, x, h = planned(cell, backend), torch.randn(5, rows, 4).double(), torch.randn(rows, 4).double()
    other_x = torch.randn(5, 4, rows).double().transpose(1, 2)
    other_h = torch.randn(4, rows).double().t()
    for given in ((x, h), (other_x, h), (x.transpose(0, 1).contiguous().transpose(0, 1), h.expand_as(h))):
        close(outcome(net, *given), outcome(eagerly(cell), *given))
    assert run_by(net) == {backend} and len(net.why()) == rows  # a single row has only one layout
    if rows == 1:
        close(outcome(net, x, other_h), outcome(eagerly(cell), x, other_h))
        return
    words = r"another memory layout than later ones.*\.contiguous\(\)"
    if backend == "c":
        with pytest.raises(UsageError, match=words):
            net(x, other_h)
        net.backend = "auto"
    with pytest.warns(NoPlanWarning, match=words):
        close(outcome(net, x, other_h), outcome(eagerly(cell), x, other_h))
