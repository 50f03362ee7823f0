"""The demo's net keeps shapes, its skips cross the stages as the drawing says, and its data is what it says."""

import importlib.util
import sys

import pytest
import torch

from weft.core.errors import UsageError
from weft.demo.unet import BALANCE, NOISE, SIDE, load_digits, unet, with_noise
from weft.pipeline.pipe import Pipe
from weft.pipeline.skip import inspect_skip_layout, verify_skippables

needs_scikit_learn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="the digits need scikit-learn (the extra `demo`)"
)


def test_the_net_gives_an_image_of_the_same_shape() -> None:
    model = unet(4)
    verify_skippables(model)
    for side in (8, SIDE):
        assert model(torch.rand(2, 1, side, side)).shape == (2, 1, side, side)


def test_two_skips_go_from_the_first_stage_straight_to_the_last() -> None:
    pipe = Pipe(unet(4), chunks=2, balance=BALANCE, devices=["cpu"] * 4)
    layout = inspect_skip_layout(pipe.partitions)
    crossings = {name: layout.by_ns_name[None, name] for name in ("noisy", "fine", "middle")}
    assert crossings == {"noisy": (0, 3), "fine": (0, 3), "middle": (1, 2)}


@needs_scikit_learn
def test_the_digits_are_grey_images_and_none_is_in_both_parts() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    assert digits.train.shape == (1500, 1, SIDE, SIDE) and digits.held_out.shape == (297, 1, SIDE, SIDE)
    for images in (digits.train, digits.held_out):
        assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
    assert digits.noisy.shape == digits.held_out.shape
    distances = torch.cdist(digits.held_out.flatten(1), digits.train.flatten(1))
    assert (distances == 0).sum() == 0


@needs_scikit_learn
def test_the_same_seed_gives_the_same_digits() -> None:
    seen = []
    for _ in range(2):
        torch.manual_seed(3)
        seen.append(load_digits())
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_noise_has_the_deviation_that_it_says() -> None:
    torch.manual_seed(0)
    assert with_noise(torch.zeros(100, 100)).std().item() == pytest.approx(NOISE, rel=0.05)


def test_without_scikit_learn_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'weft\[demo\]'"):
        load_digits()
