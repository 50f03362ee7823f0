"""The C++ text: what runs step by step, and bits that do not depend on threads, chunks or memory."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.cells_for_tests import CASES, Case, Told, engine_of
from tests.recurrent.recurrent_cases import needs_compiler
from weft.core.pytree import flatten
from weft.recurrent import Recurrent
from weft.recurrent.backends import Memory
from weft.recurrent.cpp import backend
from weft.recurrent.cpp.backend import CppBackend

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


class Contrived(NamedTuple):
    """A step, the shapes of its weights, and of its states; one that is of integers has the shape None."""

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
    "nothing of anything": Contrived(
        lambda c, x, h: twice(torch.tanh(h + x[:, :0] @ c.w + c.u[:, :0].sum(1))), {"w": (0, HIDDEN), "u": (HIDDEN, 2)}
    ),
}


def states_of(case: Contrived) -> Any:
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


@pytest.mark.parametrize("name", CONTRIVED)
def test_a_cell_at_the_edge_is_equal_to_the_eager_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CONTRIVED[name]
    torch.manual_seed(0)
    cell = Cell(case.step, **case.weights)
    x, state = torch.randn(STEPS, case.rows, WIDTH).double().requires_grad_(), states_of(case)
    wanted = found(cell, x, state, backend="eager")
    seen = found(cell, x, state, backend="c", verify="never")
    for one, other in zip(seen, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(backend, "MIN_PARALLEL_OPERATIONS", -1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for memory in MEMORIES:
        again = found(cell, x, state, backend="c", memory=memory, verify="never")
        assert all(torch.equal(one, other) for one, other in zip(again, seen, strict=True)), f"{memory}, by 3 threads"


DOWN, UP = "for (long t = steps - 1; t >= 0; t--) {", "for (long t = 0; t < steps; t++) {"


def function(engine: CppBackend, name: str) -> str:
    """The text of one of the three functions."""
    return engine.compiled.text.split(f'extern "C" void {name}(')[1].split('extern "C" void ')[0]


def block(text: str, head: str) -> str:
    """What stands between the braces behind `head`, which is there once."""
    assert text.count(head) == 1
    inside, depth = text.split(head)[1], 1
    for at, letter in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return inside[:at]
    raise AssertionError("the braces do not match")


def wide(make: Callable[[], nn.Module], states: int) -> Case:
    cell = Told(make()).double()
    state = tuple(torch.randn(5, 4).double() for _ in range(states))
    return Case(cell, torch.randn(5, 3).double(), state if states > 1 else state[0], list(cell.parameters()))


CLASSIC = {
    "LSTM": lambda: wide(lambda: nn.LSTMCell(3, 4), 2),
    "GRU": lambda: wide(lambda: nn.GRUCell(3, 4), 1),
    "RNN": lambda: wide(lambda: nn.RNNCell(3, 4), 1),
}


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
def test_each_loop_of_the_classic_cells_holds_one_matrix_product_and_no_gradient_of_a_parameter(
    make: Callable[[], Case],
) -> None:
    engine = engine_of("c", make())
    for name, head in (("forward", UP), ("backward", DOWN)):
        loop = block(function(engine, name), head)
        assert len(re.findall(r"\bw_product\(", loop)) == 1
        assert not re.findall(r"\b(w_gather|w_columns|w_small|dp\d)", loop)


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
def test_a_weights_gradient_is_one_product_over_all_steps_after_the_loop(make: Callable[[], Case]) -> None:
    text = function(engine_of("c", make()), "backward")
    behind = text.split(DOWN)[1]
    assert len(re.findall(r"\bw_gather\(.*\* steps", behind)) == 2, "one for each weight"
    assert len(re.findall(r"\bw_columns\(", behind)) >= 1, "and sums of rows for the biases"


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
def test_what_is_made_again_from_known_states_carries_nothing(make: Callable[[], Case]) -> None:
    text = function(engine_of("c", make()), "recompute")
    assert UP not in text and DOWN not in text, "threads take steps, since steps are apart"


def test_the_text_does_not_depend_on_values() -> None:
    case = CASES["LSTM"]()
    one, other = engine_of("c", case), engine_of("c", case._replace(x=torch.randn_like(case.x)))
    assert one.compiled.text == other.compiled.text
