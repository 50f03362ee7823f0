"""From operators of the captured graph to values of the loops: handler, table, or view.

    getitem                  one of several views
    HANDLERS                 an operator that is made of more than one value, or that looks at its arguments
    ARITHMETIC, COMPARISON   one C expression
    otherwise                a view, if the operator's schema says so

What is not known here raises `Unsupported`. PyTorch runs it, if it is not needed step by step; else another backend
runs the cell.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx

from weft.recurrent.captured import Captured
from weft.recurrent.native.c_types import Unsupported, check_dtype
from weft.recurrent.native.handlers import HANDLERS
from weft.recurrent.native.maker import Maker, promoted, value_of
from weft.recurrent.native.operators import ARITHMETIC, COMPARISON, NARROWING, RESTRIDING, views
from weft.recurrent.native.values import Operand, Ref, Value, seen

__all__ = ["Lowering", "Unsupported", "refusal"]


class Lowering(Maker):
    """Turns nodes into values, each once; `refs` holds what was given and what was made."""

    def run(self, node: fx.Node) -> None:
        """Lower one node; those that it reads were lowered before. Raises Unsupported."""
        if node in self.refs:
            return
        if node.target is operator.getitem:
            source, index = cast("tuple[fx.Node, int]", node.args)
            self.refs[node] = cast("list[Ref]", self.refs[source])[index]
            return
        value: object = node.meta.get("val")
        for each in cast("list[object]", value) if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor):
                check_dtype(each.dtype, f"what {node.target} yields")
        self.refs[node] = self._made(node)

    def _made(self, node: fx.Node) -> Ref | list[Ref]:
        if node.target in HANDLERS:
            return HANDLERS[node.target](self, node)
        if node.target in ARITHMETIC:
            return self.like(node, ARITHMETIC[node.target], self._operands(node))
        if node.target in COMPARISON:
            operands, value = self._operands(node), value_of(node)
            return self.point(COMPARISON[node.target], operands, value.shape, value.dtype, promoted(operands))
        return self._view(node)

    def _operands(self, node: fx.Node) -> list[Operand]:
        """The arguments that are tensors or numbers."""
        return [self.operand(each) for each in node.args if isinstance(each, fx.Node | bool | int | float)]

    def _view(self, node: fx.Node) -> Ref | list[Ref]:
        source = node.args[0] if node.args else None
        if not views(node) or node.target in RESTRIDING or not isinstance(source, fx.Node):
            raise Unsupported(f"loops in C do not know the operator {node.target}")

        def view(at: Tensor) -> Any:
            return cast(Any, node.target)(at, *node.args[1:], **node.kwargs)

        seen = self.look(self.ref(source), view, push=node.target in NARROWING)
        if seen is None:
            raise Unsupported(f"loops in C cannot view a tensor by {node.target}")
        return seen


def refusal(node: fx.Node, captured: Captured, varies: Callable[[fx.Node], bool]) -> str | None:
    """Why an operator cannot be lowered, whatever it reads; None if it can."""
    if node.target is operator.getitem:
        return None
    try:
        given: dict[fx.Node, Ref | list[Ref]] = {}
        for each in node.all_input_nodes:
            value = captured.value(each)
            several = isinstance(value, list | tuple)
            tensors = cast("list[Any]", value) if several else [value]
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    raise Unsupported(f"loops in C do not know the operator {node.target}, which reads no tensor")
                check_dtype(tensor.dtype, f"what {node.target} reads")
            refs = [seen(Value("", tuple(tensor.shape), tensor.dtype, None, varies(each))) for tensor in tensors]
            given[each] = refs if several else refs[0]
        Lowering(given).run(node)
    except Unsupported as error:
        return str(error)
    return None
