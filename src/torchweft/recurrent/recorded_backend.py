"""The Python backend on CUDA: all work of a chunk as one CUDA graph, recorded once for each length, and replayed.

    record      bulk operators | loop of the Python backend, L steps | bulk operators
    replay      copy the chunk in | launch the graph | copy the results out

The host does nothing for a single step: what a chunk reads and writes are stacked tensors, which `recordings.py` copies
in and out. Kernels that are compiled for a step would be fewer, but compilation takes seconds, and Triton's kernels
(`triton/`) are made for the cells that it pays for.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.plan_backends import Chunk, Gradients
from torchweft.recurrent.python_backend import PythonBackend, copy_into
from torchweft.recurrent.recordings import Recordings, Tables, cuda_recorder
from torchweft.recurrent.step_plan import BulkEvaluator

CHUNK_STEPS = 256  # at least so many steps in a recorded chunk


class RecordedBackend(PythonBackend):
    """See `weft.recurrent.plan_backends.Backend`."""

    def __init__(self, captured: StepGraph) -> None:
        super().__init__(captured)
        self.recordings = Recordings(cuda_recorder)
        self.chunk_steps = max(self.chunk_steps, CHUNK_STEPS)

    def work_bytes(self, steps: int) -> int:
        """See `Backend`. A recording has its own copy of inputs and results."""
        return super().work_bytes(steps) + (2 * self.kept_bytes(steps) if self.recordings.record else 0)

    def explain(self) -> str:
        how = "all steps of a chunk at a time, recorded" if self.recordings.record else "step by step"
        why = f", because {self.recordings.why_not}" if self.recordings.why_not else ""
        return f"{super().explain()}\n\nlaunched {how}{why}"

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> Any:
        return self._forward_of_chunk(chunk)

    def recompute(self, constants: None, chunk: Chunk) -> Any:
        states = [state if k in self.captured.invariant else state.clone() for k, state in enumerate(chunk.states)]
        outputs = [torch.empty_like(output) for output in chunk.outputs]
        return self._forward_of_chunk(Chunk(chunk.steps, chunk.inputs, states, outputs))

    def backward(self, constants: None, chunk: Chunk, kept: Any, gradients: Gradients) -> None:
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
