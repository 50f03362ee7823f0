"""Packed in, packed out, as torch.nn.LSTM does it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.recurrent.recurrent_cases import close, eagerly
from tests.recurrent.test_cells import copied
from weft.core.errors import UsageError


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_a_packed_sequence_gives_what_torch_gives(lengths: list[int], presorted: bool, given_state: bool) -> None:
    if presorted:
        lengths = sorted(lengths, reverse=True)
    torch.manual_seed(len(lengths))
    whole = nn.LSTM(3, 4).double()
    net = eagerly(copied(nn.LSTMCell(3, 4), whole))
    x = torch.randn(max(lengths), len(lengths), 3).double()
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=presorted)
    state = (torch.randn(len(lengths), 4).double(), torch.randn(len(lengths), 4).double()) if given_state else None
    wanted, (h, c) = whole(packed, None if state is None else (state[0][None], state[1][None]))
    seen = net(packed, state)
    close(seen.outputs.data, wanted.data)
    close(seen.last, (h[0], c[0]))
    assert torch.equal(seen.outputs.batch_sizes, wanted.batch_sizes)
    if presorted:
        assert seen.outputs.sorted_indices is seen.outputs.unsorted_indices is None
    else:
        assert torch.equal(seen.outputs.sorted_indices, wanted.sorted_indices)
        assert torch.equal(seen.outputs.unsorted_indices, wanted.unsorted_indices)
    close(seen.states[0][-1], h[0])  # past its length a row keeps its state


def test_outputs_that_are_none_stay_none_and_others_are_packed_one_by_one() -> None:
    packed = pack_padded_sequence(torch.randn(3, 2, 1), torch.tensor([3, 1]))
    seen = eagerly(lambda x, s: ((x, None), s + x))(packed, torch.zeros(2, 1))
    assert seen.outputs[1] is None
    assert torch.equal(seen.outputs[0].data, packed.data)


def test_a_packed_sequence_has_lengths_of_its_own() -> None:
    packed = pack_padded_sequence(torch.randn(3, 2, 3), torch.tensor([3, 1]))
    with pytest.raises(UsageError, match="which has its own"):
        eagerly(nn.GRUCell(3, 4))(packed, lengths=[3, 1])


def test_batch_first_turns_the_states_of_a_packed_sequence_only() -> None:
    packed = pack_padded_sequence(torch.randn(3, 2, 3), torch.tensor([3, 1]))
    cell, mask = nn.GRUCell(3, 4), torch.tensor([[True, True], [False, True], [True, True]])
    wanted = eagerly(cell)(packed, mask=mask)
    seen = eagerly(cell, batch_first=True)(packed, mask=mask.t())
    assert torch.equal(seen.outputs.data, wanted.outputs.data)
    assert torch.equal(seen.last, wanted.last)
    assert torch.equal(seen.states, wanted.states.transpose(0, 1))
