"""Where the inputs, outputs and states of a sequence lie, and what of that is a chunk's.

    rows of a state     initial | after step 1 | ... | after step T      an output that is a state lies there as well
    chunk of steps 4-7                 '── row 4 to row 8 ──'             begins with the state before it

A state that passes through the cell unchanged has no rows; one that is not kept whole has none either, but `heads`:
what each segment begins with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.recurrent.engine import Chunk, Engine, borders


@dataclass
class Series:
    """Outputs and states over a stretch of steps: None for a state that is not kept whole; `heads`: see above."""

    outputs: list[Tensor]
    states: list[Tensor | None]
    heads: list[list[Tensor]]


class Room:
    """Of one sequence. Holds its inputs and initial states, until they are let go."""

    def __init__(self, engine: Engine, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self.inputs = [each.detach().resolve_neg() for each in inputs]
        self.states = [each.detach().resolve_neg().contiguous() for each in states]
        self.steps = len(inputs[0])
        self.marks = borders(self.steps, engine.chunk_steps())
        self.still = engine.captured.passing
        self._captured, self._same = engine.captured, engine.captured.aliases

    @property
    def device(self) -> torch.device:
        """That of all of it."""
        return self.inputs[0].device

    def let_go(self) -> None:
        """Hold nothing any more."""
        self.inputs.clear()
        self.states.clear()

    def series(self, steps: int, *, whole: bool) -> Series:
        """Room for so many steps: all states, or only those that are outputs as well."""
        rows: list[Tensor | None] = [
            each.new_empty(steps + 1, *each.shape)
            if k not in self.still and (whole or k in self._same.values())
            else None
            for k, each in enumerate(self.states)
        ]
        outputs: list[Tensor] = []
        for i, look in enumerate(self._captured.outputs):
            state = rows[self._same[i]] if i in self._same else None
            outputs.append(look.over(steps, self.device) if state is None else state[1:])
        return Series(outputs, rows, [])

    def spare(self, series: Series) -> dict[int, Tensor]:
        """Room for one chunk of every state that is not kept whole, by its number.

        Used for all chunks: blocks of this size, freed and asked for again between small ones, would never fit where
        the last one lay, and a process would grow by one for each chunk.
        """
        longest = max(end - start for start, end in pairwise(self.marks))
        return {
            k: each.new_empty(longest + 1, *each.shape)
            for k, (each, whole) in enumerate(zip(self.states, series.states, strict=True))
            if whole is None and k not in self.still
        }

    def chunk(
        self,
        series: Series,
        start: int,
        end: int,
        first: Sequence[Tensor],
        spare: Mapping[int, Tensor],
        offset: int = 0,
    ) -> Chunk:
        """A chunk to be run. `first` are the states that it begins with; `offset` the step where `series` begins.

        `spare`: rows of the states that have none of their own.
        """
        inputs = [each[start:end].contiguous() for each in self.inputs]
        states: list[Tensor] = []
        for k, (state, whole) in enumerate(zip(first, series.states, strict=True)):
            if k in self.still:
                states.append(self.states[k])
                continue
            part = spare[k][: end - start + 1] if whole is None else whole[start - offset : end - offset + 1]
            part[0].copy_(state)
            states.append(part)
        outputs = [
            states[self._same[i]][1:] if i in self._same else each[start - offset : end - offset]
            for i, each in enumerate(series.outputs)
        ]
        return Chunk(inputs, states, outputs)

    def as_it_was(self, series: Series, start: int, end: int) -> Chunk:
        """A chunk that was run, of which all states were kept."""
        inputs = [each[start:end].contiguous() for each in self.inputs]
        states = [
            s if whole is None else whole[start : end + 1] for s, whole in zip(self.states, series.states, strict=True)
        ]
        return Chunk(inputs, states, [each[start:end] for each in series.outputs])

    def after_steps(self, series: Series, k: int) -> Tensor:
        """A state after every step."""
        whole = series.states[k]
        return self.states[k].expand(self.steps, *self.states[k].shape) if whole is None else whole[1:]

    def read_again(self, series: Series) -> list[tuple[str, Tensor]]:
        """What backward reads and others can write to: each tensor with its name."""
        parts = {
            "input": self.inputs,
            "output": series.outputs,
            "state": [each for each in series.states if each is not None],
            "initial state": [self.states[k] for k in sorted(self.still)],
            "parameter": self._captured.parameters,
            "constant": self._captured.constants,
        }
        return [(f"{what} {i}", each) for what, values in parts.items() for i, each in enumerate(values)]
