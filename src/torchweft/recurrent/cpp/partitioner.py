"""Partition of a captured step: forward or backward, C or PyTorch, sums over time, and rows that need no products.

    inputs, states --> [ front ] --> new states, outputs
                           |
                     saved | bases: values of `front` that `back` reads, before any views of them
                           v
    gradients      --> [ back  ] --> gradients of inputs and states, and the terms that are summed over time

C must know all operators between one step's state and the next. PyTorch runs other unknown operators for all steps at
once, together with all that they depend on (before) or that depends on them (after):

    before        on inputs only                             before_back   not on the gradient of step t + 1
    front         in C                                       back          in C
    after         leads to outputs, or to backward, only     after_back    leads to gradients of inputs and parameters

A parameter's gradient is a sum over all steps. Computed literally, each step would add a whole matrix. Instead, the sum
moves through linear operators, down to a sum over rows or to a product of two values that both vary. That one becomes a
single product with an inner axis over all steps:

    sum of t(x)         =  t(sum of x)               sum of x + y    =  sum of x, then sum of y
    sum of a b          =  one product               sum of sum x    =  one sum

Rows of padding, where a mask is false, need no products:

    z = x W + h U            skipped: a row past its length gets only the start of the sum ...
    new = cell(z, h)         ... which stays finite through elementwise functions
    h' = where(valid, new, h)                ... and is dropped here

    d new = where(valid, d h', 0)            zero in such a row, and so are products of it:
    d z = d new * ...                        elementwise, d z W' by rows, and d z' h as the row's share of a sum

Such rows of a value, along its first axis, are *zero*, or *unwanted*: as long as they are finite, no result of the step
depends on them. A product by rows can skip them if it is unwanted, or if its left side is zero there. A sum over rows
of products can skip them if one side is zero.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.cpp.operators import FILL, RESHAPES, aten, is_view, why_unsupported
from torchweft.recurrent.graph import StepGraph, alike
from torchweft.recurrent.step_plan import CARRIED, INPUT, STATE, ZEROS, dependences, leading_to

# By view: the destination of a sum, in the shape before that view.
_INVERSE_VIEWS: dict[Any, Callable[[Tensor, Sequence[Any]], Tensor]] = {
    aten.t.default: lambda at, args: at.t(),
    aten.transpose.int: lambda at, args: at.transpose(args[1], args[2]),
    aten.permute.default: lambda at, args: at.permute(sorted(range(at.dim()), key=lambda i: args[1][i] % at.dim())),
    aten.unsqueeze.default: lambda at, args: at.squeeze(args[1]),
}


@dataclass(frozen=True, eq=False)
class ReductionPattern:
    """One term of a sum over time: a node's value, its product or its reduction, and the destination of the sum."""

    node: fx.Node
    kind: Literal["value", "product", "sum"]
    at: Tensor  # the destination within the whole sum, as a view of a meta tensor
    read: list[fx.Node]  # values computed in every step
    axes: tuple[int, ...] = ()
    keep: bool = False  # for a sum: its axes, and whether they stay, with size 1


def reduction_patterns(
    node: fx.Node, at: Tensor, varies: Callable[[fx.Node], bool], is_forward: Callable[[fx.Node], bool]
) -> list[ReductionPattern]:
    """The terms to sum over time to add the node's total to `at`, a meta tensor of its shape."""
    # A sum does not move past the nodes of forward, because their values exist in any case.
    as_it_is = [ReductionPattern(node, "value", at, [node])]
    if not varies(node) or is_forward(node):
        return as_it_is
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node):
        before = source.meta["val"]
        if node.target in _INVERSE_VIEWS:
            return reduction_patterns(source, _INVERSE_VIEWS[node.target](at, node.args), varies, is_forward)
        if node.target is aten.reshape.default:
            reshaped = at.reshape(before.shape)
            # A reshape that copies would lose the connection to the destination.
            if at.shape == before.shape or ir.shares_storage(reshaped, at):
                return reduction_patterns(source, reshaped, varies, is_forward)
        casts = node.target is aten._to_copy.default and before.dtype in ir.REDUCED_PRECISION
        # The sum before a cast from 16 bits has the same dtype, and is more precise, because it skips the rounding.
        if casts and ir.compute_dtype(before.dtype) == node.meta["val"].dtype:
            return reduction_patterns(source, at, varies, is_forward)
    if node.target is aten.add.Tensor and not node.kwargs and alike(node):
        terms = cast("tuple[fx.Node, ...]", node.args)
        return [piece for term in terms for piece in reduction_patterns(term, at, varies, is_forward)]
    if node.target is aten.mm.default and all(varies(operand) for operand in node.all_input_nodes):
        return [ReductionPattern(node, "product", at, cast("list[fx.Node]", list(node.args[:2])))]
    if node.target is aten.sum.dim_IntList and node.args[1] and not node.kwargs:
        source, axes, *keep = cast("tuple[fx.Node, list[int], bool]", node.args)
        along = tuple(sorted(axis % ir.meta_value(source).dim() for axis in axes))
        return [ReductionPattern(node, "sum", at, [source], along, keep == [True])]
    return as_it_is


# Elementwise operators that are finite, with finite derivatives, wherever their operands are finite.
_TAME = {
    *(getattr(getattr(aten, name), kind) for name in ("add", "sub", "mul") for kind in ("Tensor", "Scalar")),
    *(aten.neg.default, aten.sigmoid.default, aten.tanh.default, aten.relu.default, aten.where.self),
    *(aten.sigmoid_backward.default, aten.tanh_backward.default, aten.threshold_backward.default),
    *(aten._to_copy.default, aten.clone.default),
}
# Operators that are zero wherever their first operand is.
_FIRST = {
    *(aten.neg.default, aten.relu.default, aten.tanh.default, aten._to_copy.default, aten.clone.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor, aten.mm.default),
    *(aten.sigmoid_backward.default, aten.tanh_backward.default, aten.threshold_backward.default),
}
_REDUCED = (aten.sum.dim_IntList, aten.mean.dim)
# Operators that leave the first axis as it is, unless it is among their axes.
_ALONG = {*_REDUCED, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, *RESHAPES}


class MaskSparsity:
    """The operators that can skip rows where the mask, an input of the step, is false. Empty without a mask."""

    def __init__(self, captured: StepGraph, varies: Callable[[fx.Node], bool], mask: fx.Node | None) -> None:
        self.mask = mask
        self.products: set[fx.Node] = set()  # matrix products whose result can lack these rows
        self.totals: set[fx.Node] = set()  # products whose sum over rows can skip them
        self._zero: set[fx.Node] = set()
        self._unwanted: set[fx.Node] = set()
        if mask is None:
            return
        self._rows = ir.meta_value(mask).shape[0]
        # Zeros propagate from operands to results, so nodes go in order. Unwanted rows propagate from results to
        # operands, so they go in reverse, and they need the zeros: a product with zero rows does not read them.
        for node in captured.nodes:
            if self._is_zero(node):
                self._zero.add(node)
        for node in reversed(captured.nodes):
            if node.users and all(self._ignores_rows(user, node) for user in node.users):
                self._unwanted.add(node)
        for node in captured.nodes:
            if node.target not in (aten.mm.default, aten.addmm.default):
                continue
            left, right = cast("list[fx.Node]", node.args[-2:])
            by_rows = self._has_rows(node) and not varies(right)
            if by_rows and (node in self._unwanted or self._zero_along(left, node)):
                self.products.add(node)
            transposed = node.target is aten.mm.default and left.target is aten.t.default
            if transposed and (self._has_zero_rows(left.args[0]) or self._has_zero_rows(right)):
                self.totals.add(node)

    def _is_zero(self, node: fx.Node) -> bool:
        """Whether the masked rows of a result are zero, given those of its operands."""
        args = node.args

        def zero(*positions: int) -> bool:
            return all(self._zero_along(args[i], node) for i in positions)

        if node.target in ZEROS:
            return True
        if node.target in (aten.full.default, aten.full_like.default):
            return bool(args[1] == 0)
        if node.target is aten.scalar_tensor.default:
            return bool(args[0] == 0)
        if node.target is aten.where.self:
            return zero(2) and (self._is_mask(args[0], node) or zero(1))
        if node.target is aten.mul.Tensor:
            return zero(0) or zero(1)
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            return zero(0, 1)
        if node.target in _FIRST:
            return zero(0)
        if node.target is aten.cat.default:
            return _axis_of(node) != 0 and all(self._zero_along(x, node) for x in cast("list[object]", args[0]))
        if node.target is aten.addmm.default:
            return not node.kwargs and zero(0, 1)
        return self._keeps_rows(node) and args[0] in self._zero

    def _zero_along(self, operand: object, node: fx.Node) -> bool:
        """Whether an operand is zero in the rows of the result `node`."""
        if not isinstance(operand, fx.Node) or operand not in self._zero:
            return False
        everywhere = operand.target in ZEROS or ir.meta_value(operand).dim() == 0
        return everywhere or (self._has_rows(operand) and _same_dims(operand, node))

    def _has_zero_rows(self, value: object) -> bool:
        return isinstance(value, fx.Node) and value in self._zero and self._has_rows(value)

    def _ignores_rows(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether a reader of `node` works with any finite numbers in its masked rows."""
        if user.op != "call_function" or not (isinstance(node.meta["val"], list | tuple) or self._has_rows(node)):
            return False
        if user.target in FILL:  # it reads only the shape
            return True
        if user.target in (aten.mm.default, aten.addmm.default):
            return self._product_ignores_rows(user, node)
        if user.target is aten.t.default:
            products = all(reader.target is aten.mm.default and reader.args[0] is user for reader in user.users)
            return products and all(self._has_zero_rows(reader.args[1]) for reader in user.users)
        # The mask is false in these rows, so only the third operand counts.
        if user.target is aten.where.self and self._is_mask(user.args[0], user):
            return user.args[2] is not node and _same_dims(node, user)
        # The rows of the reader are unwanted too, or zero whichever finite numbers the operand holds.
        settled = user in self._unwanted or user in self._zero
        if user.target in _TAME:
            return settled and _same_dims(node, user)
        if user.target is aten.cat.default:
            return settled and _axis_of(user) != 0
        return settled and self._keeps_rows(user)

    def _product_ignores_rows(self, user: fx.Node, node: fx.Node) -> bool:
        *start, left, right = user.args
        if right is node:  # the product sums over its rows
            transposed = isinstance(left, fx.Node) and left is not node and left.target is aten.t.default
            return transposed and self._has_zero_rows(cast(fx.Node, left).args[0])
        by_rows = left is node or (start == [node] and _same_dims(node, user))
        return by_rows and (user in self._unwanted or user in self._zero)

    def _is_mask(self, condition: object, node: fx.Node) -> bool:
        """Whether a condition is the mask, broadcast over the rows of the result."""
        if not isinstance(condition, fx.Node) or not _same_dims(condition, node):
            return False
        if ir.meta_value(condition).shape != (self._rows, *[1] * (ir.meta_value(node).dim() - 1)):
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
        axes = node.args[1] if node.target in _REDUCED else [_axis_of(node)]
        dims = ir.meta_value(cast(fx.Node, node.args[0])).dim()
        return bool(axes) and all(axis % dims for axis in cast("list[int]", axes))


def _same_dims(node: fx.Node, other: fx.Node) -> bool:
    return ir.meta_value(node).dim() == ir.meta_value(other).dim()


def _axis_of(node: fx.Node) -> int:
    first = node.args[0]
    source = cast(fx.Node, cast("list[object]", first)[0] if isinstance(first, list | tuple) else first)
    return int(ir.schema_arguments(node)["dim"]) % ir.meta_value(source).dim()


class TorchOperators(NamedTuple):
    """The operators that PyTorch runs, by time. Each list is in order of running."""

    before: list[fx.Node]
    after: list[fx.Node]
    before_back: list[fx.Node]
    after_back: list[fx.Node]


class ForwardValues(NamedTuple):
    """Values of forward that something else reads later."""

    bases: list[fx.Node]  # computed by C, before any views of them: saved, unless they are a new state or an output
    from_torch: list[fx.Node]  # computed by PyTorch, and read by backward
    views: set[fx.Node]  # operators of forward that only view a base, which backward applies again
    torch_views: set[fx.Node]  # the same, of values that PyTorch reads


class ForwardBackwardSplit:
    """A captured step, split in two. Raises Unsupported if C does not know an operator of the carried values."""

    def __init__(self, captured: StepGraph) -> None:
        self.captured = captured
        self._dependences = dependences(captured, invariant=INPUT)
        signature = captured.signature
        results = [node for node in (*signature.outputs, *signature.new_states) if node is not None]
        checks = [node for node in captured.checks if self.varies(node)]
        front = self.ancestors_of([*results, *checks], {*signature.inputs, *signature.states})
        pieces = [[] if node is None else self._pieces(node, front) for node in signature.parameter_gradients]
        gradients = [node for node in (*signature.input_gradients, *signature.state_gradients) if node is not None]
        ends = {*gradients, *(node for some in pieces for piece in some for node in piece.read)}
        starts = {*signature.inputs, *signature.states, *signature.new_state_gradients, *signature.output_gradients}
        back = self.ancestors_of(ends, starts | front)
        # All results of one operator are computed at one time, even if only backward reads some of them.
        extra = {user for node in front for user in node.users if user in back and user.target is getitem}
        front, back = front | extra, back - extra
        unknown = self._unknown(front, back)
        early, late = _around_loop(unknown, front, lambda node: STATE in self._dependences[node])
        early_back, late_back = _around_loop(unknown, back, lambda node: CARRIED in self._dependences[node])
        parts = (early, late, early_back, late_back)
        self.by_torch = TorchOperators(*([node for node in captured.nodes if node in part] for part in parts))
        self.torch = early | late | early_back | late_back
        # The operators that C runs forward and backward.
        self.front: set[fx.Node] = front - self.torch
        self.back: set[fx.Node] = back - self.torch
        # The terms of each parameter's sum over time: those of C, and those of PyTorch with the parameter's index.
        self.totals = [[piece for piece in some if not self._is_torch_sum(piece)] for some in pieces]
        self.sums = [(j, piece) for j, some in enumerate(pieces) for piece in some if self._is_torch_sum(piece)]
        self.forward_values = self._forward_values(ends)
        self.sparsity = self._best_sparsity()
        # The caller keeps states and outputs in any case.
        stored = {*signature.new_states, *signature.outputs}
        self.saved = [node for node in self.forward_values.bases if node not in stored]

    def varies(self, node: fx.Node) -> bool:
        return bool(self._dependences[node])

    def ancestors_of(self, ends: Iterable[fx.Node], stops: set[fx.Node]) -> set[fx.Node]:
        """The operators that lead from `stops` to the ends, without constants."""
        return leading_to(ends, {node for node in self.captured.nodes if self.varies(node)} - stops)

    def _pieces(self, node: fx.Node, front: set[fx.Node]) -> list[ReductionPattern]:
        value = ir.meta_value(node)
        return reduction_patterns(node, ir.contiguous_meta(value.shape, value.dtype), self.varies, front.__contains__)

    def _unknown(self, front: set[fx.Node], back: set[fx.Node]) -> set[fx.Node]:
        """Operators that C does not know. Raises Unsupported if a carried value needs one."""
        signature, on = self.captured.signature, self._dependences
        carried = {node for node in leading_to(signature.new_states) if STATE in on[node]}
        carried |= {node for node in leading_to(signature.state_gradients) if CARRIED in on[node]}
        needed = [node for node in self.captured.nodes if node in front or node in back]
        reasons = {node: why for node in needed if (why := why_unsupported(node, self.captured, self.varies))}
        fatal = dict.fromkeys(why for node, why in reasons.items() if node in carried)
        if fatal:
            raise ir.Unsupported(f"{'; '.join(fatal)}; the value that is carried from step to step needs it")
        return {*reasons}

    def _is_torch_sum(self, piece: ReductionPattern) -> bool:
        """Whether PyTorch sums a term: it computes the term or a factor of it, or the kernels lack the dtype."""
        if piece.kind == "value" and piece.node in self.torch:
            return True
        small = piece.at.dtype not in (torch.float32, torch.float64)
        return small or any(node in self.by_torch.after_back for node in piece.read)

    @property
    def summed(self) -> list[fx.Node]:
        """The nodes that PyTorch sums, and computes again for that."""
        return list(dict.fromkeys(piece.node for _, piece in self.sums))

    @cached_property
    def for_torch(self) -> list[fx.Node]:
        """Values of backward that C computes or carries, and PyTorch reads."""
        last = [*self.by_torch.after_back, *(node for node in self.summed if node not in self.torch)]
        read = operands_of(last) | {node for node in self.summed if node in self.back}
        carried = [node for node in self.captured.signature.new_state_gradients if node in read]
        return [*carried, *(node for node in self.captured.nodes if node in read and node in self.back)]

    def is_outside(self, node: fx.Node) -> bool:
        """Whether C lacks a value: PyTorch computes it, or its dtype is unknown to C."""
        return node in self.torch or node.meta["val"].dtype not in ir.C_TYPES

    def _best_sparsity(self) -> MaskSparsity:
        values = [node.meta.get("val") for node in self.captured.nodes]
        # In float16 an unwanted row could overflow, and then it would not be finite any more.
        half = any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in values)
        inputs = [(node, ir.meta_value(node)) for node in ([] if half else self.captured.signature.inputs)]
        masks = [node for node, value in inputs if value.dtype == torch.bool and value.dim() == 1]
        candidates = [MaskSparsity(self.captured, self.varies, mask) for mask in (None, *masks)]
        return max(candidates, key=lambda sparsity: len(sparsity.products) + len(sparsity.totals))

    def _forward_values(self, ends: set[fx.Node]) -> ForwardValues:
        """Find the values of forward that are read by backward, which computes `ends`, or by PyTorch."""
        parts = self.by_torch
        by_c = ends | operands_of(self.back)
        by_torch_back = {*self.summed} | operands_of([*parts.before_back, *parts.after_back, *self.summed])
        by_torch = by_torch_back | operands_of(parts.after)
        torch_forward = {*parts.before, *parts.after}
        bases: dict[fx.Node, None] = {}
        from_torch: dict[fx.Node, None] = {}
        c_views: set[fx.Node] = set()
        torch_views: set[fx.Node] = set()
        # A view is not saved: its base is, and each reader applies the view again.
        for node in [node for node in self.captured.nodes if node in self.front or node in torch_forward]:
            views: list[fx.Node] = []
            base = node
            while base in self.front and is_view(base):
                views.append(base)
                base = base.all_input_nodes[0]
            for readers, seen in ((by_c, c_views), (by_torch, torch_views)):
                if node in readers:
                    seen.update(views)
                    bases.update({base: None} if base in self.front else {})
            if base in torch_forward and (node in by_c or node in by_torch_back):
                from_torch[base] = None
        return ForwardValues([*bases], [*from_torch], c_views, torch_views)


def _around_loop(
    unknown: Iterable[fx.Node], half: set[fx.Node], is_carried: Callable[[fx.Node], bool]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The operators of one half that run before its loop in C, and those that run after it."""
    # Unknown operators run before the loop, with their ancestors, unless they depend on a carried value. Then they run
    # after it, with their descendants. All results of one operator stay together.
    unknown = [node for node in unknown if node in half]
    early = leading_to([node for node in unknown if not is_carried(node)], half)
    early |= {user for node in early for user in node.users if user in half and user.target is getitem}
    late: set[fx.Node] = set()
    stack = [node for node in unknown if is_carried(node)]
    while stack:
        node = stack.pop()
        if node not in late:
            late.add(node)
            stack += [user for user in node.users if user in half]
    return early, late


def operands_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {operand for node in nodes for operand in node.all_input_nodes}
