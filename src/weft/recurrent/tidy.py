"""Passes over a captured graph that change what it says, but not what it means.

detach, alias, clone        gone: nothing writes any more, and nobody asks autograd
t(t(x))                     x
the same thing said twice   once
view                        reshape: stacked over time, a value may have other strides
fill(x, v)                  full_like(x, v), which vmap knows
prims.mul(x, y)             mul(x, y): vmap knows none of what decompositions are made of
index_put(x, [mask], v)     where(mask, v, x), for one number v: vmap knows no truth values as an index
copy(x, y)                  y in the shape and dtype of x
slice_scatter(x, y, -1)     slice_scatter(x, y, 1, 0, 4, 1): vmap takes axis and ends as they are
(gx, gw) = backward(...)    gx = backward(...) for the loop, gw = backward(...) for after it
group_norm(x)               group_norm(contiguous(x)): some operators take others wrongly, or refuse them
"""

from typing import Any, cast

import torch
from torch import fx

from weft.recurrent.passes import by_elements
from weft.recurrent.random import is_random

_aten, _prims = cast(Any, torch.ops.aten), cast(Any, torch.ops.prims)
_CONTIGUOUS_ONLY = {_aten.native_group_norm.default, _aten.native_group_norm_backward.default}
"""Operators that read memory as if it were contiguous. PyTorch sees to it before it calls them, by a clone."""

_PRIMS: dict[Any, tuple[Any, ...]] = {
    _prims.add.default: (_aten.add.Tensor,),
    _prims.sub.default: (_aten.sub.Tensor,),
    _prims.mul.default: (_aten.mul.Tensor,),
    _prims.div.default: (_aten.div.Tensor,),
    _prims.tan.default: (_aten.tan.default,),
    _prims.squeeze.default: (_aten.squeeze.dims,),
    _prims.sum.default: (_aten.sum.dim_IntList,),
    _prims.var.default: (_aten.var.correction, "dim", "correction"),
    _prims.convert_element_type.default: (_aten._to_copy.default, "dtype"),
}
"""What decompositions are made of, and the operator that is the same, with names of its arguments."""


def tidy(module: fx.GraphModule) -> None:
    """Remove what computes nothing new: detach, alias and clone (nothing writes any more), a transpose of a transpose,
    repeated operators, dead ends."""
    graph = module.graph
    by_elements(graph)  # first: the strides are those of clones, too
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in (_aten.view.default, _aten._unsafe_view.default):
            node.target = _aten.reshape.default  # stacked over time, a value may have other strides
        elif node.target is _aten.fill.Scalar:
            node.target = _aten.full_like.default  # without writes it is that, and vmap of older PyTorch knows it
        elif node.target in _PRIMS:
            _rename(node, *_PRIMS[node.target])
        elif node.target is _aten.slice_scatter.default:
            _name_ends(node)
        elif node.target is _aten.index_put.default:
            _choose(node)
        same = _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            continue
        if node.op == "get_attr":
            key = f"{id(getattr(module, str(node.target)))}"
        elif node.op == "call_function" and not is_random(node):  # each draw is another
            key = f"{node.target} {node.args} {node.kwargs}"
        else:
            continue
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
    _separate(graph)
    _make_contiguous(graph)
    graph.eliminate_dead_code()
    module.recompile()


def _rename(node: fx.Node, target: Any, *names: str) -> None:
    """Another operator in the place of one; arguments behind the first are named, where names are given."""
    rest = dict(zip(names, node.args[1:], strict=False))
    node.target = target
    node.args, node.kwargs = (node.args[:1], rest) if names else (node.args, {})


def _separate(graph: fx.Graph) -> None:
    """Part each operator that makes the gradients of an input and of weights at once into two, one for each.

    They have a mask that says which gradients are wanted. Whole, all of it would stay in the backward loop.
    """
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        if node.op != "call_function" or "output_mask" not in names:
            continue
        at = names.index("output_mask")
        mask = list(node.args[at])
        if not (mask[0] and any(mask[1:])):
            continue
        with graph.inserting_before(node):
            halves = [
                graph.call_function(node.target, (*node.args[:at], half, *node.args[at + 1 :]), node.kwargs)
                for half in ([True, *[False] * (len(mask) - 1)], [False, *mask[1:]])
            ]
        for half in halves:
            half.meta = dict(node.meta)
        for user in list(node.users):
            user.replace_input_with(node, halves[0] if user.args[1] == 0 else halves[1])
        graph.erase_node(node)


def _make_contiguous(graph: fx.Graph) -> None:
    """Give operators contiguous operands that read them so, also where a value lies otherwise at a later step."""
    made: dict[fx.Node, fx.Node] = {}
    for node in [each for each in graph.nodes if each.target in _CONTIGUOUS_ONLY]:
        for operand in node.all_input_nodes:
            if operand not in made:
                with graph.inserting_after(operand):
                    made[operand] = graph.call_function(_aten.contiguous.default, (operand,))
                made[operand].meta = dict(operand.meta)
            node.replace_input_with(operand, made[operand])


def _name_ends(node: fx.Node) -> None:
    """Give the axis and the ends of a slice as numbers within the tensor: vmap makes a table of all numbers between."""
    whole, piece, *given = cast("tuple[Any, ...]", node.args)
    axis, start, end, step = cast("list[Any]", [*given, *(0, None, None, 1)[len(given) :]])
    shape = whole.meta["val"].shape
    begin, end, _ = slice(start, end).indices(shape[axis])
    node.args = (whole, piece, axis % len(shape), begin, max(begin, end), step)


def _choose(node: fx.Node) -> None:
    """Say of one number, written wherever a mask holds, that it is chosen there."""
    whole, indices, value, *accumulate = cast("tuple[Any, ...]", node.args)
    mask, *others = indices
    looks, number = whole.meta["val"], value.meta["val"]
    if others or mask is None or mask.meta["val"].dtype != torch.bool or any(accumulate) or number.numel() != 1:
        return
    if number.dtype != looks.dtype:
        return
    with node.graph.inserting_before(node):
        flags = mask.meta["val"].shape
        where = [_reshaped(mask, [*flags, *[1] * (looks.dim() - len(flags))]), _reshaped(value, [])]
    node.target, node.args, node.kwargs = _aten.where.self, (*where, whole), {}


def _reshaped(node: fx.Node, shape: list[int]) -> fx.Node:
    made = node.graph.call_function(_aten.reshape.default, (node, shape))
    made.meta = {**node.meta, "val": node.meta["val"].reshape(shape)}
    return made


def _copied(node: fx.Node) -> fx.Node:
    """What is written by `copy` over a whole tensor, in the looks of that tensor."""
    looks, found = node.meta["val"], cast(fx.Node, node.args[1])
    with node.graph.inserting_before(node):
        if found.meta["val"].dtype != looks.dtype:
            found = node.graph.call_function(_aten._to_copy.default, (found,), {"dtype": looks.dtype})
            found.meta = {**node.meta, "val": cast(fx.Node, node.args[1]).meta["val"].to(looks.dtype)}
        if found.meta["val"].shape != looks.shape:
            found = node.graph.call_function(_aten.expand.default, (found, list(looks.shape)))
            found.meta = dict(node.meta)
    return found


def _same_as(node: fx.Node) -> fx.Node | None:
    """The node whose value this one repeats, if it is one of the operators that only do that."""
    if node.target is _aten.copy.default:
        one, other = (each.meta["val"] for each in cast("tuple[fx.Node, fx.Node]", node.args[:2]))
        return _copied(node) if one.device == other.device else None
    if node.target in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
        return node.all_input_nodes[0]
    if node.target is _aten.t.default:
        (before,) = node.all_input_nodes
        if before.target is _aten.t.default:
            return before.all_input_nodes[0]
    return None
