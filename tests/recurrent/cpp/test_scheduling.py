"""Schedules: what is done in bulk and what in which loop, and which axis threads share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import at_once
from tests.recurrent.step_cases import Told
from weft.recurrent import cells
from weft.recurrent.capture import capture
from weft.recurrent.cpp.ir import (
    Cat,
    Elementwise,
    LoopValue,
    Operation,
    Product,
    Reduce,
    TimeReduction,
    View,
    contiguous_meta,
    sources,
    whole_view,
)
from weft.recurrent.cpp.lowering import Lowered, decomposition_table, lower
from weft.recurrent.cpp.scheduling import axis_in_view, row_axes

ROWS, INPUT, HIDDEN = 6, 3, 5


def built(cell: nn.Module) -> Lowered:
    x = torch.zeros(ROWS, INPUT)
    state = torch.zeros(ROWS, HIDDEN)
    return lower(capture(cell, x, (state, state) if "LSTM" in repr(cell) else state, composed=decomposition_table()))


CELLS: dict[str, Callable[[], nn.Module]] = {
    "torch's LSTM": lambda: Told(nn.LSTMCell(INPUT, HIDDEN)),
    "torch's GRU": lambda: Told(nn.GRUCell(INPUT, HIDDEN)),
    "torch's RNN": lambda: Told(nn.RNNCell(INPUT, HIDDEN)),
    "zoo's LSTM": lambda: cells.LSTMCell(INPUT, HIDDEN),
    "zoo's GRU": lambda: cells.GRUCell(INPUT, HIDDEN),
    "layer norm LSTM": lambda: cells.LayerNormLSTMCell(INPUT, HIDDEN),
}
every = at_once("make", CELLS.values(), CELLS)


def products(values: Sequence[LoopValue]) -> int:
    return sum(isinstance(each.made, Product) for each in values)


@every
def test_a_loop_holds_one_product_and_no_gradient_of_a_parameter(make: Callable[[], nn.Module]) -> None:
    it = built(make())
    for function in (it.forward, it.backward):
        (main,) = [each for each in function.phases if each.main]
        assert products(main.loop) == 1
        assert not any(isinstance(each.made, TimeReduction) for each in main.loop)
        assert function.axes is not None, "rows of the batch never meet, so threads may take some each"
    kinds = [type(value.made.of) for value, _ in it.backward.totals if isinstance(value.made, TimeReduction)]
    assert kinds.count(Product) == 2 and View not in kinds and set(kinds) <= {Product, Reduce}
    recompute = it.recompute  # all states are known, so no loop carries
    assert not any(each.main for each in recompute.phases)
    assert products([value for each in recompute.phases for value in each.bulk]) == products(recompute.values)


@every
def test_a_phase_reads_only_what_was_made_before(make: Callable[[], nn.Module]) -> None:
    for function in built(make()).functions:
        done = set(function.layouts) - set(function.values)
        for step in function.phases:
            for made in [[each] for each in step.bulk] + list(step.groups):
                for value in made:
                    reads = sources(value.made)
                    assert all(each in done or (each in made and isinstance(value.made, Elementwise)) for each in reads)
                    done.add(value)


def test_gates_before_their_functions_are_never_stored_and_pieces_are_made_in_place() -> None:
    it = built(cells.LSTMCell(INPUT, HIDDEN))
    stored = [each for step in it.forward.phases for group in step.groups for each in group if len(group) > 1]
    assert sum(it.forward.stored(each, stored) for each in stored) == 7  # 5 that backward reads, h and c
    assert len(it.backward.slots) == 4  # the gates' gradients, within their concatenation


BATCH = 4
VIEWS = ("transpose", "narrow", "select", "unsqueeze", "flatten", "halve", "expand", "diagonal")


def looked(data: Any, at: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """One more view of both, drawn."""
    axis = data.draw(st.integers(0, max(at.dim() - 1, 0)))
    kind = data.draw(st.sampled_from(VIEWS))
    size = at.shape[axis] if at.dim() else 0
    if kind == "transpose" and at.dim() > 1:
        return at.transpose(0, axis), labels.transpose(0, axis)
    if kind == "narrow" and size > 1:
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        return at.narrow(axis, start, length), labels.narrow(axis, start, length)
    if kind == "select" and at.dim() > 1:
        index = data.draw(st.integers(0, size - 1))
        return at.select(axis, index), labels.select(axis, index)
    if kind == "unsqueeze":
        return at.unsqueeze(axis), labels.unsqueeze(axis)
    if kind == "flatten" and at.is_contiguous() and at.dim() > axis + 1:
        return at.flatten(axis, axis + 1), labels.flatten(axis, axis + 1)
    if kind == "halve" and at.is_contiguous() and size and size % 2 == 0:
        return at.unflatten(axis, (2, -1)), labels.unflatten(axis, (2, -1))
    if kind == "expand" and at.dim() < 4:
        return at.expand(2, *at.shape), labels.expand(2, *labels.shape)
    if kind == "diagonal" and at.dim() > 1:
        return at.diagonal(0, 0, at.dim() - 1), labels.diagonal(0, 0, labels.dim() - 1)
    return at, labels


def is_row_axis(labels: Tensor, axis: int) -> bool:
    """Whether along the axis stands row 0, 1, 2 ... wherever one looks."""
    if labels.shape[axis] != BATCH:
        return False
    wanted = torch.arange(BATCH).view([-1 if i == axis else 1 for i in range(labels.dim())])
    return bool((labels == wanted).all())


@given(st.data())
def test_the_row_axis_of_a_view_is_where_the_rows_are(data: Any) -> None:
    before, behind = data.draw(st.sampled_from([(1, 3), (2, 1), (1, 1), (2, 3), (4, 4), (1, 4)]))
    labels = torch.arange(BATCH).view(1, -1, 1).expand(before, BATCH, behind).contiguous()
    value = LoopValue("v", tuple(labels.shape), torch.float32)
    at = contiguous_meta(value.shape, value.dtype)
    for _ in range(data.draw(st.integers(0, 4))):
        at, labels = looked(data, at, labels)
    found = axis_in_view(View(value, at), 1, BATCH)
    if found is not None:
        assert is_row_axis(labels, found)


@at_once(
    ("view", "axis"),
    [
        (lambda at: at, 1),
        (lambda at: at.transpose(1, 2), 2),
        (lambda at: at[:, :, 1:], 1),
        (lambda at: at[1], 0),
        (lambda at: at[:, None], 2),
        (lambda at: at.flatten(0, 1), None),
        (lambda at: at.flatten(0, 1)[1 : 1 + BATCH], None),  # rows of two batches
        (lambda at: at.flatten(0, 1)[BATCH:], 0),
        (lambda at: at[:, 1:], None),
    ],
)
def test_usual_views_have_their_row_axis(view: Any, axis: int | None) -> None:
    value = LoopValue("v", (2, BATCH, 3), torch.float32)
    assert axis_in_view(View(value, view(contiguous_meta(value.shape, value.dtype))), 1, BATCH) == axis


H = LoopValue("h", (BATCH, BATCH), torch.float32)
WEIGHT = whole_view(LoopValue("w", (BATCH, BATCH), torch.float32, None, False))
X = whole_view(LoopValue("x", (BATCH, BATCH), torch.float32))
TURNED = View(H, contiguous_meta((BATCH, BATCH), torch.float32).t())


@at_once(
    ("made", "shape", "axis"),
    [
        (Elementwise("{0}", [whole_view(H)], torch.float32), (2, BATCH, BATCH), 1),
        (Elementwise("({0}+{1})", [whole_view(H), TURNED], torch.float32), (BATCH, BATCH), "mixed"),
        (Elementwise("{0}", [X], torch.float32), (BATCH, BATCH), None),
        (Reduce("sum", whole_view(H), (1,), False), (BATCH,), 0),
        (Reduce("sum", whole_view(H), (0,), False), (BATCH,), "mixed"),
        (Reduce("sum", TURNED, (0,), False), (BATCH,), 0),
        (Cat([whole_view(H), X], 1), (BATCH, 2 * BATCH), 0),
        (Cat([whole_view(H), X], 0), (2 * BATCH, BATCH), "mixed"),
        (Product(whole_view(H), WEIGHT), (BATCH, BATCH), 0),
        (Product(TURNED, WEIGHT), (BATCH, BATCH), "mixed"),
        (Product(WEIGHT, TURNED), (BATCH, BATCH), 1),
        (Product(whole_view(H), TURNED), (BATCH, BATCH), "mixed"),
        (Product(X, WEIGHT, whole_view(H)), (BATCH, BATCH), 0),
        (Product(X, WEIGHT, TURNED), (BATCH, BATCH), "mixed"),  # columns of a packed weight are not shared out by rows
        (Product(X, X, TURNED), (BATCH, BATCH), 1),
    ],
)
def test_an_operator_hands_the_row_axis_on_or_mixes_rows(made: Operation, shape: tuple[int, ...], axis: Any) -> None:
    value = LoopValue("z", shape, torch.float32, made)
    found = row_axes([value], [H])
    assert found is None if axis == "mixed" else found is not None and found[value] == axis
