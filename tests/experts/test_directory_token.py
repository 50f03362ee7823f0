"""Fencing tokens of several lives of a directory: what is told apart, and what has an order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.experts.directory import Fence, FencedError
from weft.experts.directory.token import later, life_of, new_life, number_of, replaced, token_of

lives = st.integers(1, 2**20 - 1)
numbers = st.integers(1, 2**44 - 1)
tokens = st.builds(token_of, st.integers(1, 3), st.integers(1, 9))


@given(lives, numbers)
def test_a_token_tells_life_and_number_and_fits_the_wire(life: int, number: int) -> None:
    token = token_of(life, number)
    assert (life_of(token), number_of(token)) == (life, number) and token < 2**64
    assert 0 < new_life() < 2**20


@given(tokens, tokens)
def test_of_two_tokens_of_a_life_one_is_later_and_of_two_lives_each_refuses_the_other(one: int, other: int) -> None:
    if life_of(one) == life_of(other):
        assert replaced(one, other) == (one < other) == later(other, one)
    else:
        assert replaced(one, other) and replaced(other, one) and not later(one, other)
    assert not replaced(one, 0) and replaced(0, one) and not replaced(0, 0)


@given(st.lists(tokens, min_size=1, max_size=6), tokens)
def test_whom_the_directory_granted_last_is_admitted_and_nobody_of_another_life(granted: list[int], other: int) -> None:
    fence = Fence()
    for before, token in zip([None, *granted], granted, strict=False):
        assert fence.named("a", token, granted=True) == (before is not None and not later(token, before))
        assert fence.largest("a") == token
        fence.admit("a", token)
    if later(other, granted[-1]) or other == granted[-1]:
        fence.admit("a", other)
    else:
        with pytest.raises(FencedError):
            fence.admit("a", other)
        assert fence.largest("a") == granted[-1]


@given(tokens, tokens)
def test_old_news_of_a_life_change_nothing(one: int, other: int) -> None:
    fence = Fence()
    fence.named("a", one)
    assert fence.named("a", other) == (life_of(one) != life_of(other))
    assert fence.largest("a") == (max(one, other) if life_of(one) == life_of(other) else other)
