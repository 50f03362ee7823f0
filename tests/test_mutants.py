"""The tool that finds tests which notice no fault: its mutants, and what it says of their outcomes."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.processes import ROOT

SOURCE = '''"""A module."""

LIMIT = 3


def clipped(x: int = 1, *, least: bool = True) -> int:
    """Return x, at most the limit."""
    if x > LIMIT and least:
        raise ValueError(f"{x + 1} is too large")
    print(x)
    return x + 1
'''


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mutants_change_code_and_no_text(tool: ModuleType) -> None:
    """Constants of the module, defaults, docstrings and the texts of errors stay."""
    mutants = list(tool.mutants_of("m.py", SOURCE))
    assert sorted(mutant.change for mutant in mutants) == [
        "1: 2",
        "if x > LIMIT and least: not",
        "print(x): left out",
        "return x + 1: None",
        "x + 1: Sub",
        "x > LIMIT and least: Or",
        "x > LIMIT: GtE",
    ]
    plain = compile(SOURCE, "m.py", "exec").co_code
    assert len({mutant.source for mutant in mutants}) == len(mutants) and plain
    assert all("LIMIT = 3" in mutant.source and "x: int=1" in mutant.source for mutant in mutants)


def test_draw_takes_one_of_each_line_first(tool: ModuleType) -> None:
    mutants = list(tool.mutants_of("m.py", SOURCE))
    drawn = tool.draw(mutants, 3, seed=1)
    assert len({mutant.line for mutant in drawn}) == 3 and drawn == tool.draw(mutants, 3, seed=1)
    assert len(tool.draw(mutants, 99, seed=0)) == len(mutants)


def test_report_names_survivors_and_useless_tests(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    mutants = list(tool.mutants_of("m.py", SOURCE))[:4]
    seen = [{"a", "b"}, {"a"}, {"c"}, set()]
    outcomes = [tool.Outcome(frozenset(killers), "tests") for killers in seen]
    table: dict[str, Any] = tool.report(list(zip(mutants, outcomes, strict=True)), ["a", "b", "c", "d"])
    assert table["cover"] == ["a", "c"] and table["kills"] == {"a": 2, "b": 1, "c": 1, "d": 0}
    assert "4 mutants, 3 killed, by 4 test functions" in (text := capsys.readouterr().out) and text.endswith("  d\n")


@pytest.mark.long
def test_folder_is_measured(tmp_path: Path) -> None:
    """Of one real module, each of three mutants is killed or survives, and the file stays as it is."""
    source = ROOT / "src" / "torchweft" / "core" / "validation.py"
    before = source.read_bytes()
    if subprocess.run(["git", "status"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("mutants: needs a git checkout, which lists the files")
    words = ["tests/core/test_validation.py", "--source", "src/torchweft/core/validation.py", "--most", "3"]
    argv = [sys.executable, str(ROOT / "tools" / "mutants.py"), *words, "--out", str(tmp_path / "matrix.json")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 drawn" in done.stdout and (tmp_path / "matrix.json").exists()
    assert source.read_bytes() == before
