"""A sequence run by a derived plan, as one node of autograd.

    forward     chunk by chunk: outputs, states; what is saved and what is recomputed, memory.py decides
    backward    chunk by chunk, the last one first: gradients of inputs T x ..., of states, handed from chunk to chunk,
                and of parameters, added up

The node is core's autograd function, so what holds for a pipeline's step holds here: parameters get their gradient
once, their hooks fire once, `retain_graph=True` works.

The derived backward is a loop that autograd does not see, and takes one gradient of each end. For a gradient of a
gradient (`create_graph=True`), or a batch of gradients (`is_grads_batched=True`), the sequence is run once more by the
eager loop, over the same tensors and with the same random numbers, and autograd makes the gradients:

    x ----+                         +--> first gradients, which autograd can differentiate again
    s0 ---+-> gates -> eager loop --+
    w -----------------^

A gate is where the node's own inputs begin. Closed, no gradient passes it, so the first gradients are those of this
node alone, even if an input was computed from a parameter that the cell reads as well. Then it is opened, for the
second ones. It costs what the eager loop costs, and only those who ask pay for it.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from weft.core.autograd import apply, quiet_hooks, without_gradient
from weft.core.context import ExecutionContext
from weft.core.errors import TWICE, BackwardTwiceError, DoubleBackwardError, InPlaceError, listed
from weft.core.pytree import flatten, unflatten
from weft.core.rng import generators
from weft.core.segment import differentiable
from weft.recurrent.buffers import Buffers, SequenceBuffers
from weft.recurrent.capture import Cell, present
from weft.recurrent.captured import Captured
from weft.recurrent.engine import Chunk, Engine, Gradients
from weft.recurrent.memory import Keeping, Memory, keeping, size_of

Value = TypeVar("Value")


@dataclass(frozen=True)
class Leaves(Generic[Value]):
    """Flat leaves of a sequence: outputs T x ..., states after every step T x ..., and the states after the last."""

    outputs: list[Value]
    states: list[Value]
    last: list[Value]

    def named(self) -> list[tuple[str, Value]]:
        """Each with a name for people."""
        parts = (("output", self.outputs), ("state", self.states), ("last state", self.last))
        return [(f"{name} {i}", value) for name, values in parts for i, value in enumerate(values)]


_C = cast(Any, torch._C)
Restore = Callable[[], AbstractContextManager[bool]]
Ends = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Flat leaves: outputs T x ..., states after every step T x ..., states after the last."""
Read = tuple[str, Tensor, tuple[int, int]]
"""A tensor that backward reads: its name for people, and what changes when it is written to."""
_has_storage = cast("Callable[[Tensor], bool]", cast(Any, torch._C)._has_storage)


def run_derived(
    engine: Engine,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    memory: Memory = "full",
    again: "Replay | None" = None,
) -> Leaves[Tensor]:
    """A whole sequence; `inputs` are T x ... with T at least 1, `states` the initial ones.

    Where not all states are kept, `states` of the result is empty. Without `again` a gradient of a gradient is refused.
    Raises UsageError if `memory` is too small.
    """
    steps = len(inputs[0])
    tracked = torch.is_grad_enabled() and any(
        each.requires_grad for each in (*inputs, *states, *engine.captured.parameters)
    )
    if tracked and memory not in ("full", "states"):
        way = keeping(memory, size_of(engine, steps, states))
    else:
        way = Keeping(values=tracked and memory == "full")
    function = ScanFunction(engine, inputs, states, way, tracked, again)
    if tracked:
        return function.ends(apply(function, function.tensors))
    with torch.no_grad():
        return function.ends(function.forward()[0])


class ScanFunction:
    """One sequence; see `weft.core.autograd.CutFunction`."""

    def __init__(
        self,
        engine: Engine,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        way: Keeping,
        tracked: bool,
        again: "Replay | None",
    ) -> None:
        self.tensors = [*inputs, *states, *engine.captured.parameters]
        self._engine = engine
        self._roles = engine.captured.roles
        self._buffers = SequenceBuffers(engine, inputs, states)
        self._counts = len(inputs), len(states)
        self._way, self._tracked = way, tracked
        self._made: Buffers | None = None
        self._kept: list[Any] = []
        self._read: list[Read] = []
        self._again = again
        begun = states if tracked else ()
        self._begun: list[Read] = [(f"initial state {i}", each, _mark(each)) for i, each in enumerate(begun)]

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Outputs, states after every step, and the last ones once more: often only these are used."""
        engine, buffers, marks = self._engine, self._buffers, self._buffers.borders
        made = buffers.allocate(buffers.steps, whole=self._way.segment is None)
        constants = engine.begin()
        passed = [each.clone() for each in buffers.states]
        spare = buffers.spare(made) if self._way.segment else {}
        length = self._way.segment or len(marks)
        for first in range(0, len(marks) - 1, length):
            made.heads.append([each.clone() for each in passed] if self._way.segment else [])
            for i in range(first, min(first + length, len(marks) - 1)):
                chunk = buffers.chunk(made, marks[i], marks[i + 1], passed, spare)
                kept = engine.forward(constants, chunk, keep=self._way.values and self._tracked)
                if self._way.values and self._tracked:
                    self._kept.append(kept)
                for k, (state, part) in enumerate(zip(passed, chunk.states, strict=True)):
                    if k not in buffers.still:
                        state.copy_(part[-1])
        every = [] if self._way.segment else [buffers.after_steps(made, k) for k in range(len(passed))]
        ends = [*(each.detach() for each in made.outputs), *every, *passed]
        if self._tracked:
            self._made = made
            self._read = [(name, each, _mark(each)) for name, each in buffers.read_again(made)]
        return ends, [differentiable(each) for each in ends]

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`. Raises BackwardTwiceError when the sequence was freed."""
        if not all([_has_storage(each) for each in gradients if each is not None]):  # many at once, as vmap has them
            return self.differentiable_backward(gradients, retain=retain)
        with self._left_by_forward(self._read, retain=retain) as made, torch.no_grad():
            buffers, given = self._buffers, self.ends(gradients)
            back = _BackwardGradients(self._engine.captured, buffers.states, buffers.steps, buffers.device, given)
            if self._way.segment:
                self._by_segments(made, back, self._way.segment)
            else:
                self._by_chunks(made, back, retain)
            found = back.found()
            pairs = zip(self.tensors, found, strict=True)
            without_gradient(tensor for tensor, gradient in pairs if gradient is None and tensor.is_leaf)
        return found

    def differentiable_backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `TwiceDifferentiable`. Raises BackwardTwiceError when the sequence was freed, and DoubleBackwardError."""
        with self._left_by_forward([*self._read, *self._begun], retain=retain):
            again, given = self._again, self.ends(gradients)
            if again is None:
                raise DoubleBackwardError("a gradient of a gradient was asked for, but this plan came without its cell")
            count, behind = self._counts[0], sum(self._counts)
            return differentiable_gradients(
                again, self.tensors[:count], self.tensors[count:behind], (given.outputs, given.states, given.last)
            )

    @contextmanager
    def _left_by_forward(self, read: Sequence[Read], *, retain: bool) -> Generator[Buffers]:
        """What forward left, if it still is as it was; behind this, without `retain`, nothing of the call is held.

        The node of autograd lives as long as what was computed from its outputs, such as a loss that is kept.
        """
        made = self._there(read)
        try:
            yield made
        finally:
            if not retain:
                self._made = self._again = None
                self._buffers.release()
                for each in (self.tensors, self._kept, self._read, self._begun):
                    each.clear()

    def _there(self, read: Sequence[Read]) -> Buffers:
        if self._made is None:
            raise BackwardTwiceError(TWICE)
        written = [name for name, each, mark in read if _mark(each) != mark]
        if written:
            raise InPlaceError(
                listed("backward reads these again, but they were written to after forward; work on a copy:", written)
            )
        return self._made

    def _by_chunks(self, made: Buffers, back: "_BackwardGradients", retain: bool) -> None:
        engine, buffers, kept = self._engine, self._buffers, self._kept
        constants = engine.begin()
        for i in range(len(buffers.borders) - 2, -1, -1):
            start, end = buffers.borders[i], buffers.borders[i + 1]
            chunk = buffers.chunk_of(made, start, end)
            values = kept[i] if self._way.values else engine.again(constants, chunk)
            engine.backward(constants, chunk, values, back.chunk(start, end))
            if not (self._way.values and retain):
                engine.release(values)
                if self._way.values:
                    kept[i] = None

    def _by_segments(self, made: Buffers, back: "_BackwardGradients", length: int) -> None:
        """Each segment forward once more, in memory of its own, and back; the last one first."""
        engine, buffers = self._engine, self._buffers
        constants = engine.begin()
        again = buffers.allocate(buffers.borders[min(length, len(buffers.borders) - 1)], whole=True)
        for n in range(len(made.heads) - 1, -1, -1):
            marks = buffers.borders[n * length : (n + 1) * length + 1]
            first: Sequence[Tensor] = made.heads[n]
            run: list[tuple[int, int, Chunk, Any]] = []
            for start, end in pairwise(marks):
                chunk = buffers.chunk(again, start, end, first, {}, offset=marks[0])
                run.append((start, end, chunk, engine.forward(constants, chunk, keep=True)))
                first = [part if k in buffers.still else part[-1] for k, part in enumerate(chunk.states)]
            while run:
                start, end, chunk, values = run.pop()
                engine.backward(constants, chunk, values, back.chunk(start, end))
                engine.release(values)

    def ends(self, values: Sequence[Value]) -> Leaves[Value]:
        """Outputs, states and last states out of one list."""
        count, width = len(self._roles.outputs), self._counts[1]
        behind = count if self._way.segment else count + width
        return Leaves(list(values[:count]), list(values[count:behind]), list(values[behind:]))


def _mark(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or given other memory."""
    return tensor._version, tensor.data_ptr()


class _BackwardGradients:
    """The gradients of one backward over a sequence of so many steps, which began with `states`."""

    def __init__(
        self,
        captured: Captured,
        states: Sequence[Tensor],
        steps: int,
        device: torch.device,
        given: Leaves[Tensor | None],
    ) -> None:
        roles = captured.roles
        self._given, self._device = given, device
        self._looks = captured.outputs
        self._carried = [
            torch.zeros_like(s) if each is None else each.resolve_neg().clone(memory_format=torch.contiguous_format)
            for s, each in zip(states, given.last, strict=True)
        ]
        self._moving = [differentiable(s) for s in states]
        self._inputs = [None if look is None else look.over(steps, device) for look in captured.input_gradients]
        self._parameters = [
            None if node is None else torch.zeros_like(p, memory_format=torch.contiguous_format)
            for node, p in zip(roles.parameter_gradients, captured.parameters, strict=True)
        ]

    def chunk(self, start: int, end: int) -> Gradients:
        """Those of a chunk; chunks are asked for from the last to the first."""
        outputs = [
            look.over(end - start, self._device).zero_() if each is None else _plain(each[start:end])
            for look, each in zip(self._looks, self._given.outputs, strict=True)
        ]
        states: list[Tensor | None] = [None] * len(self._carried)
        if self._given.states:
            states = [None if each is None else _plain(each[start:end]) for each in self._given.states]
        inputs = [None if each is None else each[start:end] for each in self._inputs]
        return Gradients(outputs, states, self._carried, inputs, self._parameters)

    def found(self) -> list[Tensor | None]:
        """The gradients of inputs, initial states and parameters."""
        states = [each if moving else None for each, moving in zip(self._carried, self._moving, strict=True)]
        return [*self._inputs, *states, *self._parameters]


def _plain(gradient: Tensor) -> Tensor:
    """As compiled code reads it: contiguous, and negated in memory where autograd only marked it as negative."""
    return gradient.resolve_neg().contiguous()


# -- gradients of gradients -------------------------------------------------------------------------------------------


def stepwise(captured: Captured, cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Ends:
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
    return stacked[0], stacked[1], after[-1]


@dataclass(frozen=True)
class Replay:
    """What it takes to run a sequence a second time as it was run first."""

    captured: Captured
    cell: Cell
    ambient: ExecutionContext
    random: tuple[tuple[torch.Generator, Tensor], ...]
    """The generators that the cell draws from, as they were before."""
    restored: Restore
    """Inside, the cell reads the tensors that it read then; tells whether it is what was captured in all else."""

    @staticmethod
    def capture(captured: Captured, cell: Cell, device: torch.device, restored: Restore) -> "Replay":
        """Before the sequence runs, and before it draws."""
        sources = generators([device]) if captured.draws else ()
        random = tuple([(each, each.get_state()) for each in sources])
        return Replay(captured, cell, ExecutionContext.capture([device.type]), random, restored)

    def run(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Ends:
        """The sequence in plain autograd; the generators stay as they are. Raises DoubleBackwardError."""
        now = [(source, source.get_state()) for source, _ in self.random]
        with ExitStack() as stack:
            for each in (self.ambient.here(), self.ambient.casting(), self.ambient.process_flags(), _outside_vmap()):
                stack.enter_context(each)
            if not stack.enter_context(self.restored()):
                raise DoubleBackwardError(
                    "a gradient of a gradient (create_graph=True), or a batch of gradients, runs the cell once more, "
                    "but since forward the cell was changed: a flag such as .training, a plain attribute, or a tensor "
                    "that a function closes over; change it after backward"
                )
            try:
                for source, state in self.random:
                    source.set_state(state)
                return stepwise(self.captured, self.cell, inputs, states)
            finally:
                for source, state in now:
                    source.set_state(state)


def _outside_vmap() -> AbstractContextManager[None]:
    """A batch of gradients comes under vmap, which forbids to draw; what is drawn inside belongs to no batch."""
    inside = _C.DispatchKeySet(_C._dispatch_key_parse("VmapMode"))
    return cast("AbstractContextManager[None]", _C._ExcludeDispatchKeyGuard(inside))


Given = tuple[Sequence[Tensor | None], Sequence[Tensor | None], Sequence[Tensor | None]]
"""Gradients of `Ends`; those of the states may be missing as a whole."""


def differentiable_gradients(
    again: Replay, inputs: Sequence[Tensor], states: Sequence[Tensor], given: Given
) -> list[Tensor | None]:
    """The gradients of inputs, states and parameters, in this order; under grad mode autograd can differentiate them.

    `given` are those of outputs, of all states (or none), and of the last states. Raises DoubleBackwardError.
    """
    door, further = _Gates(), torch.is_grad_enabled()
    parameters = again.captured.parameters
    with torch.enable_grad():
        gated = [door.gate(each) for each in (*inputs, *states)]
        ends = again.run(gated[: len(inputs)], gated[len(inputs) :])
        pairs = [
            (end, gradient)
            for values, gradients in zip(ends, given, strict=True)
            for end, gradient in zip(values, gradients, strict=False)
            if gradient is not None and end.requires_grad
        ]
        asked = [each for each in (*gated, *parameters) if each.requires_grad]
        if not pairs or not asked:
            return [None] * (len(gated) + len(parameters))
        with door.shut(), quiet_hooks(parameters):
            found = torch.autograd.grad(
                [end for end, _ in pairs],
                asked,
                [each for _, each in pairs],
                create_graph=further,
                allow_unused=True,
            )
    rest = iter(found)
    return [next(rest) if each.requires_grad else None for each in (*gated, *parameters)]


class _Gates:
    """All gates of one sequence. They open and shut together."""

    def __init__(self) -> None:
        self.open = True

    def gate(self, tensor: Tensor) -> Tensor:
        """The same values, behind the door."""
        return cast(Tensor, _Gate.apply(self, tensor)) if tensor.requires_grad else tensor

    @contextmanager
    def shut(self) -> Generator[None]:
        """No gradient passes inside."""
        self.open = False
        try:
            yield
        finally:
            self.open = True


class _Gate(torch.autograd.Function):
    """Use `_Gates.gate`; this is its autograd node."""

    @staticmethod
    def forward(ctx: Any, door: _Gates, tensor: Tensor) -> Tensor:
        ctx.door = door
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        return None, gradients[0] if ctx.door.open else None
