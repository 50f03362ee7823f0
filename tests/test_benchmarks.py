"""Every benchmark runs and prints its table. The figures are not judged here, because a test machine is too noisy.

The benchmarks themselves omit peers that are not installed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import __main__ as command
from benchmarks import load
from benchmarks.experts import helper, peer, survive_directory, throughput
from benchmarks.experts.processes import callers
from benchmarks.experts.rounds import laps
from benchmarks.gpu import command as gpu
from benchmarks.gpu import jobs
from benchmarks.gpu.checks import CHECKS
from benchmarks.harness import race
from benchmarks.pipeline import processes, rank_checks
from benchmarks.recurrent import cells
from benchmarks.recurrent.apart import _seconds_of_children, in_a_fresh_process
from benchmarks.recurrent.memory_job import peak_of
from benchmarks.recurrent.racing import SAMPLE, race_for
from benchmarks.recurrent.work import agree, training
from benchmarks.table import Table, at_least, at_most

SLOW = {"pipeline.transformer"}  # starts two processes, each of which imports torch


def set_foreign_load(monkeypatch: pytest.MonkeyPatch, *readings: float, then: float = 0.0) -> None:
    """Replace the measured load of other processes, which decides whether a round is repeated."""
    remaining = iter(readings)
    monkeypatch.setattr(load.LoadMeter, "foreign", lambda self: next(remaining, then))


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_foreign_load(monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(600)  # some run for a minute, where the machine has nothing else to do
@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", [name for name in command.benchmarks() if name not in SLOW])
def test_benchmark_prints_its_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--quick", name])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torch ")
    assert lines[2].startswith(f"{name}: ")
    header, rule, *rows = [line for line in lines[4:] if line]
    assert "verdict" in header
    assert set(rule) == {" ", "-"}
    assert any("holds" in row or "falls short" in row for row in rows)


@pytest.mark.long
def test_targets_after_a_lost_directory_can_be_reached() -> None:
    figures = survive_directory.away(1.0)
    if not figures:
        pytest.skip("unavailable directory: needs etcd")
    assert all(figure.holds for figure in figures)


@pytest.mark.long
@pytest.mark.usefixtures("undisturbed")
def test_peer_in_two_processes_does_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--quick", "pipeline.transformer"])
    assert "torch 1F1B, 2 processes" in capsys.readouterr().out


def test_unsteady_times_are_left_out() -> None:
    """Wall and CPU times are judged separately, by the middle half of the rounds of the plain loop."""
    row = {
        "measure": "overhead",
        "case": "gpipe",
        "torchweft": "1",
        "ratio": "2.00",
        "verdict": "holds",
        "CPU ratio": "1.5",
    }
    steady, unsteady = [1.0, 1.05, 1.1, 9.0, 1.0, 1.05, 1.1], [1.0, 1.5, 1.0, 1.5, 1.2]
    assert processes.only_steady([row], {"wall": steady, "processor": steady}) == ([row], [])
    rows, notes = processes.only_steady([row], {"wall": unsteady, "processor": steady})
    assert rows == [{"measure": "overhead", "case": "gpipe", "CPU ratio": "1.5"}]
    assert notes == ["wall times not reported: the plain loop varies by 42%"]
    assert processes.only_steady([row], {"wall": unsteady, "processor": unsteady})[0] == []


def test_rounds_of_a_slow_machine_do_not_count() -> None:
    """Speed is measured on fixed work, so that no candidate influences which rounds count."""
    quiet, busy, slow = (processes.Round({}, {}, *load) for load in [(0.05, 1.1), (0.5, 1.0), (0.0, 1.5)])
    assert quiet.disturbance(1.0) <= 1 < slow.disturbance(1.0) < busy.disturbance(1.0)


def test_expected_bytes_count_a_value_once_per_rank() -> None:
    """Two ranks with two of four blocks each: a value with two readers on the other rank crosses once each way."""
    sizes = rank_checks.expected_bytes(rank_checks.Skips([[0], [], [], []], [[], [0], [0], [0]]), [0, 1, 0, 1])
    main, skip = 8 * 16 * 4, 8 * 20 * 4
    assert sizes == {(0, 1): [main, main, main, skip], (1, 0): [main, main, main, skip]}


def test_name_selects_a_capability_or_one_benchmark() -> None:
    assert command.chosen([]) == command.chosen(["pipeline", "recurrent", "experts"]) == list(command.benchmarks())
    assert {name.partition(".")[0] for name in command.chosen(["recurrent"])} == {"recurrent"}
    assert command.chosen(["pipeline.sleep", "pipeline.sleep"]) == ["pipeline.sleep"]


def test_unknown_name_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"(?s)pipe, pipeline\.slip; there are: .*pipeline\.sleep"):
        command.chosen(["pipe", "pipeline", "pipeline.slip"])


def test_race_rotates_the_candidates_of_a_round() -> None:
    ran: list[str] = []
    result = race({name: lambda name=name: ran.append(name) for name in "ab"}, rounds=2, sample=0.0)
    assert ran[:4] == list("aabb")  # warm-up
    assert ran[4:8] == list("abba")
    assert {len(seconds) for seconds in result.seconds.values()} == {2}


def test_ratios_are_taken_within_a_round() -> None:
    result = race({"a": lambda: None, "b": lambda: None}, rounds=1, sample=0.0)
    result.seconds = {"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 3.0]}
    assert (result.ratio("a", "b"), result.difference("a", "b"), result.median("a")) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("foreign", [0.0, 50.0])
def test_foreign_work_excludes_our_own(foreign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = load.LoadMeter()
    meter.start()
    start, busy, own = meter._marks
    monkeypatch.setattr(meter, "_now", lambda: (start + 10, busy + 1 + foreign, own + 1))
    assert meter.foreign() == pytest.approx(foreign / 10)


def test_disturbed_round_is_repeated_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    set_foreign_load(monkeypatch, 0.5, 0.0, 0.02, then=0.7)
    assert race({"a": lambda: None}, rounds=2, sample=0.0).note() == "2 rounds, 1 rejected"
    assert "DISTURBED: other processes used up to 0.70" in race({"a": lambda: None}, rounds=1, sample=0.0).note()


def test_disturbed_round_is_repeated_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    set_foreign_load(monkeypatch, 0.5, 0.0, 0.02, then=0.7)
    work = {"a": lambda: time.sleep(SAMPLE)}
    assert race_for(work, 0.0, expected={"a": SAMPLE}, patience=9).note() == "2 rounds, 1 rejected"
    assert "up to 0.70" in race_for(work, 0.0, expected={"a": SAMPLE}).note()


def test_disturbed_round_of_laps_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    set_foreign_load(monkeypatch, 0.5, 0.0, 0.02)
    result = laps({"a": lambda seconds: seconds, "b": lambda seconds: 2 * seconds}, 0.1, 2)
    assert result.note() == "2 rounds, 1 rejected"
    assert result.ratio("b", "a") == 2.0


@pytest.mark.usefixtures("undisturbed")
def test_race_against_the_clock_samples_every_candidate() -> None:
    """Each sample lasts at least `SAMPLE` seconds."""
    ran: list[str] = []
    start = time.perf_counter()
    result = race_for({name: lambda name=name: (time.sleep(0.01), ran.append(name)) for name in "ab"}, 0.0)
    assert time.perf_counter() - start >= 4 * SAMPLE
    # One call each measures its duration. The first candidate of the two rounds alternates, so b runs twice in a row.
    turns = [name for name, before in zip(ran, ["", *ran], strict=False) if name != before]
    assert turns == list("ababa")
    assert {len(seconds) for seconds in result.seconds.values()} == {2}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(("expected", "rounds"), [(60.0, 1), (0.2, 2)])
def test_slow_candidate_runs_once_without_warm_up(expected: float, rounds: int) -> None:
    ran: list[None] = []
    race_for({"a": lambda: (time.sleep(SAMPLE), ran.append(None))}, 0.0, expected={"a": expected})
    assert len(ran) == rounds


def test_candidates_with_other_gradients_are_not_raced() -> None:
    x = torch.randn(3, 2, 4, requires_grad=True)
    seeds = [torch.ones(3, 2, 4)]
    same = training(lambda: [x * 2], [x], seeds)
    agree({"a": same, "b": same})
    with pytest.raises(RuntimeError, match=r"do not do the same work.*'b': 0\.5"):
        agree({"a": same, "b": training(lambda: [x * 3], [x], seeds)})


@pytest.mark.parametrize(("make", "of_torch"), [(cells.LSTMCell, nn.LSTM), (cells.GRUCell, nn.GRU)])
def test_hand_written_cells_are_those_of_torch(make: type[nn.Module], of_torch: type[nn.RNNBase]) -> None:
    net = of_torch(3, 3)
    cell = cells.with_weights_of(net, make(3, 3))
    x = torch.randn(5, 2, 3)
    state = (torch.randn(2, 3), torch.randn(2, 3)) if of_torch is nn.LSTM else torch.randn(2, 3)
    ours, theirs = cells.eager(cell, x, state)(), cells.by_torch(net, x, state)()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.view_as(one))


def test_load_of_a_separate_job_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_busy_seconds", lambda: time.process_time() + _seconds_of_children())
    before = _seconds_of_children()
    value, foreign = in_a_fresh_process(os.getpid)
    assert value != os.getpid()
    assert _seconds_of_children() > before
    assert foreign < 0.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "argument", "says"), [(int, "x", r"(?s)failed.*invalid literal"), (os._exit, 3, "ended without")]
)
def test_failed_separate_job_is_reported(job: Callable[[Any], Any], argument: Any, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        in_a_fresh_process(job, argument)


@pytest.mark.long
@pytest.mark.skipif(not load.STAT.exists(), reason="needs /proc")
def test_memory_peak_counts_outputs_and_gradients() -> None:
    steps, batch, width = 2000, 16, 32
    peak = in_a_fresh_process(peak_of, "states", steps, batch, width).value
    sequence = steps * batch * width * 4
    assert peak.trains
    assert peak.kept == "states"
    assert peak.forecast >= 3 * sequence  # outputs, states that are not outputs, input gradients
    assert peak.measured >= 0.95 * peak.forecast  # other processes cannot add to this peak


@pytest.mark.skipif(not load.STAT.exists(), reason="needs /proc/stat")
def test_time_of_a_process_is_read_after_its_name() -> None:
    assert load._seconds_of(os.getpid()) == pytest.approx(time.process_time(), abs=0.5)


def test_rate_of_many_callers_is_the_sum_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = threading.local()  # one clock per caller
    now = SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0))
    monkeypatch.setattr(callers, "time", now)

    def taking(seconds: float) -> Callable[[], None]:
        return lambda: setattr(clock, "now", now.perf_counter() + seconds)

    assert callers.rate([taking(0.04), taking(0.01), taking(0.01)], 0.3) == pytest.approx(25 + 100 + 100)


@pytest.mark.timeout(30)  # half of what the others would wait for it
def test_failing_caller_is_reported_and_the_others_end() -> None:
    with pytest.raises(ZeroDivisionError):
        callers.rate([lambda: None, lambda: 1 // 0], 600.0)


def test_dying_helper_reports_its_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text("raise SystemExit('no more')")
    monkeypatch.setattr(helper, "PROGRAMS", tmp_path)
    with (
        helper.Helper("dying", {}, python=sys.executable) as dying,
        pytest.raises(helper.HelperLost, match=r"dying ended: no more"),
    ):
        dying.hear()


@pytest.mark.skipif(not load.STAT.exists(), reason="needs /proc")
def test_processes_of_a_helper_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    (tmp_path / "parent.py").write_text(child + "\nprint('{}', flush=True); sys.stdin.read()")
    monkeypatch.setattr(helper, "PROGRAMS", tmp_path)
    with helper.Helper("parent", {}, python=sys.executable) as parent:
        assert parent.hear() == {}
        processes = parent.processes
        assert len(processes) == 2
    while any(_runs(process) for process in processes):  # until the time limit of the test
        time.sleep(0.01)


def _runs(process: int) -> bool:
    """Whether the process exists and is not a zombie."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.long
def test_peer_that_cannot_be_installed_is_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_install() -> str:
        raise peer.NoPeer("cannot be installed: no network")

    monkeypatch.setattr(peer, "python", fail_to_install)
    with ExitStack() as stack:
        servers = throughput.Servers(stack, 8, with_peer=True)
        result = servers.race(throughput.Point(1, 1, False), 0.01, 1)
    assert servers.peer is None and servers.why == "cannot be installed: no network"
    assert set(result.seconds) == {throughput.IDEAL, throughput.WEFT, throughput.BARE}


@pytest.mark.parametrize(("value", "small", "large"), [(1.0, "holds", "falls short"), (3.0, "falls short", "holds")])
def test_figure_is_judged_by_its_target(value: float, small: str, large: str) -> None:
    assert at_most(value, 2.0) == {"required": "<= 2", "verdict": small}
    assert at_least(value, 2.0) == {"required": ">= 2", "verdict": large}


def test_table_aligns_columns_that_some_rows_lack() -> None:
    text = str(Table("what", [{"a": "1", "b": "22"}, {"b": "3", "c": "4"}], ["  why"]))
    assert text.splitlines() == ["what", "", "  a  b   c", "  -  --  -", "  1  22", "     3   4", "  why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_command_names_its_needs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["gpu"])
    assert ended.value.code == 0
    assert "There is no GPU here" in (text := capsys.readouterr().out) and len(text.splitlines()) <= 5


def test_every_gpu_check_states_its_condition() -> None:
    for name, check in CHECKS.items():
        assert gpu.first_sentence(check.__doc__), name


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHECKS)
def test_gpu_check_holds_on_the_cpu(name: str) -> None:
    outcome = jobs.run_job(["-m", "benchmarks.gpu.checks", name, "cpu", "cpu"], 290.0)
    assert outcome.verdict in ("ok", "skipped"), outcome.last_lines(20)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "cases"), [("rows", {"serial", "threads"}), ("ranks", {"torchweft 1f1b", "torch 1f1b"})]
)
def test_gpu_measurement_of_pipelines_runs_on_the_cpu(name: str, cases: set[str], tmp_path: Path) -> None:
    """Bits are equal, and a killed rank is known."""
    file = tmp_path / "rows"
    outcome = jobs.run_job(["-m", "benchmarks.gpu.speed", name, "cpu", "9", str(file)], 290.0)
    found = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert outcome.verdict == "ok", outcome.last_lines(20)
    assert cases <= {row.get("run by", row.get("case")) for row in found}, found
    assert not any(word in text for row in found for text in row.values() for word in ("DIFFER", "FAILED")), found


@pytest.mark.parametrize(
    ("program", "verdict", "says"),
    [
        ("print('fine')", "ok", "fine"),
        ("raise SystemExit(77)", "skipped", ""),
        ("raise ValueError('broken')", "FAILED", "ValueError: broken"),
        ("import os; os.kill(os.getpid(), 6)", "FAILED", "killed by SIGABRT"),
        ("import time; print('begun', flush=True); time.sleep(600)", "FAILED", "killed at its deadline"),
    ],
)
def test_job_of_the_gpu_command_is_judged(program: str, verdict: str, says: str) -> None:
    outcome = jobs.run_job(["-c", program], 10.0 if "600" in program else 60.0)
    assert outcome.verdict == verdict
    assert says in outcome.last_lines()


def test_failed_check_is_reported_and_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"sparse_gradients": jobs.Outcome(1, "AssertionError: a | b", 2.0)}
    good = jobs.Outcome(0, "holds", 1.0)
    monkeypatch.setattr(gpu, "run_job", lambda argv, seconds: outcomes.get(argv[2], good))
    assert gpu.main(["--rehearse", "sparse_gradients", "graph_over_places", "--write", str(tmp_path)]) == 1
    assert gpu.main(["--rehearse", "graph_over_places"]) == 0
    assert "sparse_gradients: FAILED AssertionError: a | b (2 s)" in capsys.readouterr().out
    (report,) = tmp_path.glob("*-gpu.md")
    assert "| sparse_gradients | FAILED | 2 |" in report.read_text("utf-8")
