"""A loop over time whose step is compiled by Inductor: one call per step, any operator, any device.

    step(constants, values of this step, rows to write, carried) -> carried, values to collect

The step is the same list of operators that code.py writes out as Python; here they become one function of kernels.
What later parts read is written straight into a row of its buffer, and a state that is written there is read from there
by the next step. Inductor fixes the strides of its arguments, so all that goes in is contiguous.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.code import CompiledLoop, Loop
from weft.recurrent.cpp.compiler import CompileError

_aten = cast(Any, torch.ops.aten)


class BodyLoop(Loop):
    """A loop of which all that is saved is written into rows."""

    @property
    def written(self) -> list[fx.Node]:
        """Whatever the loop computes and saves: a compiled step can write any value into a given tensor."""
        made = set(self.nodes)
        return [node for node in self.saved if node in made and isinstance(node.meta.get("val"), torch.Tensor)]


@dataclass(frozen=True)
class InductorLoop(CompiledLoop):
    """A `CompiledLoop` whose function calls the compiled step; `source` is the step's graph."""

    @staticmethod
    def of(plain: Loop) -> "InductorLoop":
        """The loop with a compiled step. It is compiled when it is first called."""
        loop = BodyLoop(**{field.name: getattr(plain, field.name) for field in fields(plain)})
        step = _Step(loop)
        return InductorLoop(loop, f"a compiled step:\n{step.module.code}", step.run)


class _Step:
    """The step as a graph, and as what Inductor made of it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        written = loop.written
        self._at = [written.index(end) if end in written else None for end in loop.ends]
        self.module = self._graph()
        self._compiled: Callable[..., Sequence[Tensor]] | None = None

    def run(self, steps: int, *given: Any) -> list[Tensor]:
        """In the form that `CompiledLoop.run` calls; see the source that code.py writes."""
        loop, rest = self._loop, iter(given)
        constants = [next(rest).contiguous() for _ in loop.constants]
        carried = [next(rest).contiguous() for _ in loop.carried]
        rows = [_contiguous(next(rest)) for _ in loop.rows]
        written: list[Sequence[Tensor]] = [next(rest) for _ in loop.written]
        saves = [next(rest) for _ in range(len(loop.saved) - len(written))]
        added = [_contiguous(next(rest)) for _ in loop.carried] if loop.added else []
        for step in range(steps - 1, -1, -1) if loop.backward else range(steps):
            found = iter(self._call([*constants, *carried, *(each[step] for each in (*rows, *written, *added))]))
            carried = [next(found).contiguous() if at is None else written[at][step] for at in self._at]
            for save, value in zip(saves, found, strict=True):
                save(value)
        return carried

    def _call(self, arguments: list[Tensor]) -> Sequence[Tensor]:
        if self._compiled is None:
            self._compiled = _compiled(self.module, arguments)
        return self._compiled(*arguments)

    def _graph(self) -> fx.GraphModule:
        """The step as a function, its arguments in the order in which `run` gives them."""
        loop, graph, written = self._loop, fx.Graph(), self._loop.written
        new = {node: graph.placeholder(f"given_{node}") for node in (*loop.constants, *loop.carried, *loop.rows)}
        places = [graph.placeholder(f"row_{node}") for node in written]
        for node, added in [(node, graph.placeholder(f"added_{node}")) for node in loop.carried if loop.added]:
            new[node] = graph.call_function(_aten.add.Tensor, (new[node], added))
        for node in loop.nodes:
            new[node] = graph.node_copy(node, lambda each: new[each])
            new[node].meta = {}
        for node, place in zip(written, places, strict=True):
            graph.call_function(_aten.copy_.default, (place, new[node]))
        ends = [
            graph.call_function(_aten.zeros_like.default, (new[kept],)) if end is None else new[end]
            for kept, end, at in zip(loop.carried, loop.ends, self._at, strict=True)
            if at is None
        ]
        graph.output((*ends, *(new[node] for node in loop.saved if node not in written)))
        return fx.GraphModule({}, graph)


def _compiled(module: fx.GraphModule, arguments: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """What Inductor makes of a step, for arguments that look like these; in this process alone, so nothing is left.

    Raises CompileError.
    """
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return module
    # A written row changes while it is traced: what is compiled for must be others than the caller's.
    examples = [each.clone() for each in arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's own, as it imports its parts
            from torch import _inductor  # noqa: PLC0415  (takes seconds, and most never need it)

            return cast(Any, _inductor).compile(module, examples, {"compile_threads": 1})
    except Exception as error:
        raise CompileError(f"Inductor cannot compile the step: {type(error).__name__}: {str(error)[:500]}") from error


def _contiguous(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """The rows, contiguous each; they look alike."""
    return rows if not rows or rows[0].is_contiguous() else torch.stack(list(rows)).unbind(0)
