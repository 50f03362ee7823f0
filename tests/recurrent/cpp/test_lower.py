"""From operators to values: slices of sums are never made, and what is not known is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from weft.recurrent.cpp.ir import Point, Value, arguments, promoted, seen
from weft.recurrent.cpp.operators import Lowering, Unsupported


def lowered(function: Callable[..., Any], *example: Tensor) -> tuple[Lowering, fx.Node]:
    """All operators of a function, and what it returns."""
    graph: Any = make_fx(function)(*example).graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    given = {
        node: seen(Value(f"x{i}", tuple(like.shape), like.dtype))
        for i, (node, like) in enumerate(zip(inputs, example, strict=True))
    }
    lower = Lowering(given)
    for node in graph.nodes:
        if node.op == "call_function":
            lower.run(node)
    return lower, next(node for node in graph.nodes if node.op == "output").args[0]


def test_a_slice_of_a_sum_is_the_sum_of_slices() -> None:
    lower, end = lowered(lambda x, y: (x + y).chunk(4, 1)[2].sigmoid(), torch.zeros(2, 8), torch.zeros(8))
    made = lower.ref(end).value.made
    assert isinstance(made, Point)
    (operand,) = made.operands
    assert not isinstance(operand, int | float)
    inner = operand.value.made
    assert isinstance(inner, Point) and operand.shape == (2, 2)
    places = [(str(each.value), each.at.storage_offset(), each.at.stride()) for each in inner.operands]  # type: ignore[union-attr]
    assert places == [("x0", 4, (8, 1)), ("x1", 4, (0, 1))]


def test_views_of_views_are_one_view_and_make_nothing() -> None:
    lower, end = lowered(lambda x: x.t()[1:].unsqueeze(0).expand(5, -1, -1)[:, :, 1], torch.zeros(3, 4))
    ref = lower.ref(end)
    assert not lower.store.made
    assert (ref.shape, ref.at.stride(), ref.at.storage_offset()) == ((5, 3), (0, 1), 5)


def test_a_reshape_that_needs_a_copy_makes_one() -> None:
    lower, end = lowered(lambda x: x.t().reshape(-1), torch.zeros(3, 4))
    (copy,) = lower.store.made
    assert lower.ref(end).value is copy and copy.shape == (4, 3)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.cumprod(0), "aten.cumprod"),
        (lambda x: x.gather(1, x.long()), "constant indices, not such as are computed in a step"),
        (lambda x: x.index_select(0, x[:2, 0].long()), "constant indices"),
        (lambda x: torch.as_strided(x.t(), (2, 2), (1, 2)), "aten.as_strided"),
        (lambda x: x.view(torch.int32), "aten.view.dtype"),
        (lambda x: x.to(torch.complex64), "complex64"),
        (lambda x: x.long() ** 5, "powers 0 to 3"),
        (lambda x: x.long() @ x.long().t(), "multiply matrices"),
        (lambda x: torch.slice_scatter(x, x[:, :2], 1, 0, 4, 2), "whole pieces"),
        (lambda x: x.sort(1)[0], "aten.sort"),
        (lambda x: x.byte().clamp(-1, 2), r"torch.uint8 can hold, not by -1 \(aten.clamp.default\)"),
        (lambda x: torch.clamp_min(x.byte(), -1), "torch.uint8 can hold, not by -1"),
    ],
)
def test_what_is_not_known_is_refused_by_name(function: Callable[..., Any], name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        lowered(function, torch.zeros(3, 4))


def test_arguments_have_the_names_and_defaults_of_the_schema() -> None:
    graph: Any = make_fx(lambda x: torch.clamp(x, max=2.0))(torch.zeros(3)).graph
    node = next(each for each in graph.nodes if each.op == "call_function")
    given = arguments(node)
    assert (given["min"], given["max"]) == (None, 2.0)


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.float32),
        (torch.zeros(3, dtype=torch.int64), 0.5, torch.float32),
        (torch.zeros(3), torch.zeros((), dtype=torch.float64), torch.float32),
        (torch.zeros(3, dtype=torch.int8), 300, torch.int8),
        (torch.zeros(3, dtype=torch.bool), 1, torch.int64),
    ],
)
def test_operands_promote_as_in_pytorch(one: Tensor, other: Tensor | float, wanted: torch.dtype) -> None:
    def operand(given: Tensor | float) -> Any:
        return seen(Value("v", tuple(given.shape), given.dtype)) if isinstance(given, Tensor) else given

    assert promoted([operand(one), operand(other)]) == wanted == torch.result_type(one, other)
