"""What the operators' handlers work with: values made so far, views of them, and the arguments of a node by name.

A view of a sum or a product of elements is pushed through to their operands, so that slices of pre-activations, which
most gated cells take, are never stored:

    z = a + b        i = z[:, :4]        becomes        i = a[:, :4] + b[:, :4]        and z is never made
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.native.c_types import Unsupported, computed_in
from weft.recurrent.native.operators import CHEAP
from weft.recurrent.native.values import Operand, Point, Ref, Store, Value, natural, shares

View = Callable[[Tensor], Any]


class Maker:
    """Holds what was given and what was made, by node."""

    def __init__(self, given: Mapping[fx.Node, Ref | list[Ref]], live: Mapping[fx.Node, Ref] | None = None) -> None:
        self.store = Store()
        self.live = live or {}
        """By product, a mask of the only rows that anybody wants."""
        self.refs: dict[fx.Node, Ref | list[Ref]] = dict(given)

    def ref(self, node: fx.Node) -> Ref:
        """The view that a node stands for."""
        found = self.refs[node]
        if isinstance(found, list):
            raise Unsupported(f"{node.target} yields several tensors where one is wanted")
        return found

    def operand(self, given: object) -> Operand:
        """An argument of an elementwise operator: a tensor's view, or a number."""
        if isinstance(given, fx.Node):
            return self.ref(given)
        if isinstance(given, bool | int | float):
            return given
        raise Unsupported(f"loops in C compute with plain numbers, not with {given!r}")

    def point(
        self,
        expression: str,
        operands: Sequence[Operand],
        shape: Sequence[int],
        dtype: torch.dtype,
        type: torch.dtype | None = None,
    ) -> Ref:
        """A new elementwise value, computed in `type`, which is its own dtype if not given."""
        return self.store.add(shape, dtype, Point(expression, list(operands), computed_in(type or dtype)))

    def like(self, node: fx.Node, expression: str, operands: Sequence[Operand]) -> Ref:
        """A new elementwise value that looks like the node's."""
        value = value_of(node)
        return self.point(expression, operands, value.shape, value.dtype)

    def copied(self, ref: Ref, dtype: torch.dtype | None = None) -> Ref:
        """The elements of a view in a layout of their own, and of a dtype."""
        return self.point("{0}", [ref], ref.shape, dtype or ref.value.dtype)

    def as_dtype(self, ref: Ref, dtype: torch.dtype) -> Ref:
        """The elements in a dtype; the view itself if they are."""
        return ref if ref.value.dtype == dtype else self.copied(ref, dtype)

    def look(self, ref: Ref, view: View, push: bool = False) -> Ref | list[Ref] | None:
        """A view of a view; None if there can be none. With `push`, cheap elementwise operators are computed in it."""
        made = ref.value.made
        if push and isinstance(made, Point) and made.expression in CHEAP and ref.whole:
            return self._pushed(ref.value, made, view)
        seen = view(ref.at)
        if isinstance(seen, list | tuple):
            return [Ref(ref.value, each) for each in cast("list[Tensor]", seen)]
        return Ref(ref.value, seen) if shares(seen, ref.at) or seen is ref.at else None

    def _pushed(self, value: Value, made: Point, view: View) -> Ref | list[Ref]:
        """Looks of the operands instead of a look of what is made of them."""
        several = isinstance(view(natural(value.shape, value.dtype)), list | tuple)

        def looks(operand: Operand) -> list[Operand]:
            if not isinstance(operand, Ref):
                return [operand]
            seen = view(operand.at.expand(value.shape))
            return [Ref(operand.value, each) for each in (cast("list[Tensor]", seen) if several else [seen])]

        columns = [looks(each) for each in made.operands]
        found: list[Ref] = []
        for i in range(max(len(each) for each in columns)):
            operands = [each[i if len(each) > 1 else 0] for each in columns]
            shape = next(each.shape for each in operands if isinstance(each, Ref))
            found.append(self.point(made.expression, operands, shape, value.dtype, made.type))
        return found if several else found[0]


def value_of(node: fx.Node) -> Tensor:
    """What the node yielded when the step was captured: its shape and dtype count."""
    return cast(Tensor, node.meta["val"])


def arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names that the operator's schema gives them, with defaults."""
    schema = cast(Any, node.target)._schema
    found: dict[str, Any] = {}
    for i, each in enumerate(schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(each.name, each.default_value)
        found[each.name] = given
    return found


def promoted(operands: Sequence[Operand]) -> torch.dtype:
    """The dtype that one or two operands promote to."""
    like = [natural((1,) * len(o.shape), o.value.dtype) if isinstance(o, Ref) else o for o in operands]
    if len(like) == 1:
        return like[0].dtype if isinstance(like[0], Tensor) else torch.tensor(like[0]).dtype
    one, other = like
    return torch.result_type(cast(Any, one), cast(Any, other))
