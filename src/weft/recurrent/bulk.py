"""Operators of one step, run for all steps at once.

A value that depends on time is *stacked*: T x (its shape). `evaluate` runs a part over stacked values by `torch.vmap`,
which makes one product over T x N rows of what is a product per step. `summed` gives the sum over time of a value
without ever stacking it, where it can: the sum goes through linear operators, until a product of two values that
both depend on time becomes one product whose inner axis is T x N. So a weight's gradient is one matrix product.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.parts import leading_to

_aten = cast(Any, torch.ops.aten)
_LINEAR_VIEWS = (
    _aten.t.default,
    _aten.reshape.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
    _aten.neg.default,
)

_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)


class Bulk:
    """Values of a graph for a whole sequence: `env` holds them by node, stacked where `varies` says so."""

    def __init__(self, steps: int, varies: Callable[[fx.Node], bool]) -> None:
        self.steps = steps
        self.varies = varies
        self.env: dict[fx.Node, Any] = {}

    def evaluate(self, nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> None:
        """Compute `wanted`, all of them among `nodes`, for all steps, and nothing that they do not need."""
        if not wanted:
            return
        inside = leading_to(wanted, set(nodes))
        nodes = [node for node in nodes if node in inside]
        given = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
        dims = tuple(0 if self.varies(node) else None for node in given)

        def step(*values: Any) -> tuple[Any, ...]:
            local = dict(zip(given, values, strict=True))
            for node in nodes:
                local[node] = _call(node, local)
            return tuple(local[node] for node in wanted)

        values = [self.env[node] for node in given]
        found = step(*values) if all(dim is None for dim in dims) else _vmap(step, dims)(*values)
        self.env.update(zip(wanted, found, strict=True))

    def summed(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """The sum over all steps of a value that is computed by nodes `inside`."""
        if not self.varies(node):
            return self.env[node] * self.steps
        if node not in inside:
            return self.env[node].sum(0)
        args = node.args
        if summed_at_once(node):
            return self._rows_added(node, inside)
        if node.target in _LINEAR_VIEWS:
            return cast(Any, node.target)(self.summed(cast(fx.Node, args[0]), inside), *args[1:])
        if node.target is _aten.sum.dim_IntList:
            return self._sum_of_sum(node, inside)
        if node.target is _aten.mm.default:
            return self._sum_of_product(*cast("tuple[fx.Node, fx.Node]", args), inside)
        if node.target is _aten.add.Tensor and all(isinstance(each, fx.Node) for each in args) and not node.kwargs:
            one, other = cast("tuple[fx.Node, fx.Node]", args)
            if _shape(one) == _shape(other):
                return self.summed(one, inside) + self.summed(other, inside)
        return self._stacked(node, inside).sum(0)

    def _sum_of_sum(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        source, axes, *rest = node.args
        value = self._stacked(cast(fx.Node, source), inside)
        steps = [0, *(axis % (value.dim() - 1) + 1 for axis in cast("list[int]", axes))]
        keep = bool(rest[0]) if rest else False
        total = value.sum(steps, keepdim=keep)
        return total[0] if keep else total

    def _sum_of_product(self, one: fx.Node, other: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        if not self.varies(other):
            return self.summed(one, inside) @ self.env[other]
        if not self.varies(one):
            return self.env[one] @ self.summed(other, inside)
        left, right = self._stacked(one, inside), self._stacked(other, inside)
        return left.permute(1, 0, 2).reshape(left.shape[1], -1) @ right.reshape(-1, right.shape[2])

    def _rows_added(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """Rows of all steps, added at their indices to a table of zeros."""
        if node.target is _aten.embedding_dense_backward.default:
            rows, index, count, padding, by_frequency = node.args
        else:
            (_, (index,), rows, _), shape = cast("tuple[Any, Any, Any, Any]", node.args), _shape(node)
            count, padding, by_frequency = shape[0], -1, False
        rows, index = (self._each(cast(fx.Node, each), inside) for each in (rows, index))
        flat, at = rows.reshape(index.numel(), -1), index.reshape(-1)
        at = at if node.target is _aten.embedding_dense_backward.default else at.remainder(cast(int, count))
        found = _aten.embedding_dense_backward.default(flat, at, count, padding, by_frequency)
        return found.reshape(_shape(node))

    def _each(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """The value for all steps, also of what is the same in each."""
        value = self._stacked(node, inside)
        return value if self.varies(node) else value.expand(self.steps, *value.shape)

    def _stacked(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """The value for all steps, computed when it is first asked for."""
        if node not in self.env:
            self.evaluate([each for each in inside if each not in self.env], [node])
        return self.env[node]


def summed_at_once(node: fx.Node) -> bool:
    """Whether an operator, given what it reads of all steps, yields the sum of what it yields in each step."""
    if node.target is _aten.embedding_dense_backward.default:
        return not node.args[4]  # by frequency, it counts within a step
    if node.target is not _aten.index_put.default or node.args[3:] != (True,):
        return False
    table, indices, rows, _ = cast("tuple[fx.Node, list[fx.Node | None], fx.Node, bool]", node.args)
    (index, *others), width = indices, _shape(table)[1:]
    whole = index is not None and not others and _shape(rows) == (*_shape(index), *width)
    small = rows.meta["val"].dtype not in (torch.float32, torch.float64)
    return whole and not small and table.target in _ZEROS


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = cast("tuple[Any, Any]", fx.map_arg((node.args, node.kwargs), lambda each: values[each]))
    return cast(Any, node.target)(*args, **kwargs)


def _vmap(function: Callable[..., Any], dims: tuple[int | None, ...]) -> Callable[..., Any]:
    return torch.vmap(function, in_dims=dims, randomness="error")


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)
