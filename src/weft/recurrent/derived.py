"""A derived plan as one node of autograd: the whole sequence forward, and back by the derived backward loop.

The node is core's `Boundary`, so what holds for a pipeline's step holds here: parameters get their gradient once,
their hooks fire once, `retain_graph=True` works. What is kept in between, and what is made again, memory.py decides.
A gradient of a gradient goes by double_backward.py.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.boundary import cross, without_gradient
from weft.core.errors import TWICE, BackwardTwiceError, DoubleBackwardError, InPlaceError, listed
from weft.core.segment import differentiable
from weft.recurrent.double_backward import Again, differentiable_gradients
from weft.recurrent.engine import Chunk, Engine, borders
from weft.recurrent.gradients_back import GradientsBack, Leaves, Value
from weft.recurrent.memory import Keeping, Memory, keeping, size_of

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


@dataclass
class _Memory:
    """Where a sequence's outputs and states lie. A state that is not kept whole has no rows but `heads`."""

    outputs: list[Tensor]
    rows: list[Tensor | None]
    heads: list[list[Tensor]]


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
        self._inputs = [each.detach().resolve_neg() for each in inputs]
        self._states = [each.detach().resolve_neg().contiguous() for each in states]
        self._way, self._tracked = way, tracked
        self._steps = len(inputs[0])
        self._marks = borders(self._steps, engine.chunk_steps())
        self._still, self._same = engine.captured.passing, engine.captured.aliases
        self._memory: _Memory | None = None
        self._kept: list[Any] = []
        self._read: list[Read] = []
        self._again = again
        begun = states if tracked else ()
        self._begun: list[Read] = [(f"initial state {i}", each, _mark(each)) for i, each in enumerate(begun)]

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Outputs, states after every step, and the last ones once more: often only these are used."""
        memory, engine = self._memory_for(self._steps, whole=self._way.segment is None), self._engine
        constants = engine.begin()
        passed = [each.clone() for each in self._states]
        spare = self._spare(memory) if self._way.segment else []
        length = self._way.segment or len(self._marks)
        for first in range(0, len(self._marks) - 1, length):
            memory.heads.append([each.clone() for each in passed] if self._way.segment else [])
            for i in range(first, min(first + length, len(self._marks) - 1)):
                chunk = self._chunk(memory, self._marks[i], self._marks[i + 1], passed, spare=spare)
                kept = engine.forward(constants, chunk, keep=self._way.values and self._tracked)
                if self._way.values and self._tracked:
                    self._kept.append(kept)
                for k, (state, rows) in enumerate(zip(passed, chunk.states, strict=True)):
                    if k not in self._still:
                        state.copy_(rows[-1])
        rows = [] if self._way.segment else [self._all_rows(memory, k) for k in range(len(self._states))]
        made = [*(each.detach() for each in memory.outputs), *rows, *passed]
        if self._tracked:
            self._memory = memory
            self._read = [(name, each, _mark(each)) for name, each in self._read_again(memory)]
        return made, [differentiable(each) for each in made]

    def _memory_for(self, steps: int, *, whole: bool) -> _Memory:
        """Room for so many steps: all states, or only those that are outputs as well."""
        rows: list[Tensor | None] = [
            each.new_empty(steps + 1, *each.shape)
            if k not in self._still and (whole or k in self._same.values())
            else None
            for k, each in enumerate(self._states)
        ]
        outputs: list[Tensor] = []
        for i, look in enumerate(self._engine.captured.outputs):
            state = rows[self._same[i]] if i in self._same else None
            outputs.append(look.over(steps, self._device) if state is None else state[1:])
        return _Memory(outputs, rows, [])

    @property
    def _device(self) -> torch.device:
        return self._inputs[0].device

    def _spare(self, memory: _Memory) -> list[Tensor | None]:
        """Room for one chunk of every state that is not kept whole.

        Used for all chunks: blocks of this size, freed and asked for again between small ones, would never fit where
        the last one lay, and a process would grow by one for each chunk.
        """
        longest = max(end - start for start, end in pairwise(self._marks))
        return [
            each.new_empty(longest + 1, *each.shape) if rows is None and k not in self._still else None
            for k, (each, rows) in enumerate(zip(self._states, memory.rows, strict=True))
        ]

    def _chunk(
        self,
        memory: _Memory,
        start: int,
        end: int,
        first: Sequence[Tensor],
        offset: int = 0,
        spare: Sequence[Tensor | None] = (),
    ) -> Chunk:
        """The chunk's memory. `first` are the states that it begins with; `offset` the step where `memory` begins.

        `spare`: rows of the states that `memory` has none of.
        """
        inputs = [each[start:end].contiguous() for each in self._inputs]
        states: list[Tensor] = []
        for k, (state, rows) in enumerate(zip(first, memory.rows, strict=True)):
            if k in self._still:
                states.append(self._states[k])
                continue
            if rows is None:
                room = spare[k]
                assert room is not None
                part = room[: end - start + 1]
            else:
                part = rows[start - offset : end - offset + 1]
            part[0].copy_(state)
            states.append(part)
        outputs = [
            states[self._same[i]][1:] if i in self._same else each[start - offset : end - offset]
            for i, each in enumerate(memory.outputs)
        ]
        return Chunk(inputs, states, outputs)

    def _all_rows(self, memory: _Memory, k: int) -> Tensor:
        rows = memory.rows[k]
        return self._states[k].expand(self._steps, *self._states[k].shape) if rows is None else rows[1:]

    def _read_again(self, memory: _Memory) -> list[tuple[str, Tensor]]:
        """What backward reads and others can write to: each tensor with its name."""
        parts = {
            "input": self._inputs,
            "output": memory.outputs,
            "state": [each for each in memory.rows if each is not None],
            "initial state": [self._states[k] for k in sorted(self._still)],
            "parameter": self._engine.captured.parameters,
            "constant": self._engine.captured.constants,
        }
        return [(f"{what} {i}", each) for what, values in parts.items() for i, each in enumerate(values)]

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `Journey.backward`. Raises BackwardTwiceError when the sequence was freed."""
        if not all([_has_storage(each) for each in gradients if each is not None]):  # many at once, as vmap has them
            return self.differentiable_backward(gradients, retain=retain)
        with self._left_by_forward(self._read, retain=retain) as memory, torch.no_grad():
            back = GradientsBack(self._engine.captured, self._states, self._steps, self._device, self.named(gradients))
            if self._way.segment:
                self._by_segments(memory, back, self._way.segment)
            else:
                self._by_chunks(memory, back, retain)
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
            count, behind = len(self._inputs), len(self._inputs) + len(self._states)
            return differentiable_gradients(
                again, self.tensors[:count], self.tensors[count:behind], (given.outputs, given.states, given.last)
            )

    @contextmanager
    def _left_by_forward(self, read: Sequence[Read], *, retain: bool) -> Generator[_Memory]:
        """What forward left, if it still is as it was; behind this, without `retain`, nothing of the call is held.

        The node of autograd lives as long as what was computed from its outputs, such as a loss that is kept.
        """
        memory = self._there(read)
        try:
            yield memory
        finally:
            if not retain:
                self._memory = self._again = None
                for each in (self.tensors, self._inputs, self._states, self._kept, self._read, self._begun):
                    each.clear()

    def _there(self, read: Sequence[Read]) -> _Memory:
        if self._memory is None:
            raise BackwardTwiceError(TWICE)
        written = [name for name, each, mark in read if _mark(each) != mark]
        if written:
            raise InPlaceError(
                listed("backward reads these again, but they were written to after forward; work on a copy:", written)
            )
        return self._memory

    def _by_chunks(self, memory: _Memory, back: GradientsBack, retain: bool) -> None:
        engine, kept = self._engine, self._kept
        constants = engine.begin()
        for i in range(len(self._marks) - 2, -1, -1):
            start, end = self._marks[i], self._marks[i + 1]
            chunk = self._as_it_was(memory, start, end)
            values = kept[i] if self._way.values else engine.again(constants, chunk)
            engine.backward(constants, chunk, values, back.chunk(start, end))
            if not (self._way.values and retain):
                engine.release(values)
                if self._way.values:
                    kept[i] = None

    def _as_it_was(self, memory: _Memory, start: int, end: int) -> Chunk:
        inputs = [each[start:end].contiguous() for each in self._inputs]
        states = [
            s if rows is None else rows[start : end + 1] for s, rows in zip(self._states, memory.rows, strict=True)
        ]
        return Chunk(inputs, states, [each[start:end] for each in memory.outputs])

    def _by_segments(self, memory: _Memory, back: GradientsBack, length: int) -> None:
        """Each segment forward once more, in memory of its own, and back; the last one first."""
        engine = self._engine
        constants = engine.begin()
        room = self._memory_for(self._marks[min(length, len(self._marks) - 1)], whole=True)
        for n in range(len(memory.heads) - 1, -1, -1):
            marks = self._marks[n * length : (n + 1) * length + 1]
            first: Sequence[Tensor] = memory.heads[n]
            made: list[tuple[int, int, Chunk, Any]] = []
            for start, end in pairwise(marks):
                chunk = self._chunk(room, start, end, first, offset=marks[0])
                made.append((start, end, chunk, engine.forward(constants, chunk, keep=True)))
                first = [rows if k in self._still else rows[-1] for k, rows in enumerate(chunk.states)]
            while made:
                start, end, chunk, values = made.pop()
                engine.backward(constants, chunk, values, back.chunk(start, end))
                engine.release(values)

    def named(self, values: Sequence[Value]) -> Leaves[Value]:
        """Outputs, states and last states out of one list."""
        count, width = len(self._roles.outputs), len(self._states)
        behind = count if self._way.segment else count + width
        return Leaves(list(values[:count]), list(values[count:behind]), list(values[behind:]))


def _mark(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or given other memory."""
    return tensor._version, tensor.data_ptr()
