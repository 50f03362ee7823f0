"""Fewer operators in the loops of a captured step, for loops in Python, which pay for each of them.

sigmoid_backward(g, y)      g * (y * (1 - y)): the factor is known before the backward loop, for all steps at once
(g * a) * b                 g * (a * b), likewise
x + a * b                   addcmul(x, a, b)
p + h @ w                   addmm(p, h, w)
p + addmm(bias, h, w)       addmm(p + bias, h, w), where p is known before the loop

Nodes are changed where they stand, so whoever knows them need not be told. A sum may be rounded otherwise than in the
cell; a compiled loop has no use for any of this.
"""

from typing import Any, cast

import torch
from torch import fx

from weft.recurrent.captured import Captured, alike
from weft.recurrent.parts import CARRIED, cut, dependences

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
