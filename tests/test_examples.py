"""The examples are short, and each runs to its end."""

import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, run, torchrun

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = {"report": ("report.html", "trace.json"), "remote_experts": ("experts.html",)}
SMALL = {
    "gpt2_pipeline": ["--steps", "4"],
    "char_rnn": ["--seconds", "1"],
    "remote_experts": ["--steps", "60"],
    "report": ["--steps", "2"],
    "unet_pipeline": ["--seconds", "0.5"],
    "unet_ranks": ["--steps", "12"],
}
# A script that trains a model in one process, then again over ranks with `group=` as the only change.
OVER_RANKS = """
import functools
from datetime import timedelta
import torch, torch.distributed as dist, torchweft as weft
from examples import gpt2_pipeline

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
_, alone, expected = gpt2_pipeline.train(steps=4, stages=2, seed=0)
weft.Pipe = functools.partial(weft.Pipe, group=dist.group.WORLD)
_, pipe, losses = gpt2_pipeline.train(steps=4, stages=2, seed=0)
torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
every = dict(alone.named_parameters())
local = dict(pipe.named_parameters())
assert 0 < len(local) < len(every), (len(local), len(every))
for name, parameter in local.items():
    torch.testing.assert_close(parameter, every[name], rtol=1e-3, atol=1e-4)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_has_at_most_250_lines_and_a_docstring(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith('"""') and len(text.splitlines()) <= 250


@pytest.mark.long
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    words = SMALL[path.stem] + (["--out", str(tmp_path)] if path.stem in PAGES else [])
    done = run([sys.executable, str(path), *words])
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((tmp_path / name).stat().st_size > 5_000 for name in PAGES.get(path.stem, ()))


@pytest.mark.long
def test_example_of_one_process_runs_over_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the example needs transformers; the extra `hf` brings it")
    script = tmp_path / "over_ranks.py"
    script.write_text(OVER_RANKS, encoding="utf-8")
    done = torchrun(2, script)
    assert done.returncode == 0, done.stdout + done.stderr
