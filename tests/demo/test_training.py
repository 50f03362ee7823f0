"""Training stops when it should, gets better, and its score is the one in the books."""

import io
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.demo import recording
from weft.demo.recording import WAYS, record
from weft.demo.stage import Options, Stagehand
from weft.demo.training import plain_seconds, psnr, restored, train
from weft.demo.unet import BALANCE, Digits, unet, with_noise
from weft.pipeline.pipe import Pipe


@pytest.fixture
def digits() -> Digits:
    torch.manual_seed(0)
    images = torch.rand(6, 1, 1, 1).expand(6, 1, 8, 8).contiguous()
    return Digits(images, images, with_noise(images))


def pipe_of(model: nn.Sequential) -> Pipe:
    return Pipe(model, chunks=2, balance=BALANCE, devices=["cpu"] * 4, loss=nn.functional.mse_loss, executor="serial")


def hand_of(out: Path, steps: int, seconds: float) -> Stagehand:
    return Stagehand(Options(out, steps, seconds), io.StringIO())


def test_training_ends_after_the_steps_and_the_net_is_better(digits: Digits, tmp_path: Path) -> None:
    pipe = pipe_of(unet(4))
    before = psnr(restored(pipe, digits.noisy), digits.held_out)
    training = train(pipe, digits, 6, hand_of(tmp_path, 40, 1e6))
    assert len(training.losses) == 40 and training.seconds > 0
    assert psnr(restored(pipe, digits.noisy), digits.held_out) > before + 1


def test_training_ends_after_the_seconds_but_not_before_one_step(digits: Digits, tmp_path: Path) -> None:
    assert len(train(pipe_of(unet(4)), digits, 6, hand_of(tmp_path, 10**6, 0.0)).losses) == 1


def test_the_plain_step_leaves_the_model_alone(digits: Digits) -> None:
    model = unet(4)
    before = [parameter.clone() for parameter in model.parameters()]
    assert plain_seconds(model, digits.train, steps=3) > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_restoring_keeps_the_mode_and_the_range(digits: Digits) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Dropout(0.5)).train()
    found = restored(model, 9 * digits.noisy)
    assert model.training and not found.requires_grad
    assert found.min() >= 0 and found.max() <= 1
    assert torch.equal(found, restored(model, 9 * digits.noisy)), "no dropout outside of training"


def test_psnr_is_that_of_the_mean_squared_error() -> None:
    clean = torch.zeros(4, 4)
    assert psnr(clean + 0.1, clean) == pytest.approx(20.0, abs=1e-4)
    assert psnr(clean + 1, clean) == pytest.approx(0.0, abs=1e-4)
    assert psnr(clean + 0.5, clean) == pytest.approx(-10 * math.log10(0.25), abs=1e-4)


def test_recordings_show_who_keeps_the_least_alive(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_RECORDED", 1)
    monkeypatch.setattr(recording, "_COUNTED", 1)
    batch = digits.noisy, digits.train
    peaks = {}
    for way in WAYS:
        found = record(unet(4), way, BALANCE, 6, batch)
        assert {event.kind for event in found.events} == set("FBR" if way.checkpoint == "always" else "FB")
        assert len(found.events) == len(found.forecast.spans)
        assert found.live[0] == (0.0, 0) and found.live[-1][1] == 0
        assert max(count for _, count in found.live) == found.peak_bytes
        peaks[way.name] = found.peak_bytes
    assert peaks["gpipe"] > peaks["1f1b"] and peaks["gpipe"] > peaks["gpipe, recomputed"]
