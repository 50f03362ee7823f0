"""A traced step without writes: each becomes an operator that makes a new tensor.

    w = clone(W);  w[0] = x          becomes          w = select_scatter(clone(W), x, 0, 0)

PyTorch's `functionalize` does it for what is computed from the arguments of a function. Tensors that a graph holds are
none, and a write into what follows from weights alone would stay. So they are made arguments for the while.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

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
