"""`torchweft plan` and the report draw the values that cross stages."""

from pathlib import Path

import pytest
import torch

import torchweft as weft
from tests.pipeline.pipe_cases import with_batch_norm
from tests.pipeline.split.zoo import UNet
from torchweft.cli import main
from torchweft.report import routes

MODULE = """
import torch
import torchweft as weft
from torch import nn

def build():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return weft.Pipe(model, chunks=2, split=["1", "2"], devices=["cpu"] * 3, sample=torch.randn(2, 8))


def plain():
    return weft.Pipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), chunks=2, devices=["cpu"] * 2)


def unsampled():
    return weft.Pipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), chunks=2, split=["1"], devices=["cpu"] * 2)


def none():
    return None
"""


def test_plan_draws_the_routes_of_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "making_a_pipe.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plan", "--pipe", "making_a_pipe:build"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["o--->       64 bytes  0", "    o--->   64 bytes  1"]
    assert any(line.startswith("live micro-batches of each stage: 2 2 1") for line in lines)
    for function in ("plain", "unsampled"):  # the routes of the second are not known before a step
        assert main(["plan", "--pipe", f"making_a_pipe:{function}"]) == 0
        assert "live micro-batches of each stage: 2 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--pipe", "making_a_pipe:none"])
    assert "none() returned NoneType" in capsys.readouterr().err


def test_plan_reports_missing_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["plan"], "--stages and --chunks, or --pipe"),
        (["plan", "--pipe", "no.such:f"], "no.such"),
    ):
        with pytest.raises(SystemExit) as seen:
            main(list(arguments))
        assert seen.value.code == 2
        assert words in capsys.readouterr().err


@with_batch_norm
def test_the_report_draws_routes() -> None:
    sample = {"x": torch.randn(2, 3, 8, 8)}
    pipe = weft.Pipe(UNet(), chunks=2, split=["middle", "up1"], devices=["cpu"] * 3, sample=sample)
    forms = str(routes(pipe.routes, 3, title="Values that cross")).split("<svg")[1:]
    assert len(forms) == 2  # a wide one, and one for phones
    for picture in forms:
        assert picture.count("<circle") == len(pipe.routes)
        assert picture.count("<path") >= sum(len(route.readers) for route in pipe.routes)
        assert "down1" in picture and "stage 2" in picture
