"""Rows that do not count need no products: which of a step's products may skip the rows of which a mask is false.

    z = x W + h U            skipped: a row past its length gets only what the sum starts with ...
    new = cell(z, h)         ... which flows through tame functions, elementwise, and stays finite
    h' = where(valid, new, h)                ... to end here

    d new = where(valid, d h', 0)            zeros in such a row, and so is what is made of it by products:
    d z = d new * ...                        elementwise, d z W' by rows, and d z' h as the row's share of a sum

Two properties of a node's value, of the rows along its first axis where the mask is false:

    zero        it is zero there
    unwanted    whatever finite is there, no end of the graph depends on it

A product by rows may skip them if it is unwanted, or if its left side is zero there; a sum over rows of products if one
side is zero. Batches of padded sequences are where most of the time of a recurrent net goes to waste without.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx

from weft.recurrent.captured import Captured
from weft.recurrent.native.maker import arguments, value_of
from weft.recurrent.native.operators import FILL, RESHAPES, aten

_TAME = {
    *(getattr(getattr(aten, name), kind) for name in ("add", "sub", "mul") for kind in ("Tensor", "Scalar")),
    *(aten.neg.default, aten.sigmoid.default, aten.tanh.default, aten.relu.default, aten.where.self),
    *(aten.sigmoid_backward.default, aten.tanh_backward.default, aten.threshold_backward.default),
    *(aten._to_copy.default, aten.clone.default),
}
"""Elementwise, and finite with finite derivatives wherever the operands are finite."""
_FIRST = {
    *(aten.neg.default, aten.relu.default, aten.tanh.default, aten._to_copy.default, aten.clone.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor),
    *(aten.sigmoid_backward.default, aten.tanh_backward.default, aten.threshold_backward.default),
}
"""Zero where their first operand is."""
_REDUCED = (aten.sum.dim_IntList, aten.mean.dim)
_ALONG = {*_REDUCED, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, *RESHAPES}
"""They leave the first axis as it is, unless it is among their axes."""
_ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)


@dataclass
class Live:
    """The mask, an input of the step; the products that may skip rows, and those whose sum over rows may."""

    mask: fx.Node | None = None
    products: set[fx.Node] = field(default_factory=set[fx.Node])
    totals: set[fx.Node] = field(default_factory=set[fx.Node])


def live(captured: Captured, varies: Callable[[fx.Node], bool]) -> Live:
    """What may be skipped, by the mask that allows most; nothing where float16 could turn what is finite infinite."""
    if any(isinstance(v := node.meta["val"], Tensor) and v.dtype == torch.float16 for node in captured.nodes):
        return Live()
    masks = [each for each in captured.roles.inputs if value_of(each).dtype == torch.bool and value_of(each).dim() == 1]
    found = [_Rows(captured, mask).found(varies) for mask in masks]
    return max(found, key=lambda each: len(each.products) + len(each.totals), default=Live())


class _Rows:
    """What is known of the rows where one mask is false."""

    def __init__(self, captured: Captured, mask: fx.Node) -> None:
        self._mask, self._rows = mask, value_of(mask).shape[0]
        self._nodes = captured.nodes
        self._zero: set[fx.Node] = set()
        for node in self._nodes:
            if self._is_zero(node):
                self._zero.add(node)
        self._unwanted: set[fx.Node] = set()
        for node in reversed(self._nodes):
            if node.users and all(self._bears(node, user) for user in node.users):
                self._unwanted.add(node)

    def found(self, varies: Callable[[fx.Node], bool]) -> Live:
        """The products that may skip those rows."""
        found = Live(self._mask)
        for node in self._nodes:
            if node.target not in (aten.mm.default, aten.addmm.default):
                continue
            left, right = cast("list[fx.Node]", node.args[-2:])
            by_rows = self._has_rows(node) and not varies(right)
            if by_rows and (node in self._unwanted or self._zero_along(left, node)):
                found.products.add(node)
            turned = node.target is aten.mm.default and left.target is aten.t.default
            if turned and (self._zero_rows(left.args[0]) or self._zero_rows(right)):
                found.totals.add(node)
        return found if found.products or found.totals else Live()

    # -- zero -------------------------------------------------------------------------------------------------------

    def _is_zero(self, node: fx.Node) -> bool:
        args = node.args
        if node.target in _ZEROS:
            return True
        if node.target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default):
            return bool(args[0 if node.target is aten.scalar_tensor.default else 1] == 0)
        if node.target is aten.where.self:
            condition, yes, no = args
            return self._zero_along(no, node) and (self._by_mask(condition, node) or self._zero_along(yes, node))
        if node.target is aten.mul.Tensor:
            return any(self._zero_along(each, node) for each in args)
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            return all(self._zero_along(each, node) for each in args)
        if node.target in _FIRST:
            return self._zero_along(args[0], node)
        if node.target is aten.cat.default:
            return _axis(node) != 0 and all(self._zero_along(each, node) for each in cast("list[object]", args[0]))
        if node.target is aten.mm.default:
            return self._zero_along(args[0], node)
        if node.target is aten.addmm.default:
            return not node.kwargs and self._zero_along(args[0], node) and self._zero_along(args[1], node)
        return self._keeps_rows(node) and args[0] in self._zero

    def _zero_along(self, given: object, node: fx.Node) -> bool:
        """Whether an operand is zero in those rows of what is made of it."""
        if not isinstance(given, fx.Node) or given not in self._zero:
            return False
        return (
            given.target in _ZEROS or value_of(given).dim() == 0 or (self._has_rows(given) and _same_axes(given, node))
        )

    def _zero_rows(self, given: object) -> bool:
        """Whether those rows of a value are zero."""
        return isinstance(given, fx.Node) and given in self._zero and self._has_rows(given)

    # -- unwanted ---------------------------------------------------------------------------------------------------

    def _bears(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether those rows of a value may be anything, as far as this reader goes."""
        if user.op != "call_function" or not (isinstance(node.meta["val"], list | tuple) or self._has_rows(node)):
            return False
        if user.target in FILL:  # it reads a shape only
            return True
        if user.target in (aten.mm.default, aten.addmm.default):
            return self._product_bears(node, user)
        if user.target is aten.t.default:
            readers = [*user.users]
            return all(
                each.target is aten.mm.default and each.args[0] is user and self._zero_rows(each.args[1])
                for each in readers
            )
        if user.target is aten.where.self and self._by_mask(user.args[0], user):
            return user.args[2] is not node and _same_axes(node, user)
        settled = user in self._unwanted or user in self._zero
        if user.target in _TAME:
            return settled and _same_axes(node, user)
        if user.target is aten.cat.default:
            return settled and _axis(user) != 0
        return settled and self._keeps_rows(user)

    def _product_bears(self, node: fx.Node, user: fx.Node) -> bool:
        *start, left, right = user.args
        if right is node:  # its rows are summed over
            turned = cast(fx.Node, left)
            return turned is not node and turned.target is aten.t.default and self._zero_rows(turned.args[0])
        by_rows = left is node or (start == [node] and _same_axes(node, user))
        return by_rows and (user in self._unwanted or user in self._zero)

    # -- looks ------------------------------------------------------------------------------------------------------

    def _by_mask(self, condition: object, node: fx.Node) -> bool:
        """Whether a condition is the mask, spread over the rows of the result."""
        if not isinstance(condition, fx.Node) or value_of(condition).shape[:1] != (self._rows,):
            return False
        narrow = all(size == 1 for size in value_of(condition).shape[1:])
        if not narrow or value_of(condition).dim() != value_of(node).dim():
            return False
        while condition is not self._mask and condition.target in (*RESHAPES, aten.unsqueeze.default):
            condition = cast(fx.Node, condition.args[0])
        return condition is self._mask

    def _has_rows(self, node: object) -> bool:
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            return False
        return value_of(node).shape[:1] == (self._rows,)

    def _keeps_rows(self, node: fx.Node) -> bool:
        """Whether the first axis of an operator's operand is that of its result, or of its results."""
        if getattr(node.target, "__name__", "") == "getitem":
            return self._has_rows(node)
        if node.target not in _ALONG or not self._has_rows(node.args[0]):
            return False
        if node.target in RESHAPES:
            return self._has_rows(node)
        axes = node.args[1] if node.target in _REDUCED else [_axis(node)]
        dims = value_of(cast(fx.Node, node.args[0])).dim()
        return bool(axes) and all(axis % dims for axis in cast("list[int]", axes))


def _same_axes(node: fx.Node, other: fx.Node) -> bool:
    return value_of(node).dim() == value_of(other).dim()


def _axis(node: fx.Node) -> int:
    """The axis that an operator works along, from the front."""
    first = node.args[0]
    source = cast(fx.Node, cast("list[object]", first)[0] if isinstance(first, list | tuple) else first)
    return int(arguments(node)["dim"]) % value_of(source).dim()
