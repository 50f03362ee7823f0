"""A derived plan as one node of autograd: the whole sequence forward, and back by the derived backward loop.

The node is core's `Boundary`, so what holds for a pipeline's step holds here: parameters get their gradient once,
their hooks fire once, `retain_graph=True` works. What is kept in between, and what is made again, memory.py decides;
where it lies, room.py.
A gradient of a gradient goes by double_backward.py.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.boundary import cross, without_gradient
from weft.core.errors import TWICE, BackwardTwiceError, DoubleBackwardError, InPlaceError, listed
from weft.core.segment import differentiable
from weft.recurrent.double_backward import Again, differentiable_gradients
from weft.recurrent.engine import Chunk, Engine
from weft.recurrent.gradients_back import GradientsBack, Leaves, Value
from weft.recurrent.memory import Keeping, Memory, keeping, size_of
from weft.recurrent.room import Room, Series

Read = tuple[str, Tensor, tuple[int, int]]
"""A tensor that backward reads: its name for people, and what changes when it is written to."""
_has_storage = cast("Callable[[Tensor], bool]", cast(Any, torch._C)._has_storage)


def run_derived(
    engine: Engine,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    memory: Memory = "full",
    again: Again | None = None,
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
    journey = _Journey(engine, inputs, states, way, tracked, again)
    if tracked:
        return journey.named(cross(journey, journey.tensors))
    with torch.no_grad():
        return journey.named(journey.forward()[0])


class _Journey:
    """One sequence; see `weft.core.boundary.Journey`."""

    def __init__(
        self,
        engine: Engine,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        way: Keeping,
        tracked: bool,
        again: Again | None,
    ) -> None:
        self.tensors = [*inputs, *states, *engine.captured.parameters]
        self._engine = engine
        self._roles = engine.captured.roles
        self._room = Room(engine, inputs, states)
        self._counts = len(inputs), len(states)
        self._way, self._tracked = way, tracked
        self._series: Series | None = None
        self._kept: list[Any] = []
        self._read: list[Read] = []
        self._again = again
        begun = states if tracked else ()
        self._begun: list[Read] = [(f"initial state {i}", each, _mark(each)) for i, each in enumerate(begun)]

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Outputs, states after every step, and the last ones once more: often only these are used."""
        engine, room, marks = self._engine, self._room, self._room.marks
        series = room.series(room.steps, whole=self._way.segment is None)
        constants = engine.begin()
        passed = [each.clone() for each in room.states]
        spare = room.spare(series) if self._way.segment else {}
        length = self._way.segment or len(marks)
        for first in range(0, len(marks) - 1, length):
            series.heads.append([each.clone() for each in passed] if self._way.segment else [])
            for i in range(first, min(first + length, len(marks) - 1)):
                chunk = room.chunk(series, marks[i], marks[i + 1], passed, spare)
                kept = engine.forward(constants, chunk, keep=self._way.values and self._tracked)
                if self._way.values and self._tracked:
                    self._kept.append(kept)
                for k, (state, part) in enumerate(zip(passed, chunk.states, strict=True)):
                    if k not in room.still:
                        state.copy_(part[-1])
        every = [] if self._way.segment else [room.after_steps(series, k) for k in range(len(passed))]
        made = [*(each.detach() for each in series.outputs), *every, *passed]
        if self._tracked:
            self._series = series
            self._read = [(name, each, _mark(each)) for name, each in room.read_again(series)]
        return made, [differentiable(each) for each in made]

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `Journey.backward`. Raises BackwardTwiceError when the sequence was freed."""
        if not all([_has_storage(each) for each in gradients if each is not None]):  # many at once, as vmap has them
            return self.differentiable_backward(gradients, retain=retain)
        with self._left_by_forward(self._read, retain=retain) as series, torch.no_grad():
            room, given = self._room, self.named(gradients)
            back = GradientsBack(self._engine.captured, room.states, room.steps, room.device, given)
            if self._way.segment:
                self._by_segments(series, back, self._way.segment)
            else:
                self._by_chunks(series, back, retain)
            found = back.found()
            pairs = zip(self.tensors, found, strict=True)
            without_gradient(tensor for tensor, gradient in pairs if gradient is None and tensor.is_leaf)
        return found

    def differentiable_backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `TwiceDifferentiable`. Raises BackwardTwiceError when the sequence was freed, and DoubleBackwardError."""
        with self._left_by_forward([*self._read, *self._begun], retain=retain):
            again, given = self._again, self.named(gradients)
            if again is None:
                raise DoubleBackwardError("a gradient of a gradient was asked for, but this plan came without its cell")
            count, behind = self._counts[0], sum(self._counts)
            return differentiable_gradients(
                again, self.tensors[:count], self.tensors[count:behind], (given.outputs, given.states, given.last)
            )

    @contextmanager
    def _left_by_forward(self, read: Sequence[Read], *, retain: bool) -> Generator[Series]:
        """What forward left, if it still is as it was; behind this, without `retain`, nothing of the call is held.

        The node of autograd lives as long as what was computed from its outputs, such as a loss that is kept.
        """
        series = self._there(read)
        try:
            yield series
        finally:
            if not retain:
                self._series = self._again = None
                self._room.let_go()
                for each in (self.tensors, self._kept, self._read, self._begun):
                    each.clear()

    def _there(self, read: Sequence[Read]) -> Series:
        if self._series is None:
            raise BackwardTwiceError(TWICE)
        written = [name for name, each, mark in read if _mark(each) != mark]
        if written:
            raise InPlaceError(
                listed("backward reads these again, but they were written to after forward; work on a copy:", written)
            )
        return self._series

    def _by_chunks(self, series: Series, back: GradientsBack, retain: bool) -> None:
        engine, room, kept = self._engine, self._room, self._kept
        constants = engine.begin()
        for i in range(len(room.marks) - 2, -1, -1):
            start, end = room.marks[i], room.marks[i + 1]
            chunk = room.as_it_was(series, start, end)
            values = kept[i] if self._way.values else engine.again(constants, chunk)
            engine.backward(constants, chunk, values, back.chunk(start, end))
            if not (self._way.values and retain):
                engine.release(values)
                if self._way.values:
                    kept[i] = None

    def _by_segments(self, series: Series, back: GradientsBack, length: int) -> None:
        """Each segment forward once more, in memory of its own, and back; the last one first."""
        engine, room = self._engine, self._room
        constants = engine.begin()
        again = room.series(room.marks[min(length, len(room.marks) - 1)], whole=True)
        for n in range(len(series.heads) - 1, -1, -1):
            marks = room.marks[n * length : (n + 1) * length + 1]
            first: Sequence[Tensor] = series.heads[n]
            made: list[tuple[int, int, Chunk, Any]] = []
            for start, end in pairwise(marks):
                chunk = room.chunk(again, start, end, first, {}, offset=marks[0])
                made.append((start, end, chunk, engine.forward(constants, chunk, keep=True)))
                first = [part if k in room.still else part[-1] for k, part in enumerate(chunk.states)]
            while made:
                start, end, chunk, values = made.pop()
                engine.backward(constants, chunk, values, back.chunk(start, end))
                engine.release(values)

    def named(self, values: Sequence[Value]) -> Leaves[Value]:
        """Outputs, states and last states out of one list."""
        count, width = len(self._roles.outputs), self._counts[1]
        behind = count if self._way.segment else count + width
        return Leaves(list(values[:count]), list(values[count:behind]), list(values[behind:]))


def _mark(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or given other memory."""
    return tensor._version, tensor.data_ptr()
