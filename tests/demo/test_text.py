"""The text is that of Python's topics, spelled by numbers, and characters stand beside those that follow them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.demo.text import UNKNOWN, Text, load_text, side_by_side


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text()


def test_both_parts_follow_each_other_and_spell_what_was_written(text: Text) -> None:
    assert len(text.train) > 18 * len(text.held_out) > 10_000
    words = text.spell(torch.cat([text.train[-50_000:], text.held_out]).tolist())
    assert "statement" in words and "\n\n" in words
    assert words.count(UNKNOWN) < len(words) / 1000


def test_every_number_is_in_the_alphabet_and_every_character_has_one(text: Text) -> None:
    both = torch.cat([text.train, text.held_out])
    assert both.min() >= 0 and both.max() < len(text.alphabet)
    assert text.alphabet[0] == UNKNOWN and len(set(text.alphabet)) == len(text.alphabet)
    assert text.spell(text.numbers("def f(x): ☃")) == f"def f(x): {UNKNOWN}"


@given(st.integers(1, 5), st.integers(0, 12))
def test_beside_each_character_stands_the_next_one(rows: int, more: int) -> None:
    numbers = torch.arange(rows + 1 + more)
    one, following = side_by_side(numbers, rows)
    assert one.shape == following.shape == ((rows + more) // rows, rows)
    assert torch.equal(following, one + 1)
    assert torch.equal(one.t().flatten(), numbers[: one.numel()]), "each row goes on where the one before it ends"
