"""The command line: its output, its errors and its exit codes."""

import sys
from pathlib import Path

import pytest

from tests.processes import run
from torchweft import cli
from torchweft.cli import main
from torchweft.pipeline.schedule import SCHEDULES, Schedule, one_f_one_b


def run_rejected(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the text on standard error."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    code = stop.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


def test_plan_prints_a_table_that_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--stages", "4", "--chunks", "8"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    assert Schedule.parse(table) == one_f_one_b(4, 8)
    assert "live micro-batches of each stage: 4 3 2 1" in rest
    assert "takes 33, idle 27.3% of the time of 4 workers" in rest


def test_plan_uses_the_given_costs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["plan", "--stages", "1", "--chunks", "2", "--schedule", "gpipe"]
    assert main([*sizes, "--forward", "3", "--backward", "5", "--recompute", "2"]) == 0
    assert "takes 20, idle 0.0% of the time of 1 workers" in capsys.readouterr().out


def test_plan_takes_every_name_of_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    for name, make in SCHEDULES.items():
        assert main(["plan", "--stages", "4", "--chunks", "5", "--schedule", name]) == 0
        assert Schedule.parse(capsys.readouterr().out.partition("\n\n")[0]) == make(4, 5)


def test_plan_takes_a_table_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", "utf-8")
    assert main(["plan", "--stages", "2", "--chunks", "2", "--schedule", str(file)]) == 0
    assert capsys.readouterr().out.startswith("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")


def test_binary_file_is_rejected_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.bin"
    file.write_bytes(b"\xff\x00")
    code, errors = run_rejected(["plan", "--stages", "2", "--chunks", "2", "--schedule", str(file)], capsys)
    assert code == 2 and "table.bin is not UTF-8 text" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["plan", "--stages", "4"], "--chunks"),
        (["plan", "--stages", "0", "--chunks", "1"], "'0' is not a whole number from 1 up"),
        (["plan", "--stages", "1", "--chunks", "1", "--forward", "nan"], "'nan' is not a number from 0 up"),
        (["plan", "--stages", "1", "--chunks", "1", "--schedule", "zigzag"], "there is no schedule 'zigzag'"),
        (["plan", "--stages", "3", "--chunks", "1", "--schedule", "zbv"], "two stages per worker, but got 3 stages"),
        (["plan", "--stages", "3", "--chunks", "1", "--schedule", "0F0,0B0"], "the schedule cannot be used"),
    ],
)
def test_misuse_exits_with_2_and_a_reason(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = run_rejected(arguments, capsys)
    assert code == 2 and words in errors


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build", interrupted)
    assert run_rejected(["plan", "--stages", "1", "--chunks", "1"], capsys)[0] == 130


@pytest.mark.long
def test_module_runs_the_command_line() -> None:
    done = run([sys.executable, "-m", "torchweft", "--version"])
    assert done.returncode == 0 and done.stdout.startswith("torchweft ")
