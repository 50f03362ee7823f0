"""Training stops when it should, gets better, hands its state on, and its score is the one in the books."""

import io
import math
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch

from weft.demo import learning
from weft.demo.learning import bits, learn
from weft.demo.speller import Speller
from weft.demo.stage import Options, Stagehand
from weft.demo.text import Text


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Text:
    monkeypatch.setattr(learning, "ROWS", 4)
    monkeypatch.setattr(learning, "STEPS", 8)
    turn = torch.arange(400) % 5
    return Text("abcde", turn[:320], turn[320:])


@pytest.fixture
def model() -> Speller:
    torch.manual_seed(0)
    return Speller(5, 4, 8, backend="eager")


def hand_of(out: Path, steps: int, seconds: float) -> Stagehand:
    return Stagehand(Options(out, steps, seconds), io.StringIO())


def test_training_ends_after_the_steps_and_the_model_knows_more(model: Speller, text: Text, tmp_path: Path) -> None:
    before = bits(model, text.held_out)
    found = learn(model, text, hand_of(tmp_path, 40, 1e6))
    assert len(found.losses) == 40 and found.seconds > 0
    assert found.held_out[-1] == (40.0, pytest.approx(bits(model, text.held_out)))
    assert found.held_out[-1][1] < before - 0.5
    steps = [step for step, _ in found.held_out]
    assert steps == sorted(set(steps)) and 5 <= len(steps) <= 12


def test_training_ends_after_the_seconds_but_not_before_one_step(model: Speller, text: Text, tmp_path: Path) -> None:
    found = learn(model, text, hand_of(tmp_path, 10**6, 0.0))
    assert len(found.losses) == len(found.held_out) == 1


def test_a_model_that_knows_nothing_lacks_the_bits_of_the_alphabet(model: Speller, text: Text) -> None:
    with torch.no_grad():
        for parameter in model.scores.parameters():
            parameter.zero_()
    assert bits(model, text.held_out) == pytest.approx(math.log2(5))


def test_chunks_go_on_where_the_one_before_ended_until_the_text_begins_anew(text: Text) -> None:
    chunks = list(islice(learning._chunks(text.train), 25))
    assert [fresh for _, _, fresh in chunks] == [i % 9 == 0 for i in range(25)]
    assert all(torch.equal(following, (characters + 1) % 5) for characters, following, _ in chunks)
    for (_, before, _), (characters, _, fresh) in pairwise(chunks):
        assert fresh or torch.equal(before[-1], characters[0])
