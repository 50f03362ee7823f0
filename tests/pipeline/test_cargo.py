"""MiniBatch cuts a mini-batch and joins its gradients; outcomes join results and cut the gradients of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.pipeline.pipe_cases import assert_close, rows
from weft import NoChunk
from weft.core.errors import BatchError, SpecError
from weft.core.pytree import flatten
from weft.pipeline.loss import WeightedLoss, checked_loss
from weft.pipeline.microbatch import JoinedOutput, MiniBatch

SIZES = {"count": st.integers(1, 9), "chunks": st.integers(1, 5)}


def leaves_of(parts: list) -> list:
    return [leaf for part in parts for leaf in flatten(part)[0]]


# --- mini_batch


@given(**SIZES)
def test_the_gradient_of_the_mini_batch_is_that_of_its_micro_batches(count: int, chunks: int) -> None:
    x, y = rows(count, 2).requires_grad_(), rows(count, 3, seed=1)
    whole = rows(4, seed=2).requires_grad_()
    mini_batch = MiniBatch([{"x": x, "n": 3}, (y, NoChunk(whole))], chunks)
    assert sum(mini_batch.rows) == count and mini_batch.micro_batches == len(mini_batch.rows) == min(count, chunks)
    assert [id(each) for each in mini_batch.tensors] == [id(x), id(whole)]
    gradients: list[list[Tensor | None]] = []
    for parts in mini_batch.leaves():
        leaves = leaves_of(parts)
        assert [each.requires_grad for each in leaves if isinstance(each, Tensor)] == [True, False, True]
        assert all(each.is_leaf for each in leaves if isinstance(each, Tensor))
        total = parts[0]["x"].square().sum() * parts[0]["n"] * parts[1][1].prod() + parts[1][0].sum()
        one, other = torch.autograd.grad(total, [parts[0]["x"], parts[1][1]])
        gradients.append([one, None, None, other])
    (x.square().sum() * 3 * whole.prod() + y.sum()).backward()
    assert_close(mini_batch.gradients(gradients), [x.grad, whole.grad])


@given(**SIZES)
def test_pieces_are_still_connected_with_the_callers_tensors(count: int, chunks: int) -> None:
    x = rows(count, 2).requires_grad_()
    sum(part.square().sum() for (part,) in MiniBatch([x], chunks).pieces()).backward()
    assert_close(x.grad, 2 * x.detach())


def test_a_tensor_that_no_micro_batch_used_has_no_gradient() -> None:
    mini_batch = MiniBatch([(rows(4, 2).requires_grad_(), rows(4, 2).requires_grad_())], 2)
    unused, used = mini_batch.gradients([[None, None], [None, rows(2, 2)]])
    assert unused is None and used is not None
    assert torch.equal(used, torch.cat([torch.zeros_like(rows(2, 2)), rows(2, 2)]))
    assert mini_batch.gradients([[None, None], [None, None]]) == [None, None]


def test_input_and_target_must_agree_in_rows() -> None:
    with pytest.raises(BatchError) as caught:
        MiniBatch([rows(7, 2), {"y": rows(6)}], 3)
    assert "(input, target)" in str(caught.value)
    assert "7 rows" in str(caught.value) and "6 rows" in str(caught.value)


# --- outputs


@given(**SIZES)
def test_an_output_is_joined_and_its_gradient_cut_again(count: int, chunks: int) -> None:
    x = rows(count, 2)
    pieces = [part for (part,) in MiniBatch([x], chunks).leaves()]
    output = JoinedOutput()
    results = [{"y": each.requires_grad_(), "note": "same", "i": each.argmax(1)} for each in pieces]
    tensors, tracked = output.gather(results)
    assert tracked == [True, False] and not any(each.requires_grad for each in tensors)
    filled = output.filled(tensors)
    assert list(filled) == ["y", "note", "i"] and filled["note"] == "same"
    assert torch.equal(filled["y"], x) and torch.equal(filled["i"], x.argmax(1))
    gradient = rows(count, 2, seed=1)
    spread = output.spread([gradient, None])
    assert torch.equal(torch.cat([each[0] for each in spread]), gradient)
    assert all(each[1] is None and each[2] is None for each in spread)
    assert torch.equal(output.visible(results)["y"], x)


def test_outputs_nested_in_different_ways_are_refused() -> None:
    with pytest.raises(BatchError, match="micro-batch 1"):
        JoinedOutput().gather([(rows(2), rows(2)), (rows(2),)])


# --- losses


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(-3, 3))
def test_the_weighted_loss_is_the_loss_of_all_rows(sizes: list[int], factor: float) -> None:
    total = sum(sizes)
    x = rows(total)
    pieces = [each.requires_grad_() for each in x.split(sizes)]
    output = WeightedLoss([size / total for size in sizes])
    losses = [each.square().mean() for each in pieces]
    (loss,), tracked = output.gather(losses)
    assert tracked == [True]
    assert_close(output.filled([loss]), x.square().mean())
    assert_close(output.visible(losses), x.square().mean())
    for each, (gradient,) in zip(losses, output.spread([torch.tensor(factor, dtype=torch.float64)]), strict=True):
        each.backward(gradient)
    assert_close(torch.cat([each.grad for each in pieces]), factor * 2 * x / total)


def test_a_loss_is_one_number() -> None:
    number = torch.tensor(3.0)
    assert checked_loss(number) is number
    with pytest.raises(SpecError, match=r"shape \(2, 1\).*loss_reduction='sum'"):
        checked_loss(torch.ones(2, 1))
    with pytest.raises(SpecError, match="float"):
        checked_loss(3.0)
    with pytest.raises(SpecError, match=r"complex64.*one real number"):  # scaled gradients could not carry its phase
        checked_loss(torch.ones((), dtype=torch.complex64))
