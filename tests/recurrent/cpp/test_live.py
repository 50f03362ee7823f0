"""Products skip the rows that do not count, where that changes nothing; and everything else is as in the eager loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, needs_compiler, planned, run_by
from weft.recurrent import Recurrent, cells
from weft.recurrent.cpp.backend import NativeEngine
from weft.recurrent.cpp.partitioner import Halves

pytestmark = needs_compiler
T, N, D = 7, 5, 4
Pair = tuple[Tensor, Tensor]


class Step(nn.Module):
    """``h' = function(x W + h U, h)``, which is also the output."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.w, self.u = nn.Linear(D, D, bias=bias), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        h = self.function(self.w(x) + self.u(h), h)
        return h, h

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), D)


def found(net: Recurrent, **call: Tensor) -> tuple[int, int]:
    """How many products skip rows, and how many sums of them."""
    net(torch.randn(T, N, D, dtype=torch.float64).requires_grad_(), **call)
    (choice,) = net._plans._known.values()
    assert isinstance(choice.engine, NativeEngine), choice.why
    live = Halves(choice.engine.captured).live
    return len(live.products), len(live.totals)


CELLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "LSTM": (lambda: cells.LSTMCell(D, D), (4, 2)),
    "GRU": (lambda: cells.GRUCell(D, D), (4, 2)),
    "reset before GRU": (lambda: cells.ResetBeforeGRUCell(D, D), (6, 3)),
    "a gate": (lambda: Step(lambda z, h: torch.tanh(z)), (4, 2)),
    "a gate that may be infinite": (lambda: Step(lambda z, h: h + 1 / (z + 9)), (2, 2)),
}


@pytest.mark.parametrize(("make", "wanted"), CELLS.values(), ids=CELLS)
def test_products_skip_rows_past_their_length_where_nobody_wants_them(
    make: Callable[[], nn.Module], wanted: tuple[int, int]
) -> None:
    net = planned(make().double(), "c")
    assert found(net, lengths=torch.tensor([7, 3, 0, 5, 1])) == wanted


def test_where_rows_meet_only_the_gradient_of_padding_is_skipped() -> None:
    net = planned(Step(lambda z, h: torch.tanh(z - z.mean(0))).double(), "c", verify="never")
    assert found(net, lengths=torch.tensor([7, 3, 0, 5, 1])) == (1, 0)


def test_without_padding_and_with_resets_alone_nothing_is_skipped() -> None:
    assert found(planned(cells.LSTMCell(D, D).double(), "c")) == (0, 0)
    resets = torch.rand(T, N) < 0.3
    resets[0, 0] = True
    assert found(planned(cells.LSTMCell(D, D).double(), "c"), reset=resets) == (0, 0)


@pytest.mark.parametrize(("memory", "mask"), [("full", "lengths"), ("sqrt", "holes"), ("states", "nothing counts")])
@pytest.mark.parametrize("make", [each for each, _ in CELLS.values()], ids=CELLS)
def test_with_rows_skipped_all_is_as_in_the_eager_loop(make: Callable[[], nn.Module], mask: str, memory: str) -> None:
    cell = make().double()
    valid = torch.arange(T)[:, None] < torch.tensor([7, 3, 0, 5, 1]) if mask == "lengths" else torch.rand(T, N) < 0.5
    valid = valid & (mask != "nothing counts")
    x = torch.randn(T, N, D, dtype=torch.float64).masked_fill(~valid[..., None], torch.nan).requires_grad_()
    results = []
    for net in (planned(cell, "c", memory=memory), eagerly(cell)):
        result = net(x, mask=valid)
        ends = [result.outputs, *(result.last if isinstance(result.last, tuple) else [result.last])]
        gradients = torch.autograd.grad(sum(each.sin().sum() for each in ends), [x, *cell.parameters()])
        results.append((ends, gradients))
    close(results[0], results[1], 1e-11)
    net = planned(cell, "c", memory=memory)
    net(x, mask=valid)
    assert run_by(net) == {"c"}


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_infinite_where_nothing_was_computed_leaks_nowhere(bias: bool) -> None:
    cell = Step(lambda z, h: h / (z * z + h * h).sqrt() + torch.log(z * z), bias).double()
    x = torch.randn(T, N, D, dtype=torch.float64).requires_grad_()
    results = []
    for net in (planned(cell, "c"), eagerly(cell)):
        outputs = net(x, torch.ones(N, D).double(), lengths=torch.tensor([7, 3, 0, 5, 1])).outputs
        results.append((outputs, torch.autograd.grad(outputs.sum(), [x, *cell.parameters()])))
    assert all(each.isfinite().all() for each in results[0][1])
    close(results[0], results[1], 1e-9)


def test_an_axis_as_long_as_there_are_rows_is_not_taken_for_the_rows() -> None:
    """A row of numbers, one for each row of the batch, is added to the columns: every row wants all of it."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.u = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))

        def forward(self, x: Tensor, h: Tensor) -> Pair:
            h = torch.tanh(torch.addmm((h @ self.u).sum(1), x, self.w))
            return h, h

    cell, found_by = Mixing().double(), []
    x, h = torch.randn(T, D, D, dtype=torch.float64).requires_grad_(), torch.randn(D, D, dtype=torch.float64)
    for net in (planned(cell, "c"), eagerly(cell)):
        outputs = net(x, h, lengths=torch.tensor([7, 3, 0, 5])).outputs
        found_by.append((outputs, torch.autograd.grad(outputs.sin().sum(), [x, cell.w, cell.u])))
    close(found_by[0], found_by[1], 1e-11)
