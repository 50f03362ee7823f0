"""A traced step without writes: each becomes an operator that makes a new tensor.

    w = clone(W);  w[0] = x          becomes          w = select_scatter(clone(W), x, 0, 0)

PyTorch's `functionalize` does it for what is computed from the arguments of a function. Tensors that a graph holds are
none, and a write into what follows from weights alone would stay. So they are made arguments for the while.

Looks at a tensor by strides (`as_strided`, also within `fill_diagonal_`), said by elements instead.

    as_strided(x, [4], [5])      becomes      reshape(x, [-1])[0:16:5]

A plan stacks a value over time, and later steps may have it in another layout: then its strides are others.

Fewer operators in the loops of a captured step, for loops in Python, which pay for each of them.

sigmoid_backward(g, y)      g * (y * (1 - y)): the factor is known before the backward loop, for all steps at once
(g * a) * b                 g * (a * b), likewise
x + a * b                   addcmul(x, a, b)
p + h @ w                   addmm(p, h, w)
p + addmm(bias, h, w)       addmm(p + bias, h, w), where p is known before the loop

Nodes are changed where they stand, so whoever knows them need not be told. A sum may be rounded otherwise than in the
cell; a compiled loop has no use for any of this.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from weft.core.errors import WeftError
from weft.recurrent.captured import Captured, alike
from weft.recurrent.plan import CARRIED, cut, dependences

make_fx = cast("Callable[..., Callable[..., fx.GraphModule]]", proxy_tensor.make_fx)
_functionalize = cast("Callable[..., Callable[..., Any]]", torch.func.functionalize)


def purified(
    seen: fx.GraphModule, example: Sequence[Sequence[Tensor]], composed: Mapping[Any, Any] | None
) -> fx.GraphModule:
    """The graph `seen`, whose arguments look like `example`, without writes; `composed` as for `capture`."""
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


_aten = cast(Any, torch.ops.aten)
_ADD, _MUL = _aten.add.Tensor, _aten.mul.Tensor


def shorten(captured: Captured) -> None:
    """Make the loops of a captured step shorter; what it computes stays the same."""
    for node in captured.nodes:
        if node.target in (_aten.sigmoid_backward.default, _aten.tanh_backward.default):
            _factor(node)
    _regroup(captured)
    for group in (cut(captured).loop, cut(captured).loop_back):
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


def _regroup(captured: Captured) -> None:
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
    """A sum with the operator that made one of its summands, if nobody else reads that."""
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


def _new(target: Any, args: Any, like: fx.Node) -> fx.Node:
    node = like.graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node


def _become(node: fx.Node, target: Any, args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _is(node: fx.Node, target: Any) -> bool:
    return node.target is target and len(node.args) == 2 and not node.kwargs


def _plain(node: fx.Node) -> bool:
    """Whether operands and result are real numbers, and look the same."""
    return alike(node) and node.meta["val"].is_floating_point()
