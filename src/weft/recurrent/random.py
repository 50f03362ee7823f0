"""Random numbers of a cell, made inputs of the step.

    mask = bernoulli(shape of h, 0.9)      becomes      an input "mask", T x ..., drawn before the loop

Each step draws what the eager loop would draw, in its order, from the same generator; so a plan gives the very
numbers of the eager loop, and backward and recomputation read what was drawn. What depends on a computed value, as the
probabilities of a sampled action do, cannot be drawn in advance; such cells run by the eager loop.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

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
"""Operators that read only shape, dtype and device of their tensor arguments."""
_IN_PLACE = {
    _aten.bernoulli.p: _aten.bernoulli_.float,
    _aten.normal_functional.default: _aten.normal_.default,
    _aten.uniform.default: _aten.uniform_.default,
    _aten.exponential.default: _aten.exponential_.default,
}
"""In-place operators that cells call, by their functional form in the graph."""
_SWITCHES = frozenset({"dropout_p", "train", "training"})
"""Arguments without which nothing is drawn: attention has a rate of dropout, which mostly is 0."""
_STRIDES = "weft: strides"


@dataclass(frozen=True)
class Draw:
    """One random operator: its arguments, and the metadata of the result. None stands for a tensor.

    Numbers are drawn in the order of memory, so the strides count as well.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def fill(self, row: Tensor) -> None:
        """Draw once."""
        like = torch.empty_strided(self.shape, self.strides, dtype=row.dtype, device=row.device)
        args = [like if each is None else each for each in self.args]
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
    """The random operators that depend on values, and so cannot be drawn in advance."""
    nodes = [node for node in module.graph.nodes if is_random(node)]
    return [str(node.target) for node in nodes if node.target not in _BY_SHAPE or len(node.all_input_nodes) > 1]


def tell_apart(module: fx.GraphModule) -> None:
    """Let `bernoulli(x, p)` draw into a new tensor: after functionalization, `x.bernoulli_(p)` reads the same."""
    for node in [each for each in module.graph.nodes if each.target is _aten.bernoulli.p]:
        with module.graph.inserting_before(node):
            new = module.graph.call_function(_aten.empty_like.default, node.args[:1])
            new.kwargs = {"memory_format": torch.contiguous_format}
        node.replace_input_with(node.args[0], new)
    module.recompile()


def note_strides(module: fx.GraphModule) -> None:
    """Keep the strides of the result with every random node, before later passes change them."""
    for node in [each for each in module.graph.nodes if is_random(each)]:
        written = node.args[0] if node.target in _IN_PLACE else node
        node.meta[_STRIDES] = tuple(written.meta["val"].stride())


def lifted(module: fx.GraphModule) -> tuple[list[fx.Node], list[Draw]]:
    """Replace every random node by a placeholder; returns these and their draws, in order."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inputs: list[fx.Node] = []
    draws: list[Draw] = []
    for node in [each for each in graph.nodes if is_random(each)]:
        args = tuple(None if isinstance(each, fx.Node) else each for each in node.args)
        value = node.meta["val"]
        meta = (tuple(value.shape), node.meta[_STRIDES], value.dtype)
        draws.append(Draw(_IN_PLACE.get(node.target, node.target), args, dict(node.kwargs), *meta))
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


def memory_order(tensor: Tensor) -> Hashable:
    """The memory layout of a new tensor like this one, which is the order of drawing; None for row-major."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    like = torch.empty_like(tensor, device="meta")
    return None if like.is_contiguous() else _strides(like)


def layouts_drawn(step: Callable[[Any], tuple[Any, Any]], state: Any, steps: int = 3) -> list[list[tuple[int, ...]]]:
    """The strides of all that a cell draws, for each of some steps. `step` runs it once, from a state.

    A state may be given transposed, and then be row by row: then other numbers come where draws follow its layout.
    """
    found: list[list[tuple[int, ...]]] = []
    for _ in range(steps):
        with _Layouts() as layouts:
            _, state = step(state)
        found.append(layouts.seen)
    return found


class _Layouts(TorchDispatchMode):
    """Collects in `seen` the strides of all random results inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor):
            self.seen.append(_strides(result))
        return result


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of axes longer than 1."""
    return tuple([stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1])


def drawn(draws: Sequence[Draw], steps: int, device: torch.device) -> list[Tensor]:
    """The random numbers of so many steps, T x ... each."""
    rows = [torch.empty((steps, *each.shape), dtype=each.dtype, device=device) for each in draws]
    with torch.no_grad():
        for t in range(steps if draws else 0):
            for draw, row in zip(draws, rows, strict=True):
                draw.fill(row[t])
    return rows
