"""The acts in small, for tests that play them."""

import pytest

from weft.demo import characters, keeping, speeds
from weft.demo.text import Text, load_text


@pytest.fixture
def small_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The act "across time" with a small cell, a short text and short sequences."""
    text = load_text()
    short = Text(text.alphabet, text.train[:20_000], text.held_out[:1_000])
    monkeypatch.setattr(characters, "load_text", lambda: short)
    monkeypatch.setattr(characters, "WIDTH", 4)
    monkeypatch.setattr(characters, "HIDDEN", 8)
    monkeypatch.setattr(characters, "SPELLED", 30)
    monkeypatch.setattr(keeping, "MEASURED", {"c": (64, 128), "python": (64,)})
    monkeypatch.setattr(characters, "MEASURED", keeping.MEASURED)
    monkeypatch.setattr(speeds, "SHAPES", ((8, 2),))
    monkeypatch.setattr(speeds, "_ROUNDS", 1)
