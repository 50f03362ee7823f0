"""Fencing: within an epoch only the newest owner writes. Tokens of different epochs are not ordered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.experts.discovery import Fence
from torchweft.experts.discovery.fencing import epoch_of, later, new_epoch, number_of, replaced, token_of
from torchweft.experts.errors import FencedError

epochs = st.integers(1, 2**20 - 1)
numbers = st.integers(1, 2**44 - 1)
tokens = st.builds(token_of, st.integers(1, 3), st.integers(1, 9))


@given(epochs, numbers)
def test_a_token_holds_epoch_and_number_and_fits_the_wire(epoch: int, number: int) -> None:
    token = token_of(epoch, number)
    assert (epoch_of(token), number_of(token)) == (epoch, number) and token < 2**64
    assert 0 < new_epoch() < 2**20


@given(tokens, tokens)
def test_tokens_are_ordered_within_an_epoch_only(one: int, other: int) -> None:
    if epoch_of(one) == epoch_of(other):
        assert replaced(one, other) == (one < other) == later(other, one)
    else:
        assert replaced(one, other) and replaced(other, one) and not later(one, other)
    assert not replaced(one, 0) and replaced(0, one) and not replaced(0, 0)


@given(st.lists(tokens, min_size=1, max_size=6), tokens)
def test_fence_admits_only_the_last_grant(granted: list[int], other: int) -> None:
    fence = Fence("a")
    for before, token in zip([None, *granted], granted, strict=False):
        assert fence.listed(token, granted=True) == (before is not None and not later(token, before))
        assert fence.largest == token
        fence.admit(token)
    if later(other, granted[-1]) or other == granted[-1]:
        fence.admit(other)
    else:
        with pytest.raises(FencedError, match=f"token {number_of(other)} for expert 'a' is"):
            fence.admit(other)
        assert fence.largest == granted[-1]


@given(tokens, tokens)
def test_an_outdated_listing_of_an_epoch_changes_nothing(one: int, other: int) -> None:
    fence = Fence("a")
    fence.listed(one)
    assert fence.listed(other) == (epoch_of(one) != epoch_of(other))
    assert fence.largest == (max(one, other) if epoch_of(one) == epoch_of(other) else other)
