"""Command line of the checks and measurements on a GPU.

    python -m benchmarks gpu                      everything, in at most ten minutes
    python -m benchmarks gpu --section checks     laws on one or two GPUs, each in its own process, four at a time
    python -m benchmarks gpu --section tests      the tests marked `cuda`
    python -m benchmarks gpu --section speed      memory and time compared with plain PyTorch
    python -m benchmarks gpu NAME ...             single checks or measurements
    python -m benchmarks gpu --write FOLDER       also writes the report to FOLDER/DATE-gpu.md
    python -m benchmarks gpu --rehearse           on the CPU: shows that the checks run, measures nothing

Needs PyTorch with CUDA and no network. The tests need pytest, pytest-timeout, hypothesis and beartype.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.checks import CHECKS, Places
from benchmarks.gpu.jobs import ROOT, Outcome, run_job
from benchmarks.gpu.speed import MEASUREMENTS
from benchmarks.table import Row, Table

SECTIONS = ("checks", "tests", "speed")
CHECKS_END, TESTS_END, ALL_END = 190.0, 110.0, 590.0
"""Time limits in seconds: of the checks, of the tests, of everything."""
CHECK_END, TOGETHER = 120.0, 4
FOR_EXPERTS = ("cryptography", "grpc_health", "grpc_reflection", "pydantic", "starlette", "uvicorn")
"""Packages required to collect the tests of experts."""


def first_sentence(text: str | None) -> str:
    """First sentence of a docstring, which states the law."""
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


def run_checks(names: Sequence[str], places: Places, end: float) -> Table:
    """Run checks, several at a time, and print a line when each one ends."""
    same_gpu = places[0] == places[1] and places[0] != "cpu"

    def run(name: str) -> Outcome:
        seconds = min(CHECK_END, end - time.monotonic())
        outcome = run_job(["-m", "benchmarks.gpu.checks", name, *places], seconds)
        details = f"both stages on {places[0]}" if same_gpu else ""
        if outcome.verdict != "ok":
            details = outcome.last_lines()
        print(f"{name}: {outcome.verdict} {details} ({outcome.seconds:.0f} s)", flush=True)
        return outcome

    with ThreadPoolExecutor(TOGETHER if places[0] != "cpu" else 1) as pool:
        outcomes = dict(zip(names, pool.map(run, names), strict=True))
    rows: list[Row] = []
    for name, outcome in outcomes.items():
        short = outcome.last_lines(1)[:150] if outcome.verdict != "ok" else ""
        law = first_sentence(CHECKS[name].__doc__)
        rows.append(
            {"check": name, "verdict": outcome.verdict, "seconds": f"{outcome.seconds:.0f}", "law": law, "why": short}
        )
    failures = [f"{name}:\n{job.last_lines(25)}\n" for name, job in outcomes.items() if job.verdict == "FAILED"]
    return Table(f"checks, with stages on {places[0]} and {places[1]}", rows, failures)


def test_files() -> tuple[list[str], list[str]]:
    """Files with tests marked `cuda`, and a note about those that cannot be collected here."""
    paths = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text("utf-8"))
    names = [str(path.relative_to(ROOT)) for path in paths]
    if missing := [name for name in FOR_EXPERTS if find_spec(name) is None]:
        names = [name for name in names if not name.startswith("tests/experts/")]
        return names, [f"  tests of experts omitted, because they need {', '.join(missing)}"]
    return names, []


def run_tests(end: float) -> Table:
    """Run the tests marked `cuda`, in several processes if pytest-xdist is installed."""
    files, notes = test_files()
    argv = ["-m", "pytest", "-m", "cuda", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *files]
    if find_spec("xdist"):
        argv += ["-n", "4", "--dist", "loadfile", "-p", "no:benchmark"]  # pytest-benchmark warns about xdist
    outcome = run_job(argv, min(TESTS_END, end - time.monotonic()))
    lines = outcome.output.splitlines()
    rows = [{"failed": line[:220]} for line in lines if line.startswith(("FAILED", "ERROR"))]
    print(outcome.output[-6000:], flush=True)
    summary = "; ".join(outcome.last_lines(1).splitlines())
    title = f"pytest -m cuda: {summary} ({outcome.seconds:.0f} s)"
    return Table(title, rows or [{"failed": "none" if outcome.code == 0 else "see the output"}], notes)


def run_speed(names: Sequence[str], place: str, end: float) -> Iterator[Table]:
    """Run measurements one after another. Rows that a killed one has written are kept."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            function, most = MEASUREMENTS[name]
            seconds, file = min(most, end - time.monotonic()), Path(folder) / name
            file.touch()
            outcome = run_job(["-m", "benchmarks.gpu.speed", name, place, str(seconds), str(file)], seconds)
            rows: list[Row] = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
            notes = [] if outcome.verdict == "ok" else [f"  {outcome.verdict}: {outcome.last_lines()}"]
            table = Table(f"{name}: {first_sentence(function.__doc__)} ({outcome.seconds:.0f} s)", rows, notes)
            print(table, flush=True)
            yield table


def machine() -> str:
    """GPUs, driver, versions and commit, for the title of the report."""

    def output_of(*argv: str) -> str:
        try:
            return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            return ""

    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if output_of("git", "status", "--porcelain") else ""
    return (
        f"{', '.join(cards) or 'no GPU'}; driver {driver or 'unknown'}; torch {torch.__version__} (CUDA "
        f"{torch.version.cuda}); Python {platform.python_version()}; {os.cpu_count()} cores; commit {commit}{changed}"
    )


def two_gpus() -> Places:
    """The first two GPUs if they have peer access, otherwise the first one twice."""
    both = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
    return "cuda:0", "cuda:1" if both else "cuda:0"


def markdown(title: str, tables: Sequence[Table]) -> str:
    """Format the report."""
    text = [f"# torchweft on a GPU\n\n{title}\n"]
    for table in tables:
        columns = list(dict.fromkeys(name for row in table.rows for name in row))
        text.append(f"## {table.title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        text += [f"| {' | '.join(row.get(name, '').replace('|', ' ') for name in columns)} |" for row in table.rows]
        text += ["", *(f"```text\n{note.rstrip()}\n```\n" for note in table.notes)]
    return "\n".join(text)


def main(argv: Sequence[str]) -> int:
    """Run the sections that the arguments name. The exit code is 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="benchmarks gpu", description="Checks, tests and measurements on a GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join([*CHECKS, *MEASUREMENTS])}")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="run this section alone; can be repeated")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the report there, as DATE-gpu.md")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, to show that the checks run")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in CHECKS and name not in MEASUREMENTS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join([*CHECKS, *MEASUREMENTS])}")
    if not options.rehearse and not torch.cuda.is_available():
        print(
            f"There is no GPU here (torch {torch.__version__}), so nothing was run. With one or two GPUs this command\n"
            f"runs {len(CHECKS)} checks of streams, recordings, memory and gradients, and the tests marked `cuda`. It\n"
            "also compares stages, recurrent networks and experts with plain PyTorch. It takes at most ten minutes,\n"
            "and needs PyTorch with CUDA. `--rehearse` runs the checks on the CPU."
        )
        return 0
    begun = time.monotonic()
    sections = [] if options.names else options.section or (SECTIONS if not options.rehearse else ("checks", "speed"))
    places = ("cpu", "cpu") if options.rehearse else two_gpus()
    end = begun + (ALL_END if not options.rehearse else 3600.0)
    tables: list[Table] = []
    print(title := machine(), end="\n\n", flush=True)
    if checks := [name for name in CHECKS if name in options.names or "checks" in sections]:
        tables.append(
            run_checks(checks, places, min(end, time.monotonic() + CHECKS_END) if not options.rehearse else end)
        )
        print(f"\n{tables[-1]}", flush=True)
    if "tests" in sections:
        tables.append(run_tests(end))
        print(tables[-1], flush=True)
    measured = [name for name in MEASUREMENTS if name in options.names or "speed" in sections]
    tables += run_speed(measured, places[0], end)
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        file = options.write / f"{datetime.date.today():%Y-%m-%d}-gpu.md"
        file.write_text(markdown(title, tables), encoding="utf-8")
        print(f"written to {file}")
    print(f"finished in {time.monotonic() - begun:.0f} s")
    return int(any(row.get("verdict") == "FAILED" for table in tables for row in table.rows))
