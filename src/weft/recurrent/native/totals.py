"""A parameter's gradient: the sum over all steps of what one step yields, without ever making that for every step.

The sum goes through what is linear, down to a product of two values that both change from step to step, which becomes
one product whose inner axis runs over all steps, or to a sum over rows:

    total of t(x)       =  t(total of x)             total of x + y  =  total of x, then total of y
    total of a b        =  one product               total of sum x  =  one sum
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, fx

from weft.recurrent.captured import alike
from weft.recurrent.native.c_types import SMALL, computed_in
from weft.recurrent.native.operators import aten
from weft.recurrent.native.values import natural, shares

_TURNED: dict[Any, Callable[[Tensor, Sequence[Any]], Tensor]] = {
    aten.t.default: lambda at, args: at.t(),
    aten.transpose.int: lambda at, args: at.transpose(args[1], args[2]),
    aten.permute.default: lambda at, args: at.permute(_inverse(args[1])),
    aten.unsqueeze.default: lambda at, args: at.squeeze(args[1]),
}
"""For a view, how the place of the sum looks before it."""


@dataclass(frozen=True, eq=False)
class Sought:
    """One piece of a sum over time: of a node's value, or of its product or reduction; and where it is added to."""

    node: fx.Node
    kind: Literal["value", "product", "sum"]
    at: Tensor

    @property
    def read(self) -> list[fx.Node]:
        """What must be made in every step."""
        if self.kind == "value":
            return [self.node]
        return cast("list[fx.Node]", list(self.node.args[: 2 if self.kind == "product" else 1]))

    @property
    def axes(self) -> tuple[int, ...]:
        """For a sum: along which axes."""
        dims = cast(fx.Node, self.node.args[0]).meta["val"].dim()
        return tuple(sorted(axis % dims for axis in cast("list[int]", self.node.args[1])))

    @property
    def keep(self) -> bool:
        """For a sum: whether the axes stay, with size 1."""
        return bool(len(self.node.args) > 2 and self.node.args[2])


def sought(
    node: fx.Node, at: Tensor, varies: Callable[[fx.Node], bool], made: Callable[[fx.Node], bool]
) -> list[Sought]:
    """What must be summed over time to add the node's total to `at`, a meta tensor of its shape.

    `made` tells of nodes whose values exist anyway, in forward.
    """
    if not varies(node) or made(node):
        return [Sought(node, "value", at)]
    source = node.args[0] if node.args else None
    if node.target in _TURNED and isinstance(source, fx.Node):
        return sought(source, _TURNED[node.target](at, node.args), varies, made)
    if node.target is aten.reshape.default and isinstance(source, fx.Node):
        before = _reshaped(at, tuple(source.meta["val"].shape))
        if before is not None:
            return sought(source, before, varies, made)
    if node.target is aten._to_copy.default and isinstance(source, fx.Node) and _widens(source, node):
        return sought(source, at, varies, made)
    if node.target is aten.add.Tensor and not node.kwargs and alike(node):
        return [piece for each in node.args for piece in sought(cast(fx.Node, each), at, varies, made)]
    if node.target is aten.mm.default and all(varies(each) for each in node.all_input_nodes):
        return [Sought(node, "product", at)]
    if node.target is aten.sum.dim_IntList and node.args[1] and not node.kwargs:
        return [Sought(node, "sum", at)]
    return [Sought(node, "value", at)]


def place_of(node: fx.Node) -> Tensor:
    """The place of a sum as a meta tensor, contiguous."""
    value = node.meta["val"]
    return natural(value.shape, value.dtype)


def _reshaped(at: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The place in another shape, if it needs no copy."""
    seen = at.reshape(shape)
    return seen if at.shape == shape or shares(seen, at) else None


def _widens(source: fx.Node, node: fx.Node) -> bool:
    """Whether a value is only held in a wider dtype: so is its sum, then, which is the better for it."""
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    return before in SMALL and computed_in(before) == after


def _inverse(order: Sequence[int]) -> list[int]:
    order = [axis % len(order) for axis in order]
    return [order.index(i) for i in range(len(order))]
