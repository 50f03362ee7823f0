"""The act "across machines" in small: a server is killed, its experts come back, and everything adds up."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.demo import machines
from weft.demo.stage import Options, Stagehand
from weft.report import page

pytest.importorskip("grpc", reason="the act needs the extra `experts`")
pytest.importorskip("sklearn", reason="the demo needs scikit-learn (the extra `demo`)")

from weft.demo import machines_play


def hand_of(out: Path) -> tuple[Stagehand, io.StringIO]:
    voice = io.StringIO()
    return Stagehand(Options(out, steps=8, seconds=1.0), voice), voice


def test_a_server_dies_its_experts_come_back_and_no_trainer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines_play, "SAVED", 0.1)
    state = torch.get_rng_state()
    hand, voice = hand_of(tmp_path)
    html = page("test", machines.act(hand))  # raises if something does not add up
    said = voice.getvalue()
    assert torch.equal(state, torch.get_rng_state())
    for words in (
        "server a is killed (SIGKILL)",
        "server a, again: digits.0.0 and digits.1.1 at 127.0.0.1:",
        "its experts answer again",
        "steps lost",
        "calls that failed in a trainer: 0",
        "exactly once",
    ):
        assert words in said
    for words in (
        "Loss of both trainers over time",
        "server a is killed",
        "Time to come back",
        "Optimizer steps of each expert over time",
        "went on from",
        "acknowledged",
        "What the servers say of themselves",
    ):
        assert words in html
    assert html.count("<svg") == 3 and "http" not in html


def test_without_the_packages_it_is_left_out_and_says_how_to_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'grpc'", name="grpc")

    monkeypatch.setattr(machines, "import_module", missing)
    hand, voice = hand_of(tmp_path)
    assert machines.act(hand) == []
    assert voice.getvalue() == (
        "machines: left out, for there is no module 'grpc'; to see it: pip install 'weft[experts]'\n"
    )


def test_a_module_of_ours_that_is_missing_is_no_reason_to_leave_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(machines, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="machines_play"):
        machines.act(hand_of(tmp_path)[0])
