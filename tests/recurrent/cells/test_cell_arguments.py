"""Constructors reject invalid arguments, all at once, and create parameters with the requested dtype and device."""

import pytest
import torch

from tests.recurrent.recurrent_cases import at_once, close, fault_lines
from torchweft.core.errors import UsageError
from torchweft.core.pytree import flatten, map_leaves
from torchweft.recurrent import Recurrent, cells
from torchweft.recurrent.cells.gated import GatedCell


def test_all_faults_of_a_constructor_are_listed() -> None:
    with pytest.raises(UsageError, match=r"invalid arguments of ConvLSTMCell") as caught:
        cells.ConvLSTMCell(0, -1, kernel_size=2)
    assert fault_lines(caught) == [
        "input_size is 0, wanted an int of at least 1",
        "hidden_size is -1, wanted an int of at least 1",
        "kernel_size is 2, wanted an odd number, so that images keep their size",
    ]
    with pytest.raises(UsageError) as caught:
        cells.SequenceDropout(cells.LSTMCell(3, 4), inputs=-1.0, states=(2.0, 0.5))
    assert fault_lines(caught) == [
        "inputs is -1.0, wanted a number from 0 to 1",
        "states[0] is 2.0, wanted a number from 0 to 1",
    ]


def test_unknown_choices_are_rejected() -> None:
    # Call the wrapped function, because the run-time type check of the tests would fail first.
    make = cells.ElmanCell.__init__.__wrapped__
    with pytest.raises(UsageError, match="nonlinearity is 'sine', wanted one of 'tanh', 'relu'"):
        make(cells.ElmanCell.__new__(cells.ElmanCell), 3, 4, True, "sine")
    make = cells.AttentionCell.__init__.__wrapped__
    with pytest.raises(UsageError, match="score is 'cosine', wanted one of 'additive', 'dot'"):
        make(cells.AttentionCell.__new__(cells.AttentionCell), cells.GRUCell(3, 4), 2, 4, 3, "cosine")


CELLS = sorted(
    (cell for cell in vars(cells).values() if isinstance(cell, type) and issubclass(cell, GatedCell)),
    key=lambda cell: cell.__name__,
)
WITH_IMAGES = [*CELLS, cells.ConvLSTMCell]


@at_once("make", WITH_IMAGES)
def test_parameters_have_dtype_and_device_and_can_be_reset(make: type) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        cell = make(3, 4, device="meta", dtype=dtype)
        assert {(parameter.device.type, parameter.dtype) for parameter in cell.parameters()} == {("meta", dtype)}
    cell = make(3, 4)
    before = [parameter.clone() for parameter in cell.parameters()]
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.fill_(torch.nan)
    cell.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in [*before, *cell.parameters()])
    assert not all(map(torch.equal, before, cell.parameters())), "drawn again"


@at_once("make", CELLS)
def test_initial_states_have_rows_and_the_dtype_of_weights(make: type) -> None:
    state = make(3, 4, dtype=torch.float64).initial_state(torch.ones(5, 3, dtype=torch.int64))
    *zeros, last = flatten(state)[0]
    assert {(leaf.dtype, *leaf.shape) for leaf in (*zeros, last)} == {(torch.float64, 5, 4)}
    assert not any(leaf.any() for leaf in zeros)
    assert make is cells.SLSTMCell or not last.any()


@pytest.mark.parametrize("make", [cells.LSTMCell, cells.RHNCell])
def test_a_sequence_without_rows_is_one_row(make: type) -> None:
    net = Recurrent(make(3, 4, dtype=torch.float64))
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = net(x.unsqueeze(1))
    close(net(x).outputs, expected.outputs[:, 0])
    close(net(x).last, map_leaves(lambda leaf: leaf[0], expected.last))


@at_once(
    "make",
    [
        lambda: cells.LSTMCell(3, 4, recurrent_dropout=1.5),
        lambda: cells.GRUCell(3, 4, recurrent_dropout=-0.5),
        lambda: cells.RHNCell(3, 4, depth=0),
        lambda: cells.SLSTMCell(3, 4, heads=3),
        lambda: cells.SLSTMCell(3, 4, heads=0),
        lambda: cells.Zoneout(cells.GRUCell(3, 4), (0.5, "0.5")),
        *(lambda make=make: make(3, 0) for make in WITH_IMAGES),
    ],
)
def test_invalid_arguments_are_rejected(make) -> None:
    with pytest.raises(UsageError, match="invalid arguments of"):
        make()
