"""Looks at a tensor by strides (`as_strided`, also within `fill_diagonal_`), said by elements instead.

    as_strided(x, [4], [5])      becomes      reshape(x, [-1])[0:16:5]

A plan stacks a value over time, and later steps may have it in another layout: then its strides are others.
"""

from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.core.errors import WeftError

_aten = cast(Any, torch.ops.aten)
_READ, _WRITTEN = _aten.as_strided.default, _aten.as_strided_scatter.default


def by_elements(graph: fx.Graph) -> None:
    """Replace both operators. Raises WeftError where they look at what is no part of the tensor."""
    for node in [each for each in graph.nodes if each.target in (_READ, _WRITTEN)]:
        node.replace_all_uses_with(_same_by_elements(node))
        graph.erase_node(node)


def _same_by_elements(node: fx.Node) -> fx.Node:
    base, *given = cast("tuple[Any, ...]", node.args)
    piece = given.pop(0) if node.target is _WRITTEN else None
    size, strides, *offset = given
    look: Tensor = base.meta["val"]
    order = sorted(range(look.dim()), key=lambda axis: -look.stride(axis))
    start = 0 if not offset or offset[0] is None else offset[0] - look.storage_offset()
    reach = start + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
    if not look.permute(order).is_contiguous() or start < 0 or reach >= look.numel():
        raise WeftError(f"the cell looks by {node.target} at memory outside of a tensor; use slices and indices")
    device = look.device

    def new(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = node.graph.call_function(target, args, kwargs)
        with cast(Any, look).fake_mode:
            values = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
            made.meta = {"val": target(*cast(Any, values)[0], **cast(Any, values)[1])}
        return made

    with node.graph.inserting_before(node):
        flat = new(_aten.reshape.default, new(_aten.permute.default, base, order), [-1])
        at = new(_aten.full.default, [1] * len(size), start, dtype=torch.int64, device=device, pin_memory=False)
        for axis, (n, step) in enumerate(zip(size, strides, strict=True)):
            line = new(_aten.arange.start_step, 0, n * max(step, 1), max(step, 1), device=device, pin_memory=False)
            shape = [n if axis == other else 1 for other in range(len(size))]
            along = new(_aten.reshape.default, line, shape)
            at = new(_aten.add.Tensor, at, along if step else new(_aten.mul.Tensor, along, 0))
        at = new(_aten.reshape.default, at, [-1])
        if piece is None:
            return new(_aten.reshape.default, new(_aten.index_select.default, flat, 0, at), list(size))
        filled = new(_aten.scatter.src, flat, 0, at, new(_aten.reshape.default, piece, [-1]))
        back = new(_aten.reshape.default, filled, [look.shape[axis] for axis in order])
        return new(_aten.permute.default, back, [order.index(axis) for axis in range(look.dim())])
