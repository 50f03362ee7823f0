"""Partition of a captured step: forward or backward, C or PyTorch, sums over time, and rows that need no products.

    inputs, states --> [ front ] --> new states, outputs
                           |
                     saved | bases: what `back` reads of `front`, before any views of it
                           v
    gradients      --> [ back  ] --> gradients of inputs and states, and what is summed over time for parameters

C must know the operators of what is carried from step to step. Others run by PyTorch, with what they depend on (before)
or what depends on them (after):

    before        on inputs only                             before_back   not on the gradient of the step t+1
    front         in C                                       back          in C
    after         leads to outputs, or to backward, only     after_back    leads to gradients of inputs and parameters

A parameter's gradient is a sum over all steps, which moves through linear operators, down to a product of two values
that both vary, which becomes one product whose inner axis runs over all steps, or to a sum over rows:

    sum of t(x)         =  t(sum of x)               sum of x + y    =  sum of x, then sum of y
    sum of a b          =  one product               sum of sum x    =  one sum

Rows of padding, where a mask is false, need no products:

    z = x W + h U            skipped: a row past its length gets only what the sum starts with ...
    new = cell(z, h)         ... which stays finite through elementwise functions
    h' = where(valid, new, h)                ... and is dropped here

    d new = where(valid, d h', 0)            zero in such a row, and so is what products make of it:
    d z = d new * ...                        elementwise, d z W' by rows, and d z' h as the row's share of a sum

Such rows of a value, along its first axis, are *zero*, or *unwanted*: no end of the graph depends on what is there, as
long as it is finite. A product by rows may skip them if it is unwanted, or if its left side is zero there; a sum over
rows of products if one side is zero.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from weft.recurrent.cpp.ir import (
    C_TYPES,
    REDUCED_PRECISION,
    Unsupported,
    compute_dtype,
    contiguous_meta,
    meta_value,
    schema_arguments,
    shares_storage,
)
from weft.recurrent.cpp.operators import FILL, RESHAPES, aten, is_view, refusal
from weft.recurrent.graph import StepGraph, alike
from weft.recurrent.step_plan import CARRIED, INPUT, STATE, ZEROS, dependences, leading_to

_TURNED: dict[Any, Callable[[Tensor, Sequence[Any]], Tensor]] = {
    aten.t.default: lambda at, args: at.t(),
    aten.transpose.int: lambda at, args: at.transpose(args[1], args[2]),
    aten.permute.default: lambda at, args: at.permute(sorted(range(at.dim()), key=lambda i: args[1][i] % at.dim())),
    aten.unsqueeze.default: lambda at, args: at.squeeze(args[1]),
}
"""By view: the target of the sum, as seen before that view."""


@dataclass(frozen=True, eq=False)
class ReductionPattern:
    """One piece of a sum over time: of a node's value, its product or its reduction; and where it is added to."""

    node: fx.Node
    kind: Literal["value", "product", "sum"]
    at: Tensor
    read: list[fx.Node]
    """Values computed in every step."""
    axes: tuple[int, ...] = ()
    keep: bool = False
    """For a sum: along which axes, and whether they stay, with size 1."""


def reduction_patterns(
    node: fx.Node, at: Tensor, varies: Callable[[fx.Node], bool], made: Callable[[fx.Node], bool]
) -> list[ReductionPattern]:
    """The pieces to sum over time to add the node's total to `at`, a meta tensor of its shape.

    `made` tells of nodes whose values exist anyway, in forward.
    """
    whole = [ReductionPattern(node, "value", at, [node])]
    if not varies(node) or made(node):
        return whole
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node):
        before = source.meta["val"]
        if node.target in _TURNED:
            return reduction_patterns(source, _TURNED[node.target](at, node.args), varies, made)
        if node.target is aten.reshape.default:
            seen = at.reshape(before.shape)
            if at.shape == before.shape or shares_storage(seen, at):  # without a copy
                return reduction_patterns(source, seen, varies, made)
        casts = node.target is aten._to_copy.default and before.dtype in REDUCED_PRECISION
        if casts and compute_dtype(before.dtype) == node.meta["val"].dtype:  # so is its sum, which is the better for it
            return reduction_patterns(source, at, varies, made)
    if node.target is aten.add.Tensor and not node.kwargs and alike(node):
        return [piece for each in node.args for piece in reduction_patterns(cast(fx.Node, each), at, varies, made)]
    if node.target is aten.mm.default and all(varies(each) for each in node.all_input_nodes):
        return [ReductionPattern(node, "product", at, cast("list[fx.Node]", list(node.args[:2])))]
    if node.target is aten.sum.dim_IntList and node.args[1] and not node.kwargs:
        source, axes, *keep = cast("tuple[fx.Node, list[int], bool]", node.args)
        along = tuple(sorted(axis % meta_value(source).dim() for axis in axes))
        return [ReductionPattern(node, "sum", at, [source], along, keep == [True])]
    return whole


_TAME = {
    *(getattr(getattr(aten, name), kind) for name in ("add", "sub", "mul") for kind in ("Tensor", "Scalar")),
    *(aten.neg.default, aten.sigmoid.default, aten.tanh.default, aten.relu.default, aten.where.self),
    *(aten.sigmoid_backward.default, aten.tanh_backward.default, aten.threshold_backward.default),
    *(aten._to_copy.default, aten.clone.default),
}
"""Elementwise, and finite with finite derivatives wherever the operands are finite."""
_FIRST = {
    *(aten.neg.default, aten.relu.default, aten.tanh.default, aten._to_copy.default, aten.clone.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor, aten.mm.default),
    *(aten.sigmoid_backward.default, aten.tanh_backward.default, aten.threshold_backward.default),
}
"""Zero where their first operand is."""
_REDUCED = (aten.sum.dim_IntList, aten.mean.dim)
_ALONG = {*_REDUCED, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, *RESHAPES}
"""They leave the first axis as it is, unless it is among their axes."""


class MaskSparsity:
    """What may skip the rows where one mask, an input of the step, is false; nothing if there is no mask."""

    def __init__(self, captured: StepGraph, varies: Callable[[fx.Node], bool], mask: fx.Node | None) -> None:
        self.mask = mask
        self.products: set[fx.Node] = set()
        self.totals: set[fx.Node] = set()
        """Products whose sum over rows may skip them."""
        self._zero: set[fx.Node] = set()
        self._unwanted: set[fx.Node] = set()
        if mask is None:
            return
        self._rows = meta_value(mask).shape[0]
        for node in captured.nodes:
            if self._is_zero(node):
                self._zero.add(node)
        for node in reversed(captured.nodes):
            if node.users and all(self._bears(node, user) for user in node.users):
                self._unwanted.add(node)
        for node in captured.nodes:
            if node.target not in (aten.mm.default, aten.addmm.default):
                continue
            left, right = cast("list[fx.Node]", node.args[-2:])
            by_rows = self._has_rows(node) and not varies(right)
            if by_rows and (node in self._unwanted or self._zero_along(left, node)):
                self.products.add(node)
            transposed = node.target is aten.mm.default and left.target is aten.t.default
            if transposed and (self._zero_rows(left.args[0]) or self._zero_rows(right)):
                self.totals.add(node)

    def _is_zero(self, node: fx.Node) -> bool:
        args = node.args

        def zero(*which: int) -> bool:
            return all(self._zero_along(args[i], node) for i in which)

        if node.target in ZEROS:
            return True
        if node.target in (aten.full.default, aten.full_like.default):
            return bool(args[1] == 0)
        if node.target is aten.scalar_tensor.default:
            return bool(args[0] == 0)
        if node.target is aten.where.self:
            return zero(2) and (self._by_mask(args[0], node) or zero(1))
        if node.target is aten.mul.Tensor:
            return zero(0) or zero(1)
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            return zero(0, 1)
        if node.target in _FIRST:
            return zero(0)
        if node.target is aten.cat.default:
            return _axis(node) != 0 and all(self._zero_along(each, node) for each in cast("list[object]", args[0]))
        if node.target is aten.addmm.default:
            return not node.kwargs and zero(0, 1)
        return self._keeps_rows(node) and args[0] in self._zero

    def _zero_along(self, given: object, node: fx.Node) -> bool:
        """Whether an operand is zero in those rows of what is made of it."""
        if not isinstance(given, fx.Node) or given not in self._zero:
            return False
        everywhere = given.target in ZEROS or meta_value(given).dim() == 0
        return everywhere or (self._has_rows(given) and _same_axes(given, node))

    def _zero_rows(self, given: object) -> bool:
        """Whether those rows of a value are zero."""
        return isinstance(given, fx.Node) and given in self._zero and self._has_rows(given)

    def _bears(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether those rows of a value may be anything, as far as this reader goes."""
        if user.op != "call_function" or not (isinstance(node.meta["val"], list | tuple) or self._has_rows(node)):
            return False
        if user.target in FILL:  # it reads a shape only
            return True
        if user.target in (aten.mm.default, aten.addmm.default):
            return self._product_bears(node, user)
        if user.target is aten.t.default:
            products = all(each.target is aten.mm.default and each.args[0] is user for each in user.users)
            return products and all(self._zero_rows(each.args[1]) for each in user.users)
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
            turned = isinstance(left, fx.Node) and left is not node and left.target is aten.t.default
            return turned and self._zero_rows(cast(fx.Node, left).args[0])
        by_rows = left is node or (start == [node] and _same_axes(node, user))
        return by_rows and (user in self._unwanted or user in self._zero)

    def _by_mask(self, condition: object, node: fx.Node) -> bool:
        """Whether a condition is the mask, spread over the rows of the result."""
        if not isinstance(condition, fx.Node) or not _same_axes(condition, node):
            return False
        if meta_value(condition).shape != (self._rows, *[1] * (meta_value(node).dim() - 1)):
            return False
        while condition is not self.mask and condition.target in (*RESHAPES, aten.unsqueeze.default):
            condition = cast(fx.Node, condition.args[0])
        return condition is self.mask

    def _has_rows(self, node: object) -> bool:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        return isinstance(value, Tensor) and value.shape[:1] == (self._rows,)

    def _keeps_rows(self, node: fx.Node) -> bool:
        """Whether the first axis of an operator's operand is that of its result, or of its results."""
        if node.target is getitem:
            return self._has_rows(node)
        if node.target not in _ALONG or not self._has_rows(node.args[0]):
            return False
        if node.target in RESHAPES:
            return self._has_rows(node)
        axes = node.args[1] if node.target in _REDUCED else [_axis(node)]
        dims = meta_value(cast(fx.Node, node.args[0])).dim()
        return bool(axes) and all(axis % dims for axis in cast("list[int]", axes))


def _same_axes(node: fx.Node, other: fx.Node) -> bool:
    return meta_value(node).dim() == meta_value(other).dim()


def _axis(node: fx.Node) -> int:
    """The axis that an operator works along, from the front."""
    first = node.args[0]
    source = cast(fx.Node, cast("list[object]", first)[0] if isinstance(first, list | tuple) else first)
    return int(schema_arguments(node)["dim"]) % meta_value(source).dim()


class ForwardBackwardSplit:
    """A captured step, cut in two. Raises Unsupported if what is carried needs an operator that C does not know."""

    def __init__(self, captured: StepGraph) -> None:
        self.captured = captured
        self._on = dependences(captured, invariant=INPUT)
        signature, nodes = captured.signature, captured.nodes
        ends = [each for each in (*signature.outputs, *signature.new_states) if each is not None]
        checks = [node for node in captured.checks if self.varies(node)]
        front = self.ancestors([*ends, *checks], {*signature.inputs, *signature.states})
        pieces = [[] if node is None else self._pieces(node, front) for node in signature.parameter_gradients]
        gradients = [each for each in (*signature.input_gradients, *signature.state_gradients) if each is not None]
        wanted = {*gradients, *(each for some in pieces for piece in some for each in piece.read)}
        given = {*signature.inputs, *signature.states, *signature.new_state_gradients, *signature.output_gradients}
        back = self.ancestors(wanted, given | front)
        results = {user for node in front for user in node.users if user in back and user.target is getitem}
        front, back = front | results, back - results  # what one operator yields is made at one time
        unknown = self._unknown(front, back)
        early, late = _outside_loops(unknown, front, lambda node: STATE in self._on[node])
        early_back, late_back = _outside_loops(unknown, back, lambda node: CARRIED in self._on[node])
        self.before, self.after, self.before_back, self.after_back = (
            [node for node in nodes if node in some] for some in (early, late, early_back, late_back)
        )
        self.torch = early | late | early_back | late_back
        """All that PyTorch runs; the lists are in order of running."""
        self.front: set[fx.Node] = front - self.torch
        self.back: set[fx.Node] = back - self.torch
        self.totals = [[piece for piece in some if not self._sums(piece, late_back)] for some in pieces]
        """For each parameter, what C must sum over time."""
        self.sums = [(j, piece) for j, some in enumerate(pieces) for piece in some if self._sums(piece, late_back)]
        """Sums over time that PyTorch computes, with the index of the parameter."""
        self.views: set[fx.Node] = set()
        """Operators of `front` that only view what is saved: backward views it once more."""
        self.torch_views: set[fx.Node] = set()
        """Likewise, of what PyTorch reads."""
        self.bases: list[fx.Node] = []
        """Values of `front` that `back` and PyTorch read; saved, unless they are a new state or an output."""
        self.kept: list[fx.Node] = []
        """Values that PyTorch computes forward and backward reads."""
        self._read(wanted)
        self.sparsity = self._sparsity()
        stored = {*signature.new_states, *signature.outputs}
        self.saved = [node for node in self.bases if node not in stored]

    def varies(self, node: fx.Node) -> bool:
        """Whether a node's value is another in each step."""
        return bool(self._on[node])

    def ancestors(self, ends: Iterable[fx.Node], stops: set[fx.Node]) -> set[fx.Node]:
        """The operators that lead to the ends, but for constants."""
        return leading_to(ends, {node for node in self.captured.nodes if self.varies(node)} - stops)

    def _pieces(self, node: fx.Node, front: set[fx.Node]) -> list[ReductionPattern]:
        value = meta_value(node)
        return reduction_patterns(node, contiguous_meta(value.shape, value.dtype), self.varies, front.__contains__)

    def _unknown(self, front: set[fx.Node], back: set[fx.Node]) -> set[fx.Node]:
        """Operators that C does not know. Raises Unsupported if what is carried needs one."""
        signature, on = self.captured.signature, self._on
        carried = {node for node in leading_to(signature.new_states) if STATE in on[node]}
        carried |= {node for node in leading_to(signature.state_gradients) if CARRIED in on[node]}
        needed = [node for node in self.captured.nodes if node in front or node in back]
        reasons = {node: why for node in needed if (why := refusal(node, self.captured, self.varies)) is not None}
        stuck = dict.fromkeys(why for node, why in reasons.items() if node in carried)
        if stuck:
            raise Unsupported(f"{'; '.join(stuck)}; what is carried from step to step needs it")
        return {*reasons}

    def _sums(self, piece: ReductionPattern, late: set[fx.Node]) -> bool:
        """Whether PyTorch sums it: what it makes itself, what is made of what it makes last, and small dtypes."""
        if piece.kind == "value" and piece.node in self.torch:
            return True
        small = piece.at.dtype not in (torch.float32, torch.float64)
        return small or any(each in late for each in piece.read)

    @property
    def summed(self) -> list[fx.Node]:
        """The nodes that PyTorch sums, and makes anew for it."""
        return list(dict.fromkeys(piece.node for _, piece in self.sums))

    @cached_property
    def made(self) -> list[fx.Node]:
        """Values that C computes or carries backward and PyTorch reads."""
        last = [*self.after_back, *(node for node in self.summed if node not in self.torch)]
        read = inputs_of(last) | {node for node in self.summed if node in self.back}
        carried = [node for node in self.captured.signature.new_state_gradients if node in read]
        return [*carried, *(node for node in self.captured.nodes if node in read and node in self.back)]

    def outside(self, node: fx.Node) -> bool:
        """Whether C cannot tell a value: PyTorch makes it, or it is given in a dtype that C does not have."""
        return node in self.torch or node.meta["val"].dtype not in C_TYPES

    def _sparsity(self) -> MaskSparsity:
        """That of the most effective mask; none where float16 could overflow."""
        values = [node.meta.get("val") for node in self.captured.nodes]
        half = any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in values)
        inputs = [(node, meta_value(node)) for node in ([] if half else self.captured.signature.inputs)]
        masks = [node for node, value in inputs if value.dtype == torch.bool and value.dim() == 1]
        found = [MaskSparsity(self.captured, self.varies, mask) for mask in (None, *masks)]
        return max(found, key=lambda each: len(each.products) + len(each.totals))

    def _read(self, wanted: set[fx.Node]) -> None:
        """Find what is read of forward, by whom."""
        by_c = wanted | inputs_of(self.back)
        by_torch_back = {*self.summed} | inputs_of([*self.before_back, *self.after_back, *self.summed])
        by_torch = by_torch_back | inputs_of(self.after)
        made = {*self.before, *self.after}
        bases: dict[fx.Node, None] = {}
        kept: dict[fx.Node, None] = {}
        for node in [each for each in self.captured.nodes if each in self.front or each in made]:
            views: list[fx.Node] = []
            base = node
            while base in self.front and is_view(base):
                views.append(base)
                base = base.all_input_nodes[0]
            for readers, seen in ((by_c, self.views), (by_torch, self.torch_views)):
                if node in readers:
                    seen.update(views)
                    bases.update({base: None} if base in self.front else {})
            if base in made and (node in by_c or node in by_torch_back):
                kept[base] = None
        self.bases, self.kept = [*bases], [*kept]


def _outside_loops(
    unknown: Iterable[fx.Node], half: set[fx.Node], carried: Callable[[fx.Node], bool]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Operators of a half that run before its loops in C, with what they wait for, and after, with what waits for them.

    `carried` tells of those that depend on what is carried from step to step. Several results of one go together.
    """
    unknown = [node for node in unknown if node in half]
    early = leading_to([node for node in unknown if not carried(node)], half)
    early |= {user for node in early for user in node.users if user in half and user.target is getitem}
    late: set[fx.Node] = set()
    stack = [node for node in unknown if carried(node)]
    while stack:
        node = stack.pop()
        if node not in late:
            late.add(node)
            stack += [user for user in node.users if user in half]
    return early, late


def inputs_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The operands of these nodes."""
    return {each for node in nodes for each in node.all_input_nodes}
