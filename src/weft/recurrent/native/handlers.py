"""Operators that are more than one C expression: sums with a factor, fills, reductions, products, concatenations."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.native.c_types import Unsupported
from weft.recurrent.native.maker import Maker, arguments, value_of
from weft.recurrent.native.operators import FILL, RESHAPES, aten, prims
from weft.recurrent.native.values import Cat, Product, Reduce, Ref

Handler = Callable[[Maker, fx.Node], Ref | list[Ref]]


# -- elementwise ------------------------------------------------------------------------------------------------------


def _add(maker: Maker, node: fx.Node) -> Ref:
    """A sum or a difference, of which the second operand may have a factor. Truth values are added as by "or"."""
    given = arguments(node)
    operands = [maker.operand(given["self"]), maker.operand(given["other"])]
    if value_of(node).dtype == torch.bool:
        return maker.like(node, "({0}|{1})", operands)
    sign = "-" if node.target in (aten.sub.Tensor, aten.sub.Scalar) else "+"
    if given["alpha"] == 1:
        return maker.like(node, f"({{0}}{sign}{{1}})", operands)
    return maker.like(node, f"({{0}}{sign}{{1}}*{{2}})", [*operands, maker.operand(given["alpha"])])


def _where(maker: Maker, node: fx.Node) -> Ref:
    return maker.like(node, "({0}!=0?{1}:{2})", [maker.operand(each) for each in node.args])


def _clamp(maker: Maker, node: fx.Node) -> Ref:
    """The upper bound last, as PyTorch has it: where the lower one is above it, the upper one wins."""
    given, dtype = arguments(node), value_of(node).dtype
    found = maker.ref(given["self"])
    for name, expression in (("min", "w_max({0},{1})"), ("max", "w_min({0},{1})")):
        bound = given.get(name)
        if bound is None:
            continue
        if isinstance(bound, int) and not (dtype.is_floating_point or _holds(dtype, bound)):
            raise Unsupported(
                f"loops in C clamp by numbers that {dtype} can hold, not by {bound} ({node.target}): to PyTorch 2.15 "
                "that is no bound, before it was the number that the bits of this one make"
            )
        found = maker.like(node, expression, [found, maker.operand(bound)])
    return found


def _holds(dtype: torch.dtype, number: int) -> bool:
    return dtype != torch.bool and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


_POWERS = {
    0: "1",
    1: "{0}",
    2: "({0}*{0})",
    3: "({0}*{0}*{0})",
    0.5: "w_sqrt({0})",
    -0.5: "(1/w_sqrt({0}))",
    -1: "(1/{0})",
    -2: "(1/({0}*{0}))",
}
"""Exponents that PyTorch itself computes otherwise than by the library's pow."""


def _power(maker: Maker, node: fx.Node) -> Ref:
    base, exponent = maker.operand(node.args[0]), maker.operand(node.args[1])
    floating = value_of(node).is_floating_point()
    if not isinstance(exponent, Ref) and exponent in _POWERS and (floating or exponent in (0, 1, 2, 3)):
        return maker.like(node, _POWERS[exponent], [base])
    if not floating:
        raise Unsupported(f"loops in C raise integers to the powers 0 to 3 only ({node.target})")
    return maker.like(node, "w_pow({0},{1})", [base, exponent])


def _not(maker: Maker, node: fx.Node) -> Ref:
    truth = value_of(node).dtype == torch.bool
    return maker.like(node, "(!{0})" if truth else "(~{0})", [maker.operand(node.args[0])])


def _rounded(maker: Maker, node: fx.Node) -> Ref:
    """Whole numbers stay as they are."""
    name = cast(Any, node.target)._schema.name.removeprefix("aten::")
    floating = value_of(node).is_floating_point()
    return maker.like(node, f"w_{name}({{0}})" if floating else "{0}", [maker.operand(node.args[0])])


def _fill(maker: Maker, node: fx.Node) -> Ref:
    number = FILL[node.target]
    if number is None:
        given = arguments(node)
        number = maker.operand(given["s"] if "s" in given else given["fill_value"])
    return maker.like(node, "{0}", [number])


# -- shapes -----------------------------------------------------------------------------------------------------------


def _reshape(maker: Maker, node: fx.Node) -> Ref:
    source, shape = maker.ref(cast(fx.Node, node.args[0])), tuple(value_of(node).shape)
    if source.shape == shape:
        return source

    def view(at: Tensor) -> Tensor:
        return at.reshape(shape)

    return cast(Ref, maker.look(source, view) or maker.look(maker.copied(source), view))


def _copy(maker: Maker, node: fx.Node) -> Ref:
    return maker.copied(maker.ref(cast(fx.Node, node.args[0])))


def _same(maker: Maker, node: fx.Node) -> Ref:
    return maker.ref(cast(fx.Node, node.args[0]))


def _cat(maker: Maker, node: fx.Node) -> Ref:
    value, given = value_of(node), arguments(node)
    pieces = [maker.ref(each) for each in given["tensors"]]
    pieces = [each for each in pieces if each.shape != (0,)]  # PyTorch takes an empty tensor of one axis anywhere
    pieces = [maker.as_dtype(each, value.dtype) for each in pieces]
    return maker.store.add(value.shape, value.dtype, Cat(pieces, given["dim"] % len(value.shape)))


def _slice_scatter(maker: Maker, node: fx.Node) -> Ref:
    """A tensor with a piece of it replaced: what is before, the piece, what is behind."""
    value, given = value_of(node), arguments(node)
    axis = cast(int, given["dim"]) % len(value.shape)
    size = int(value.shape[axis])
    begin, end, _ = slice(given["start"], given["end"]).indices(size)
    if given["step"] != 1:
        raise Unsupported(f"loops in C replace whole pieces only, not every {given['step']}th element ({node.target})")
    whole, piece = maker.ref(given["self"]), maker.ref(given["src"])
    before, behind = (Ref(whole.value, whole.at.narrow(axis, i, n)) for i, n in ((0, begin), (end, size - end)))
    pieces = [each for each in (before, piece, behind) if each.shape[axis]]
    return maker.store.add(value.shape, value.dtype, Cat(pieces, axis))


# -- sums and products ------------------------------------------------------------------------------------------------


def _axes(given: object, dims: int) -> tuple[int, ...]:
    """Axes as PyTorch takes them: one, several, or none for all."""
    several = cast("list[int]", [given] if isinstance(given, int) else given)
    return tuple(sorted({axis % dims for axis in several})) if several else tuple(range(dims))


def _reduced(maker: Maker, node: fx.Node, kind: Any) -> tuple[Ref, int]:
    """A reduction, and of how many numbers each."""
    given, value = arguments(node), value_of(node)
    source = maker.as_dtype(maker.ref(cast(fx.Node, node.args[0])), value.dtype)
    axes = _axes(given.get("dim", given.get("dims")), len(source.shape))
    if not axes:
        return source, 1
    keep = len(value.shape) == len(source.shape)
    made = maker.store.add(value.shape, value.dtype, Reduce(kind, source, axes, keep))
    return made, math.prod(source.shape[axis] for axis in axes)


def _sum(maker: Maker, node: fx.Node) -> Ref:
    return _reduced(maker, node, "sum")[0]


def _mean(maker: Maker, node: fx.Node) -> Ref:
    total, count = _reduced(maker, node, "sum")
    return total if count == 1 else maker.like(node, "({0}/{1})", [total, float(count)])


def _greatest(maker: Maker, node: fx.Node) -> Ref:
    return _reduced(maker, node, "max")[0]


def _least(maker: Maker, node: fx.Node) -> Ref:
    return _reduced(maker, node, "min")[0]


def _var(maker: Maker, node: fx.Node) -> Ref:
    """As the mean of the squared distances from the mean: two passes, so that nothing cancels."""
    given, value = arguments(node), value_of(node)
    source = maker.ref(cast(fx.Node, node.args[0]))
    axes = _axes(given.get("dim", given.get("dims")), len(source.shape))
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(source.shape))
    count = math.prod(source.shape[axis] for axis in axes)
    correction = 1.0 if given["correction"] is None else float(given["correction"])
    total = maker.store.add(kept, value.dtype, Reduce("sum", source, axes, True))
    mean = maker.point("({0}/{1})", [total, float(count)], kept, value.dtype)
    apart = maker.point("({0}-{1})", [source, mean], source.shape, value.dtype)
    square = maker.point("({0}*{0})", [apart], source.shape, value.dtype)
    summed = maker.store.add(value.shape, value.dtype, Reduce("sum", square, axes, len(value.shape) == len(kept)))
    return maker.like(node, "({0}/{1})", [summed, max(count - correction, 0.0)])


_FACTORS = ("self", "mat1", "batch1", "mat2", "batch2")


def _product(maker: Maker, node: fx.Node) -> Ref:
    value, given = value_of(node), arguments(node)
    if value.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"loops in C multiply matrices of float32 and float64, not of {value.dtype}")
    *start, left, right = (maker.ref(given[name]) for name in _FACTORS if name in given)
    alpha, beta = given.get("alpha", 1), given.get("beta", 1)
    plain = alpha == 1 and beta == 1
    begin = Ref(start[0].value, start[0].at.expand(value.shape)) if start and plain else None
    made = maker.store.add(value.shape, value.dtype, Product(left, right, begin, maker.live.get(node)))
    if plain:
        return made
    scaled = maker.like(node, "({0}*{1})", [made, maker.operand(alpha)])
    if beta == 0:  # whatever the start is, be it NaN
        return scaled
    return maker.like(node, "({0}+{1}*{2})", [scaled, start[0], maker.operand(beta)])


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys([aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar], _add),
    aten.where.self: _where,
    **dict.fromkeys([aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default], _clamp),
    **dict.fromkeys([aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar], _power),
    aten.bitwise_not.default: _not,
    **dict.fromkeys([aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default], _rounded),
    **dict.fromkeys(FILL, _fill),
    **dict.fromkeys(RESHAPES, _reshape),
    aten.clone.default: _copy,
    **dict.fromkeys([aten.contiguous.default, aten.detach.default, aten.alias.default], _same),
    aten.cat.default: _cat,
    aten.slice_scatter.default: _slice_scatter,
    **dict.fromkeys([aten.sum.dim_IntList, aten.sum.default, prims.sum.default], _sum),
    **dict.fromkeys([aten.mean.dim, aten.mean.default], _mean),
    **dict.fromkeys([aten.amax.default, aten.max.default], _greatest),
    **dict.fromkeys([aten.amin.default, aten.min.default], _least),
    **dict.fromkeys([aten.var.correction, prims.var.default], _var),
    **dict.fromkeys([aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default], _product),
}
