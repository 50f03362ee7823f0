"""Passes over the captured graph of a step.

PyTorch has such passes in Inductor, but for one call of a graph. Here the same graph runs for one step (in a loop), for
all steps at once (under `vmap`), and in compiled C. The passes rewrite it into a form that is valid in all three.

`functionalize`: removes writes. Each becomes an operator that returns a new tensor.

`canonicalize`: forms that hold for all steps at once, where a value is stacked over time and mapped by `vmap`.

    detach, alias, clone        removed: there are no writes left, and autograd is not involved
    t(t(x))                     x
    common subexpressions       one
    view                        reshape: stacked over time, a value can have other strides
    prims.mul(x, y)             mul(x, y): vmap does not support the prims that decompositions consist of
    index_put(x, [mask], v)     where(mask, v, x), for a single number v: vmap does not support boolean indices
    copy(x, y)                  y in the shape and dtype of x
    (gx, gw) = backward(...)    gx = backward(...) for the loop, gw = backward(...) for after it
    group_norm(x)               group_norm(contiguous(x)): some operators assume contiguous memory

`fuse`: fewer operators in Python loops, which pay for each one. Compiled loops do not need it.

    sigmoid_backward(g, y)      g * (y * (1 - y)): the factor is known before the backward loop, for all steps at once
    (g * a) * b                 g * (a * b), likewise
    x + a * b                   addcmul(x, a, b)
    p + h @ w                   addmm(p, h, w)
    p + addmm(bias, h, w)       addmm(p + bias, h, w), where p is known before the loop

Nodes are changed in place, so references to them stay valid. A fused sum can round differently from the cell's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.core.errors import WeftError
from torchweft.recurrent.graph import StepGraph, alike, is_random
from torchweft.recurrent.pytorch_internals import make_fx
from torchweft.recurrent.step_plan import CARRIED, dependences, partition

_functionalize = cast("Callable[..., Callable[..., Any]]", torch.func.functionalize)
_aten, _prims = cast(Any, torch.ops.aten), cast(Any, torch.ops.prims)
_ADD, _MUL = _aten.add.Tensor, _aten.mul.Tensor
_STRIDED = {_aten.as_strided.default, _aten.as_strided_scatter.default}
# Operators that read memory as if it were contiguous. PyTorch makes a contiguous copy before it calls them.
_CONTIGUOUS_ONLY = {_aten.native_group_norm.default, _aten.native_group_norm_backward.default}

# Primitives that decompositions produce, with the equivalent ATen operator and names of its arguments.
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


def functionalize(
    traced: fx.GraphModule, example: Sequence[Sequence[Tensor]], composed: Mapping[Any, Any] | None
) -> fx.GraphModule:
    """The graph `traced`, whose arguments look like `example`, without writes. `composed` as for `capture`."""
    # PyTorch's pass removes writes only into values computed from the arguments of a function. The tensors that the
    # graph holds therefore become arguments. Otherwise a write into a value of weights alone would remain.
    nodes = [node for node in traced.graph.nodes if node.op == "get_attr" and not is_step_constant(node)]
    held: dict[str, Tensor] = {str(node.target): getattr(traced, str(node.target)) for node in nodes}
    flat = [value for values in example for value in values]

    def run_graph(*values: Tensor) -> Any:
        substitutes = dict(zip(held, values[len(flat) :], strict=True))
        interpreter = _SubstitutingInterpreter(traced, substitutes)
        return interpreter.run(*values[: len(flat)], enable_io_processing=False)

    arguments = (*flat, *(tensor.detach() for tensor in held.values()))
    pure = make_fx(_functionalize(run_graph, remove="mutations"), decomposition_table=composed)(*arguments)
    starts = [node for node in pure.graph.nodes if node.op == "placeholder"]
    for i, (node, tensor) in enumerate(zip(starts[len(flat) :], held.values(), strict=True)):
        name = f"reference{i}"
        setattr(pure, name, tensor)
        with pure.graph.inserting_before(node):
            reference = pure.graph.create_node("get_attr", name)
        reference.meta = dict(node.meta)
        node.replace_all_uses_with(reference)
        pure.graph.erase_node(node)
    pure.graph.set_codegen(traced.graph._codegen)  # arguments nested as before
    pure.recompile()
    return pure


class _SubstitutingInterpreter(fx.Interpreter):
    """Runs a graph with substitutes for tensors that it holds."""

    def __init__(self, module: fx.GraphModule, substitutes: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._substitutes = substitutes

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._substitutes[target] if target in self._substitutes else super().get_attr(target, args, kwargs)


def is_step_constant(node: fx.Node) -> bool:
    """Whether a tensor that a graph holds is created by every step from plain numbers, e.g. by `torch.tensor(0.5)`."""
    return all([user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users])


def writes(module: fx.GraphModule) -> list[str]:
    """The operators of a graph that change one of their arguments."""
    schemas = [(node.target, getattr(node.target, "_schema", None)) for node in module.graph.nodes]
    return [str(target) for target, schema in schemas if schema is not None and schema.is_mutable]


def canonicalize(module: fx.GraphModule) -> None:
    """Rewrite operators into forms that hold for all steps at once, and remove redundant ones, in place."""
    # Raises WeftError for reads and writes by strides, because a value stacked over time has others.
    graph = module.graph
    first_by_key: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in (_aten.view.default, _aten._unsafe_view.default):
            node.target = _aten.reshape.default
        elif node.target is _aten.fill.Scalar:
            node.target = _aten.full_like.default  # the same without writes, and known to vmap of older PyTorch
        elif node.target in _PRIMS:
            target, *names = _PRIMS[node.target]
            rest = dict(zip(names, node.args[1:], strict=False))
            node.target, node.args, node.kwargs = target, node.args[:1] if names else node.args, rest
        elif node.target is _aten.slice_scatter.default:
            _normalize_slice(node)
        elif node.target is _aten.index_put.default:
            _mask_to_where(node)
        source = _repeated_value(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        # Common subexpressions by text: nodes before this one are merged already, so equal arguments have equal names.
        if node.op == "get_attr":
            key = f"{id(getattr(module, str(node.target)))}"
        elif node.op == "call_function" and not is_random(node):  # two equal draws give different numbers
            key = f"{node.target} {node.args} {node.kwargs}"
        else:
            continue
        if first_by_key.setdefault(key, node) is not node:
            node.replace_all_uses_with(first_by_key[key])
            graph.erase_node(node)
    _split_masked_gradients(graph)
    _make_contiguous(graph)
    graph.eliminate_dead_code()
    module.recompile()
    if any(node.target in _STRIDED for node in graph.nodes):
        raise WeftError("the cell reads or writes memory by strides (as_strided); use slices, indices and torch.where")


def _split_masked_gradients(graph: fx.Graph) -> None:
    """Split each operator that computes the gradients of an input and of weights at once into two, one for each."""
    # Such an operator has a mask of the gradients to compute. Unsplit, all of it would stay in the backward loop.
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        if node.op != "call_function" or "output_mask" not in names:
            continue
        # Position 0 of the mask is the input, the others are weights and biases.
        at = names.index("output_mask")
        mask = list(node.args[at])
        if not (mask[0] and any(mask[1:])):
            continue
        with graph.inserting_before(node):
            halves = [
                _new_node(node.target, (*node.args[:at], half, *node.args[at + 1 :]), node, **node.kwargs)
                for half in ([True, *[False] * (len(mask) - 1)], [False, *mask[1:]])
            ]
        for user in list(node.users):
            user.replace_input_with(node, halves[0] if user.args[1] == 0 else halves[1])
        graph.erase_node(node)


def _make_contiguous(graph: fx.Graph) -> None:
    # The layout seen at capture is not enough: at a later step the value can have another.
    contiguous: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node.target in _CONTIGUOUS_ONLY]:
        for operand in node.all_input_nodes:
            if operand not in contiguous:
                with graph.inserting_after(operand):
                    contiguous[operand] = _new_node(_aten.contiguous.default, (operand,), operand)
            node.replace_input_with(operand, contiguous[operand])


def _normalize_slice(node: fx.Node) -> None:
    # vmap builds a table of all indices between the ends, and the default end is the largest integer.
    whole, piece, *bounds = cast("tuple[Any, ...]", node.args)
    axis, start, end, step = cast("list[Any]", [*bounds, *(0, None, None, 1)[len(bounds) :]])
    shape = whole.meta["val"].shape
    begin, end, _ = slice(start, end).indices(shape[axis])
    node.args = (whole, piece, axis % len(shape), begin, max(begin, end), step)


def _mask_to_where(node: fx.Node) -> None:
    # Rewrite `index_put` of one number under a mask as `where`. Other uses are left alone.
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
        where = [
            _new_node(_aten.reshape.default, (source, shape), source, source.meta["val"].reshape(shape))
            for source, shape in shapes
        ]
    _rewrite(node, _aten.where.self, (*where, whole))


def _copy_source(node: fx.Node) -> fx.Node:
    fake, source = node.meta["val"], cast(fx.Node, node.args[1])
    with node.graph.inserting_before(node):
        if source.meta["val"].dtype != fake.dtype:
            value = source.meta["val"].to(fake.dtype)
            source = _new_node(_aten._to_copy.default, (source,), node, value, dtype=fake.dtype)
        if source.meta["val"].shape != fake.shape:
            source = _new_node(_aten.expand.default, (source, list(fake.shape)), node)
    return source


def _repeated_value(node: fx.Node) -> fx.Node | None:
    # The node whose value this one repeats, for operators that only do that.
    if node.target is _aten.copy.default:
        target, source = (operand.meta["val"] for operand in cast("tuple[fx.Node, fx.Node]", node.args[:2]))
        return _copy_source(node) if target.device == source.device else None
    if node.target in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
        return node.all_input_nodes[0]
    if node.target is _aten.t.default:
        (before,) = node.all_input_nodes
        if before.target is _aten.t.default:
            return before.all_input_nodes[0]
    return None


def fuse(captured: StepGraph) -> None:
    """Fuse operators in the loops of a captured step, in place."""
    for node in captured.nodes:
        if node.target in (_aten.sigmoid_backward.default, _aten.tanh_backward.default):
            _factor_derivative(node)
    _reorder_products(captured)
    # Only inside the loops. Bulk operators run once per chunk, and their fusion would change rounding for nothing.
    parts = partition(captured)
    for group in (parts.loop, parts.loop_back):
        inside = set(group)
        for node in group:
            if node.target is _ADD and len(node.args) == 2 and not node.kwargs:
                _fuse_sum(node, inside)
    captured.module.graph.eliminate_dead_code()
    captured.module.recompile()


def _factor_derivative(node: fx.Node) -> None:
    gradient, y = cast("tuple[fx.Node, fx.Node]", node.args)
    with node.graph.inserting_before(node):
        if node.target is _aten.sigmoid_backward.default:
            known = _new_node(_MUL, (y, _new_node(_aten.rsub.Scalar, (y, 1), y)), y)
        else:
            known = _new_node(_aten.rsub.Scalar, (_new_node(_MUL, (y, y), y), 1), y)
    _rewrite(node, _MUL, (gradient, known))


def _reorder_products(captured: StepGraph) -> None:
    # Multiply the known factors of a carried gradient first, so that their product leaves the loop.
    on = dependences(captured)

    def is_carried(node: object) -> bool:
        return isinstance(node, fx.Node) and CARRIED in on[node]

    for node in captured.nodes:
        if not _is_plain_product(node):
            continue
        inner, known = sorted(cast("tuple[fx.Node, fx.Node]", node.args), key=is_carried, reverse=True)
        # With another reader, the inner product would still be computed, and nothing would be saved.
        if is_carried(known) or not is_carried(inner) or not _is_plain_product(inner) or len(inner.users) > 1:
            continue
        gradient, factor = sorted(cast("tuple[fx.Node, fx.Node]", inner.args), key=is_carried, reverse=True)
        if is_carried(factor):
            continue
        with node.graph.inserting_before(node):
            product = _new_node(_MUL, (factor, known), known)
        on[product] = on[factor] | on[known]
        _rewrite(node, _MUL, (gradient, product))


def _fuse_sum(node: fx.Node, inside: set[fx.Node]) -> None:
    if not _is_plain(node):
        return
    one, other = cast("tuple[fx.Node, fx.Node]", node.args)
    for summand, rest in ((one, other), (other, one)):
        if summand not in inside or len(summand.users) > 1 or summand is rest:
            continue
        if _is_plain_product(summand):
            return _rewrite(node, _aten.addcmul.default, (rest, *summand.args))
        if summand.target is _aten.mm.default:
            return _rewrite(node, _aten.addmm.default, (rest, *summand.args))
        if summand.target is _aten.addmm.default and not summand.kwargs and rest not in inside:
            bias, *factors = summand.args
            with node.graph.inserting_before(node):
                known = _new_node(_ADD, (rest, bias), rest)
            return _rewrite(node, _aten.addmm.default, (known, *factors))
    return None


def _new_node(target: Any, args: Any, like: fx.Node, value: Any = None, **kwargs: Any) -> fx.Node:
    """An operator with the metadata of the node `like`, or with `value` as its value."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta) if value is None else {**like.meta, "val": value}
    return node


def _rewrite(node: fx.Node, target: Any, args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _is_plain_product(node: fx.Node) -> bool:
    return node.target is _MUL and len(node.args) == 2 and not node.kwargs and _is_plain(node)


def _is_plain(node: fx.Node) -> bool:
    # Fused operators and reordered products neither broadcast nor convert as the separate ones do.
    return alike(node) and node.meta["val"].is_floating_point()
