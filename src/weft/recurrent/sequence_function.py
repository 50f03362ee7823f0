"""A sequence run by a plan, as one autograd node, and the memory of its states and outputs.

    rows of a state     initial | after step 1 | ... | after step T      an output that is a state is stored there too
    chunk of steps 4-7                 '── row 4 to row 8 ──'             begins with the state before it

The derived backward is a loop that autograd does not see, and takes one gradient of each end. For a gradient of a
gradient (`create_graph=True`), or a batch of gradients (`is_grads_batched=True`), the eager loop replays the sequence
over the same tensors and with the same random numbers, and autograd differentiates it:

    x, s0 -> switches -> eager loop -> first gradients, which autograd can differentiate again
    w --------------------^

While a switch is off, no gradient passes it, so the first gradients are those of this node alone, even if an input was
computed from a parameter that the cell reads as well. Then it is turned on, for the second ones.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from weft.core import rng
from weft.core.autograd import apply, quiet_hooks, without_gradient
from weft.core.context import ExecutionContext
from weft.core.errors import TWICE, BackwardTwiceError, DoubleBackwardError, InPlaceError, listed
from weft.core.pytree import flatten, unflatten
from weft.recurrent.capture import Cell, gradients_of, present
from weft.recurrent.graph import StepGraph
from weft.recurrent.plan_backends import (
    Backend,
    Chunk,
    Gradients,
    Memory,
    MemoryPolicy,
    choose_policy,
    chunk_bounds,
    size_of,
)

Value = TypeVar("Value")


@dataclass(frozen=True)
class SequenceLeaves(Generic[Value]):
    """Flat leaves of a sequence: outputs T x ..., states after every step T x ..., and the states after the last."""

    outputs: list[Value]
    states: list[Value]
    last: list[Value]

    def named(self) -> list[tuple[str, Value]]:
        """Each with a name for messages."""
        parts = (("output", self.outputs), ("state", self.states), ("last state", self.last))
        return [(f"{name} {i}", value) for name, values in parts for i, value in enumerate(values)]


_C = cast(Any, torch._C)
Read = tuple[str, Tensor, tuple[int, int]]
"""A tensor that backward reads: its name for messages, and a mark that changes when it is written to."""
_has_storage = cast("Callable[[Tensor], bool]", _C._has_storage)


def run_derived(
    backend: Backend,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    memory: Memory = "full",
    replay: "EagerReplay | None" = None,
) -> SequenceLeaves[Tensor]:
    """Run a whole sequence; `inputs` are T x ... with T at least 1, `states` the initial ones.

    Where not all states are kept, `states` of the result is empty. Without `replay` a gradient of a gradient is
    refused. Raises UsageError if `memory` is too small.
    """
    steps, missing = len(inputs[0]), backend.missing
    parameters = backend.captured.parameters
    if missing:
        inputs, states = ([filled_up(e, axis, missing) for e in part] for axis, part in ((1, inputs), (0, states)))
    tracked = torch.is_grad_enabled() and any([each.requires_grad for each in (*inputs, *states, *parameters)])
    if tracked and memory not in ("full", "states"):
        policy = choose_policy(memory, size_of(backend, steps, states))
    else:
        policy = MemoryPolicy(values=tracked and memory == "full")
    function = ScanFunction(backend, inputs, states, parameters, policy, tracked, replay)
    with torch.set_grad_enabled(tracked):
        ends = function.ends(apply(function, function.tensors) if tracked else function.forward()[0])
        if missing:
            parts = [[(each, each[:, :-missing]) for each in part] for part in (ends.outputs, ends.states)]
            # Only what is one row for all steps, as an unchanged state, is not contiguous, and stays so.
            outputs, every = ([cut.contiguous() if e.is_contiguous() else cut for e, cut in part] for part in parts)
            ends = SequenceLeaves(outputs, every, [each[:-missing] for each in ends.last])
    return ends


def filled_up(tensor: Tensor, axis: int, more: int) -> Tensor:
    """Add rows along an axis, copies of the first one without its gradient: a cell can be singular at zero, but it is
    known to accept this row. A tensor without such an axis is returned as it is."""
    if tensor.dim() <= axis:
        return tensor
    first = tensor.detach().narrow(axis, 0, 1)
    return torch.cat([tensor, first.expand(*tensor.shape[:axis], more, *tensor.shape[axis + 1 :])], axis)


class Buffers:
    """Memory of outputs and states over the steps of a sequence, or of a segment of it; its chunks are views.

    All states with `whole`, else only those that are outputs as well; the others have `spare` rows, which all chunks
    use in turn: freed and allocated again between small blocks, each would lie elsewhere, and the process would grow.
    """

    def __init__(
        self, captured: StepGraph, inputs: list[Tensor], initial: list[Tensor], bounds: Sequence[int], *, whole: bool
    ) -> None:
        self._inputs, self._initial = inputs, initial
        self._invariant, self._aliases = captured.invariant, captured.aliases
        steps, longest = bounds[-1], bounds[1] - bounds[0]  # only the last chunk may be shorter
        self.states: list[Tensor | None] = [None] * len(initial)
        """None for a state that is loop-invariant, or not kept whole."""
        self.spare: dict[int, Tensor] = {}
        for k, each in enumerate(initial):
            if k not in self._invariant and (whole or k in self._aliases.values()):
                self.states[k] = each.new_empty(steps + 1, *each.shape)
            elif k not in self._invariant:
                self.spare[k] = each.new_empty(longest + 1, *each.shape)
        self.outputs: list[Tensor] = []
        for i, meta in enumerate(captured.outputs):
            state = self.states[self._aliases[i]] if i in self._aliases else None
            self.outputs.append(meta.over(steps, inputs[0].device) if state is None else state[1:])

    def chunk(self, start: int, end: int, first: Sequence[Tensor] | None = None, offset: int = 0) -> Chunk:
        """A chunk. `first` are the states before it, if they are not there yet; the buffers begin at step `offset`."""
        states, rows = list[Tensor](), slice(start - offset, end - offset + 1)
        for k, whole in enumerate(self.states):
            if k in self._invariant:
                states.append(self._initial[k])
                continue
            states.append(self.spare[k][: end - start + 1] if whole is None else whole[rows])
            if first is not None:
                states[k][0].copy_(first[k])
        outputs = [
            states[self._aliases[i]][1:] if i in self._aliases else each[start - offset : end - offset]
            for i, each in enumerate(self.outputs)
        ]
        return Chunk(end - start, [each[start:end].contiguous() for each in self._inputs], states, outputs)


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
        self._counts = len(inputs), len(states)
        self._backend, self._policy, self._tracked, self._replay = backend, policy, tracked, replay
        self._inputs = [each.detach().resolve_neg() for each in inputs]
        self._states = [each.detach().resolve_neg().contiguous() for each in states]
        steps = len(inputs[0])
        self._bounds = [0, steps] if steps <= backend.chunk_steps else chunk_bounds(steps, backend.chunk_steps)
        self._made: Buffers | None = None
        self._kept: list[Any] = []
        self._heads: list[list[Tensor]] = []  # where states are not kept whole, those that each segment begins with
        self._read: list[Read] = []
        begun = states if tracked else ()
        self._begun: list[Read] = [(f"initial state {i}", each, _mark(each)) for i, each in enumerate(begun)]

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Outputs, states after every step, and the last ones once more: often only these are used."""
        backend, captured, segment = self._backend, self._backend.captured, self._policy.segment
        keep = self._policy.values and self._tracked
        made = Buffers(captured, self._inputs, self._states, self._bounds, whole=segment is None)
        constants = backend.begin()
        passed = [each.clone() for each in self._states]
        for i, (start, end) in enumerate(pairwise(self._bounds)):
            if segment is not None and i % segment == 0:
                self._heads.append([each.clone() for each in passed])
            chunk = made.chunk(start, end, passed)
            kept = backend.forward(constants, chunk, keep=keep)
            if keep:
                self._kept.append(kept)
            for k, (state, rows) in enumerate(zip(passed, chunk.states, strict=True)):
                if k not in captured.invariant:
                    state.copy_(rows[-1])
        made.spare.clear()
        every: list[Tensor] = []
        if segment is None:
            pairs = zip(self._states, made.states, strict=True)
            every = [s.expand(self._bounds[-1], *s.shape) if rows is None else rows[1:] for s, rows in pairs]
        ends = [*(each.detach() for each in made.outputs), *every, *passed]
        if self._tracked:
            self._made = made
            read = {
                "input": self._inputs,
                "output": made.outputs,
                "state": [each for each in made.states if each is not None],
                "initial state": [self._states[k] for k in sorted(captured.invariant)],
                "parameter": self.tensors[sum(self._counts) :],
                "constant": captured.constants,
            }
            self._read = [(f"{what} {i}", e, _mark(e)) for what, values in read.items() for i, e in enumerate(values)]
        return ends, [_has_gradient(each) for each in ends]

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`. Raises BackwardTwiceError when the sequence was freed."""
        if not all([_has_storage(each) for each in gradients if each is not None]):  # many at once, as vmap has them
            return self.differentiable_backward(gradients, retain=retain)
        with self._left_by_forward(self._read, retain=retain) as made, torch.no_grad():
            backend, parameters = self._backend, self.tensors[sum(self._counts) :]
            back = _BackwardGradients(backend.captured, self._inputs, self._states, parameters, self.ends(gradients))
            constants = backend.begin()
            for start, end, chunk, values in self._chunks_back(made, constants, retain):
                backend.backward(constants, chunk, values, back.chunk(start, end))
                if not (self._policy.values and retain):
                    backend.release(values)
            found = back.found()
            pairs = zip(self.tensors, found, strict=True)
            without_gradient([tensor for tensor, gradient in pairs if gradient is None and tensor.is_leaf])
        return found

    def differentiable_backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `TwiceDifferentiable`. Raises BackwardTwiceError when the sequence was freed, and DoubleBackwardError."""
        with self._left_by_forward([*self._read, *self._begun], retain=retain):
            if self._replay is None:
                raise DoubleBackwardError("a gradient of a gradient was asked for, but this plan came without its cell")
            count, behind = self._counts[0], sum(self._counts)
            return self._replay.gradients(self.tensors[:count], self.tensors[count:behind], self.ends(gradients))

    @contextmanager
    def _left_by_forward(self, read: Sequence[Read], *, retain: bool) -> Generator[Buffers]:
        """The buffers of forward, if unchanged; on exit, without `retain`, every reference of the call is dropped.

        The node of autograd lives as long as what was computed from its outputs, such as a loss that is kept.
        """
        if self._made is None:
            raise BackwardTwiceError(TWICE)
        written = [name for name, each, mark in read if _mark(each) != mark]
        if written:
            raise InPlaceError(
                listed("backward reads these again, but they were written to after forward; work on a copy:", written)
            )
        try:
            yield self._made
        finally:
            if not retain:
                self._made = self._replay = None
                held = (self.tensors, self._inputs, self._states, self._kept, self._heads, self._read, self._begun)
                for each in held:
                    each.clear()

    def _chunks_back(self, made: Buffers, constants: Any, retain: bool) -> Generator[tuple[int, int, Chunk, Any]]:
        """Each chunk, the last one first, with the values that were kept or are made again.

        Where states are not kept whole, each segment is run forward once more, in memory of its own.
        """
        backend, bounds, length = self._backend, self._bounds, self._policy.segment
        if length is None:
            for i in range(len(bounds) - 2, -1, -1):
                chunk = made.chunk(bounds[i], bounds[i + 1])
                if self._policy.values:
                    yield bounds[i], bounds[i + 1], chunk, self._kept[i] if retain else self._kept.pop()
                else:
                    yield bounds[i], bounds[i + 1], chunk, backend.recompute(constants, chunk)
            return
        again = Buffers(backend.captured, self._inputs, self._states, bounds[: length + 1], whole=True)
        for n in range(len(self._heads) - 1, -1, -1):
            marks = bounds[n * length : (n + 1) * length + 1]
            first: Sequence[Tensor] = self._heads[n]
            run: list[tuple[int, int, Chunk, Any]] = []
            for start, end in pairwise(marks):
                chunk = again.chunk(start, end, first, offset=marks[0])
                run.append((start, end, chunk, backend.forward(constants, chunk, keep=True)))
                first = [part if k in backend.captured.invariant else part[-1] for k, part in enumerate(chunk.states)]
            while run:
                yield run.pop()

    def ends(self, values: Sequence[Value]) -> SequenceLeaves[Value]:
        """Outputs, states and last states out of one list."""
        count, width = len(self._backend.captured.outputs), self._counts[1]
        behind = count if self._policy.segment else count + width
        return SequenceLeaves(list(values[:count]), list(values[count:behind]), list(values[behind:]))


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or gets other memory."""
    return tensor._version, tensor.data_ptr()


class _BackwardGradients:
    """The gradients of one backward over a sequence."""

    def __init__(
        self,
        captured: StepGraph,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        parameters: Sequence[Tensor],
        given: SequenceLeaves[Tensor | None],
    ) -> None:
        self._given, self._outputs, self._device = given, captured.outputs, inputs[0].device
        self._carried = [
            torch.zeros_like(s) if each is None else each.resolve_neg().clone(memory_format=torch.contiguous_format)
            for s, each in zip(states, given.last, strict=True)
        ]
        self._inputs = [
            None if meta is None else meta.over(len(inputs[0]), self._device) for meta in captured.input_gradients
        ]
        self._parameters = [
            None if node is None else torch.zeros_like(p, memory_format=torch.contiguous_format)
            for node, p in zip(captured.signature.parameter_gradients, parameters, strict=True)
        ]

    def chunk(self, start: int, end: int) -> Gradients:
        """The gradients of a chunk; chunks come from the last to the first."""
        outputs = [
            meta.over(end - start, self._device).zero_() if each is None else _plain(each[start:end])
            for meta, each in zip(self._outputs, self._given.outputs, strict=True)
        ]
        states: list[Tensor | None] = [None] * len(self._carried)
        if self._given.states:
            states = [None if each is None else _plain(each[start:end]) for each in self._given.states]
        inputs = [None if each is None else each[start:end] for each in self._inputs]
        return Gradients(outputs, states, self._carried, inputs, self._parameters)

    def found(self) -> list[Tensor | None]:
        """The gradients of inputs, initial states and parameters."""
        states = [each if _has_gradient(each) else None for each in self._carried]
        return [*self._inputs, *states, *self._parameters]


def _plain(gradient: Tensor) -> Tensor:
    """As compiled code reads it: contiguous, and negated in memory where autograd only marked it as negative."""
    return gradient.resolve_neg().contiguous()


# -- gradients of gradients -------------------------------------------------------------------------------------------


def stepwise(
    captured: StepGraph, cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor]
) -> SequenceLeaves[Tensor]:
    """The cell that was captured, step by step, in plain autograd. `inputs` are T x ..., T at least 1.

    Further inputs, which stand for random numbers, are not looked at: the cell draws.
    """
    count = captured.input_structure.num_leaves
    state = unflatten(captured.state_structure, states)
    outputs: list[list[Tensor]] = []
    after: list[list[Tensor]] = []
    for step in zip(*(each.unbind(0) for each in inputs[:count]), strict=True):
        y, state = cell(unflatten(captured.input_structure, list(step)), state)
        outputs.append(present(flatten(y)[0]))
        after.append(flatten(state)[0])
    stacked = [[torch.stack(column) for column in zip(*rows, strict=True)] for rows in (outputs, after)]
    return SequenceLeaves(stacked[0], stacked[1], after[-1])


class EagerReplay:
    """Replays a sequence in the eager loop as it was run by the plan.

    To be made before the sequence runs, and before it draws. Within `restored()` the cell reads the tensors that it
    read then; it yields whether the cell is unchanged in all else.
    """

    def __init__(
        self,
        captured: StepGraph,
        cell: Cell,
        device: torch.device,
        restored: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._captured, self._cell, self._restored = captured, cell, restored
        self._ambient = ExecutionContext.capture([device.type])
        self._sources = rng.generators([device]) if captured.draws else ()
        self._begun = rng.states(self._sources) if self._sources else []

    def gradients(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor], given: SequenceLeaves[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of inputs, states and parameters, in this order; under grad mode autograd can differentiate
        them. Raises DoubleBackwardError."""
        passing: list[bool] = []
        further, parameters = torch.is_grad_enabled(), self._captured.parameters
        with torch.enable_grad():
            guarded = [cast(Tensor, _Switch.apply(passing, e)) if e.requires_grad else e for e in (*inputs, *states)]
            ends = self._run(guarded[: len(inputs)], guarded[len(inputs) :])
            states = ends.states if given.states else []  # which may not have been kept
            roots, seeds = [*ends.outputs, *states, *ends.last], [*given.outputs, *given.states, *given.last]
            with quiet_hooks(parameters):
                found = gradients_of([*guarded, *parameters], roots, seeds, create_graph=further)
        passing.append(True)
        return found

    def _run(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> SequenceLeaves[Tensor]:
        """The sequence in plain autograd; the generators stay as they are."""
        now = rng.states(self._sources)
        # A batch of gradients comes under vmap, which forbids to draw; what is drawn inside belongs to no batch.
        batch = _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C._dispatch_key_parse("VmapMode")))
        context = self._ambient
        with context.here(), context.casting(), context.process_flags(), batch, self._restored() as unchanged:
            if not unchanged:
                raise DoubleBackwardError(
                    "a gradient of a gradient (create_graph=True), or a batch of gradients, runs the cell once more, "
                    "but since forward the cell was changed: a flag such as .training, a plain attribute, or a tensor "
                    "that a function closes over; change it after backward"
                )
            try:
                rng.restore(self._sources, self._begun)
                return stepwise(self._captured, self._cell, inputs, states)
            finally:
                rng.restore(self._sources, now)


class _Switch(torch.autograd.Function):
    """Hands a tensor on. Gradients pass only once `passing` holds something."""

    @staticmethod
    def forward(ctx: Any, passing: list[bool], tensor: Tensor) -> Tensor:
        ctx.passing = passing
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        return None, gradients[0] if ctx.passing else None
