"""Lowering: slices of sums are never computed, views cost nothing, and unknown operators are rejected by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.recurrent.recurrent_cases import as_the_loop, at_once, close, eagerly, needs_compiler, outcome, planned
from torchweft.recurrent.capture import capture
from torchweft.recurrent.cpp.ir import Elementwise, LoopValue, LoweringContext, Unsupported, whole_view
from torchweft.recurrent.cpp.lowering import decomposition_table, lower
from torchweft.recurrent.cpp.operators import aten, lower_node

pytestmark = needs_compiler


def lower_function(function: Callable[..., Any], *example: Tensor) -> tuple[LoweringContext, fx.Node]:
    """Lower all operators of a function. Returns also the node of its result."""
    graph: Any = make_fx(function)(*example).graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    values = [LoopValue(f"x{i}", tuple(like.shape), like.dtype) for i, like in enumerate(example)]
    context = LoweringContext(dict(zip(inputs, map(whole_view, values), strict=True)))
    for node in graph.nodes:
        if node.op == "call_function":
            lower_node(context, node)
    return context, next(node for node in graph.nodes if node.op == "output").args[0]


def test_a_slice_of_a_sum_is_the_sum_of_slices() -> None:
    context, end = lower_function(lambda x, y: (x + y).chunk(4, 1)[2].sigmoid(), torch.zeros(2, 8), torch.zeros(8))
    operation = context.view_of(end).value.operation
    assert isinstance(operation, Elementwise)
    (operand,) = operation.operands
    assert not isinstance(operand, int | float)
    inner = operand.value.operation
    assert isinstance(inner, Elementwise) and operand.shape == (2, 2)
    places = [(str(view.value), view.at.storage_offset(), view.at.stride()) for view in inner.operands]  # type: ignore[union-attr]
    assert places == [("x0", 4, (8, 1)), ("x1", 4, (0, 1))]


def test_views_are_free_unless_a_reshape_must_copy() -> None:
    context, end = lower_function(lambda x: x.t()[1:].unsqueeze(0).expand(5, -1, -1)[:, :, 1], torch.zeros(3, 4))
    view = context.view_of(end)
    assert not context.values
    assert (view.shape, view.at.stride(), view.at.storage_offset()) == ((5, 3), (0, 1), 5)
    context, end = lower_function(lambda x: x.t().reshape(-1), torch.zeros(3, 4))
    (copy,) = context.values
    assert context.view_of(end).value is copy and copy.shape == (4, 3)


@at_once(
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
        (lambda x: x.sort(1)[0], "aten.sort"),
        (lambda x: x.byte().clamp(-1, 2), r"torch.uint8 can hold, not by -1 \(aten.clamp.default\)"),
        (lambda x: torch.clamp_min(x.byte(), -1), "torch.uint8 can hold, not by -1"),
    ],
)
def test_unknown_operators_are_rejected_by_name(function: Callable[..., Any], name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        lower_function(function, torch.zeros(3, 4))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slices from behind": lambda x: torch.cat([x[:, -3:-1], x[:, -4:-2]], 1),
    "a permuted sum": lambda x: torch.cat([x.view(2, 2, 2).permute(2, 0, 1).sum(0)] * 2, 1),
    "a transposed product": lambda x: (x.t() @ x)[:2] @ x.t() @ x,
    "a row for all": lambda x: x[:1].expand(2, -1) * x,
    "heads that attend": lambda x: torch.softmax(
        torch.einsum("nhi,nhj->nij", x.view(2, 2, 2), x.view(2, 2, 2)), -1
    ).reshape(2, 4),
    "a stack that is taken apart": lambda x: sum(torch.stack([x, 2 * x, x * x]).unbind(0)),
    "the sum of all": lambda x: x - x.sum() * 0.01,
    "a mean over rows": lambda x: x - x.mean(0),
    "a convolution": lambda x: nn.functional.conv1d(x.unsqueeze(1), 0.1 * torch.ones(2, 1, 3).to(x), padding=1).sum(1),
    "every second": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "a select": lambda x: x.select(1, -1).unsqueeze(1) + x * x[:, 2].unsqueeze(1),
    "padding": lambda x: nn.functional.pad(x, (1, 1))[:, :4],
    "padding by a number": lambda x: nn.functional.pad(x, (2, -1, 1, -1), value=0.5)[:, 1:],
    "padding by the other end": lambda x: nn.functional.pad(x.unsqueeze(1), (1, 1), mode="circular")[:, 0, :4],
    "repeated": lambda x: x[:, :2].repeat(1, 2) + x[:, :1].repeat(1, 4),
    "rolled": lambda x: x.roll((1, -3), (0, 1)) - x.roll(3),
    "flipped": lambda x: x.flip([0, 1]) * x,
    "gathered": lambda x: x[:, [2, 0, 1, -1]] + x.index_select(0, torch.tensor([1, 0])),
    "gathered where it is largest": lambda x: x + x.gather(1, x.argmax(1, keepdim=True)) + 0.1 * x.argmin(),
    "the lower triangle": lambda x: x.view(2, 2, 2).tril().reshape(2, 4),
    "cumulated": lambda x: x.cumsum(1) + x.view(2, 2, 2).cumsum(1).reshape(2, 4),
    "the largest along an axis": lambda x: x * x.max(1, keepdim=True).values + x.max(0).values,
    "the smallest along an axis": lambda x: x * x.view(2, 2, 2).min(1).values.repeat(1, 2),
    "the first of the largest": lambda x: x + x.relu().max(1, keepdim=True).values,
    "a tangent": lambda x: torch.tan(0.3 * x),
    "written in place": lambda x: replaced(x) + 0.0,
    "added at an index": lambda x: x.clone().index_add(1, torch.tensor([0, 0, 3]), x[:, :3]),
    "scattered": lambda x: torch.zeros_like(x).scatter(1, torch.tensor([[1, 0, 2, 3], [0, 3, 2, 1]]), x),
}


def replaced(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 2 * x[:, 1]
    y[:, [1, 2]] = x[:, [2, 3]]
    y[:, 1::2] = x[:, ::2]
    return y


PARTLY_KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted": lambda x: x.sort(1).values,
    "a remainder": lambda x: torch.remainder(x, 0.7) + x.fmod(0.6),
    "filled at an index": lambda x: x.clone().index_fill_(1, torch.tensor([1]), 0.0),
    "places of another's": lambda x: x.gather(1, x.sort(1).indices),
}
"""Compiled loops support some of these. PyTorch or another backend runs the others."""
DRAW = torch.Generator().manual_seed(2)
X, H = (torch.randn(*shape, generator=DRAW).double().requires_grad_() for shape in ((4, 2, 4), (2, 4)))


class Viewing(nn.Module):
    """Views its state in several ways, each of which is an output and part of the new state."""

    def __init__(self, views: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.views = views
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).double().view(4, 4))

    def forward(self, x: Tensor, h: Tensor) -> tuple[list[Tensor], Tensor]:
        seen = [view(x + h) @ self.weight for view in self.views]
        return [torch.tanh(y)[:, :3].contiguous() for y in seen], torch.tanh(sum(seen) / len(seen) + 0.5 * h)


GROUPS = [[*VIEWS][i::4] for i in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_views_products_and_reductions_are_pytorchs(names: list[str]) -> None:
    as_the_loop(Viewing([VIEWS[name] for name in names]), "c", X, H, verify="never")


@pytest.mark.filterwarnings("ignore:cell Viewing runs by")
@pytest.mark.parametrize("view", PARTLY_KNOWN.values(), ids=PARTLY_KNOWN)
def test_partly_known_operators_are_never_wrong(view: Callable[[Tensor], Tensor]) -> None:
    cell = Viewing([view])
    close(outcome(planned(cell, "auto", verify="never"), X, H), outcome(eagerly(cell), X, H), 1e-10)


def test_decomposition_that_writes_is_rejected() -> None:
    """PyTorch 2.13 decomposes padding into an allocation and a copy, which a graph of pure operators does not show."""

    def padded(x: Tensor, pad: list[int], value: float = 0.0) -> Tensor:
        left, right = pad
        room, source = x.new_full((x.shape[0], x.shape[1] + left + right), value), x
        if left < 0:  # the gradient of a padding
            source, left = x[:, -left:right], 0
        torch.ops.prims.copy_to(room[:, left : left + source.shape[1]], source)
        return room

    table = {**decomposition_table(), aten.constant_pad_nd.default: padded}
    x = torch.randn(2, 4)
    captured = capture(lambda x, h: (nn.functional.pad(x, (1, 1)), h), x, x, composed=table)
    with pytest.raises(Unsupported, match="copy_to"):
        lower(captured)
