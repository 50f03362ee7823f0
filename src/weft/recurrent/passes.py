"""Passes over the captured graph of a step.

`functionalize`: no writes; each becomes an operator that makes a new tensor.

`canonicalize`: forms that hold for all steps at once, where a value is stacked over time and mapped by `vmap`.

    detach, alias, clone        removed: nothing writes any more, and autograd is not involved
    t(t(x))                     x
    common subexpressions       one
    view                        reshape: stacked over time, a value may have other strides
    prims.mul(x, y)             mul(x, y): vmap supports no prims, of which decompositions consist
    index_put(x, [mask], v)     where(mask, v, x), for a single number v: vmap supports no boolean index
    copy(x, y)                  y in the shape and dtype of x
    (gx, gw) = backward(...)    gx = backward(...) for the loop, gw = backward(...) for after it
    group_norm(x)               group_norm(contiguous(x)): some operators assume contiguous memory

`fuse`: fewer operators in loops of Python, which pay for each one. Compiled loops have no use for it.

    sigmoid_backward(g, y)      g * (y * (1 - y)): the factor is known before the backward loop, for all steps at once
    (g * a) * b                 g * (a * b), likewise
    x + a * b                   addcmul(x, a, b)
    p + h @ w                   addmm(p, h, w)
    p + addmm(bias, h, w)       addmm(p + bias, h, w), where p is known before the loop

Nodes are changed in place, so references to them stay valid. A fused sum may round differently from the cell's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from weft.core.errors import WeftError
from weft.recurrent.graph import StepGraph, alike, is_random
from weft.recurrent.step_plan import CARRIED, dependences, partition

make_fx = cast("Callable[..., Callable[..., fx.GraphModule]]", proxy_tensor.make_fx)
_functionalize = cast("Callable[..., Callable[..., Any]]", torch.func.functionalize)
_aten, _prims = cast(Any, torch.ops.aten), cast(Any, torch.ops.prims)
_ADD, _MUL = _aten.add.Tensor, _aten.mul.Tensor
_STRIDED = {_aten.as_strided.default, _aten.as_strided_scatter.default}
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
"""Primitives that decompositions produce, with the equivalent ATen operator and names of its arguments."""


# -- functionalize ----------------------------------------------------------------------------------------------------


def functionalize(
    seen: fx.GraphModule, example: Sequence[Sequence[Tensor]], composed: Mapping[Any, Any] | None
) -> fx.GraphModule:
    """The graph `seen`, whose arguments look like `example`, without writes; `composed` as for `capture`.

    PyTorch's pass treats values computed from the arguments of a function. Tensors that the graph holds are none, and a
    write into a value of weights alone would remain; so these tensors become arguments for the pass.
    """
    nodes = [node for node in seen.graph.nodes if node.op == "get_attr" and not made_in_the_step(node)]
    held: dict[str, Tensor] = {str(node.target): getattr(seen, str(node.target)) for node in nodes}
    flat = [each for part in example for each in part]

    def run(*values: Tensor) -> Any:
        given = dict(zip(held, values[len(flat) :], strict=True))
        return _Run(seen, given).run(*values[: len(flat)], enable_io_processing=False)

    arguments = (*flat, *(each.detach() for each in held.values()))
    pure = make_fx(_functionalize(run, remove="mutations"), decomposition_table=composed)(*arguments)
    starts = [node for node in pure.graph.nodes if node.op == "placeholder"]
    for i, (node, tensor) in enumerate(zip(starts[len(flat) :], held.values(), strict=True)):
        name = f"reference{i}"
        setattr(pure, name, tensor)
        with pure.graph.inserting_before(node):
            again = pure.graph.create_node("get_attr", name)
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again)
        pure.graph.erase_node(node)
    pure.graph.set_codegen(seen.graph._codegen)  # arguments nested as they were
    pure.recompile()
    return pure


class _Run(fx.Interpreter):
    """Runs a graph with others in the place of tensors that it holds."""

    def __init__(self, module: fx.GraphModule, given: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._given = given

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._given[target] if target in self._given else super().get_attr(target, args, kwargs)


def made_in_the_step(node: fx.Node) -> bool:
    """Whether a tensor that a graph holds is one that the step makes anew each time, out of plain numbers."""
    return all([user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users])


def writes(module: fx.GraphModule) -> list[str]:
    """The operators of a graph that change one of their arguments."""
    schemas = [(node.target, getattr(node.target, "_schema", None)) for node in module.graph.nodes]
    return [str(target) for target, schema in schemas if schema is not None and schema.is_mutable]


# -- canonicalize -----------------------------------------------------------------------------------------------------


def canonicalize(module: fx.GraphModule) -> None:
    """Rewrite operators into forms that hold for all steps at once, and remove redundant ones; in place.

    Raises WeftError for reads and writes by strides, which a value stacked over time does not have.
    """
    graph = module.graph
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in (_aten.view.default, _aten._unsafe_view.default):
            node.target = _aten.reshape.default  # stacked over time, a value may have other strides
        elif node.target is _aten.fill.Scalar:
            node.target = _aten.full_like.default  # without writes it is that, and vmap of older PyTorch knows it
        elif node.target in _PRIMS:
            target, *names = _PRIMS[node.target]
            rest = dict(zip(names, node.args[1:], strict=False))
            node.target, node.args, node.kwargs = target, node.args[:1] if names else node.args, rest
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
        if seen.setdefault(key, node) is not node:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
    _separate(graph)
    _make_contiguous(graph)
    graph.eliminate_dead_code()
    module.recompile()
    if any(node.target in _STRIDED for node in graph.nodes):
        raise WeftError("the cell reads or writes memory by strides (as_strided); use slices, indices and torch.where")


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
                _new(node.target, (*node.args[:at], half, *node.args[at + 1 :]), node, **node.kwargs)
                for half in ([True, *[False] * (len(mask) - 1)], [False, *mask[1:]])
            ]
        for user in list(node.users):
            user.replace_input_with(node, halves[0] if user.args[1] == 0 else halves[1])
        graph.erase_node(node)


def _make_contiguous(graph: fx.Graph) -> None:
    """Insert contiguous() before operators that need it, since a value may have another layout at a later step."""
    made: dict[fx.Node, fx.Node] = {}
    for node in [each for each in graph.nodes if each.target in _CONTIGUOUS_ONLY]:
        for operand in node.all_input_nodes:
            if operand not in made:
                with graph.inserting_after(operand):
                    made[operand] = _new(_aten.contiguous.default, (operand,), operand)
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
    fake, number = whole.meta["val"], value.meta["val"]
    if others or mask is None or mask.meta["val"].dtype != torch.bool or any(accumulate) or number.numel() != 1:
        return
    if number.dtype != fake.dtype:
        return
    with node.graph.inserting_before(node):
        flags = mask.meta["val"].shape
        shapes = ((mask, [*flags, *[1] * (fake.dim() - len(flags))]), (value, list[int]()))
        where = [_new(_aten.reshape.default, each, each[0], each[0].meta["val"].reshape(each[1])) for each in shapes]
    _become(node, _aten.where.self, (*where, whole))


def _copied(node: fx.Node) -> fx.Node:
    """The source of a `copy` over a whole tensor, in the shape and dtype of that tensor."""
    fake, found = node.meta["val"], cast(fx.Node, node.args[1])
    with node.graph.inserting_before(node):
        if found.meta["val"].dtype != fake.dtype:
            found = _new(_aten._to_copy.default, (found,), node, found.meta["val"].to(fake.dtype), dtype=fake.dtype)
        if found.meta["val"].shape != fake.shape:
            found = _new(_aten.expand.default, (found, list(fake.shape)), node)
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


# -- fuse -------------------------------------------------------------------------------------------------------------


def fuse(captured: StepGraph) -> None:
    """Fuse operators in the loops of a captured step, in place."""
    for node in captured.nodes:
        if node.target in (_aten.sigmoid_backward.default, _aten.tanh_backward.default):
            _factor(node)
    _regroup(captured)
    parts = partition(captured)
    for group in (parts.loop, parts.loop_back):
        inside = set(group)
        for node in group:
            if node.target is _ADD and len(node.args) == 2 and not node.kwargs:
                _merge(node, inside)
    captured.module.graph.eliminate_dead_code()
    captured.module.recompile()


def _factor(node: fx.Node) -> None:
    gradient, y = cast("tuple[fx.Node, fx.Node]", node.args)
    with node.graph.inserting_before(node):
        if node.target is _aten.sigmoid_backward.default:
            known = _new(_MUL, (y, _new(_aten.rsub.Scalar, (y, 1), y)), y)
        else:
            known = _new(_aten.rsub.Scalar, (_new(_MUL, (y, y), y), 1), y)
    _become(node, _MUL, (gradient, known))


def _regroup(captured: StepGraph) -> None:
    """Products with what is carried, one factor after the other: the factors that are known first."""
    on = dependences(captured)

    def carried(node: object) -> bool:
        return isinstance(node, fx.Node) and CARRIED in on[node]

    for node in captured.nodes:
        if not _is(node, _MUL) or not _plain(node):
            continue
        inner, known = sorted(cast("tuple[fx.Node, fx.Node]", node.args), key=carried, reverse=True)
        if carried(known) or not carried(inner) or not _is(inner, _MUL) or not _plain(inner) or len(inner.users) > 1:
            continue
        gradient, factor = sorted(cast("tuple[fx.Node, fx.Node]", inner.args), key=carried, reverse=True)
        if carried(factor):
            continue
        with node.graph.inserting_before(node):
            product = _new(_MUL, (factor, known), known)
        on[product] = on[factor] | on[known]
        _become(node, _MUL, (gradient, product))


def _merge(node: fx.Node, inside: set[fx.Node]) -> None:
    """Fuse a sum with the operator of one summand, if it has no other reader."""
    if not _plain(node):
        return
    one, other = cast("tuple[fx.Node, fx.Node]", node.args)
    for made, rest in ((one, other), (other, one)):
        if made not in inside or len(made.users) > 1 or made is rest:
            continue
        if _is(made, _MUL) and _plain(made):
            return _become(node, _aten.addcmul.default, (rest, *made.args))
        if made.target is _aten.mm.default:
            return _become(node, _aten.addmm.default, (rest, *made.args))
        if made.target is _aten.addmm.default and not made.kwargs and rest not in inside:
            bias, *factors = made.args
            with node.graph.inserting_before(node):
                known = _new(_ADD, (rest, bias), rest)
            return _become(node, _aten.addmm.default, (known, *factors))
    return None


def _new(target: Any, args: Any, like: fx.Node, value: Any = None, **kwargs: Any) -> fx.Node:
    """An operator with the metadata of a node, or with this value in them."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta) if value is None else {**like.meta, "val": value}
    return node


def _become(node: fx.Node, target: Any, args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _is(node: fx.Node, target: Any) -> bool:
    return node.target is target and len(node.args) == 2 and not node.kwargs


def _plain(node: fx.Node) -> bool:
    """Whether operands and result are real numbers, and of one shape and dtype."""
    return alike(node) and node.meta["val"].is_floating_point()
