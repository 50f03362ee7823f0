"""Whether a call of a stack runs as a wavefront, and in which chunks.

cannot be cut                        one layer after the other
wavefront = steps                    a wave
wavefront = "auto"   may not         one layer after the other
                     measuring       both by turns, the clock watches
                     measured        what was faster
"""

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.core.boundary import cross
from weft.core.tree import flatten
from weft.recurrent.faults import Faults
from weft.recurrent.layers.borrowed import BorrowedError
from weft.recurrent.layers.chunks import Chunks, Tables
from weft.recurrent.layers.crew import Crew, configuration, kind_of
from weft.recurrent.layers.reverse import Axes
from weft.recurrent.layers.wavefront import Order, RunLayer, Wave
from weft.recurrent.network import Recurrent
from weft.recurrent.rows import Lengths, read_rows
from weft.recurrent.sequence import read_inputs
from weft.recurrent.unrolling import Result

CHUNKS, SHORTEST = 2, 16
"""How "auto" cuts: into so many chunks for each layer, so that L layers on as many cores idle (L - 1) / (3L - 1) of the
time, a fifth for two; but none shorter than so many steps, since a call costs as much as some steps do."""


@dataclass(frozen=True)
class Call:
    """The arguments of a call, unpacked. `states` holds one per layer, each may be None."""

    inputs: Any
    states: list[Any]
    lengths: Lengths | None
    mask: Tensor | None
    reset: Tensor | None
    start: int


@dataclass(frozen=True)
class AtOnce:
    """The layers of a stack, and the two ways to run a call of it."""

    layers: nn.ModuleList
    crew: Crew
    run_layer: RunLayer
    in_turn: Callable[[Call], Result]
    batch_first: bool

    def run(self, call: Call, wavefront: Literal["auto"] | int | None) -> Result:
        """The call, by whatever way it goes. Raises as `Stack.forward` does."""
        if wavefront is None:
            return self._whole(call, "wavefront is None")
        reason = self._uncut(call)
        if reason is None and wavefront == "auto":
            reason = self._unsure()
        if reason is not None:
            return self._whole(call, reason)
        axes, tables = self._read(call)
        length = max(SHORTEST, -(-axes.steps // (CHUNKS * len(self.layers)))) if wavefront == "auto" else wavefront
        chunks = Chunks(axes, length)
        if axes.steps <= length:
            return self._whole(call, f"the {axes.steps} steps are a single chunk")
        given = (tables.lengths is not None, tables.mask is not None)
        kind = kind_of(self.layers, call.inputs, call.states, given, axes)
        if wavefront == "auto":
            return self._faster(call, chunks, tables, kind)
        return self._wave(call, chunks, tables, kind)

    def _whole(self, call: Call, reason: str) -> Result:
        self.crew.last = f"one layer after the other: {reason}"
        return self.in_turn(call)

    def _uncut(self, call: Call) -> str | None:
        """Why this call cannot be a wave; None if it can."""
        tensors = [leaf for leaf in flatten((call.inputs, call.states))[0] if isinstance(leaf, Tensor)]
        if len(self.layers) < 2:
            return "there is one layer"
        if call.reset is not None:
            return "a reset may bring back a state that was made from the whole sequence"
        if any(leaf.device.type != "cpu" for leaf in tensors):
            return "a wavefront is for the CPU"
        if torch.compiler.is_compiling():
            return "it is being compiled"
        if len(set(self.layers.modules())) < sum(len(list(layer.modules())) for layer in self.layers) + 1:
            return "layers have a module in common"
        return None

    def _unsure(self) -> str | None:
        """Why "auto" does not even try; None if it does."""
        exact = [
            str(i)
            for i, layer in enumerate(self.layers)
            if not isinstance(layer, Recurrent) or getattr(layer, "backend", "eager") == "eager"
        ]
        if exact:
            return f"layers {', '.join(exact)} hold Python's lock, or may allow more than a wavefront does"
        return "there is one core" if _cores() < 2 else None

    def _read(self, call: Call) -> tuple[Axes, Tables]:
        """Where time is, and the tables. Raises as a layer would for the arguments that all of them share."""
        faults = Faults()
        by_row = call.lengths is not None or call.mask is not None
        certain = self.batch_first or by_row
        read = read_inputs(call.inputs, batch_first=self.batch_first, certain=certain, faults=faults)
        read_rows(read, call.lengths, call.mask, None, batch_first=self.batch_first, faults=faults)
        if call.start < 0:
            faults.usage.append(f"start is {call.start}, wanted the number of the first step, 0 or more")
        faults.check("the stack cannot run on these arguments:")
        return Axes.of(call.inputs, self.batch_first), Tables(call.lengths, call.mask, call.start)

    def _faster(self, call: Call, chunks: Chunks, tables: Tables, kind: Hashable) -> Result:
        """ "auto": by turns until it is known, then the faster one. Forwards are timed; their backwards are alike."""
        crew, size = self.crew, (kind, chunks.axes.steps.bit_length())
        if kind in crew.refused:
            return self._whole(call, crew.refused[kind])
        decided, candidate = crew.choice.decided(size), crew.choice.pick(size)
        begun = perf_counter()
        if candidate == 0:
            before = None if decided else torch.get_rng_state()
            result = self._whole(call, "it was faster" if decided else "to be measured")
            if before is not None and not torch.equal(before, torch.get_rng_state()):
                crew.refused[kind] = "random numbers are drawn, which would be others in a wavefront"
        else:
            try:
                result = self._wave(call, chunks, tables, kind)
            except BorrowedError as error:
                crew.refused[kind] = str(error)
                return self._whole(call, str(error))
        crew.choice.report(size, candidate, perf_counter() - begun)
        return result

    def _wave(self, call: Call, chunks: Chunks, tables: Tables, kind: Hashable) -> Result:
        parameters = [[each for each in layer.parameters() if each.requires_grad] for layer in self.layers]
        wave = Wave(
            Order(
                run_layer=self.run_layer,
                chunks=chunks,
                tables=tables,
                inputs=call.inputs,
                states=call.states,
                parameters=parameters,
                uses=self.crew.uses,
                configurations=[configuration(layer) for layer in self.layers],
                executor=self.crew.executor(kind),
                tracked=torch.is_grad_enabled(),
                searched=self.crew.searched,
            )
        )
        self.crew.last = f"as a wavefront: {len(chunks.bounds)} chunks of {chunks.length} steps"
        tensors = cross(wave, wave.tensors) if wave.tracked else wave.forward()[0]
        return wave.result(tensors)


def _cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
