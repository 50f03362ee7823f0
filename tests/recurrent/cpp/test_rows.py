"""The row axis of views and operators, against labels: every element is marked with the row that it is of."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.recurrent.cpp.ir import Cat, Made, Point, Product, Reduce, Ref, Value, natural, seen
from weft.recurrent.cpp.scheduling import axis_in_view, row_axes

ROWS = 4
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
    if labels.shape[axis] != ROWS:
        return False
    wanted = torch.arange(ROWS).view([-1 if i == axis else 1 for i in range(labels.dim())])
    return bool((labels == wanted).all())


@given(st.data())
def test_the_row_axis_of_a_view_is_where_the_rows_are(data: Any) -> None:
    before, behind = data.draw(st.sampled_from([(1, 3), (2, 1), (1, 1), (2, 3), (4, 4), (1, 4)]))
    labels = torch.arange(ROWS).view(1, -1, 1).expand(before, ROWS, behind).contiguous()
    value = Value("v", tuple(labels.shape), torch.float32)
    at = natural(value.shape, value.dtype)
    for _ in range(data.draw(st.integers(0, 4))):
        at, labels = looked(data, at, labels)
    found = axis_in_view(Ref(value, at), 1, ROWS)
    if found is not None:
        assert is_row_axis(labels, found)


@pytest.mark.parametrize(
    ("view", "axis"),
    [
        (lambda at: at, 1),
        (lambda at: at.transpose(1, 2), 2),
        (lambda at: at[:, :, 1:], 1),
        (lambda at: at[1], 0),
        (lambda at: at[:, None], 2),
        (lambda at: at.flatten(0, 1), None),
        (lambda at: at.flatten(0, 1)[1 : 1 + ROWS], None),  # rows of two batches
        (lambda at: at.flatten(0, 1)[ROWS:], 0),
        (lambda at: at[:, 1:], None),
    ],
)
def test_usual_views_have_their_row_axis(view: Any, axis: int | None) -> None:
    value = Value("v", (2, ROWS, 3), torch.float32)
    assert axis_in_view(Ref(value, view(natural(value.shape, value.dtype))), 1, ROWS) == axis


H = Value("h", (ROWS, ROWS), torch.float32)
WEIGHT = seen(Value("w", (ROWS, ROWS), torch.float32, None, False))
X = seen(Value("x", (ROWS, ROWS), torch.float32))
TURNED = Ref(H, natural((ROWS, ROWS), torch.float32).t())


@pytest.mark.parametrize(
    ("made", "shape", "axis"),
    [
        (Point("{0}", [seen(H)], torch.float32), (2, ROWS, ROWS), 1),
        (Point("({0}+{1})", [seen(H), TURNED], torch.float32), (ROWS, ROWS), "mixed"),
        (Point("{0}", [X], torch.float32), (ROWS, ROWS), None),
        (Reduce("sum", seen(H), (1,), False), (ROWS,), 0),
        (Reduce("sum", seen(H), (0,), False), (ROWS,), "mixed"),
        (Reduce("sum", TURNED, (0,), False), (ROWS,), 0),
        (Cat([seen(H), X], 1), (ROWS, 2 * ROWS), 0),
        (Cat([seen(H), X], 0), (2 * ROWS, ROWS), "mixed"),
        (Product(seen(H), WEIGHT), (ROWS, ROWS), 0),
        (Product(TURNED, WEIGHT), (ROWS, ROWS), "mixed"),
        (Product(WEIGHT, TURNED), (ROWS, ROWS), 1),
        (Product(seen(H), TURNED), (ROWS, ROWS), "mixed"),
        (Product(X, WEIGHT, seen(H)), (ROWS, ROWS), 0),
        (Product(X, WEIGHT, TURNED), (ROWS, ROWS), "mixed"),  # columns of a packed weight are not shared out by rows
        (Product(X, X, TURNED), (ROWS, ROWS), 1),
    ],
)
def test_an_operator_hands_the_row_axis_on_or_mixes_rows(made: Made, shape: tuple[int, ...], axis: Any) -> None:
    value = Value("z", shape, torch.float32, made)
    found = row_axes([value], [H])
    assert found is None if axis == "mixed" else found is not None and found[value] == axis
