"""Wrong arguments of a drop-in are told all at once, by an error that whoever expects torch's will catch."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from tests.recurrent.layers.layer_cases import HIDDEN, WIDTH, pair
from tests.recurrent.recurrent_cases import at_once, told
from weft.core.errors import SpecError
from weft.recurrent.layers.rnn import LayerInputError


def test_all_faults_are_told_at_once() -> None:
    _, ours = pair("LSTM", proj_size=2)
    with pytest.raises(LayerInputError) as caught:
        ours(torch.zeros(5, 2, 7), (torch.zeros(1, 3, 2), "c"))
    assert told(caught) == [
        "input has shape (5, 2, 7), wanted 3 (input_size) as its last size",
        "input is torch.float32, the weights are torch.float64; convert the input with .to(torch.float64) or the layer "
        "with .to(torch.float32)",
        "hx[0] has shape (1, 3, 2), wanted layers * directions x N x H = (1, 2, 2)",
        "hx[1] is 'c', wanted a tensor",
    ]


@at_once("kind", [SpecError, TypeError, ValueError, RuntimeError])
def test_the_error_is_what_torch_would_raise(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="wanted T x N x D, or T x D for one row"):
        pair("GRU")[1](torch.zeros(2, 2, 2, WIDTH).double())


def test_the_first_state_is_checked_against_the_form_of_the_input() -> None:
    _, ours = pair("GRU", batch_first=True)
    state = torch.zeros(1, 5, HIDDEN).double()
    with pytest.raises(LayerInputError, match=r"wanted layers \* directions x N x H = \(1, 2, 4\)"):
        ours(torch.zeros(2, 5, WIDTH).double(), state)
    with pytest.raises(LayerInputError, match=r"wanted layers \* directions x H = \(1, 4\)"):
        ours(torch.zeros(5, WIDTH).double(), state)
    packed = pack_padded_sequence(torch.zeros(5, 3, WIDTH).double(), torch.tensor([5, 2, 1]))
    with pytest.raises(LayerInputError, match=r"\(1, 3, 4\)"):
        ours(packed, state)


def test_other_objects_are_refused() -> None:
    with pytest.raises(LayerInputError, match="input is of type list"):
        pair("GRU")[1]([1.0])
    with pytest.raises(LayerInputError, match="wanted the pair"):
        pair("LSTM")[1](torch.zeros(5, 2, WIDTH).double(), torch.zeros(1, 2, HIDDEN).double())


def test_under_autocast_dtypes_may_differ() -> None:
    _, ours = pair("LSTM")
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.float()(torch.randn(3, 2, WIDTH, dtype=torch.bfloat16))[0].shape == (3, 2, HIDDEN)
