"""What ends the act: gradients that are off, a process that fails, something that does not come."""

import io
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the act needs the extra `experts`")
pytest.importorskip("sklearn", reason="the demo needs scikit-learn (the extra `demo`)")

from weft.demo import machines_play
from weft.demo.machines_processes import Crew
from weft.demo.stage import Options, ProofError, Stagehand


def hand_of(out: Path) -> Stagehand:
    return Stagehand(Options(out), io.StringIO())


def test_gradients_that_are_off_end_the_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_play, "largest_difference", lambda seed: 1e-3)
    with Crew(1) as crew, ExitStack() as ways, pytest.raises(ProofError, match=r"differs by 1\.0e-03"):
        machines_play._Play(hand_of(tmp_path), crew, ways)._prove()


@pytest.mark.parametrize(("module", "who"), [("machines_trainer", "trainer"), ("machines_server", "server")])
def test_a_process_that_fails_ends_the_act_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, who: str
) -> None:
    """Every process but the one that the act kills."""
    (tmp_path / "demo_fails.py").write_text("raise SystemExit('out of luck')")
    (tmp_path / "demo_waits.py").write_text("import sys; sys.stdin.read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("machines_trainer", "machines_server"):
        stands_in = "demo_fails" if name == module else "demo_waits"
        monkeypatch.setattr(machines_play, name, type("Module", (), {"__name__": stands_in})())
    monkeypatch.setattr(machines_play, "largest_difference", lambda seed: 0.0)
    with pytest.raises(ProofError, match=rf"a {who} (failed|ended): {who} [ab01] \(exit code 1\): out of luck"):
        machines_play.play(hand_of(tmp_path))


def test_what_does_not_come_in_time_ends_the_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_play, "_PATIENCE", 0.1)
    with Crew(1) as crew, ExitStack() as ways, pytest.raises(ProofError, match=r"waited 0\.1 s until pigs fly"):
        machines_play._Play(hand_of(tmp_path), crew, ways)._until("pigs fly", lambda: False)
