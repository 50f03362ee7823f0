"""A recording is saved by one call, and a script is recorded without changes to it."""

import json
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.processes import run
from torchweft import Pipe, Recorder
from torchweft.core.errors import UsageError
from torchweft.report import record_script, summary

PIPE = """
import sys
import torch
import torchweft as weft
from torch import nn

def make(**settings):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return weft.Pipe(model, chunks=2, devices=["cpu", "cpu"], executor="serial", **settings)

x = torch.randn(4, 8)
"""


def recorded(*, memory: bool = False) -> Recorder:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
    recorder = Recorder(memory=memory)
    with pipe.observed_by(recorder):
        pipe(torch.randn(4, 3)).sum().backward()
    return recorder


def written(folder: Path, *lines: str) -> str:
    script = folder / "train.py"
    script.write_text("\n".join([PIPE, *lines]), encoding="utf-8")
    return str(script)


def test_recorder_saves_a_report_or_a_trace(tmp_path: Path) -> None:
    recorder = recorded(memory=True)
    html = recorder.save(tmp_path / "step.html", title="a < b").read_text("utf-8")
    assert "<title>a &lt; b</title>" in html and "Summary" in html and "stage 1" in html
    assert f"torch {torch.__version__}" in html and "2 stages, 2 micro-batches" in html
    assert "<details>" in html and "peak memory" in html and "all stages, peak" in html
    trace = json.loads(recorder.save(str(tmp_path / "step.json")).read_text("utf-8"))
    assert sum(entry["ph"] == "X" for entry in trace["traceEvents"]) == len(recorder.events)
    assert "peak memory" not in recorded().save(tmp_path / "bare.html").read_text("utf-8")


def test_recorder_rejects_other_formats_and_empty_recordings(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"step\.txt has the suffix '\.txt'.*\.html.*\.json"):
        recorded().save(tmp_path / "step.txt")
    with pytest.raises(UsageError, match=r"nothing was recorded, so .*step\.html.*observed_by"):
        Recorder().save(tmp_path / "step.html")
    assert list(tmp_path.iterdir()) == []


def test_both_pictures_of_a_step_end_at_the_same_time(tmp_path: Path) -> None:
    recorder = recorded(memory=True)
    recorder.bytes.append((recorder.events[0].start + 100.0, 0))
    html = recorder.save(tmp_path / "step.html").read_text("utf-8")
    assert html.count("time in s<") == 3, "the timeline in its wide form, and both forms of the memory curve"


def test_summary_has_the_figures_of_every_step() -> None:
    section = summary({"first": recorded(), "second": Recorder()})
    assert "first" in section.body[0] and "no actions" in section.body[0] and "Python 3" in section.body[0]


def test_script_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import helper",
        "assert __name__ == '__main__' and sys.argv[1:] == ['--steps', '3'] and sys.argv[0] == __file__",
        "pipe = make(schedule='1f1b', loss=nn.functional.mse_loss)",
        "for _ in range(3): pipe(x, target=x).backward()",
        "with torch.no_grad(): pipe(x)",
        "sys.exit(3)",
    )
    (tmp_path / "helper.py").touch()
    argv, paths = list(sys.argv), list(sys.path)
    assert record_script(script, ["--steps", "3"], str(tmp_path / "step.html")) == 3
    assert (sys.argv, sys.path) == (argv, paths)
    html = (tmp_path / "step.html").read_text("utf-8")
    assert "The last step of train.py" in html and "Pipe 1: 1f1b, 2 stages" in html
    assert "All 8 actions as a table" in html, "one training step, and not the evaluation after it"
    assert "peak memory" in html


def test_every_pipe_of_a_script_has_its_last_step(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "first, second, unused = make(), make(schedule='1f1b', loss=nn.functional.mse_loss), make()",
        "losses = [first(x).sum(), first(x).sum(), second(x, target=x)]",
        "for loss in losses: loss.backward()",
        "first(x)",
    )
    assert record_script(script, [], str(tmp_path / "step.json")) == 0
    entries = json.loads((tmp_path / "step.json").read_text("utf-8"))["traceEvents"]
    assert {entry["args"]["name"] for entry in entries if entry["name"] == "process_name"} == {
        "Pipe 1: gpipe, 2 stages",
        "Pipe 2: 1f1b, 2 stages",
    }
    assert [sum(entry["ph"] == "X" and entry["pid"] == pipe for entry in entries) for pipe in (0, 1)] == [8, 8]


def test_exception_of_a_script_passes_after_the_report(tmp_path: Path) -> None:
    script = written(
        tmp_path, "pipe = make()", "pipe(x).sum().backward()", "def fail():", "    raise KeyError('mine')", "fail()"
    )
    with pytest.raises(KeyError, match="mine") as caught:
        record_script(script, [], str(tmp_path / "step.html"))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames if frame.filename == script] == ["<module>", "fail"]
    assert not any("runpy" in frame.filename for frame in frames)
    assert "All 8 actions" in (tmp_path / "step.html").read_text("utf-8")


def test_traced_pipe_computes_the_same_gradients(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "torch.manual_seed(0)",
        "pipe = make(checkpoint='always')",
        "plain = nn.Sequential(*[layer for layer in pipe])",
        "pipe(x).square().sum().backward()",
        "gradients = [parameter.grad.clone() for parameter in pipe.parameters()]",
        "pipe.zero_grad()",
        "plain(x).square().sum().backward()",
        "for gradient, parameter in zip(gradients, plain.parameters()):",
        "    torch.testing.assert_close(gradient, parameter.grad)",
    )
    assert record_script(script, [], str(tmp_path / "step.html")) == 0
    assert "recompute" in (tmp_path / "step.html").read_text("utf-8")


def test_faults_are_found_before_the_script_runs(tmp_path: Path) -> None:
    script = written(tmp_path, "raise AssertionError('it ran')")
    with pytest.raises(UsageError, match="suffix"):
        record_script(script, [], str(tmp_path / "step.txt"))
    with pytest.raises(UsageError, match=r"no script .*none\.py"):
        record_script(str(tmp_path / "none.py"), [], str(tmp_path / "step.html"))
    with pytest.raises(UsageError, match="no folder for the report"):
        record_script(script, [], str(tmp_path / "none" / "step.html"))


def test_script_without_an_observable_step_is_an_error(tmp_path: Path) -> None:
    script = written(tmp_path, "make()")
    with pytest.raises(UsageError, match=r"no weft\.Pipe in .*train\.py ran a step.*step\.html is not written"):
        record_script(script, [], str(tmp_path / "step.html"))
    failing = written(tmp_path, "sys.exit('no data')")
    assert record_script(failing, [], str(tmp_path / "step.html")) == 1


def test_rank_is_added_to_the_name_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A pipe of one of several processes wants torch.distributed. Any group will do.
    script = written(
        tmp_path,
        "import torch.distributed as dist",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "make()(x).sum().backward()",
        "dist.destroy_process_group()",
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert record_script(script, [], str(tmp_path / "step.html")) == 0
    assert (tmp_path / "step-rank1.html").exists() and not (tmp_path / "step.html").exists()


def test_pipes_are_observed_only_while_a_script_runs(tmp_path: Path) -> None:
    record_script(written(tmp_path, "make()(x).sum().backward()"), [], str(tmp_path / "step.html"))
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), chunks=2, devices=["cpu"] * 2)
    assert pipe._observer is None


def test_steps_that_are_kept_are_bounded(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import gc",
        "pipe = make()",
        "for _ in range(20): pipe(x).sum().backward()",
        "gc.collect()",
        "recorders = [thing for thing in gc.get_objects() if type(thing) is weft.Recorder]",
        "assert len(recorders) < 20, len(recorders)",
    )
    assert record_script(script, [], str(tmp_path / "step.html")) == 0


@pytest.mark.long
def test_script_with_worker_processes_is_recorded(tmp_path: Path) -> None:
    """Spawned workers of a data loader import the script, and find its classes by name."""
    lines = [
        "class Rows(torch.utils.data.Dataset):",
        "    def __len__(self): return 4",
        "    def __getitem__(self, index): return torch.ones(8)",
        "if __name__ == '__main__':",
        "    rows = torch.utils.data.DataLoader(Rows(), 4, num_workers=1, multiprocessing_context='spawn')",
        "    for batch in rows: make()(batch).sum().backward()",
    ]
    script = written(tmp_path, *lines)
    program = f"from torchweft.report import record_script; record_script({script!r}, [], {str(tmp_path / 'a.html')!r})"
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0 and (tmp_path / "a.html").exists(), done.stderr
