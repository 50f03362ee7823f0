"""The Inductor backend: the two loops of a plan as compiled steps. On CUDA a whole chunk is one CUDA graph.

    CPU      bulk operators | compiled step, L times | bulk operators
    CUDA     all of it recorded once for each length L, and replayed

    step(constants, carried, values of this step, rows to write) -> carried

The operators are those that the Python backend generates as source. Here they become one compiled function, for any
operator and device. Compiling the loop over T as a whole would unroll it, once for each length. Values that later parts
read are written straight into a row of their buffer, and the next step reads a state from there. Inductor fixes the
strides of its arguments, so all inputs are contiguous.

On CUDA the host does nothing for a single step: what a chunk reads and writes are stacked tensors, which
`recordings.py` copies in and out.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.recurrent.cpp.compiler import CompileError
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.plan_backends import Chunk, Gradients
from torchweft.recurrent.python_backend import CompiledLoop, Loop, PythonBackend, copy_into
from torchweft.recurrent.pytorch_internals import inductor
from torchweft.recurrent.recordings import Recordings, Tables, cuda_recorder
from torchweft.recurrent.step_plan import BulkEvaluator

CHUNK_STEPS = 256  # at least so many steps in a recorded chunk
_aten = cast(Any, torch.ops.aten)


class InductorStep:
    """The step of a loop: its graph, and its compiled function."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._at = [loop.saved.index(end) if end in loop.saved else None for end in loop.ends]
        self.module = self._build_module()
        self._compiled: Callable[..., Sequence[Tensor]] | None = None

    def run(self, steps: int, *given: Any) -> list[Tensor]:
        """The function of a `CompiledLoop`. Its arguments are those of the source that `Loop.compile` generates."""
        loop, arguments = self._loop, iter(given)
        values = [next(arguments).contiguous() for _ in (*loop.constants, *loop.carried)]
        rows = [_contiguous_rows(next(arguments)) for _ in loop.rows]
        places = [row for _ in loop.saved for row in next(arguments)]
        rows += [_contiguous_rows(next(arguments)) for _ in loop.carried] if loop.added else []
        values += [row for node_rows in rows for row in node_rows]
        return self._launch_steps(steps, values, places)

    def _launch_steps(self, steps: int, values: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """The carried values after the last step."""
        # `values` are constants, carried values and rows. Rows and `places` are ordered by node, then by step.
        loop, count = self._loop, len(self._loop.constants)
        constants, carried = values[:count], values[count : count + len(loop.carried)]
        rows = values[count + len(carried) :]
        for step in range(steps - 1, -1, -1) if loop.backward else range(steps):
            arguments = [*constants, *carried, *rows[step::steps], *places[step::steps]]
            if self._compiled is None:
                self._compiled = compile_module(self.module, arguments)
            ends = iter(self._compiled(*arguments))
            carried = [next(ends).contiguous() if at is None else places[at * steps + step] for at in self._at]
        return [*carried]

    def _build_module(self) -> fx.GraphModule:
        # The step as a function, its arguments in the order of `_launch_steps`.
        loop, graph = self._loop, fx.Graph()
        new = {node: graph.placeholder(f"given_{node}") for node in (*loop.constants, *loop.carried, *loop.rows)}
        added = {node: graph.placeholder(f"added_{node}") for node in loop.carried if loop.added}
        places = [graph.placeholder(f"row_{node}") for node in loop.saved]
        for node, more in added.items():
            new[node] = graph.call_function(_aten.add.Tensor, (new[node], more))
        for node in loop.nodes:
            new[node] = graph.node_copy(node, lambda operand: new[operand])
            new[node].meta = {}
        for node, place in zip(loop.saved, places, strict=True):
            graph.call_function(_aten.copy_.default, (place, new[node]))
        ends = [
            graph.call_function(_aten.zeros_like.default, (new[old],)) if end is None else new[end]
            for old, end, at in zip(loop.carried, loop.ends, self._at, strict=True)
            if at is None
        ]
        graph.output((*ends,))
        return fx.GraphModule({}, graph)


def compile_module(module: fx.GraphModule, arguments: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return module
    # Copies, because tracing writes into the rows.
    examples = [argument.clone() for argument in arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by imports inside PyTorch
            # One thread: a pool of worker processes would outlive the call.
            return inductor().compile(module, examples, {"compile_threads": 1})
    except Exception as error:
        raise CompileError(f"Inductor cannot compile the step: {type(error).__name__}: {str(error)[:500]}") from error


def _contiguous_rows(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    # The rows of one node share a layout, so the first decides.
    return rows if not rows or rows[0].is_contiguous() else torch.stack(list(rows)).unbind(0)


class InductorBackend(PythonBackend):
    """See `weft.recurrent.plan_backends.Backend`. On CUDA all work of a chunk is one recording."""

    def __init__(self, captured: StepGraph) -> None:
        super().__init__(captured)
        self._on_cuda = runs_on_cuda(captured)
        self.recordings = Recordings(cuda_recorder if self._on_cuda else None)
        if self._on_cuda:
            self.chunk_steps = max(self.chunk_steps, CHUNK_STEPS)

    def writes_row(self, node: fx.Node) -> bool:
        """See `PythonBackend`. A compiled step copies all values that it saves."""
        return True

    def compile_loop(self, loop: Loop) -> CompiledLoop:
        """See `PythonBackend`. A step is compiled at its first call."""
        step = InductorStep(loop)
        return CompiledLoop(loop, f"a compiled step:\n{step.module.code}", step.run)

    def work_bytes(self, steps: int) -> int:
        """See `Backend`. A recording has its own copy of inputs and results."""
        return super().work_bytes(steps) + (2 * self.kept_bytes(steps) if self.recordings.record else 0)

    def explain(self) -> str:
        how = "all steps of a chunk at a time, recorded" if self.recordings.record else "step by step"
        why = f", because {self.recordings.why_not}" if self.recordings.why_not else ""
        return f"{super().explain()}\n\nlaunched {how}{why}"

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> Any:
        return self._forward_of_chunk(chunk) if self._on_cuda else super().forward(constants, chunk, keep)

    def recompute(self, constants: None, chunk: Chunk) -> Any:
        if not self._on_cuda:
            return super().recompute(constants, chunk)
        states = [state if k in self.captured.invariant else state.clone() for k, state in enumerate(chunk.states)]
        outputs = [torch.empty_like(output) for output in chunk.outputs]
        return self._forward_of_chunk(Chunk(chunk.steps, chunk.inputs, states, outputs))

    def backward(self, constants: None, chunk: Chunk, kept: Any, gradients: Gradients) -> None:
        if not self._on_cuda:
            super().backward(constants, chunk, kept, gradients)
            return
        totals = [None if into is None else torch.empty_like(into) for into in gradients.parameters]
        first = [torch.empty_like(gradient) for gradient in gradients.carried]
        read: Tables = {
            "input": chunk.inputs, "state": chunk.states, "output": chunk.outputs, "reference": self._references(),
            "kept": kept, "output gradient": gradients.outputs, "added gradient": gradients.states,
            "last": gradients.carried,
        }  # fmt: skip
        written: Tables = {"first": first, "input gradient": gradients.inputs, "parameter gradient": totals}
        self.recordings.run(("backward", chunk.steps), self._backward_work, read, written)
        copy_into(gradients.carried, first)
        for into, total in zip(gradients.parameters, totals, strict=True):
            if into is not None and total is not None:
                into.add_(total)

    # -- a chunk as a function of stacked tensors ---------------------------------------------------------------------

    def _forward_of_chunk(self, chunk: Chunk) -> list[Tensor]:
        """Write states and outputs. Returns the other values that backward reads."""
        kept: list[Tensor] = []
        for node in self._kept_nodes:
            meta = node.meta["val"]
            shape = (chunk.steps, *meta.shape) if self.varies(node) else meta.shape
            kept.append(torch.empty(shape, dtype=meta.dtype, device=meta.device))
        invariant = self.captured.invariant
        moving = [None if k in invariant else state[1:] for k, state in enumerate(chunk.states)]
        read: Tables = {"input": chunk.inputs, "first": self._first_states(chunk), "reference": self._references()}
        written: Tables = {"output": chunk.outputs, "state": moving, "kept": kept}
        self.recordings.run(("forward", chunk.steps), self._forward_work, read, written)
        return kept

    def _forward_work(self, read: Tables, written: Tables) -> None:
        references = dict(zip(self.captured.signature.references, _present(read["reference"]), strict=True))
        outputs, states, bulk = self.run_forward(_present(read["input"]), _present(read["first"]), references)
        moving = [state for state, into in zip(states, written["state"], strict=True) if into is not None]
        copy_into(_present(written["output"]), outputs)
        copy_into(_present(written["state"]), moving)
        copy_into(_present(written["kept"]), [bulk.env[node] for node in self._kept_nodes])

    def _backward_work(self, read: Tables, written: Tables) -> None:
        signature, invariant = self.captured.signature, self.captured.invariant
        inputs, states, last = (_present(read[name]) for name in ("input", "state", "last"))
        bulk = BulkEvaluator(len(inputs[0]), self.varies)
        bulk.env.update(zip(self._kept_nodes, _present(read["kept"]), strict=True))
        bulk.env.update(zip(signature.references, _present(read["reference"]), strict=True))
        bulk.env.update(zip(signature.inputs, inputs, strict=True))
        for k, (node, new, state) in enumerate(zip(signature.states, signature.new_states, states, strict=True)):
            bulk.env[node] = state.expand(bulk.steps, *state.shape) if k in invariant else state[:-1]
            if new is not None and k not in invariant:
                bulk.env.setdefault(new, state[1:])
        for node, output in zip(signature.outputs, _present(read["output"]), strict=True):
            if node is not None:
                bulk.env.setdefault(node, output)
        added = read["added gradient"]
        if any(gradient is not None for gradient in added):
            pairs = zip(last, added, strict=True)
            every = [one.new_zeros(bulk.steps, *one.shape) if more is None else more for one, more in pairs]
        else:
            every = None
        results = self.run_backward(bulk, _present(read["output gradient"]), every, last)
        copy_into(_present(written["first"]), results[1])
        for into, gradient in zip(written["input gradient"], results[0], strict=True):
            if into is not None and gradient is not None:
                into.copy_(gradient)
        for into, gradient in zip(written["parameter gradient"], results[2], strict=True):
            if into is not None:
                into.zero_() if gradient is None else into.copy_(gradient)

    def _references(self) -> list[Tensor]:
        references = self.captured.signature.references
        return list(self.captured.referred(references).values())

    @cached_property
    def _kept_nodes(self) -> list[fx.Node]:
        """The values of forward that backward reads, without inputs, states and outputs."""
        parts, signature = self.parts, self.captured.signature
        back = {*parts.before_back, *parts.loop_back, *parts.after_back}
        ends = [*signature.input_gradients, *signature.state_gradients, *signature.parameter_gradients]
        read = {operand for node in back for operand in node.all_input_nodes} | {end for end in ends if end is not None}
        known = {*back, *signature.new_states, *signature.outputs}
        return [node for node in self.captured.nodes if node in read and node not in known]


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def runs_on_cuda(captured: StepGraph) -> bool:
    values = [node.meta.get("val") for node in (*captured.signature.inputs, *captured.signature.states)]
    return bool(values) and all(isinstance(value, Tensor) and value.is_cuda for value in values)
