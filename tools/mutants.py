#!/usr/bin/env python3
"""Kill matrix: which tests of a folder notice which small faults of the code. By `python3 do.py mutants FOLDER`.

    python tools/mutants.py tests/pipeline/skip [--most 500] [--source src/torchweft/pipeline/skip] [--out matrix.json]

    source ── ast ──> mutants: one comparison, number, condition, call or return is changed in each
    mutant ── copy of the repository ── fork ──> all tests of the folder ──> the tests that fail, the killers

The folders of tests mirror `src/torchweft`, so `--source` is seldom necessary. Mutants are drawn with a seed, evenly
over the lines. Type checks at run time are on, as in every test run. A test function that kills no mutant of its own
folder can still hold a promise of the documentation, or a law of another folder: read it before you delete it.

Tests run as in a quick run, without those marked `long`, unless --all is given. One process at a time runs them.
"""

import argparse
import ast
import copy
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SWAPPED = {
    **{
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
    },
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    line: int
    change: str
    source: str  # of the whole file, with the change


class Outcome(NamedTuple):
    """The tests that a run with a mutant failed. `end`: how it ended, ``"tests"``, ``"import"`` or ``"timeout"``."""

    killers: frozenset[str]
    end: str


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file. Docstrings, annotations and the texts of errors stay."""
    tree = ast.parse(source)
    for node in [node for top in tree.body for node in _code_of(top)]:
        for change, mutate in _changes(node):
            before = copy.copy(node.__dict__)
            mutate()
            text = ast.unparse(ast.fix_missing_locations(tree))
            node.__dict__.clear()
            node.__dict__.update(before)
            yield Mutant(file, getattr(node, "lineno", 0), change, text)


def _code_of(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes within functions whose change can be seen by a test."""
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        if inside and child not in node.body:
            continue  # arguments, decorators, annotations
        if inside:
            yield from _parts_of(child)
        elif isinstance(child, ast.stmt):
            yield from _code_of(child)


def _parts_of(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Raise | ast.JoinedStr):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _parts_of(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Descriptions of the changes of a node, each with a function that makes it."""

    def put(**fields: Any) -> Any:
        return lambda: node.__dict__.update(fields)

    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        other = SWAPPED[type(node.ops[0])]()
        yield f"{ast.unparse(node)}: {type(other).__name__}", put(ops=[other, *node.ops[1:]])
    if isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
        other = SWAPPED[type(node.op)]()
        yield f"{ast.unparse(node)}: {type(other).__name__}", put(op=other)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield f"if {ast.unparse(node.test)}: not", put(test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension) and node.ifs:
        yield f"if {ast.unparse(node.ifs[0])}: all", put(ifs=node.ifs[1:])
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield f"{ast.unparse(node)}: None", put(value=ast.Constant(None))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value}: {other}", put(value=other)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield f"{ast.unparse(node)}: left out", put(value=ast.Constant(None))


def draw(mutants: Sequence[Mutant], most: int, seed: int) -> list[Mutant]:
    """At most `most` mutants, spread evenly over files and lines."""
    generator = random.Random(seed)
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    for group in by_line.values():
        generator.shuffle(group)
    lines = list(by_line.values())
    generator.shuffle(lines)
    rounds = [group[turn] for turn in range(max(map(len, lines), default=0)) for group in lines if turn < len(group)]
    return sorted(rounds[:most], key=lambda mutant: (mutant.file, mutant.line))


def smallest_cover(kills: Mapping[str, frozenset[int]]) -> list[str]:
    """Tests that together kill all that the tests kill, by the greedy rule: the one that adds most comes next."""
    left, chosen = frozenset().union(*kills.values()) if kills else frozenset(), list[str]()
    while left:
        best = max(sorted(kills), key=lambda test: len(kills[test] & left))
        chosen.append(best)
        left -= kills[best]
    return chosen


class Runner:
    """Runs tests on a copy of the repository, in a child per mutant that has PyTorch imported already."""

    def __init__(self, copied: Path, words: Sequence[str]) -> None:
        self._copied, self._words = copied, list(words)
        os.environ["CI"] = "1"  # hypothesis draws the same examples for every mutant
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copied / "src"), str(copied)])
        sys.path[:0] = [str(copied / "src"), str(copied)]
        os.chdir(copied)
        # Shared by all children. Not hypothesis, because pytest warns of plugins that were imported before it.
        for name in ("pytest", "torch"):
            importlib.import_module(name)

    def run(self, limit: float) -> Outcome:
        """The tests that fail now. A test that runs at the limit, in seconds, has failed too."""
        log = self._copied / "mutant.log"
        log.write_text("")
        child = os.fork()
        if child == 0:
            self._be_child(log)
        until = time.monotonic() + limit
        ended = False
        try:
            while not ended and time.monotonic() < until:
                ended = os.waitpid(child, os.WNOHANG)[0] == child
                time.sleep(0.0 if ended else 0.05)
        finally:
            if not ended:  # at the limit, or by Ctrl-C, which the child does not get
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return self._read(log, "tests" if ended else "timeout")

    def _be_child(self, log: Path) -> None:
        # In a session of its own, so that processes of its tests end with it.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            import pytest  # noqa: PLC0415

            with log.open("a", buffering=1) as file:
                pytest.main([*self._words, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], [_Recorder(file)])
        finally:
            os._exit(0)

    @staticmethod
    def _read(log: Path, end: str) -> Outcome:
        started: list[str] = []
        failed: set[str] = set()
        ended = False
        for kind, _, test in (line.partition(" ") for line in log.read_text().splitlines()):
            started += [test] * (kind == "start")
            failed |= {test} if kind == "fail" else set()
            ended |= kind == "end"
        if not started:
            return Outcome(frozenset(), "import")
        if not ended:  # stuck, or it took the process with it
            failed.add(started[-1])
        return Outcome(frozenset(failed), end)


class _Recorder:
    def __init__(self, file: Any) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print("start", nodeid.partition("[")[0], file=self._file)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print("fail", report.nodeid.partition("[")[0], file=self._file)

    def pytest_sessionfinish(self) -> None:
        print("end", file=self._file)


def copy_repository(into: Path) -> None:
    """All files that git does not ignore, with changes that are not committed."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    for name in names.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def measure(mutants: Iterable[Mutant], copied: Path, runner: Runner, limit: float) -> list[tuple[Mutant, Outcome]]:
    """The outcome of each mutant."""
    results: list[tuple[Mutant, Outcome]] = []
    for number, mutant in enumerate(mutants, start=1):
        path = copied / mutant.file
        original = path.read_text("utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # bytecode is recognised by seconds and size, which a mutant can share
        path.write_text(mutant.source, "utf-8")
        try:
            results.append((mutant, runner.run(limit)))
        finally:
            path.write_text(original, "utf-8")
        killers, end = results[-1][1]
        seen = f"killed by {len(killers)}" if killers else "no import" if end == "import" else "SURVIVES"
        print(f"{number:4} {seen:13} {mutant.file}:{mutant.line}  {mutant.change[:80]}", flush=True)
    return results


def report(results: Sequence[tuple[Mutant, Outcome]], tests: Iterable[str]) -> dict[str, Any]:
    """Print the matrix in short, and return it as a table for JSON."""
    kills = {
        test: frozenset(number for number, (_, seen) in enumerate(results) if test in seen.killers) for test in tests
    }
    counted = [(mutant, seen) for mutant, seen in results if seen.end != "import"]
    survivors = [mutant for mutant, seen in counted if not seen.killers]
    cover = smallest_cover(kills)
    print(f"\n{len(counted)} mutants, {len(counted) - len(survivors)} killed, by {len(kills)} test functions")
    print(f"{len(cover)} functions kill all of these; of the others, these kill nothing:")
    for test in sorted(kills):
        if not kills[test]:
            print(f"  {test}")
    return {
        "killed_by": {f"{mutant.file}:{mutant.line} {mutant.change}": sorted(seen.killers) for mutant, seen in counted},
        "kills": {test: len(numbers) for test, numbers in kills.items()},
        "cover": cover,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one folder of tests. Returns 1 if the tests fail without any mutant, else 0."""
    parser = argparse.ArgumentParser("mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="of tests, or one file of tests")
    parser.add_argument("--source", action="append", default=[], metavar="PATH", help="file or folder to change")
    parser.add_argument("--most", type=int, default=500, metavar="N", help="mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    parser.add_argument("--all", action="store_true", help="with the tests marked `long`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the whole matrix as JSON")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(chosen.folder).resolve().relative_to(ROOT)
    mirror = Path("src", "torchweft", *folder.parts[1:])
    sources = [Path(source) for source in chosen.source] or [mirror]
    if missing := [str(path) for path in (folder, *sources) if not (ROOT / path).exists()]:
        parser.error(f"there is no {', no '.join(missing)}; name the code to change with --source")
    files = sorted(file for path in sources for file in ([path] if path.suffix else (ROOT / path).rglob("*.py")))
    names = [str((ROOT / file).relative_to(ROOT)) for file in files]
    every = [mutant for name in names for mutant in mutants_of(name, (ROOT / name).read_text("utf-8"))]
    out = chosen.out.resolve() if chosen.out else None
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copied = Path(temporary)
        copy_repository(copied)
        runner = Runner(copied, [str(folder), *["--all"] * chosen.all])
        start = time.monotonic()
        runner.run(3600.0)  # writes bytecode
        tests = _started(copied / "mutant.log")
        first = runner.run(3600.0)
        took = (time.monotonic() - start) / 2
        if first.killers or first.end != "tests":
            print(f"without a mutant, these fail: {', '.join(sorted(first.killers)) or first.end}")
            return 1
        drawn = draw(every, chosen.most, chosen.seed)
        print(f"{len(every)} mutants, {len(drawn)} drawn; the tests take {took:.1f} s", flush=True)
        sys.dont_write_bytecode = True
        table = report(measure(drawn, copied, runner, 20.0 + 5 * took), tests)
        os.chdir(ROOT)
    if out is not None:
        out.write_text(json.dumps(table, indent=1), "utf-8")
    return 0


def _started(log: Path) -> list[str]:
    lines = log.read_text().splitlines()
    return sorted({line.removeprefix("start ") for line in lines if line.startswith("start ")})


if __name__ == "__main__":
    sys.exit(main())
