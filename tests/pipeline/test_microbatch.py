"""Micro-batches: exact cut and join, or an error where that is impossible."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.pipeline.pipe_cases import assert_close, rows
from torchweft.core.errors import BatchError
from torchweft.core.pytree import flatten
from torchweft.pipeline.microbatch import JoinedOutput, MiniBatch, NoChunk, micro_sizes, plan_split, split

SIZES = {"count": st.integers(1, 9), "chunks": st.integers(1, 5)}
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool])


@st.composite
def tensors(draw: st.DrawFn, rows: int, axis: int) -> Tensor:
    rest = draw(st.lists(st.integers(0, 3), min_size=axis, max_size=axis + 2))
    shape = (*rest[:axis], rows, *rest[axis:])
    seed = draw(st.integers(0, 99))
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (numbers * 10).to(draw(dtypes))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A nested value with at least one tensor, its number of rows, and their axis."""
    rows, axis = draw(st.integers(0, 9)), draw(st.integers(0, 1))
    one = tensors(rows, axis)
    leaf = one | st.none() | st.integers() | st.just("text")
    inner = st.recursive(
        leaf,
        lambda deeper: (
            st.lists(deeper, max_size=2).map(tuple) | st.dictionaries(st.text(max_size=2), deeper, max_size=2)
        ),
        max_leaves=4,
    )
    return draw(st.fixed_dictionaries({"x": one, "more": inner}) | one), rows, axis


def bit_equal(a: Any, b: Any) -> bool:
    def same(x: Any, y: Any) -> bool:
        if not isinstance(x, Tensor):
            return x == y
        return x.dtype == y.dtype and torch.equal(x, y)

    return flatten(a)[1] == flatten(b)[1] and all(map(same, flatten(a)[0], flatten(b)[0]))


@given(st.integers(0, 60), st.integers(1, 20))
def test_sizes_are_balanced_and_larger_ones_come_first(rows: int, chunks: int) -> None:
    sizes = micro_sizes(rows, chunks)
    assert sum(sizes) == rows
    assert len(sizes) == max(1, min(rows, chunks))
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(batches(), st.integers(1, 11))
def test_join_is_the_inverse_of_split(batch: tuple[Any, int, int], chunks: int) -> None:
    value, rows, axis = batch
    pieces = split(value, chunks, axis=axis)
    assert len(pieces) == max(1, min(rows, chunks))
    assert bit_equal(join(pieces, axis=axis), value)
    assert bit_equal(split(join(pieces, axis=axis), chunks, axis=axis), pieces)


@given(batches(), st.integers(1, 11))
def test_pieces_are_views(batch: tuple[Any, int, int], chunks: int) -> None:
    value, _, axis = batch
    whole = flatten(value)[0]
    pieces = split(value, chunks, axis=axis)
    for piece in pieces:
        for part, leaf in zip(flatten(piece)[0], whole, strict=True):
            if isinstance(leaf, Tensor):
                assert part.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
            if len(pieces) == 1:
                assert part is leaf
    if len(pieces) == 1:
        assert all(a is b for a, b in zip(flatten(join(pieces))[0], whole, strict=True))


def test_a_negative_axis_counts_from_the_end() -> None:
    value = (torch.arange(12).view(3, 4), torch.arange(4))
    pieces = split(value, 3, axis=-1)
    assert [tuple(piece[0].shape) for piece in pieces] == [(3, 2), (3, 1), (3, 1)]
    assert bit_equal(join(pieces, axis=-1), value)


def test_a_slice_may_be_written_by_a_layer_inside_autograd() -> None:
    # The views of torch.split cannot be written in place under autograd.
    base = torch.ones(4, 2, requires_grad=True)
    first = split(base * 1, 2)[0]
    first.mul_(2)
    first.sum().backward()
    assert torch.equal(base.grad, torch.tensor([[2.0, 2.0]] * 2 + [[0.0, 0.0]] * 2))


def test_no_chunk_value_goes_whole_to_every_micro_batch() -> None:
    mask, table, scale = torch.ones(5, 5), torch.ones(2), torch.tensor(2.0)
    whole = NoChunk({"mask": mask, "deep": [NoChunk(table), None]})
    value = {"x": torch.arange(3), "whole": whole, "n": 0.5, "scale": scale}
    plan, leaves = plan_split(value, 2)
    assert plan.axes == (0, None, None, None, None, None)
    assert leaves[1] is mask
    for piece, size in zip(split(value, 2), (2, 1), strict=True):
        assert piece["whole"]["mask"] is mask
        assert piece["whole"]["deep"][0] is table
        assert piece["n"] == 0.5 and piece["scale"] is scale
        assert piece["x"].shape == (size,)


@given(st.integers(1, 9), st.integers(1, 9), st.sets(st.integers(0, 8)))
def test_gradients_of_slices_are_joined_with_zeros_where_missing(rows: int, chunks: int, missing: set[int]) -> None:
    x = torch.zeros(rows, 2)
    full = torch.randn(rows, 2)
    plan, leaves = plan_split(x, chunks)
    pieces = [None if i in missing else part[0] for i, part in enumerate(plan.split([full]))]
    expected = full.clone()
    for part, piece in zip(plan.split([expected]), pieces, strict=True):
        if piece is None:
            part[0].zero_()
    joined = plan.join_gradients(0, pieces, leaves[0])
    if all(piece is None for piece in pieces):
        assert joined is None
    else:
        assert joined is not None
        assert torch.equal(joined, expected)


def test_gradients_of_shared_values_are_summed_out_of_place() -> None:
    w = torch.ones(3)
    plan, leaves = plan_split((torch.ones(4), NoChunk(w)), 4)
    pieces = [torch.full((3,), 1.0), None, torch.full((3,), 2.0), torch.full((3,), 4.0)]
    total = plan.join_gradients(1, pieces, leaves[1])
    assert total is not None
    assert torch.equal(total, torch.full((3,), 7.0))
    assert [piece[0].item() for piece in pieces if piece is not None] == [1.0, 2.0, 4.0]
    assert plan.join_gradients(1, [None] * 4, leaves[1]) is None


def join(pieces: list[Any], axis: int = 0) -> Any:
    """The inverse of `split`."""
    return JoinedOutput(axis=axis).visible(pieces)


def test_tensors_of_different_length_are_named_and_never_dropped() -> None:
    value = {"x": torch.ones(4, 2), "y": [torch.ones(3), torch.ones(4), torch.tensor(1.0)]}
    with pytest.raises(BatchError) as caught:
        plan_split(value, 2, where="args")
    text = str(caught.value)
    assert "args['x']: 4 rows, shape (4, 2)" in text
    assert "args['y'][0]: 3 rows, shape (3,)" in text
    assert "NoChunk" in text
    with pytest.raises(BatchError, match=r"input\[1\]: no such axis, shape \(2,\)"):
        plan_split((torch.ones(2, 2), torch.ones(2)), 2, axis=1)


@pytest.mark.parametrize("value", [3, (), None, torch.tensor(1.0), NoChunk(torch.ones(3))])
def test_nothing_to_cut_is_an_error(value: Any) -> None:
    with pytest.raises(BatchError, match="no tensor to cut"):
        plan_split(value, 2)


@pytest.mark.filterwarnings("ignore:.*in (beta|prototype) (state|stage):UserWarning")  # torch's own
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.Tensor.to_sparse, "torch.sparse_coo"),
        (torch.Tensor.to_sparse_csr, "torch.sparse_csr"),
        (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "nested"),
        (lambda x: torch.nested.nested_tensor(list(x)), "nested"),
    ],
)
def test_only_dense_tensors_are_cut(make: Callable[[torch.Tensor], torch.Tensor], kind: str) -> None:
    odd = make(torch.ones(4, 2))
    with pytest.raises(BatchError, match=rf"NoChunk\(\.\.\.\):\n  - input\[1\] is {kind}$"):
        plan_split((torch.ones(4, 2), odd), 2)
    plan, leaves = plan_split((torch.ones(4, 2), NoChunk(odd)), 2)
    assert [piece[1] is odd for piece in plan.split(leaves)] == [True, True]


def test_empty_batch_is_one_micro_batch_and_chunks_are_positive() -> None:
    (piece,) = split(torch.ones(0, 3), 4)
    assert piece.shape == (0, 3)
    with pytest.raises(BatchError, match="chunks is 0"):
        split(torch.ones(2), 0)


def test_all_that_cannot_be_joined_is_named() -> None:
    def piece(number: int) -> dict[str, Any]:
        return {
            "n": number,
            "scalar": torch.tensor(1.0),
            "shape": torch.ones(2, 3 + number),
            "dtype": torch.ones(2, dtype=[torch.float32, torch.float64][number]),
            "mixed": [torch.ones(2), None][number],
            "fine": torch.ones(2 + number, 1),
            "equal": "text",
        }

    with pytest.raises(BatchError) as caught:
        join([piece(0), piece(1)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert "output['n'] is not a tensor and differs between micro-batches (0, 1)" in lines[1]
    assert "output['scalar'] is a single number per micro-batch" in lines[2]
    assert "loss=" in lines[2]
    assert "output['shape'] differs" in lines[3]
    assert "(2, 3), (2, 4)" in lines[3]
    assert "output['dtype'] differs in dtype" in lines[4]
    assert "output['mixed'] is a tensor only in some" in lines[5]


def test_a_missing_axis_of_a_result_is_named() -> None:
    with pytest.raises(BatchError, match=r"output has no axis 1 .*\(2,\), \(2,\)"):
        join([torch.ones(2), torch.ones(2)], axis=1)


def test_results_of_different_structure_are_named() -> None:
    one = torch.ones(2)
    with pytest.raises(BatchError) as caught:
        join([(one, one), (one, [one]), (one, one), one])
    text = str(caught.value)
    assert "micro-batch 1: output[1] should be a leaf, but is a list of 1" in text
    assert "micro-batch 3: output should be a tuple of 2, but is a leaf" in text


def test_objects_with_odd_equality_are_equal_only_to_themselves() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError

        __hash__ = None

    odd = Odd()
    assert join([odd, odd]) is odd
    with pytest.raises(BatchError, match="differs between micro-batches"):
        join([odd, Odd()])


def test_single_piece_is_returned_unchanged() -> None:
    """This holds also for a scalar, which cannot be joined."""
    value = {"loss": torch.tensor(1.0), "x": torch.ones(3)}
    output = JoinedOutput()
    output.gather([value])
    grads = [torch.tensor(2.0), torch.ones(3)]
    assert all(seen is given for seen, given in zip(output.scatter_gradients(grads)[0], grads, strict=True))
    joined = join([value])
    assert joined["loss"] is value["loss"]
    assert joined["x"] is value["x"]


@given(**SIZES)
def test_gradient_equals_that_of_the_micro_batches(count: int, chunks: int) -> None:
    x, y = rows(count, 2).requires_grad_(), rows(count, 3, seed=1)
    whole = rows(4, seed=2).requires_grad_()
    mini_batch = MiniBatch([{"x": x, "n": 3}, (y, NoChunk(whole))], chunks)
    assert sum(mini_batch.rows) == count and mini_batch.micro_batches == len(mini_batch.rows) == min(count, chunks)
    assert [id(tensor) for tensor in mini_batch.tensors] == [id(x), id(whole)]
    gradients: list[list[Tensor | None]] = []
    for parts in mini_batch.leaves():
        leaves = flatten(parts)[0]
        assert [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)] == [True, False, True]
        assert all(leaf.is_leaf for leaf in leaves if isinstance(leaf, Tensor))
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


@given(**SIZES, axis=st.integers(0, 1))
def test_an_output_is_joined_and_its_gradient_cut_again(count: int, chunks: int, axis: int) -> None:
    shape = (count, 2) if axis == 0 else (2, count)
    x = rows(*shape)
    pieces = [part.detach() for part in split(x, chunks, axis=axis)]
    output = JoinedOutput(axis=axis)
    results = [{"y": piece.requires_grad_(), "note": "same", "i": piece.long()} for piece in pieces]
    tensors, tracked = output.gather(results)
    assert tracked == [True, False] and not any(tensor.requires_grad for tensor in tensors)
    fill = output.fill(tensors)
    assert list(fill) == ["y", "note", "i"] and fill["note"] == "same"
    assert torch.equal(fill["y"], x) and torch.equal(fill["i"], x.long())
    gradient = rows(*shape, seed=1)
    spread = output.scatter_gradients([gradient, None])
    cut = [gradients[0] for gradients in spread]
    assert all(piece.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr() for piece in cut)
    assert torch.equal(torch.cat(cut, axis), gradient)
    assert all(gradients[1] is None and gradients[2] is None for gradients in spread)
    assert torch.equal(output.visible(results)["y"], x)
