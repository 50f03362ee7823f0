"""What runs step by step and what in bulk: the structure of well-known cells."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.cells_for_tests import Told
from tests.recurrent.recurrent_cases import eagerly, needs_compiler, planned, run_by
from weft.recurrent import cells
from weft.recurrent.capture import capture
from weft.recurrent.cpp.decompositions import composed
from weft.recurrent.cpp.ir import Point, Product, Reduce, Ref, Total, Value, sources
from weft.recurrent.cpp.lowering import Build, build
from weft.recurrent.cpp.scheduling import order

ROWS, INPUT, HIDDEN = 6, 3, 5


def built(cell: nn.Module) -> Build:
    x = torch.zeros(ROWS, INPUT)
    state = torch.zeros(ROWS, HIDDEN)
    return build(capture(cell, x, (state, state) if "LSTM" in repr(cell) else state, composed=composed()))


CELLS = {
    "torch's LSTM": (lambda: Told(nn.LSTMCell(INPUT, HIDDEN)), 4),
    "torch's GRU": (lambda: Told(nn.GRUCell(INPUT, HIDDEN)), 4),
    "torch's RNN": (lambda: Told(nn.RNNCell(INPUT, HIDDEN)), 4),
    "zoo's LSTM": (lambda: cells.LSTMCell(INPUT, HIDDEN), 3),
    "zoo's GRU": (lambda: cells.GRUCell(INPUT, HIDDEN), 4),
    "layer norm LSTM": (lambda: cells.LayerNormLSTMCell(INPUT, HIDDEN), 3),
}
every = pytest.mark.parametrize("name", CELLS)


def products(values: Sequence[Value]) -> int:
    return sum(isinstance(each.made, Product) for each in values)


@every
def test_a_loop_holds_one_product_and_no_gradient_of_a_parameter(name: str) -> None:
    it = built(CELLS[name][0]())
    for function in (it.forward, it.backward):
        (main,) = [each for each in function.phases.phases if each.main]
        assert products(main.loop) == 1
        assert not any(isinstance(each.made, Total) for each in main.loop)


@every
def test_rows_of_the_batch_never_meet_so_threads_may_take_some_each(name: str) -> None:
    it = built(CELLS[name][0]())
    assert order(it.forward).axes is not None and order(it.backward).axes is not None


@every
def test_a_weights_gradient_is_a_product_and_a_biass_a_sum_of_rows(name: str) -> None:
    kinds = [
        type(value.made.of) for value, _ in built(CELLS[name][0]()).backward.totals if isinstance(value.made, Total)
    ]
    assert kinds.count(Product) == 2 and Ref not in kinds and set(kinds) <= {Product, Reduce}


@every
def test_where_all_states_are_known_no_loop_carries(name: str) -> None:
    again = built(CELLS[name][0]()).again
    assert not any(each.main for each in again.phases.phases)
    assert products([value for each in again.phases.phases for value in each.bulk]) == products(again.values)


@every
def test_a_phase_reads_only_what_was_made_before(name: str) -> None:
    for function in built(CELLS[name][0]()).functions:
        done = set(function.homes) - set(function.values)
        for step in order(function).steps:
            for made in [[each] for each in step.bulk] + list(step.groups):
                for value in made:
                    reads = sources(value.made)
                    assert all(each in done or (each in made and isinstance(value.made, Point)) for each in reads)
                    done.add(value)


def test_gates_before_their_functions_are_never_stored_and_pieces_are_made_in_place() -> None:
    it = built(cells.LSTMCell(INPUT, HIDDEN))
    stored = [each for step in order(it.forward).steps for group in step.groups for each in group if len(group) > 1]
    assert sum(it.forward.stored(each, stored) for each in stored) == 7  # 5 that backward reads, h and c
    assert len(it.backward.slots) == 4  # the gates' gradients, within their concatenation


@needs_compiler
@pytest.mark.parametrize("products", [1, 2])
def test_a_carried_gradient_that_is_known_before_the_main_loop_is_passed_on_within_it(products: int) -> None:
    torch.manual_seed(0)
    weights = nn.ParameterList([torch.randn(3, 3).double() for _ in range(products)])

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
            h, c = state
            y = x + c
            for weight in self.weights:
                y = (y if products > 1 else x) @ weight
            y = y if products > 1 else y + c
            return (y, y + h), (0.7 * h, 0.5 * h)

    x, h, c = (torch.randn(*size, 2, 3).double().requires_grad_() for size in ([4], [], []))
    net, found = planned(Cell(), "c"), []
    for each in (eagerly(Cell()), net):
        one, other = each(x, (h, c)).outputs
        found.append(torch.autograd.grad(one.sin().sum() + other.cos().sum(), [x, h, c, *weights]))
    assert run_by(net) == {"c"}
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
