"""The act "across time" trains, spells, proves and draws; whatever backend runs it."""

import io
from pathlib import Path

import pytest
import torch

from weft.demo import characters
from weft.demo.stage import Options, ProofError, Stagehand
from weft.recurrent.cpp import compiler
from weft.report import page


def played(out: Path) -> tuple[str, str]:
    """What was said, and the page."""
    torch.manual_seed(0)
    voice = io.StringIO()
    sections = characters.act(Stagehand(Options(out, steps=3, seconds=60.0), voice))
    return voice.getvalue(), page("test", sections)


@pytest.mark.usefixtures("small_characters")
def test_the_act_says_its_numbers_and_draws_them(tmp_path: Path) -> None:
    said, html = played(tmp_path)
    for words in ("held-out text", "ran by backend", "largest difference of any gradient", "it writes: The", "nn.LSTM"):
        assert words in said
    for words in (
        "class IntegratingCell",
        "Bits per character over steps",
        "in the backward loop, step by step",
        "as net.explain() tells it",
        "weft / eager loop",
        "Peak bytes over the length of a sequence",
        "64 MiB",
    ):
        assert words in html
    assert html.count("<svg") == 2 and "http" not in html


@pytest.mark.usefixtures("small_characters")
def test_it_plays_without_a_compiler_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compiler", lambda: None)
    said, html = played(tmp_path)
    assert "ran by backend 'c'" not in said and "memory: the same bits in all modes" in said
    assert "no C++ compiler" in html


@pytest.mark.usefixtures("small_characters")
def test_a_plan_that_is_off_ends_the_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*_: object) -> float:
        return 1e-3

    monkeypatch.setattr(characters, "largest_difference", off)
    with pytest.raises(ProofError, match=r"differs from the eager loop by 1\.0e-03"):
        played(tmp_path)
