"""Constructors refuse what makes no sense, all faults at once; parameters are made where and as asked."""

from itertools import product

import pytest
import torch

from tests.recurrent.recurrent_cases import at_once, close, told
from weft.core.errors import UsageError
from weft.core.pytree import flatten, map_leaves
from weft.recurrent import Recurrent, cells
from weft.recurrent.cells.gated import GatedCell


def test_all_faults_of_a_constructor_are_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"invalid arguments of ConvLSTMCell") as caught:
        cells.ConvLSTMCell(0, -1, kernel_size=2)
    assert told(caught) == [
        "input_size is 0, wanted an int of at least 1",
        "hidden_size is -1, wanted an int of at least 1",
        "kernel_size is 2, wanted an odd number, so that images keep their size",
    ]
    with pytest.raises(UsageError) as caught:
        cells.SequenceDropout(cells.LSTMCell(3, 4), inputs=-1.0, states=(2.0, 0.5))
    assert told(caught) == [
        "inputs is -1.0, wanted a number from 0 to 1",
        "states[0] is 2.0, wanted a number from 0 to 1",
    ]


def test_a_word_that_is_no_choice_is_refused() -> None:
    # The run-time type check of the tests would come first, so the function behind it is called.
    make = cells.ElmanCell.__init__.__wrapped__
    with pytest.raises(UsageError, match="nonlinearity is 'sine', wanted one of 'tanh', 'relu'"):
        make(cells.ElmanCell.__new__(cells.ElmanCell), 3, 4, True, "sine")
    make = cells.AttentionCell.__init__.__wrapped__
    with pytest.raises(UsageError, match="score is 'cosine', wanted one of 'additive', 'dot'"):
        make(cells.AttentionCell.__new__(cells.AttentionCell), cells.GRUCell(3, 4), 2, 4, 3, "cosine")


CELLS = sorted(
    (each for each in vars(cells).values() if isinstance(each, type) and issubclass(each, GatedCell)),
    key=lambda each: each.__name__,
)
ALSO = [*CELLS, cells.ConvLSTMCell]


def test_all_parameters_are_made_where_and_as_asked() -> None:
    for make, dtype in product(ALSO, (torch.float64, torch.bfloat16)):
        cell = make(3, 4, device="meta", dtype=dtype)
        assert {(each.device.type, each.dtype) for each in cell.parameters()} == {("meta", dtype)}


@at_once("make", CELLS)
def test_a_cell_begins_with_a_row_for_each_row_of_the_input_in_the_weights_dtype(make: type) -> None:
    state = make(3, 4, dtype=torch.float64).initial_state(torch.ones(5, 3, dtype=torch.int64))
    assert {(leaf.dtype, *leaf.shape) for leaf in flatten(state)[0]} == {(torch.float64, 5, 4)}
    *zeros, last = flatten(state)[0]
    assert not any(leaf.any() for leaf in zeros)
    assert make is cells.SLSTMCell or not last.any()


@pytest.mark.parametrize("make", [cells.LSTMCell, cells.RHNCell])
def test_a_sequence_without_rows_is_one_row(make: type) -> None:
    net = Recurrent(make(3, 4, dtype=torch.float64))
    x = torch.randn(5, 3, dtype=torch.float64)
    wanted = net(x.unsqueeze(1))
    close(net(x).outputs, wanted.outputs[:, 0])
    close(net(x).last, map_leaves(lambda leaf: leaf[0], wanted.last))


@at_once("make", ALSO)
def test_a_new_cell_has_finite_parameters_and_a_reset_draws_new_ones(make: type) -> None:
    cell = make(3, 4)
    before = [each.clone() for each in cell.parameters()]
    with torch.no_grad():
        for each in cell.parameters():
            each.fill_(torch.nan)
    cell.reset_parameters()
    assert all(each.isfinite().all() for each in [*before, *cell.parameters()])
    assert not all(torch.equal(one, other) for one, other in zip(before, cell.parameters(), strict=True))


@at_once(
    "make",
    [
        lambda: cells.LSTMCell(3, 4, recurrent_dropout=1.5),
        lambda: cells.GRUCell(3, 4, recurrent_dropout=-0.5),
        lambda: cells.RHNCell(3, 4, depth=0),
        lambda: cells.SLSTMCell(3, 4, heads=3),
        lambda: cells.SLSTMCell(3, 4, heads=0),
        lambda: cells.Zoneout(cells.GRUCell(3, 4), (0.5, "0.5")),
        *(lambda make=make: make(3, 0) for make in ALSO),
    ],
)
def test_what_makes_no_sense_is_refused(make) -> None:
    with pytest.raises(UsageError, match="invalid arguments of"):
        make()
