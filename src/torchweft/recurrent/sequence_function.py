"""A sequence run by a plan, as one autograd node, and the memory of its states and outputs.

    rows of a state     initial | after step 1 | ... | after step T      an output that is a state is stored there too
    chunk of steps 4-7                 '── row 4 to row 8 ──'             begins with the state before it

Plain autograd would record every operator of every step. The derived backward is a loop that autograd does not see. It
computes one gradient of each end. For a gradient of a gradient (`create_graph=True`), or a batch of gradients
(`is_grads_batched=True`), the eager loop replays the sequence with the same tensors and random numbers, and autograd
differentiates it:

    x, s0 -> gates -> eager loop -> first gradients, which autograd can differentiate again
    w --------------------^

No gradient passes a closed gate. The first gradients are therefore those of this node alone, even if an input was
computed from a parameter that the cell reads too. The gates are then opened for the second gradients.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from torchweft.core import rng
from torchweft.core.autograd import apply_as_node, silence_hooks, silence_unused_hooks
from torchweft.core.context import ExecutionContext
from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, DoubleBackwardError, InPlaceError, join_faults
from torchweft.core.pytree import flatten, unflatten
from torchweft.recurrent.capture import Cell, gradients_of, tensor_outputs
from torchweft.recurrent.graph import StepGraph, draw_numbers
from torchweft.recurrent.plan_backends import (
    Backend,
    Chunk,
    Gradients,
    Memory,
    MemoryPolicy,
    choose_policy,
    chunk_bounds,
    copy_bytes,
    size_of,
)
from torchweft.recurrent.pytorch_internals import has_storage, outside_vmap

Value = TypeVar("Value")


@dataclass
class SequenceLeaves(Generic[Value]):
    """Flat leaves of a sequence: outputs T x ..., states after every step T x ..., and the states after the last."""

    outputs: list[Value]
    states: list[Value]
    last: list[Value]

    def named(self) -> list[tuple[str, Value]]:
        parts = (("output", self.outputs), ("state", self.states), ("last state", self.last))
        return [(f"{name} {i}", value) for name, values in parts for i, value in enumerate(values)]


# A tensor that backward reads: its role and number for messages, its version, and its address.
Read = tuple[str, int, Tensor, tuple[int, int]]


def run_derived(
    backend: Backend,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    memory: Memory = "full",
    replay: "EagerReplay | None" = None,
    reserved: int = 0,
) -> SequenceLeaves[Tensor]:
    """Run a whole sequence. `inputs` are T x ... with T at least 1, `states` the initial ones.

    If not all states are kept, `states` of the result is empty. Without `replay` a gradient of a gradient is rejected.
    Raises UsageError if `memory`, without the `reserved` bytes, is too small.
    """
    steps, missing = inputs[0].shape[0], backend.missing
    parameters = backend.captured.parameters
    if missing:
        inputs = [append_rows(leaf, 1, missing) for leaf in inputs]
        states = [append_rows(leaf, 0, missing) for leaf in states]
    tracked = torch.is_grad_enabled() and any([leaf.requires_grad for leaf in (*inputs, *states, *parameters)])
    if tracked and memory not in ("full", "states"):
        policy = choose_policy(memory, size_of(backend, steps, states, reserved))
    else:
        policy = MemoryPolicy(values=tracked and memory == "full")
    function = ScanFunction(backend, inputs, states, parameters, policy, tracked, replay)
    if tracked:
        ends = function.split_ends(apply_as_node(function, function.differentiable_tensors()))
        return _without_filled_rows(ends, missing) if missing else ends
    with torch.no_grad():
        ends = function.split_ends(function.forward()[0])
        return _without_filled_rows(ends, missing) if missing else ends


def _without_filled_rows(ends: SequenceLeaves[Tensor], missing: int) -> SequenceLeaves[Tensor]:
    pairs = [[(leaf, leaf[:, :-missing]) for leaf in leaves] for leaves in (ends.outputs, ends.states)]
    # A loop-invariant state is one row expanded over all steps. A contiguous copy would take T times as much.
    outputs, every = ([cut.contiguous() if e.is_contiguous() else cut for e, cut in part] for part in pairs)
    return SequenceLeaves(outputs, every, [leaf[:-missing] for leaf in ends.last])


def run_plan(
    backend: Backend,
    step: Cell,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    restored: Callable[[], AbstractContextManager[bool]],
    device: torch.device,
    memory: Memory,
    reserved: int = 0,
) -> SequenceLeaves[Tensor]:
    """`run_derived` of a cell's `step`, with its random numbers, and a replay for gradients of gradients."""
    captured = backend.captured
    # Before the draws below, because the replay draws the same numbers again.
    replay = EagerReplay(captured, step, device, restored) if torch.is_grad_enabled() else None
    if captured.draws:
        inputs = [*inputs, *draw_numbers(captured.draws, len(inputs[0]), device)]
    return run_derived(backend, inputs, states, memory, replay, reserved)


def append_rows(tensor: Tensor, axis: int, more: int) -> Tensor:
    """Append rows along an axis. A tensor without such an axis is returned as it is."""
    # Copies of the first row, detached. A cell can be singular at zero, but it is known to accept this row.
    if tensor.dim() <= axis:
        return tensor
    first = tensor.detach().narrow(axis, 0, 1)
    return torch.cat([tensor, first.expand(*tensor.shape[:axis], more, *tensor.shape[axis + 1 :])], axis)


class Buffers:
    """Memory of outputs and states over the steps of a sequence, or of a segment of it. Chunks are views into it."""

    # With `whole` it has all states, else only those that are also outputs.

    def __init__(
        self, captured: StepGraph, inputs: list[Tensor], initial: list[Tensor], bounds: Sequence[int], *, whole: bool
    ) -> None:
        self._inputs, self._initial = inputs, initial
        self._invariant, self._aliases = captured.invariant, captured.aliases
        steps, longest = bounds[-1], bounds[1] - bounds[0]  # only the last chunk can be shorter
        self._steps = steps
        # None for a state that is loop-invariant, or not kept whole.
        self.states: list[Tensor | None] = [None] * len(initial)
        # Rows that all chunks share. Allocated per chunk between small blocks, each would get another address, and the
        # process would grow.
        self._shared: dict[int, Tensor] = {}
        for k, state in enumerate(initial):
            if k not in self._invariant and (whole or k in self._aliases.values()):
                self.states[k] = state.new_empty(steps + 1, *state.shape)
            elif k not in self._invariant:
                self._shared[k] = state.new_empty(longest + 1, *state.shape)
        self.outputs: list[Tensor] = []
        for i, meta in enumerate(captured.outputs):
            state = self.states[self._aliases[i]] if i in self._aliases else None
            self.outputs.append(meta.empty_over(steps, inputs[0].device) if state is None else state[1:])

    def chunk_views(self, start: int, end: int, first: Sequence[Tensor] | None = None, offset: int = 0) -> Chunk:
        """A chunk. `first` are the states before it, unless already stored. The buffers begin at step `offset`."""
        states, rows = list[Tensor](), slice(start - offset, end - offset + 1)
        # A slice takes as long as the work of a short chunk, so a chunk of all steps has none.
        is_whole = end - start == self._steps
        for k, whole in enumerate(self.states):
            if k in self._invariant:
                states.append(self._initial[k])
                continue
            states.append(self._shared[k][: end - start + 1] if whole is None else whole if is_whole else whole[rows])
            # In memory for all steps, the chunk before has written this row.
            if first is not None and (whole is None or start == offset):
                _copy_row(states[k], 0, first[k])
        outputs, inputs = self.outputs, self._inputs
        if not is_whole:
            outputs = [
                states[self._aliases[i]][1:] if i in self._aliases else output[start - offset : end - offset]
                for i, output in enumerate(outputs)
            ]
        if end - start != inputs[0].shape[0]:
            inputs = [leaf[start:end] for leaf in inputs]
        return Chunk(end - start, [leaf.contiguous() for leaf in inputs], states, outputs)

    def free_shared(self) -> None:
        self._shared.clear()


@dataclass(slots=True)
class SavedSequence:
    """The memory that forward leaves for backward: other values by chunk, and the first states of each segment."""

    constants: Any  # see `Backend.begin`
    buffers: Buffers
    values: list[Any]
    heads: list[list[Tensor]]
    read: list[Read]


class ScanFunction:
    """One sequence; see `weft.core.autograd.CutFunction`."""

    def __init__(
        self,
        backend: Backend,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        parameters: Sequence[Tensor],
        policy: MemoryPolicy,
        tracked: bool,
        replay: "EagerReplay | None",
    ) -> None:
        self.tensors = [*inputs, *states, *parameters]
        self._learned = [i for i, tensor in enumerate(self.tensors) if tensor.requires_grad]
        self._counts = len(inputs), len(states)
        self._backend, self._policy, self._tracked, self._replay = backend, policy, tracked, replay
        # Compiled loops read memory by address. A tensor with a lazy negation (`conj().imag`) has other numbers there.
        self._inputs = [leaf.detach().resolve_neg() for leaf in inputs]
        self._states = [leaf.detach().resolve_neg().contiguous() for leaf in states]
        steps = inputs[0].shape[0]
        self._bounds = [0, steps] if steps <= backend.chunk_steps else chunk_bounds(steps, backend.chunk_steps)
        self._saved: SavedSequence | None = None
        # Only a replay reads the initial states themselves. The plan reads the copies above.
        replayed = enumerate(states if tracked else ())
        self._replay_reads: list[Read] = [("initial state", i, x, (x._version, x.data_ptr())) for i, x in replayed]

    def differentiable_tensors(self) -> list[Tensor]:
        """The inputs of the node. Other tensors would only make it slower."""
        return [self.tensors[i] for i in self._learned]

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Outputs, states after every step, and the last states again; and for each whether it can have a gradient."""
        backend, captured, segment = self._backend, self._backend.captured, self._policy.segment
        keep = self._policy.values and self._tracked
        buffers = Buffers(captured, self._inputs, self._states, self._bounds, whole=segment is None)
        values, heads = list[Any](), list[list[Tensor]]()
        constants = backend.begin()
        invariant, last = captured.invariant, self._states
        for i, (start, end) in enumerate(pairwise(self._bounds)):
            if segment is not None and i % segment == 0:
                heads.append([state.clone() for state in last])
            chunk = buffers.chunk_views(start, end, last)
            kept = backend.forward(constants, chunk, keep=keep)
            if keep:
                values.append(kept)
            last = [rows if k in invariant else rows[-1] for k, rows in enumerate(chunk.states)]
        # The last states have memory of their own: often only they are used, and a view would keep all states alive.
        last = [state.clone() for state in last]
        buffers.free_shared()
        every: list[Tensor] = []
        if segment is None:
            pairs = zip(self._states, buffers.states, strict=True)
            every = [s.expand(self._bounds[-1], *s.shape) if rows is None else rows[1:] for s, rows in pairs]
        ends = [*[output.detach() for output in buffers.outputs], *every, *last]
        if self._tracked:
            groups: tuple[tuple[str, Sequence[Tensor]], ...] = (
                ("input", self._inputs),
                ("output", buffers.outputs),
                ("state", [rows for rows in buffers.states if rows is not None]),
                ("initial state", [self._states[k] for k in sorted(invariant)]),
                ("parameter", self.tensors[sum(self._counts) :]),
                ("constant", captured.constants),
            )
            # The version alone misses `tensor.data = other` and `set_`, which exchange the memory.
            read = [(role, i, x, (x._version, x.data_ptr())) for role, group in groups for i, x in enumerate(group)]
            self._saved = SavedSequence(constants, buffers, values, heads, read)
        return ends, [end.is_floating_point() or end.is_complex() for end in ends]

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`. Raises BackwardTwiceError if the sequence was freed."""
        if not all([has_storage(gradient) for gradient in gradients if gradient is not None]):
            # A batch of gradients under vmap. It has no memory that a compiled loop could read.
            return self.differentiable_backward(gradients, retain=retain)
        saved = self._saved_by_forward()
        try:  # autograd runs this without grad mode
            backend, parameters = self._backend, self.tensors[sum(self._counts) :]
            incoming = self.split_ends(gradients)
            back = _BackwardGradients(backend.captured, self._inputs, self._states, parameters, incoming)
            for start, end, chunk, values in self._chunks_back(saved, retain):
                backend.backward(saved.constants, chunk, values, back.of_chunk(start, end))
                if not (self._policy.values and retain):
                    backend.release(values)
            results = back.results()
            if len(self._learned) < len(results):
                results = [results[i] for i in self._learned]
            if any([gradient is None for gradient in results]):
                pairs = zip(self.differentiable_tensors(), results, strict=True)
                silence_unused_hooks([tensor for tensor, gradient in pairs if gradient is None and tensor.is_leaf])
            return results
        finally:
            if not retain:
                self._free()

    def differentiable_backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `TwiceDifferentiable`. Raises BackwardTwiceError if the sequence was freed, and DoubleBackwardError."""
        self._saved_by_forward(replayed=True)
        try:
            if self._replay is None:
                raise DoubleBackwardError("a gradient of a gradient was requested, but this plan has no cell to replay")
            count, stop = self._counts[0], sum(self._counts)
            ends = self.split_ends(gradients)
            results = self._replay.gradients(self.tensors[:count], self.tensors[count:stop], ends)
            return [results[i] for i in self._learned]
        finally:
            if not retain:
                self._free()

    def _saved_by_forward(self, *, replayed: bool = False) -> SavedSequence:
        """The memory of forward. Raises BackwardTwiceError if it was freed, and InPlaceError if it was written to."""
        saved = self._saved
        if saved is None:
            raise BackwardTwiceError(BACKWARD_TWICE)
        read = [*saved.read, *self._replay_reads] if replayed else saved.read
        # Plain autograd compares versions of saved tensors in the same way. The derived loop is invisible to it.
        written = [f"{role} {i}" for role, i, x, version in read if (x._version, x.data_ptr()) != version]
        if written:
            raise InPlaceError(
                join_faults(
                    "backward reads these again, but they were written to after forward; work on a copy:", written
                )
            )
        return saved

    def _free(self) -> None:
        # The autograd node lives as long as any value computed from its outputs, such as a logged loss.
        self._saved = self._replay = None
        for references in (self.tensors, self._inputs, self._states, self._replay_reads):
            references.clear()

    def _chunks_back(self, saved: SavedSequence, retain: bool) -> Generator[tuple[int, int, Chunk, Any]]:
        """Each chunk, the last one first, with the values that were kept or are recomputed."""
        # If states are not kept whole, each segment is run forward once more, in memory of its own.
        backend, bounds, length, constants = self._backend, self._bounds, self._policy.segment, saved.constants
        if length is None:
            for i in range(len(bounds) - 2, -1, -1):
                chunk = saved.buffers.chunk_views(bounds[i], bounds[i + 1])
                if self._policy.values:
                    yield bounds[i], bounds[i + 1], chunk, saved.values[i] if retain else saved.values.pop()
                else:
                    yield bounds[i], bounds[i + 1], chunk, backend.recompute(constants, chunk)
            return
        segment_buffers = Buffers(backend.captured, self._inputs, self._states, bounds[: length + 1], whole=True)
        for n in range(len(saved.heads) - 1, -1, -1):
            segment_bounds = bounds[n * length : (n + 1) * length + 1]
            first: Sequence[Tensor] = saved.heads[n]
            chunks: list[tuple[int, int, Chunk, Any]] = []
            for start, end in pairwise(segment_bounds):
                chunk = segment_buffers.chunk_views(start, end, first, offset=segment_bounds[0])
                chunks.append((start, end, chunk, backend.forward(constants, chunk, keep=True)))
                first = [rows if k in backend.captured.invariant else rows[-1] for k, rows in enumerate(chunk.states)]
            while chunks:
                yield chunks.pop()

    def split_ends(self, values: Sequence[Value]) -> SequenceLeaves[Value]:
        count, width = len(self._backend.captured.outputs), self._counts[1]
        stop = count if self._policy.segment else count + width
        return SequenceLeaves(list(values[:count]), list(values[count:stop]), list(values[stop:]))


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _BackwardGradients:
    """The gradients of one backward over a sequence."""

    def __init__(
        self,
        captured: StepGraph,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        parameters: Sequence[Tensor],
        incoming: SequenceLeaves[Tensor | None],
    ) -> None:
        self._incoming, self._outputs, self._device = incoming, captured.outputs, inputs[0].device
        self._steps = inputs[0].shape[0]
        # Clones, because the chunks overwrite them, and the incoming gradients belong to autograd.
        self._carried = [
            torch.zeros_like(s) if grad is None else grad.resolve_neg().clone(memory_format=torch.contiguous_format)
            for s, grad in zip(states, incoming.last, strict=True)
        ]
        self._inputs = [
            None if meta is None else meta.empty_over(self._steps, self._device) for meta in captured.input_gradients
        ]
        self._parameters = [
            None if node is None else torch.zeros_like(p, memory_format=torch.contiguous_format)
            for node, p in zip(captured.signature.parameter_gradients, parameters, strict=True)
        ]

    def of_chunk(self, start: int, end: int) -> Gradients:
        """The gradients of a chunk. Chunks must be requested from the last to the first."""
        of_outputs, of_states, of_inputs = self._incoming.outputs, self._incoming.states, self._inputs
        if end - start < self._steps:
            of_outputs, of_states, of_inputs = (
                [None if grad is None else grad[start:end] for grad in grads]
                for grads in (of_outputs, of_states, of_inputs)
            )
        outputs = [
            meta.empty_over(end - start, self._device).zero_() if grad is None else _in_memory(grad)
            for meta, grad in zip(self._outputs, of_outputs, strict=True)
        ]
        states: list[Tensor | None] = [None] * len(self._carried)
        if of_states:
            states = [None if grad is None else _in_memory(grad) for grad in of_states]
        return Gradients(outputs, states, self._carried, of_inputs, self._parameters)

    def results(self) -> list[Tensor | None]:
        states = [gradient if _can_have_gradient(gradient) else None for gradient in self._carried]
        return [*self._inputs, *states, *self._parameters]


def _copy_row(rows: Tensor, at: int, value: Tensor) -> None:
    # Both are contiguous and of the same form.
    if value.is_cpu:
        copy_bytes(rows, value, at)
    else:
        rows[at].copy_(value)


def _in_memory(gradient: Tensor) -> Tensor:
    # The form that compiled code reads. Autograd can mark a tensor as negative instead of negating its numbers.
    return gradient.resolve_neg().contiguous()


def run_stepwise(
    captured: StepGraph, cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor]
) -> SequenceLeaves[Tensor]:
    """Run the cell that was captured step by step in plain autograd. `inputs` are T x ..., T at least 1."""
    # Further inputs, which stand for random numbers, are ignored, because the cell draws its own.
    count = captured.input_structure.num_leaves
    state = unflatten(captured.state_structure, states)
    outputs: list[list[Tensor]] = []
    after: list[list[Tensor]] = []
    for step in zip(*(leaf.unbind(0) for leaf in inputs[:count]), strict=True):
        y, state = cell(unflatten(captured.input_structure, list(step)), state)
        outputs.append(tensor_outputs(flatten(y)[0]))
        after.append(flatten(state)[0])
    stacked = [[torch.stack(column) for column in zip(*rows, strict=True)] for rows in (outputs, after)]
    return SequenceLeaves(stacked[0], stacked[1], after[-1])


class EagerReplay:
    """Replays a sequence in the eager loop under the conditions in which the plan ran it."""

    # It must be created before the sequence runs and draws. Inside `restored()` the cell reads the tensors of that run.
    # `restored()` yields whether the rest of the cell is unchanged.

    def __init__(
        self,
        captured: StepGraph,
        cell: Cell,
        device: torch.device,
        restored: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._captured, self._cell, self._restored = captured, cell, restored
        self._ambient = ExecutionContext.capture([device.type])
        self._sources = rng.generators_of([device]) if captured.draws else ()
        self._rng_states = rng.get_states(self._sources) if self._sources else []

    def gradients(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor], incoming: SequenceLeaves[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of inputs, states and parameters, in this order. Raises DoubleBackwardError."""
        # In grad mode autograd can differentiate them.
        gate = threading.Event()
        in_grad_mode, parameters = torch.is_grad_enabled(), self._captured.parameters
        with torch.enable_grad():
            leaves = (*inputs, *states)
            gated = [cast(Tensor, _Gated.apply(gate, leaf)) if leaf.requires_grad else leaf for leaf in leaves]
            ends = self._run_once_more(gated[: len(inputs)], gated[len(inputs) :])
            every = ends.states if incoming.states else []  # without all states, they have no gradients either
            roots, seeds = [*ends.outputs, *every, *ends.last], [*incoming.outputs, *incoming.states, *incoming.last]
            with silence_hooks(parameters):
                results = gradients_of([*gated, *parameters], roots, seeds, create_graph=in_grad_mode)
        gate.set()
        return results

    def _run_once_more(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> SequenceLeaves[Tensor]:
        # The sequence in plain autograd. The generators do not advance.
        now = rng.get_states(self._sources)
        context = self._ambient
        # A batch of gradients runs under vmap, which forbids random numbers. Those of the cell are not batched.
        with context.here(), context.casting(), context.process_flags(), outside_vmap(), self._restored() as unchanged:
            if not unchanged:
                raise DoubleBackwardError(
                    "a gradient of a gradient (create_graph=True), or a batch of gradients, runs the cell once more, "
                    "but since forward the cell was changed: a flag such as .training, a plain attribute, or a tensor "
                    "that a function closes over; change it after backward"
                )
            try:
                rng.set_states(self._sources, self._rng_states)
                return run_stepwise(self._captured, self._cell, inputs, states)
            finally:
                rng.set_states(self._sources, now)


class _Gated(torch.autograd.Function):
    """The identity. It passes gradients only after the event `gate` is set."""

    @staticmethod
    def forward(ctx: Any, gate: threading.Event, tensor: Tensor) -> Tensor:
        ctx.gate = gate
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        return None, gradients[0] if ctx.gate.is_set() else None
