"""The examples: short enough to be read, and each runs to its end."""

import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, run

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = {"report": ("report.html", "trace.json"), "remote_experts": ("experts.html",)}
SMALL = {
    "gpt2_pipeline": ["--steps", "4"],
    "char_rnn": ["--seconds", "1"],
    "remote_experts": ["--steps", "60"],
    "report": ["--steps", "2"],
    "unet_pipeline": ["--seconds", "0.5"],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_250_lines_and_a_docstring(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith('"""') and len(text.splitlines()) <= 250


@pytest.mark.long
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    words = SMALL[path.stem] + (["--out", str(tmp_path)] if path.stem in PAGES else [])
    done = run([sys.executable, str(path), *words])
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((tmp_path / name).stat().st_size > 5_000 for name in PAGES.get(path.stem, ()))
