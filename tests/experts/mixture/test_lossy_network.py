"""Training continues over a network that delays and loses calls: no error, no hang, no double step."""

from statistics import fmean

import pytest
import torch

from benchmarks.experts.survive_learners import Setting, Trained, trained
from benchmarks.experts.survive_model import Labelled

pytestmark = pytest.mark.long
SETTING = Setting(trainers=3, steps=16, rows=32, mean=0.02, loss=0.05, timeout=5.0, after=0.3)
LATE = 10.0  # enough for a loaded machine, but not for a call that waits forever


@pytest.fixture(scope="module")
def found() -> Trained:
    return trained(SETTING, [ten_kinds()], bad=True, seed=0)


def ten_kinds() -> Labelled:
    draw = torch.Generator().manual_seed(0)
    kinds, shown = torch.rand(10, 64, generator=draw), torch.randint(10, (600,), generator=draw)
    images = kinds[shown] + 0.2 * torch.randn(600, 64, generator=draw)
    return Labelled(images[:400], shown[:400], images[400:], shown[400:])


def test_trainers_see_no_lost_call(found: Trained) -> None:
    assert found.lost > 0 and sum(found.calls.failed.values()) > 0
    assert not found.strange
    assert [len(each) for each in found.losses] == [SETTING.steps] * SETTING.trainers


def test_the_loss_falls(found: Trained) -> None:
    assert all(fmean(each[-4:]) < 0.7 * fmean(each[:4]) for each in found.losses)
    assert found.accuracy > 50.0


def test_every_call_ends_by_its_deadline(found: Trained) -> None:
    assert set(found.calls.latest) == {"forward", "backward", "expert"}
    assert max(found.calls.latest.values()) < LATE


def test_no_key_is_applied_twice_and_every_step_has_one(found: Trained) -> None:
    assert found.steps == found.batches > 0
    assert found.keys >= found.batches and found.twice == 0
    assert found.keys <= found.calls.kinds["backward"] * 4
