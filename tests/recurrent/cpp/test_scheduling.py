"""Schedules: phases of values, and the axis along which threads divide rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import at_once
from tests.recurrent.step_cases import TorchCell
from torchweft.recurrent import cells
from torchweft.recurrent.capture import capture
from torchweft.recurrent.cpp.ir import (
    Cat,
    Elementwise,
    LoopValue,
    Operation,
    Product,
    Reduce,
    TimeReduction,
    View,
    contiguous_meta,
    operand_values,
    whole_view,
)
from torchweft.recurrent.cpp.lowering import Lowered, decomposition_table, lower
from torchweft.recurrent.cpp.scheduling import axis_in_view, row_axes

ROWS, INPUT, HIDDEN = 6, 3, 5


def lower_cell(cell: nn.Module) -> Lowered:
    x = torch.zeros(ROWS, INPUT)
    state = torch.zeros(ROWS, HIDDEN)
    return lower(capture(cell, x, (state, state) if "LSTM" in repr(cell) else state, composed=decomposition_table()))


CELLS: dict[str, Callable[[], nn.Module]] = {
    "torch's LSTM": lambda: TorchCell(nn.LSTMCell(INPUT, HIDDEN)),
    "torch's GRU": lambda: TorchCell(nn.GRUCell(INPUT, HIDDEN)),
    "torch's RNN": lambda: TorchCell(nn.RNNCell(INPUT, HIDDEN)),
    "zoo's LSTM": lambda: cells.LSTMCell(INPUT, HIDDEN),
    "zoo's GRU": lambda: cells.GRUCell(INPUT, HIDDEN),
    "layer norm LSTM": lambda: cells.LayerNormLSTMCell(INPUT, HIDDEN),
}
by_cell = at_once("make", CELLS.values(), CELLS)


def product_count(values: Sequence[LoopValue]) -> int:
    return sum(isinstance(value.operation, Product) for value in values)


@by_cell
def test_main_loop_has_one_product_and_no_parameter_sum(make: Callable[[], nn.Module]) -> None:
    lowered = lower_cell(make())
    for function in (lowered.forward, lowered.backward):
        (main,) = [phase for phase in function.phases if phase.main]
        assert product_count(main.loop) == 1
        assert not any(isinstance(value.operation, TimeReduction) for value in main.loop)
        assert function.axes is not None, "a step does not mix rows, so threads can divide them"
    operations = [value.operation for value, _ in lowered.backward.signature.totals]
    kinds = [type(operation.of) for operation in operations if isinstance(operation, TimeReduction)]
    assert kinds.count(Product) == 2 and View not in kinds and set(kinds) <= {Product, Reduce}
    recompute = lowered.recompute  # all states are known, so no loop carries
    assert not any(phase.main for phase in recompute.phases)
    in_bulk = [value for phase in recompute.phases for value in phase.bulk]
    assert product_count(in_bulk) == product_count(recompute.values)


@by_cell
def test_values_are_computed_before_their_readers(make: Callable[[], nn.Module]) -> None:
    for function in lower_cell(make()).functions:
        done = set(function.layouts) - set(function.values)
        for phase in function.phases:
            for group in [[value] for value in phase.bulk] + list(phase.groups):
                for value in group:
                    fused = isinstance(value.operation, Elementwise)
                    operands = operand_values(value.operation)
                    assert all(operand in done or (fused and operand in group) for operand in operands)
                    done.add(value)


def test_pre_activations_are_never_stored() -> None:
    """The gradients of the gates are also written directly into their slots of the concatenation."""
    lowered = lower_cell(cells.LSTMCell(INPUT, HIDDEN))
    groups = [group for phase in lowered.forward.phases for group in phase.groups if len(group) > 1]
    fused = [value for group in groups for value in group]
    assert sum(lowered.forward.is_stored(value, fused) for value in fused) == 7  # 5 that backward reads, h and c
    assert len(lowered.backward.slots) == 4


BATCH = 4


def drawn_view(data: Any, at: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same random view of both."""
    axis = data.draw(st.integers(0, max(at.dim() - 1, 0)))
    size = at.shape[axis] if at.dim() else 0
    views: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x.unsqueeze(axis)]
    if at.dim() > 1:
        index = data.draw(st.integers(0, size - 1))
        views += [lambda x: x.transpose(0, axis), lambda x: x.select(axis, index)]
        views.append(lambda x: x.diagonal(0, 0, x.dim() - 1))
    if size > 1:
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        views.append(lambda x: x.narrow(axis, start, length))
    if at.is_contiguous() and at.dim() > axis + 1:
        views.append(lambda x: x.flatten(axis, axis + 1))
    if at.is_contiguous() and size and size % 2 == 0:
        views.append(lambda x: x.unflatten(axis, (2, -1)))
    if at.dim() < 4:
        views.append(lambda x: x.expand(2, *x.shape))
    view = data.draw(st.sampled_from(views))
    return view(at), view(labels)


def is_row_axis(labels: Tensor, axis: int) -> bool:
    """Whether the labels along the axis are 0, 1, 2 ... everywhere."""
    if labels.shape[axis] != BATCH:
        return False
    expected = torch.arange(BATCH).view([-1 if i == axis else 1 for i in range(labels.dim())])
    return bool((labels == expected).all())


@given(st.data())
def test_row_axis_of_a_view_holds_the_rows(data: Any) -> None:
    before, after = data.draw(st.sampled_from([(1, 3), (2, 1), (1, 1), (2, 3), (4, 4), (1, 4)]))
    labels = torch.arange(BATCH).view(1, -1, 1).expand(before, BATCH, after).contiguous()
    value = LoopValue("v", tuple(labels.shape), torch.float32)
    at = contiguous_meta(value.shape, value.dtype)
    for _ in range(data.draw(st.integers(0, 4))):
        at, labels = drawn_view(data, at, labels)
    axis = axis_in_view(View(value, at), 1, BATCH)
    if axis is not None:
        assert is_row_axis(labels, axis)


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
def test_usual_views_keep_their_row_axis(view: Any, axis: int | None) -> None:
    value = LoopValue("v", (2, BATCH, 3), torch.float32)
    assert axis_in_view(View(value, view(contiguous_meta(value.shape, value.dtype))), 1, BATCH) == axis


H = LoopValue("h", (BATCH, BATCH), torch.float32)
WEIGHT = whole_view(LoopValue("w", (BATCH, BATCH), torch.float32, None, False))
X = whole_view(LoopValue("x", (BATCH, BATCH), torch.float32))
TRANSPOSED = View(H, contiguous_meta((BATCH, BATCH), torch.float32).t())


@at_once(
    ("operation", "shape", "axis"),
    [
        (Elementwise("{0}", [whole_view(H)], torch.float32), (2, BATCH, BATCH), 1),
        (Elementwise("({0}+{1})", [whole_view(H), TRANSPOSED], torch.float32), (BATCH, BATCH), "mixed"),
        (Elementwise("{0}", [X], torch.float32), (BATCH, BATCH), None),
        (Reduce("sum", whole_view(H), (1,), False), (BATCH,), 0),
        (Reduce("sum", whole_view(H), (0,), False), (BATCH,), "mixed"),
        (Reduce("sum", TRANSPOSED, (0,), False), (BATCH,), 0),
        (Cat([whole_view(H), X], 1), (BATCH, 2 * BATCH), 0),
        (Cat([whole_view(H), X], 0), (2 * BATCH, BATCH), "mixed"),
        (Product(whole_view(H), WEIGHT), (BATCH, BATCH), 0),
        (Product(TRANSPOSED, WEIGHT), (BATCH, BATCH), "mixed"),
        (Product(WEIGHT, TRANSPOSED), (BATCH, BATCH), 1),
        (Product(whole_view(H), TRANSPOSED), (BATCH, BATCH), "mixed"),
        (Product(X, WEIGHT, whole_view(H)), (BATCH, BATCH), 0),
        (Product(X, WEIGHT, TRANSPOSED), (BATCH, BATCH), "mixed"),  # threads cannot divide a packed weight there
        (Product(X, X, TRANSPOSED), (BATCH, BATCH), 1),
    ],
)
def test_operators_keep_the_row_axis_or_mix_rows(operation: Operation, shape: tuple[int, ...], axis: Any) -> None:
    value = LoopValue("z", shape, torch.float32, operation)
    axes = row_axes([value], [H])
    assert axes is None if axis == "mixed" else axes is not None and axes[value] == axis
