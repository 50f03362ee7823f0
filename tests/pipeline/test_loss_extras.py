"""Extras that a loss returns with its number: they are joined, and change neither loss nor gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.pipeline.pipe_cases import (
    assert_close,
    assert_gradients_equal,
    chain,
    every_run,
    every_schedule,
    piped,
    rows,
    without_target,
)
from torchweft.core.errors import BatchError, SpecError


def with_metrics(output: Tensor, target: Tensor) -> Any:
    predicted = output.argmax(1)
    loss = functional.cross_entropy(output, target)
    return loss, {
        "output": output,  # requires a gradient here, but not in the result
        "target": target,
        "each": [functional.cross_entropy(output, target, reduction="none"), predicted],
        "right": (predicted == target).sum(),
        "any": (predicted == target).any(),
        "rows": len(output),
        "loss": loss,
        "item": loss.item(),
        "mean": output.mean(),
        "note": ("same", None, True),
    }


@without_target
@every_schedule
@every_run
def test_extras_are_those_of_the_undivided_mini_batch(executor: str, checkpoint: str, schedule: str) -> None:
    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint, schedule=schedule, loss=with_metrics
    )
    for count in (7, 1, 3, 8):
        x, y = rows(count, 4, seed=count), torch.arange(count) % 3
        (loss, extras), (expected, expected_extras) = pipe(x, target=y), with_metrics(plain(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        (2 * expected).backward()
        assert_gradients_equal(pipe, plain)
        assert_close(loss, expected)
        assert 0 < extras.pop("any") <= min(count, 3) and expected_extras.pop("any")
        assert extras.pop("note") == expected_extras.pop("note")
        assert list(extras) == list(expected_extras) and not any(
            leaf.requires_grad for leaf in (extras["output"], *extras["each"], extras["loss"], extras["mean"])
        )
        assert_close(extras, expected_extras)
        extras["target"].add_(1)  # a copy, so that the caller's target does not change
        assert torch.equal(y, torch.arange(count) % 3)
    with torch.no_grad():
        loss, extras = pipe(x, target=y)
        assert_close(extras["output"], plain(x))
    assert_close(pipe(x), plain(x))


@given(count=st.integers(1, 7), chunks=st.integers(1, 7), reduction=st.sampled_from(["mean", "sum"]))
def test_integers_are_summed_and_floats_combined_as_losses(count: int, chunks: int, reduction: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        number = getattr(output.square(), reduction)()
        return number, (number.item(), number.float(), len(output), (target > 0).sum().int(), torch.tensor(True))

    pipe, plain = piped(chain(4, 3), chunks=chunks, loss=loss, loss_reduction=reduction)
    x = rows(count, 4)
    pieces = min(count, chunks)
    value, extras = pipe(x, target=torch.arange(count))
    expected = loss(plain(x), torch.arange(count))[0]
    assert_close(value, expected)
    assert_close(extras[0], expected.item())
    assert_close(extras[1], expected.float(), 1e-5)
    assert extras[2] == count and extras[3] == count - 1 and extras[4] == pieces
    assert [extra.dtype for extra in (extras[1], extras[3], extras[4])] == [torch.float32, torch.int64, torch.int64]


def test_micro_batch_of_weight_zero_does_not_enter_averages() -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        number = functional.cross_entropy(output, target)
        return number, (number, number.item(), (target != -100).sum())

    pipe, plain = piped(chain(4, 3), loss=loss, loss_weight=lambda target: (target != -100).sum(), schedule="1f1b")
    x, y = rows(6, 4), torch.tensor([0, 1, -100, -100, -100, 2])
    value, extras = pipe(x, target=y)
    expected, expected_extras = loss(plain(x), y)
    assert_close((value, extras), (expected, expected_extras))
    value.backward()
    expected.backward()
    assert_gradients_equal(pipe, plain)


def test_extras_are_joined_along_the_axis_of_the_output() -> None:
    pipe, plain = piped(
        chain(4, 3), batch_dim=1, loss=lambda output, target: (output.mean(), (output - target).square().sum(2))
    )
    x, y = rows(5, 7, 4), rows(5, 7, 3)
    assert_close(pipe(x, target=y)[1], (plain(x) - y).square().sum(2))


def returning(*makers: Any) -> Any:
    """A loss that applies one of the functions in every call."""
    remaining = iter(makers)
    return lambda output, _: next(remaining)(output)


def test_extras_that_cannot_be_joined_are_named() -> None:
    def fails(kind: type[Exception], word: str, *makers: Any) -> None:
        pipe, _ = piped(chain(4, 3), chunks=2, executor="serial", loss=returning(*makers))
        with pytest.raises(kind, match=word):
            pipe(rows(4, 4), target=rows(4))

    fails(
        BatchError,
        "micro-batch 1: the loss function's result should be a tuple of 2, but is a leaf",
        lambda y: (y.mean(), 1),
        torch.Tensor.mean,
    )
    fails(BatchError, "the loss function's result", lambda y: (y.mean(), [1]), lambda y: (y.mean(), (1,)))
    fails(BatchError, "the loss function's result.*differs", lambda y: (y.mean(), "a"), lambda y: (y.mean(), "b"))
    fails(BatchError, "the loss function's result", *[lambda y: (y.mean(), y.new_ones(5))] * 2)
    fails(SpecError, r"returned tuple; it must .* \(number, extras\)", lambda y: (y.mean(), 1, 2))
    fails(SpecError, "returned int", lambda y: (3, y))
    fails(SpecError, "returned tuple", lambda y: ((y.mean(), 1), 2))
