"""The stagehand writes over one line on a terminal, and says little elsewhere."""

import io
from pathlib import Path

import pytest

from weft.demo.stage import Options, Stagehand


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path)


def test_on_a_terminal_progress_writes_over_its_line(options: Options) -> None:
    voice = Terminal()
    hand = Stagehand(options, voice)
    hand.progress("one")
    hand.progress("two")
    hand.say("done")
    assert voice.getvalue() == "\r\x1b[Kone\r\x1b[Ktwo\ndone\n"


def test_elsewhere_progress_is_a_plain_line_now_and_then(options: Options) -> None:
    voice, clock = io.StringIO(), Clock()
    hand = Stagehand(options, voice, clock)
    for second in range(12):
        clock.now = float(second)
        hand.progress(f"at {second}")
    assert voice.getvalue().splitlines() == ["at 0", "at 5", "at 10"]


def test_files_are_told_with_their_whole_path(options: Options, tmp_path: Path) -> None:
    voice = io.StringIO()
    Stagehand(options, voice).wrote(tmp_path / "x.html", "open it")
    assert voice.getvalue() == f"wrote {(tmp_path / 'x.html').resolve()}  (open it)\n"
