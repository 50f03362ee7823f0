"""Packed sequences are opened once and packed again in the same order."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from weft.core.errors import UsageError
from weft.recurrent.sequence import unpack_inputs


@pytest.mark.parametrize("batch_first", [False, True])
def test_closing_inverts_opening(batch_first: bool) -> None:
    packed = pack_padded_sequence(torch.randn(5, 3, 2), torch.tensor([2, 5, 3]), enforce_sorted=False)
    given = unpack_inputs(packed, None, batch_first=batch_first, who="X")
    assert given.inputs.shape == ((3, 5, 2) if batch_first else (5, 3, 2))
    assert torch.as_tensor(given.lengths).tolist() == [2, 5, 3]
    again, nothing = given.close((given.inputs, None))
    assert torch.equal(again.data, packed.data) and torch.equal(again.sorted_indices, packed.sorted_indices)
    assert nothing is None


def test_other_inputs_pass_through() -> None:
    x = torch.randn(5, 3, 2)
    given = unpack_inputs(x, [5, 5, 5], batch_first=True, who="X")
    assert given.inputs is x and given.lengths == [5, 5, 5] and given.close(x) is x


def test_lengths_besides_are_refused() -> None:
    packed = pack_padded_sequence(torch.randn(5, 1, 2), torch.tensor([5]))
    with pytest.raises(UsageError, match="X: lengths were given"):
        unpack_inputs(packed, [5], batch_first=False, who="X")
