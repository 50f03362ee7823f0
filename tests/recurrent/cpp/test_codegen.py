"""Unusual cells in compiled loops give the results of the eager loop, for any threads, chunks and memory mode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, equal, needs_compiler, outcome, planned
from tests.recurrent.step_cases import CASES, engine_of
from torchweft.recurrent.cpp import cpp_backend

pytestmark = [needs_compiler, pytest.mark.usefixtures("optimized_cells")]


ROWS, STEPS, WIDTH, HIDDEN = 6, 7, 3, 4


class Cell(nn.Module):
    """A step from weights, input and state to output and new state."""

    def __init__(self, step: Callable[[Any, Tensor, Any], tuple[Any, Any]], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.step = step
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).double()))

    def forward(self, x: Tensor, state: Any) -> tuple[Any, Any]:
        return self.step(self, x, state)


def twice(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y


class Contrived(NamedTuple):
    """A step, and the shapes of its weights and states. None stands for a state of integers."""

    step: Callable[[Any, Tensor, Any], tuple[Any, Any]]
    weights: dict[str, tuple[int, ...]]
    states: tuple[tuple[int, ...] | None, ...] = ((ROWS, HIDDEN),)
    rows: int = ROWS


W = {"w": (WIDTH, HIDDEN)}
TWO = ((ROWS, HIDDEN), (ROWS, HIDDEN))

CONTRIVED: dict[str, Contrived] = {
    "the carried gradient is read after the loop": Contrived(lambda c, x, h: (h * 2, h + x @ c.w), W),
    "a state that is handed on is multiplied by a weight": Contrived(
        lambda c, x, s: ((y := torch.tanh(x @ c.w + s[0] + (s[1] @ c.u).mean(0))), (y, s[1])), W | {"u": (4, 4)}, TWO
    ),
    "a state that is handed on is multiplied by itself": Contrived(
        lambda c, x, s: ((y := torch.tanh(s[0] + x @ c.w @ (s[1].t() @ s[1]))), (y, s[1])), W, TWO
    ),
    "a state that is not read": Contrived(
        lambda c, x, s: ((y := torch.tanh(x @ c.w + s[0])), (y, torch.exp(-y))), W, TWO
    ),
    "each thread needs a mean over the batch of the input": Contrived(
        lambda c, x, h: twice(torch.tanh(h * (x * c.w).exp().mean(0).pow(2).sum() + x[:, :1])), {"w": (WIDTH,)}
    ),
    "one weight, used twice and transposed": Contrived(
        lambda c, x, h: twice(torch.tanh(nn.functional.linear(x, c.w, c.b) + h @ c.w + c.b)),
        {"w": (3, 3), "b": (3,)},
        ((ROWS, 3),),
    ),
    "rows meet": Contrived(lambda c, x, h: twice(torch.tanh(x @ c.w + torch.cat([h[1:], h[:1]]))), W),
    "rows are shifted in a view": Contrived(
        lambda c, x, h: twice(torch.tanh(x @ c.w + torch.stack([h, h * 2]).reshape(-1, HIDDEN)[1 : ROWS + 1])), W
    ),
    "rows meet, and a state is not read": Contrived(
        lambda c, x, s: (s[0] * 2, (torch.tanh(x @ c.w + torch.cat([s[0][1:], s[0][:1]])), s[0] * 3)), W, TWO
    ),
    "rows meet in a product": Contrived(lambda c, x, h: twice(torch.tanh(x @ c.w + 0.1 * (h @ h.t()) @ h)), W),
    "rows are columns": Contrived(
        lambda c, x, h: twice(torch.tanh(torch.addmm(h.t(), c.w, x.t()).t())), {"w": (HIDDEN, WIDTH)}
    ),
    "the new state is a join of the old one alone": Contrived(
        lambda c, x, h: twice(torch.cat([h, x[:, :0]], 1) * c.w), {"w": (1,)}
    ),
    "the old state is joined as it is": Contrived(lambda c, x, h: (h * c.w, torch.cat([h, x[:, :0]], 1)), {"w": (1,)}),
    "states change places": Contrived(lambda c, x, s: (s[0] * 1, (torch.tanh(s[1] + x @ c.w), s[0])), W, TWO),
    "a state without axes": Contrived(lambda c, x, h: twice(torch.tanh(h + (x @ c.w).sum())), {"w": (WIDTH,)}, ((),)),
    "a state of integers": Contrived(
        lambda c, x, s: (s[0] * c.w, (s[0] * 0.5 + (~s[1]).double()[:, None] * x[:, :1], s[1] * 5 + 1)),
        {"w": (HIDDEN,)},
        ((ROWS, HIDDEN), None),
    ),
    "a weight in batches": Contrived(
        lambda c, x, h: twice(
            torch.tanh(torch.bmm(h.view(ROWS, 2, 2).transpose(0, 1), c.w).transpose(0, 1).reshape(ROWS, 4))
        ),
        {"w": (2, 2, 2)},
    ),
    "one row": Contrived(
        lambda c, x, h: twice(torch.tanh(x @ c.w + h @ c.u + c.b)), W | {"u": (4, 4), "b": (4,)}, ((1, 4),), 1
    ),
    "a carried gradient is known before the main loop": Contrived(
        lambda c, x, s: (((y := x @ c.w + s[1]), y + s[0]), (0.7 * s[0], 0.5 * s[0])), W, TWO
    ),
    "a carried gradient comes out of a product before the main loop": Contrived(
        lambda c, x, s: (((y := (x @ c.w + s[1]) @ c.u), y + s[0]), (0.7 * s[0], 0.5 * s[0])), W | {"u": (4, 4)}, TWO
    ),
    "axes of size 0": Contrived(
        lambda c, x, h: twice(torch.tanh(h + x[:, :0] @ c.w + c.u[:, :0].sum(1))), {"w": (0, HIDDEN), "u": (HIDDEN, 2)}
    ),
}


SELDOM = (
    "a state that is handed on is multiplied by itself",
    "one weight, used twice and transposed",
    "rows are shifted in a view",
    "rows meet, and a state is not read",
    "rows are columns",
    "the old state is joined as it is",
    "states change places",
    "a weight in batches",
    "a carried gradient is known before the main loop",
)
"""Cells whose features occur in other cells too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in SELDOM else []) for name in CONTRIVED]
)
def test_unusual_cells_equal_the_eager_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CONTRIVED[name]
    torch.manual_seed(0)
    cell = Cell(case.step, **case.weights)
    x, states = torch.randn(STEPS, case.rows, WIDTH).double().requires_grad_(), []
    for shape in case.states:
        states.append(torch.arange(ROWS) - 2 if shape is None else torch.randn(shape).double().requires_grad_())
    state = states[0] if len(states) == 1 else tuple(states)
    result = outcome(as_the_loop(cell, "c", x, state, 1e-12, verify="never"), x, state)
    monkeypatch.setattr(cpp_backend, "MIN_PARALLEL_OPERATIONS", -1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for memory in ("full", "states"):
        again = outcome(planned(cell, "c", memory=memory, verify="never"), x, state)
        assert equal(again, result), f"{memory}, by 3 threads"


def test_text_does_not_depend_on_values() -> None:
    case = CASES["LSTM"]()
    one, other = engine_of("c", case), engine_of("c", case._replace(x=torch.randn_like(case.x)))
    assert one.compiled.text == other.compiled.text
