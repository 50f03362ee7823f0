"""Random numbers of a cell, made inputs of the step.

    mask = bernoulli(shape of h, 0.9)      becomes      an input "mask", T x ..., drawn before the loop

Each step draws what the eager loop would draw, in its order, from the same generator; so a plan gives the very
numbers of the eager loop, and backward and recomputation read what was drawn. What depends on a computed value, as the
probabilities of a sampled action do, cannot be drawn in advance; such cells run by the eager loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

_aten = cast(Any, torch.ops.aten)
_BY_SHAPE = {
    _aten.bernoulli.p,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.rand.default,
    _aten.randn.default,
    _aten.randint.default,
    _aten.randint.low,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
    _aten.normal_functional.default,
    _aten.uniform.default,
    _aten.exponential.default,
}
"""Operators that take of their tensors the looks only."""
_SWITCHES = frozenset({"dropout_p", "train", "training"})
"""Arguments without which nothing is drawn: attention has a rate of dropout, which mostly is 0."""


@dataclass(frozen=True)
class Draw:
    """One operator that draws: itself, its arguments, and the looks of the result. None stands for a tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def fill(self, row: Tensor) -> None:
        """Draw once."""
        args = [row if each is None else each for each in self.args]
        kwargs = {**self.kwargs, "device": row.device} if "device" in self.kwargs else self.kwargs
        row.copy_(self.target(*args, **kwargs))


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    asked = cast(Any, node.target)._schema.arguments
    given = dict(zip([each.name for each in asked], node.args, strict=False)) | node.kwargs
    return all(given.get(each.name, each.default_value) for each in asked if each.name in _SWITCHES)


def bound(module: fx.GraphModule) -> list[str]:
    """The operators that draw depending on values, which cannot be drawn in advance."""
    nodes = [node for node in module.graph.nodes if is_random(node)]
    return [str(node.target) for node in nodes if node.target not in _BY_SHAPE or len(node.all_input_nodes) > 1]


def lifted(module: fx.GraphModule) -> tuple[list[fx.Node], list[Draw]]:
    """Replace every drawing node by a placeholder; these, and what they draw, in order of drawing."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inputs: list[fx.Node] = []
    draws: list[Draw] = []
    for node in [each for each in graph.nodes if is_random(each)]:
        args = tuple(None if isinstance(each, fx.Node) else each for each in node.args)
        value = node.meta["val"]
        draws.append(Draw(node.target, args, dict(node.kwargs), tuple(value.shape), value.dtype))
        with graph.inserting_after(last):
            last = graph.placeholder(f"draw{len(draws)}")
        last.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        inputs.append(last)
    if draws:
        graph.eliminate_dead_code()
        module.recompile()
    return inputs, draws


def drawn(draws: Sequence[Draw], steps: int, device: torch.device) -> list[Tensor]:
    """What so many steps draw, T x ... each."""
    rows = [torch.empty((steps, *each.shape), dtype=each.dtype, device=device) for each in draws]
    with torch.no_grad():
        for t in range(steps if draws else 0):
            for draw, row in zip(draws, rows, strict=True):
                draw.fill(row[t])
    return rows
