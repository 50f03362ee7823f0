"""Deferred BatchNorm: after a mini-batch its statistics are those of the undivided batch."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchweft.core.context import set_phase
from torchweft.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from torchweft.pipeline.microbatch import split

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def deferred(plain: nn.Module) -> DeferredBatchNorm:
    converted = convert_deferred_batch_norm(copy.deepcopy(plain))
    assert isinstance(converted, DeferredBatchNorm)
    return converted


def states_are_close(a: nn.Module, b: nn.Module, tolerance: float = 1e-12) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(
        torch.allclose(first[key].double(), second[key].double(), rtol=tolerance, atol=tolerance) for key in first
    )


def step(norm: DeferredBatchNorm, batch: Tensor, chunks: int) -> list[Tensor]:
    norm.begin()
    outputs = [norm(piece) for piece in split(batch, chunks)]
    norm.commit()
    return outputs


@given(
    dims=st.integers(2, 5),
    rows=st.integers(1, 9),
    chunks=st.integers(1, 11),
    momentum=st.sampled_from([None, 0.1, 1.0, 0.0]),
    affine=st.booleans(),
    offset=st.sampled_from([0.0, 1e3]),
)
def test_statistics_equal_those_of_the_undivided_batch(
    *, dims: int, rows: int, chunks: int, momentum: float | None, affine: bool, offset: float
) -> None:
    if dims == 2:  # one row alone has no variance
        rows, chunks = 2 * rows, min(chunks, rows)
    plain = KINDS[dims](3, momentum=momentum, affine=affine, dtype=torch.float64)
    cut, by_piece = deferred(plain), copy.deepcopy(plain)
    for _ in range(3):
        batch = torch.randn(rows, 3, *(2, 3, 2)[: dims - 2], dtype=torch.float64) + offset
        plain(batch)
        outputs = step(cut, batch, chunks)
        # Each micro-batch is normalised with its own statistics.
        alone = [by_piece(piece) for piece in split(batch, chunks)]
        for output, reference in zip(outputs, alone, strict=True):
            assert torch.allclose(output, reference, rtol=1e-12, atol=1e-12)
        if affine:
            for output in (outputs, alone):
                torch.cat(output).square().sum().backward()
            for mine, theirs in zip(cut.parameters(), by_piece.parameters(), strict=True):
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    assert states_are_close(plain, cut)
    assert int(cut.num_batches_tracked) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_running_statistics_are_gathered_in_float32(dtype: torch.dtype) -> None:
    # The reference is the undivided batch in float32. Only the result is rounded to the narrow type.
    torch.manual_seed(0)
    cut = deferred(nn.BatchNorm1d(64, momentum=1.0, dtype=dtype))
    batch = (torch.randn(12, 64) + 3).to(dtype)
    reference_norm = nn.BatchNorm1d(64, momentum=1.0)
    reference_norm(batch.float())
    step(cut, batch, 3)
    assert states_are_close(reference_norm, cut, tolerance=0.51 * torch.finfo(dtype).eps)


def test_recomputation_gathers_nothing_and_gives_the_same_output() -> None:
    batch = torch.randn(6, 3)
    cut = deferred(nn.BatchNorm1d(3))
    once = copy.deepcopy(cut)
    first = step(once, batch, 2)
    cut.begin()
    with torch.no_grad(), set_phase("checkpointing"):
        for piece in split(batch, 2):
            cut(piece)
    with set_phase("recomputing"):  # interleaved with the forward, as under 1F1B
        again = cut(batch[:3])
    cut.commit()
    with set_phase("recomputing"):
        late = cut(batch[:3])
    assert states_are_close(once, cut, tolerance=0)
    assert torch.equal(again, first[0])
    assert torch.equal(late, first[0])


def test_plain_norm_in_evaluation_and_outside_a_mini_batch() -> None:
    plain = nn.BatchNorm1d(3)
    cut = deferred(plain)
    batch = torch.randn(5, 3)
    for training in (True, False):
        plain.train(training)
        cut.train(training)
        assert torch.equal(plain(batch), cut(batch))
        assert states_are_close(plain, cut, tolerance=0)
    assert torch.equal(torch.cat(step(cut, batch, 2)), plain(batch))
    assert states_are_close(plain, cut, tolerance=0), "evaluation must not change the statistics"


def test_abandoned_or_never_reached_mini_batches_leave_no_trace() -> None:
    plain = nn.BatchNorm1d(3)
    cut = deferred(plain)
    cut.begin()
    cut(torch.randn(4, 3))
    cut.abandon()
    cut.commit()
    cut.begin()
    cut.commit()
    cut.begin()
    cut(torch.randn(4, 3))
    cut.begin()  # restarts
    cut.commit()
    assert states_are_close(plain, cut, tolerance=0)
    plain(batch := torch.randn(4, 3))
    cut(batch)
    assert states_are_close(plain, cut, tolerance=0)


def test_one_value_per_channel_raises_the_error_of_the_plain_one() -> None:
    with pytest.raises(ValueError) as reference:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    cut = deferred(nn.BatchNorm1d(3))
    with pytest.raises(ValueError) as seen:
        step(cut, torch.ones(3, 3), 3)
    assert str(seen.value) == str(reference.value)


def test_wrong_number_of_axes_raises_the_plain_error() -> None:
    cut = deferred(nn.BatchNorm2d(3))
    for begin in (cut.abandon, cut.begin):
        begin()
        with pytest.raises(ValueError, match="expected 4D input"):
            cut(torch.ones(2, 3))
    bare = DeferredBatchNorm(3)
    step(bare, torch.randn(4, 3), 2)
    assert int(bare.num_batches_tracked) == 1
    with pytest.raises(ValueError, match="at least 2 axes"):
        bare(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_micro_batch_counts_for_nothing(dtype: torch.dtype) -> None:
    plain = nn.BatchNorm1d(3, dtype=dtype)
    cut = deferred(plain)
    batch = torch.randn(4, 3, dtype=dtype)
    cut.begin()
    cut(batch)
    cut(batch[:0])
    cut.commit()
    plain(batch)
    assert states_are_close(plain, cut, tolerance=torch.finfo(dtype).eps)


def test_conversion_keeps_everything_and_shares_what_was_shared() -> None:
    shared = nn.BatchNorm2d(3, eps=0.5, momentum=None)
    inner = nn.Sequential(nn.BatchNorm1d(2, affine=False, dtype=torch.float64).eval(), shared)
    model = nn.Sequential(shared, inner, inner, nn.BatchNorm3d(4))
    before = dict(model.state_dict(keep_vars=True))
    calls: list[Any] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    assert DeferredBatchNorm.convert_deferred_batch_norm(model) is model
    new = model[0]
    assert isinstance(new, DeferredBatchNorm)
    assert isinstance(new, nn.BatchNorm2d)
    assert model[1][1] is model[2][1] is new
    assert (new.eps, new.momentum, new.training, model[1][0].training) == (0.5, None, True, False)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in after)
    new(torch.randn(2, 3, 2, 2))
    assert calls
    ids = [id(module) for module in model.modules()]
    convert_deferred_batch_norm(model)  # a second conversion changes nothing
    assert ids == [id(module) for module in model.modules()]


def test_modules_without_tracked_statistics_stay_unchanged() -> None:
    class Custom(nn.BatchNorm1d):
        pass

    layers = [
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.SyncBatchNorm(2),
        nn.LazyBatchNorm2d(),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Linear(2, 2),
        Custom(2),
    ]
    model = nn.Sequential(*layers)
    convert_deferred_batch_norm(model)
    assert all(a is b for a, b in zip(model, layers, strict=True))


def test_state_goes_both_ways_and_survives_copies() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3))
    cut = nn.Sequential(deferred(nn.BatchNorm1d(3)))
    step(cut[0], torch.randn(6, 3), 2)
    plain.load_state_dict(cut.state_dict())
    assert states_are_close(plain, cut, tolerance=0)
    plain(torch.randn(6, 3))
    cut.load_state_dict(plain.state_dict())
    for duplicate in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        clone = duplicate(cut)
        assert states_are_close(clone, cut, tolerance=0)
        batch = torch.randn(6, 3)
        step(clone[0], batch, 2)
        step(cut[0], batch, 2)
        assert states_are_close(clone, cut, tolerance=0)
        assert repr(clone) == repr(cut)


def test_it_works_under_inference_mode_and_autocast() -> None:
    cut = deferred(nn.BatchNorm2d(3))
    batch = torch.randn(4, 3, 2, 2)
    with torch.inference_mode():
        step(cut, batch, 2)
    with torch.autocast("cpu", torch.bfloat16):
        step(cut, batch.bfloat16(), 2)
    cut.begin()
    with torch.inference_mode():
        cut(batch)
    cut.commit()
    assert int(cut.num_batches_tracked) == 3
