"""Constructors refuse sizes and rates that are none, all faults at once."""

import pytest

from tests.recurrent.recurrent_cases import at_once, told
from weft.core.errors import UsageError
from weft.recurrent import cells


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


@at_once(
    "make",
    [
        lambda: cells.LSTMCell(3, 4, recurrent_dropout=1.5),
        lambda: cells.GRUCell(3, 4, recurrent_dropout=-0.5),
        lambda: cells.RHNCell(3, 4, depth=0),
        lambda: cells.SLSTMCell(3, 4, heads=3),
        lambda: cells.SLSTMCell(3, 4, heads=0),
        lambda: cells.Zoneout(cells.GRUCell(3, 4), (0.5, "0.5")),
    ],
)
def test_what_makes_no_sense_is_refused(make) -> None:
    with pytest.raises(UsageError, match="invalid arguments of"):
        make()


def test_a_word_that_is_no_choice_is_refused() -> None:
    # The run-time type check of the tests would come first, so the function behind it is called.
    make = cells.ElmanCell.__init__.__wrapped__
    with pytest.raises(UsageError, match="nonlinearity is 'sine', wanted one of 'tanh', 'relu'"):
        make(cells.ElmanCell.__new__(cells.ElmanCell), 3, 4, True, "sine")
    make = cells.AttentionCell.__init__.__wrapped__
    with pytest.raises(UsageError, match="score is 'cosine', wanted one of 'additive', 'dot'"):
        make(cells.AttentionCell.__new__(cells.AttentionCell), cells.GRUCell(3, 4), 2, 4, 3, "cosine")
