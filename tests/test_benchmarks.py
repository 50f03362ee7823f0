"""Every benchmark runs and prints its table. What they measure is not judged here: a test machine is no judge.

Peers that are not installed are left out by the benchmarks themselves.
"""

import os
import time

import pytest

from benchmarks import __main__ as command
from benchmarks import load
from benchmarks.harness import race
from benchmarks.table import Table, at_least, at_most

SLOW = {"pipeline.transformer"}  # starts two processes, each of which imports torch


@pytest.mark.parametrize("name", [each for each in command.BENCHMARKS if each not in SLOW])
def test_a_benchmark_prints_its_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--quick", name])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torch ")
    assert lines[2].startswith(f"{name}: ")
    header, rule, *rows = [line for line in lines[4:] if line]
    assert "verdict" in header
    assert set(rule) == {" ", "-"}
    assert any("holds" in row or "falls short" in row for row in rows)


def test_the_peer_in_two_processes_does_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--quick", "pipeline.transformer"])
    assert "torch 1F1B, 2 processes" in capsys.readouterr().out


def test_a_name_stands_for_a_capability_or_for_one_benchmark() -> None:
    assert command.chosen([]) == command.chosen(["pipeline"]) == list(command.BENCHMARKS)
    assert command.chosen(["pipeline.sleep", "pipeline.sleep"]) == ["pipeline.sleep"]


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(SystemExit, match=r"(?s)pipe, pipeline\.slip; there are: .*pipeline\.sleep"):
        command.chosen(["pipe", "pipeline", "pipeline.slip"])


def test_a_race_runs_all_candidates_in_every_round_each_first_in_turn() -> None:
    ran: list[str] = []
    found = race({name: lambda name=name: ran.append(name) for name in "ab"}, rounds=2, sample=0.0)
    assert ran[:4] == list("aabb")  # warm-up
    assert ran[4:8] == list("abba")
    assert {len(seconds) for seconds in found.seconds.values()} == {2}


def test_ratios_are_taken_within_a_round() -> None:
    found = race({"a": lambda: None, "b": lambda: None}, rounds=1, sample=0.0)
    found.seconds = {"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 3.0]}
    assert found.ratio("a", "b") == 2.0
    assert found.difference("a", "b") == 1.0
    assert found.median("a") == 3.0


@pytest.mark.parametrize("foreign", [0.0, 50.0])
def test_foreign_work_is_what_the_machine_did_and_we_did_not(foreign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_busy_seconds", time.process_time)
    meter = load.LoadMeter()
    meter.start()
    start = time.perf_counter()
    sum(range(1000))
    monkeypatch.setattr(load, "_busy_seconds", lambda: time.process_time() + foreign)
    # Seconds of others over the seconds that have passed; the readings lie some microseconds apart.
    assert meter.foreign() * (time.perf_counter() - start) == pytest.approx(foreign, abs=0.5, rel=0.5)


def test_a_disturbed_round_is_run_again_and_one_that_counts_all_the_same_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([0.5, 0.0, 0.02])
    monkeypatch.setattr(load.LoadMeter, "foreign", lambda self: next(readings, 0.7))
    assert race({"a": lambda: None}, rounds=2, sample=0.0).note() == "2 rounds, 1 rejected"
    assert "DISTURBED: other processes used up to 0.70" in race({"a": lambda: None}, rounds=1, sample=0.0).note()


@pytest.mark.skipif(not load.STAT.exists(), reason="needs /proc/stat")
def test_the_time_of_a_process_is_read_from_behind_its_name() -> None:
    assert load._seconds_of(os.getpid()) == pytest.approx(time.process_time(), abs=0.5)


@pytest.mark.parametrize(("value", "small", "large"), [(1.0, "holds", "falls short"), (3.0, "falls short", "holds")])
def test_a_figure_is_judged_by_what_was_wanted(value: float, small: str, large: str) -> None:
    assert at_most(value, 2.0) == {"wanted": "<= 2", "verdict": small}
    assert at_least(value, 2.0) == {"wanted": ">= 2", "verdict": large}


def test_a_table_aligns_columns_that_some_rows_lack() -> None:
    text = str(Table("what", [{"a": "1", "b": "22"}, {"b": "3", "c": "4"}], ["  why"]))
    assert text.splitlines() == ["what", "", "  a  b   c", "  -  --  -", "  1  22", "     3   4", "  why"]
