"""The Triton backend: a captured step as generated kernels, and PyTorch for the operators that they do not know.

    forward     PyTorch: before         kernels: forward     PyTorch: after
    backward    PyTorch: before_back    kernels: backward    PyTorch: after_back, and sums over time

The division between kernels and PyTorch is that of the C++ backend, whose lowering this backend shares. It has two
tiers, see kernels.py. *Rows* are one launch each way. *Segments* are launches in every step, so all launches of a chunk
are recorded. A cell that neither can run gets a plan of another backend.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.cpp.cpp_backend import ConstantEvaluator, Constants, TorchStages
from torchweft.recurrent.cpp.lowering import lower
from torchweft.recurrent.cpp.scheduling import LoopFunction, explain_function
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.plan_backends import Chunk, Gradients
from torchweft.recurrent.recordings import Recordings, Tables, cuda_recorder
from torchweft.recurrent.step_plan import BulkEvaluator, explain
from torchweft.recurrent.triton import toolchain
from torchweft.recurrent.triton.loops import Tier, TritonLoops

CHUNK_STEPS = 256  # at least so many steps in a chunk, so that the host's work for a chunk does not count
CHUNK_BYTES = 256 << 20  # approximate size of the values of one chunk


class TritonBackend:
    """See `weft.recurrent.plan_backends.Backend`. Raises Unsupported."""

    missing = 0

    def __init__(self, captured: StepGraph, tier: Tier | None = None) -> None:
        self.captured = captured
        self.lowered = lower(captured)
        self._split = self.lowered.split
        self.tier, self.why_tier = (tier, "it was asked for") if tier else choose_tier(self._functions)
        self.forward_loops, self.backward_loops = (TritonLoops(function, self.tier) for function in self._functions)
        self._outside = TorchStages(self._split, self.lowered)
        self._constants = ConstantEvaluator(captured, self.lowered, self._outside.constants)
        on_gpu = self.device.type == "cuda"
        self.recordings = Recordings(cuda_recorder if on_gpu and self.tier == "segments" else None)
        saved = sum(ir.meta_value(node).nbytes for node in self._split.saved)
        self._kept_bytes = saved + sum(ir.meta_value(node).nbytes for node in self._split.forward_values.from_torch)
        stacks = (self.forward_loops.memory.stacks, self.backward_loops.memory.stacks)
        self._work_bytes = max(sum(value.bytes for value in some) for some in stacks) + self._outside.step_bytes
        self.chunk_steps = max(CHUNK_STEPS, CHUNK_BYTES // max(self._kept_bytes + self._work_bytes, 1))

    @property
    def _functions(self) -> tuple[LoopFunction, LoopFunction]:
        return self.lowered.forward, self.lowered.backward

    @property
    def device(self) -> torch.device:
        signature = self.captured.signature
        return ir.meta_value([*signature.inputs, *signature.states][0]).device

    @cached_property
    def _description(self) -> tuple[object, ...]:
        return self.tier, self.forward_loops.description, self.backward_loops.description

    def serves_rows_like(self, other: "TritonBackend") -> bool:
        """Whether this plan, and one for another number of rows, are the same but for that number."""
        # The texts hold the number as a variable. So it can stand in neither of them as a number.
        plain = not (self._outside.is_needed or self.captured.draws)
        rows = (self.forward_loops.rows, other.forward_loops.rows)
        return plain and rows[0] != rows[1] and self._has_rows and self._description == other._description

    @cached_property
    def _has_rows(self) -> bool:
        signature, rows = self.captured.signature, self.forward_loops.rows
        nodes = [*signature.inputs, *signature.states, *signature.outputs, *signature.new_states]
        return all(node is None or ir.meta_value(node).shape[:1] == (rows,) for node in nodes)

    def for_rows(self, rows: int) -> "TritonBackend":
        """This plan for another number of rows. The kernels are the same."""
        plan = copy.copy(self)
        plan.captured = self.captured.with_rows(rows)
        plan.forward_loops, plan.backward_loops = (copy.copy(x) for x in (self.forward_loops, self.backward_loops))
        plan.forward_loops.rows = plan.backward_loops.rows = rows
        plan.recordings = Recordings(self.recordings.record)
        return plan

    def begin(self) -> Constants:
        with self._plainly():
            return self._constants.evaluate()

    def forward(self, constants: Constants, chunk: Chunk, keep: bool) -> Tables | None:
        kept = self._forward(constants, chunk)
        return kept if keep else None

    def recompute(self, constants: Constants, chunk: Chunk) -> Tables:
        """See `Backend`. Runs the loop again, because a product of all steps would round differently."""
        states = [state if k in self.captured.invariant else state.clone() for k, state in enumerate(chunk.states)]
        outputs = [
            states[self.captured.aliases[i]][1:] if i in self.captured.aliases else torch.empty_like(output)
            for i, output in enumerate(chunk.outputs)
        ]
        return self._forward(constants, Chunk(chunk.steps, chunk.inputs, states, outputs))

    def release(self, kept: Tables) -> None:
        """Nothing to do, because the memory is freed with `kept`."""

    def kept_bytes(self, steps: int) -> int:
        return steps * self._kept_bytes

    def work_bytes(self, steps: int) -> int:
        """See `Backend`. A recording has its own copy of everything that it reads and writes."""
        copies = 2 * self._kept_bytes if self.recordings.record else 0
        return steps * (self._work_bytes + copies) + self._outside.bytes(steps)

    def explain(self) -> str:
        how = f"tier {self.tier}, because {self.why_tier}"
        if self.tier == "segments":
            recorded = "recorded" if self.recordings.record else "not recorded"
            how += f"; launches {recorded}" + (f", because {why}" if (why := self.recordings.why_not) else "")
        launches = [self.forward_loops.explain(), self.backward_loops.explain()]
        parts = [explain_function(function) for function in self._functions]
        return "\n\n".join([explain(self.captured), "\n".join([how, *launches]), *parts])

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, constants: Constants, chunk: Chunk) -> Tables:
        invariant = self.captured.invariant
        forward, values = self.forward_loops, self._split.forward_values.from_torch
        saved = [forward.empty_argument(f"v{j}", chunk.steps, self.device) for j in range(len(self._split.saved))]
        kept: Tables = {"saved": saved, "kept": [_empty_over(node, chunk.steps) for node in values]}
        first = [state if k in invariant else state[0] for k, state in enumerate(chunk.states)]
        moving = [None if k in invariant else state for k, state in enumerate(chunk.states)]
        outputs = [None if i in self.captured.aliases else output for i, output in enumerate(chunk.outputs)]
        read = {"input": chunk.inputs, "first": first, **self._constant_tables(constants)}
        written = {"state": moving, "output": outputs, **kept}
        with self._plainly():
            self.recordings.run(("forward", chunk.steps), self._forward_work, read, written)
        return kept

    def _forward_work(self, read: Tables, written: Tables) -> None:
        steps = len(cast(Tensor, read["input"][0]))
        states = self._states(read["first"], written["state"])
        for first, state in zip(read["first"], written["state"], strict=True):
            if first is not None and state is not None and first.data_ptr() != state.data_ptr():
                state[0].copy_(first)
        aliases = self.captured.aliases
        outputs = [states[aliases[i]][1:] if i in aliases else output for i, output in enumerate(written["output"])]
        outside = self._torch_values(steps, read, states)
        self._outside.before.run(outside)
        tables = {**read, "state": states, "output": outputs, "saved": written["saved"]}
        self._run(self.forward_loops, steps, tables, outside)
        if self._outside.after.results:
            self._add_loop_values(outside, states, outputs, written["saved"])
            self._outside.after.run(outside)
        for i, node in self._outside.outputs:
            cast(Tensor, outputs[i]).copy_(outside.env[node])
        for node, into in zip(self._split.forward_values.from_torch, written["kept"], strict=True):
            cast(Tensor, into).copy_(outside.env[node])

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, constants: Constants, chunk: Chunk, kept: Tables, gradients: Gradients) -> None:
        read: Tables = {
            "input": chunk.inputs, "state": chunk.states, "output": chunk.outputs, **kept,
            "output gradient": gradients.outputs, "added gradient": gradients.states, "last": gradients.carried,
            **self._constant_tables(constants),
        }  # fmt: skip
        totals = [None if into is None else torch.empty_like(into) for into in gradients.parameters]
        first = [torch.empty_like(gradient) for gradient in gradients.carried]
        written: Tables = {"first gradient": first, "input gradient": gradients.inputs, "parameter gradient": totals}
        with self._plainly():
            self.recordings.run(("backward", chunk.steps), self._backward_work, read, written)
            for gradient, result in zip(gradients.carried, first, strict=True):
                if gradient.is_floating_point():
                    gradient.copy_(result)
            for into, total in zip(gradients.parameters, totals, strict=True):
                if into is not None and total is not None:
                    into.add_(total)

    def _backward_work(self, read: Tables, written: Tables) -> None:
        steps = len(cast(Tensor, read["input"][0]))
        for total in written["parameter gradient"]:
            if total is not None:
                total.zero_()
        # A carried gradient has two rows: a step reads one and writes the other. Row 0 is the last that it writes.
        last = cast("Sequence[Tensor]", read["last"])
        carried = [x.new_empty(2, *x.shape) for x in last]
        for rows, gradient in zip(carried, last, strict=True):
            rows[steps & 1].copy_(gradient)
        outside = self._torch_values(steps, read, cast("Sequence[Tensor]", read["state"]))
        if self._outside.is_needed:
            outside.env.update(zip(self.captured.signature.output_gradients, read["output gradient"], strict=True))
            outside.env.update(zip(self._split.forward_values.from_torch, read["kept"], strict=True))
            self._add_loop_values(outside, cast("Sequence[Tensor]", read["state"]), read["output"], read["saved"])
        self._outside.before_back.run(outside)
        for_torch = [_empty_over(node, steps) for node in self._split.for_torch]
        tables = {**read, **written, "carried gradient": carried, "for torch": for_torch}
        self._run(self.backward_loops, steps, tables, outside)
        outside.env.update(zip(self._split.for_torch, for_torch, strict=True))
        gradients = Gradients([], [], [], list(written["input gradient"]), list(written["parameter gradient"]))
        self._outside.finish_backward(outside, gradients)
        for rows, into in zip(carried, written["first gradient"], strict=True):
            cast(Tensor, into).copy_(rows[0])

    # -- both ---------------------------------------------------------------------------------------------------------

    def _run(
        self, loops: TritonLoops, steps: int, tables: dict[str, Sequence[Tensor | None]], outside: BulkEvaluator
    ) -> None:
        nodes = self.lowered.outside
        from_torch = [outside.env[n].contiguous() if n in outside.env else None for n in nodes]
        loops.run(steps, {**tables, "from torch": from_torch}, self.device)

    def _constant_tables(self, constants: Constants) -> dict[str, Sequence[Tensor | None]]:
        values = [constants.values[node] for node in self._outside.constants]
        return {"constant": constants.tensors, "constant of torch": values}

    def _torch_values(self, steps: int, read: Tables, states: Sequence[Tensor]) -> BulkEvaluator:
        """Values that PyTorch can read before the loops: constants, inputs, and states before each step."""
        bulk, signature = BulkEvaluator(steps, self._split.varies), self.captured.signature
        if self._outside.is_needed:
            bulk.env.update(zip(self._outside.constants, read["constant of torch"], strict=True))
            bulk.env.update(zip(signature.inputs, read["input"], strict=True))
            for k, (node, state) in enumerate(zip(signature.states, states, strict=True)):
                bulk.env[node] = state.expand(steps, *state.shape) if k in self.captured.invariant else state[:-1]
        return bulk

    def _add_loop_values(
        self, bulk: BulkEvaluator, states: Sequence[Tensor], outputs: Sequence[Any], saved: Sequence[Any]
    ) -> None:
        """Add the values that the kernels computed forward: saved ones, new states and outputs."""
        bulk.env.update(zip(self._split.saved, saved, strict=True))
        signature, invariant = self.captured.signature, self.captured.invariant
        moving = [
            (node, state[1:])
            for k, (node, state) in enumerate(zip(signature.new_states, states, strict=True))
            if k not in invariant
        ]
        results = [*zip(signature.outputs, outputs, strict=True), *moving]
        bulk.env.update({node: tensor for node, tensor in results if node is not None and node in self._split.front})

    def _states(self, first: Sequence[Tensor | None], moving: Sequence[Tensor | None]) -> list[Tensor]:
        return [cast(Tensor, one if rows is None else rows) for one, rows in zip(first, moving, strict=True)]

    def _plainly(self) -> ExitStack:
        """Inside, no gradients are tracked and nothing is cast, and kernels go to the device of the plan."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(toolchain.quiet())
        if self.device.type == "cuda":
            stack.enter_context(torch.autocast("cuda", enabled=False))
            stack.enter_context(torch.cuda.device(self.device))
        return stack


def _empty_over(node: fx.Node, steps: int) -> Tensor:
    value = ir.meta_value(node)
    return torch.empty((steps, *value.shape), dtype=value.dtype, device=value.device)


# Estimates for one GPU, in seconds: a launch within a recording, and products by one program of a kernel.
_LAUNCH = 2.5e-6
_PROGRAM_SPEED = 5.4e11  # operations per second of float32 without TF32: 60% of 128 multiply-adds at 1.75 GHz
_PROGRAMS = 132  # that run at once


def choose_tier(functions: Sequence[LoopFunction]) -> tuple[Tier, str]:
    """The tier that takes less time by an estimate of its launches and products, and the reason."""
    rows_time = segments_time = 0.0
    for function in functions:
        loops = TritonLoops(function, "segments")
        if not loops.memory.by_rows:
            return "segments", f"rows of the batch meet within a step ({function.signature.name})"
        main = [value for phase in function.phases if phase.main for value in phase.loop]
        work = 2.0 * sum(v.size * v.operation.left.shape[-1] for v in main if isinstance(v.operation, ir.Product))
        programs = -(-loops.memory.rows // 16)
        rows_time += work / min(programs, _PROGRAMS) / _PROGRAM_SPEED
        kernels = loops.main[0]
        tiles = [programs * kernel.column_tiles for kernel in kernels]
        segments_time += len(kernels) * _LAUNCH + work / max(min(max(tiles, default=1), _PROGRAMS), 1) / _PROGRAM_SPEED
    tier: Tier = "rows" if rows_time <= segments_time else "segments"
    return (
        tier,
        f"a step is estimated to take {1e6 * rows_time:.0f} us by rows and {1e6 * segments_time:.0f} us by segments",
    )
