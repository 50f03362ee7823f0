"""The demo runs from end to end, and leaves a report, a trace, and the caller's state as it was."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import demo
from weft.demo import characters, devices, machines, recording
from weft.demo.stage import ProofError
from weft.report import Section, paragraph

pytest.importorskip("sklearn", reason="the demo needs scikit-learn (the extra `demo`)")


@pytest.fixture
def kept() -> Iterator[None]:
    """Random numbers and threads are the same afterwards."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()


@pytest.mark.usefixtures("kept")
def test_the_demo_trains_proves_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "ROWS", 16)
    monkeypatch.setattr(recording, "_RECORDED", 1)
    # the others are played in test_characters.py and test_machines.py
    report = demo.run(demo.Options(tmp_path / "new", steps=2, seed=1), [devices.act])
    said = capsys.readouterr().out
    assert "held-out PSNR" in said and "largest difference of any gradient" in said and "speed" in said
    assert str(report.resolve()) in said and str(report.with_name("trace.json").resolve()) in said
    html = report.read_text("utf-8")
    for words in (
        "PSNR",
        "Timeline of a step, 1f1b",
        "Live activation bytes",
        "gpipe, recomputed",
        "Loss over steps",
    ):
        assert words in html
    assert "http:" not in html and "https:" not in html
    trace = json.loads(report.with_name("trace.json").read_text("utf-8"))
    work = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert len(work) == 2 * 4 * 8  # F and B, four stages, eight micro-batches


@pytest.mark.usefixtures("kept")
def test_a_gradient_that_is_off_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*_: Any) -> dict[tuple[str, str], float]:
        return {("gpipe", "never"): 0.0, ("1f1b", "always"): 1e-3}

    monkeypatch.setattr(devices, "largest_differences", off)
    with pytest.raises(ProofError, match=r"1f1b with checkpoint always: 1\.0e-03"):
        demo.run(demo.Options(tmp_path))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("kept")
def test_every_act_runs_as_the_options_say_and_adds_its_sections_in_order(tmp_path: Path) -> None:
    def act(name: str) -> demo.Act:
        return lambda _: [Section(name, [paragraph(f"{torch.initial_seed()}, {torch.get_num_threads()}")])]

    html = demo.run(demo.Options(tmp_path, seed=7, threads=2), [act("first"), act("second")]).read_text("utf-8")
    assert html.index("<h2>first</h2><p>7, 2</p>") < html.index("<h2>second</h2>")


def test_devices_come_before_time_and_machines_last() -> None:
    assert (devices.act, characters.act, machines.act) == demo.acts()
