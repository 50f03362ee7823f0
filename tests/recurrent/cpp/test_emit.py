"""Cells at the edges of what loops do: equal to the eager loop, whoever computes, and however memory is kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import needs_compiler
from weft.core.tree import flatten
from weft.recurrent import Recurrent
from weft.recurrent.cpp import backend as engine
from weft.recurrent.memory import Memory

pytestmark = needs_compiler
ROWS, STEPS, WIDTH, HIDDEN = 6, 7, 3, 4
MEMORIES: tuple[Memory, ...] = ("full", "states")


class Cell(nn.Module):
    """A function of weights, an input and a state."""

    def __init__(self, step: Callable[[Any, Tensor, Any], tuple[Any, Any]], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.step = step
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).double()))

    def forward(self, x: Tensor, state: Any) -> tuple[Any, Any]:
        return self.step(self, x, state)


def twice(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y


class Case(NamedTuple):
    """A step, the shapes of its weights, and of its states; one that is of integers has the shape None."""

    step: Callable[[Any, Tensor, Any], tuple[Any, Any]]
    weights: dict[str, tuple[int, ...]]
    states: tuple[tuple[int, ...] | None, ...] = ((ROWS, HIDDEN),)
    rows: int = ROWS


W = {"w": (WIDTH, HIDDEN)}
TWO = ((ROWS, HIDDEN), (ROWS, HIDDEN))

CASES: dict[str, Case] = {
    "the carried gradient is read after the loop": Case(lambda c, x, h: (h * 2, h + x @ c.w), W),
    "a state that is handed on is multiplied by a weight": Case(
        lambda c, x, s: ((y := torch.tanh(x @ c.w + s[0] + (s[1] @ c.u).mean(0))), (y, s[1])), W | {"u": (4, 4)}, TWO
    ),
    "a state that is handed on is multiplied by itself": Case(
        lambda c, x, s: ((y := torch.tanh(s[0] + x @ c.w @ (s[1].t() @ s[1]))), (y, s[1])), W, TWO
    ),
    "a state that is not read": Case(lambda c, x, s: ((y := torch.tanh(x @ c.w + s[0])), (y, torch.exp(-y))), W, TWO),
    "each thread needs a mean over the batch of the input": Case(
        lambda c, x, h: twice(torch.tanh(h * (x * c.w).exp().mean(0).pow(2).sum() + x[:, :1])), {"w": (WIDTH,)}
    ),
    "one weight, used twice and transposed": Case(
        lambda c, x, h: twice(torch.tanh(nn.functional.linear(x, c.w, c.b) + h @ c.w + c.b)),
        {"w": (3, 3), "b": (3,)},
        ((ROWS, 3),),
    ),
    "rows meet": Case(lambda c, x, h: twice(torch.tanh(x @ c.w + torch.cat([h[1:], h[:1]]))), W),
    "rows are shifted in a view": Case(
        lambda c, x, h: twice(torch.tanh(x @ c.w + torch.stack([h, h * 2]).reshape(-1, HIDDEN)[1 : ROWS + 1])), W
    ),
    "rows meet, and a state is not read": Case(
        lambda c, x, s: (s[0] * 2, (torch.tanh(x @ c.w + torch.cat([s[0][1:], s[0][:1]])), s[0] * 3)), W, TWO
    ),
    "rows meet in a product": Case(lambda c, x, h: twice(torch.tanh(x @ c.w + 0.1 * (h @ h.t()) @ h)), W),
    "rows are columns": Case(
        lambda c, x, h: twice(torch.tanh(torch.addmm(h.t(), c.w, x.t()).t())), {"w": (HIDDEN, WIDTH)}
    ),
    "the new state is a join of the old one alone": Case(
        lambda c, x, h: twice(torch.cat([h, x[:, :0]], 1) * c.w), {"w": (1,)}
    ),
    "the old state is joined as it is": Case(lambda c, x, h: (h * c.w, torch.cat([h, x[:, :0]], 1)), {"w": (1,)}),
    "states change places": Case(lambda c, x, s: (s[0] * 1, (torch.tanh(s[1] + x @ c.w), s[0])), W, TWO),
    "a state without axes": Case(lambda c, x, h: twice(torch.tanh(h + (x @ c.w).sum())), {"w": (WIDTH,)}, ((),)),
    "a state of integers": Case(
        lambda c, x, s: (s[0] * c.w, (s[0] * 0.5 + (~s[1]).double()[:, None] * x[:, :1], s[1] * 5 + 1)),
        {"w": (HIDDEN,)},
        ((ROWS, HIDDEN), None),
    ),
    "a weight in batches": Case(
        lambda c, x, h: twice(
            torch.tanh(torch.bmm(h.view(ROWS, 2, 2).transpose(0, 1), c.w).transpose(0, 1).reshape(ROWS, 4))
        ),
        {"w": (2, 2, 2)},
    ),
    "one row": Case(
        lambda c, x, h: twice(torch.tanh(x @ c.w + h @ c.u + c.b)), W | {"u": (4, 4), "b": (4,)}, ((1, 4),), 1
    ),
    "nothing of anything": Case(
        lambda c, x, h: twice(torch.tanh(h + x[:, :0] @ c.w + c.u[:, :0].sum(1))), {"w": (0, HIDDEN), "u": (HIDDEN, 2)}
    ),
}


def states_of(case: Case) -> Any:
    made = [
        torch.arange(ROWS) - 2 if shape is None else torch.randn(shape).double().requires_grad_()
        for shape in case.states
    ]
    return made[0] if len(made) == 1 else tuple(made)


def found(cell: nn.Module, x: Tensor, state: Any, **options: Any) -> list[Tensor]:
    """Outputs, all states, and all gradients."""
    net = Recurrent(cell, **options)
    result = net(x, state)
    if options["backend"] == "c":
        assert net.why()[0][1] == "c", net.why()
    ends = [each for each in flatten((result.outputs, result.last, result.states))[0] if isinstance(each, Tensor)]
    wants = [x, *(each for each in flatten(state)[0] if each.requires_grad), *cell.parameters()]
    roots = [each for each in ends if each.requires_grad]
    seeds = [torch.linspace(0.5, 1.5, each.numel()).double().view_as(each) for each in roots]
    gradients = torch.autograd.grad(roots, wants, seeds, allow_unused=True)
    zeros = [torch.zeros_like(want) if each is None else each for want, each in zip(wants, gradients, strict=True)]
    return [*(each.detach() for each in ends), *zeros]


@pytest.mark.parametrize("name", CASES)
def test_a_cell_at_the_edge_is_equal_to_the_eager_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    cell = Cell(case.step, **case.weights)
    x, state = torch.randn(STEPS, case.rows, WIDTH).double().requires_grad_(), states_of(case)
    wanted = found(cell, x, state, backend="eager")
    seen = found(cell, x, state, backend="c", verify="never")
    for one, other in zip(seen, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(engine, "WORTH", -1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for memory in MEMORIES:
        again = found(cell, x, state, backend="c", memory=memory, verify="never")
        assert all(torch.equal(one, other) for one, other in zip(again, seen, strict=True)), f"{memory}, by 3 threads"
