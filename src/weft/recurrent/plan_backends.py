"""The protocol of backends: what runs a derived plan over a chunk of time.

    sequence   |  chunk  |  chunk  |  chunk  |      a plan knows one step; T is an argument of each call
    states     h0 ...... h ....... h ....... hT     T + 1 rows; a chunk reads its first row and writes the others

Sequences are always run in chunks of a length that depends on the plan alone. So the values of a chunk are still in
the cache when they are read again, and values recomputed to save memory have the same bits as before. `memory=` says
what is saved between forward and backward; in segments:

                |----- segment -----|----- segment -----|----- segment -----|
    forward     *                   *                   *                         kept: the state at each *
    backward                                             forward again, keeping all; back; give the memory back
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from weft.core.errors import UsageError
from weft.recurrent.graph import StepGraph

CHUNK_BYTES = 4 << 20
"""About what the values of one chunk may take."""
CHUNK_ROWS = 1024
"""The least rows of a chunk, steps times batch, so that products over it are efficient."""


@dataclass(frozen=True)
class Chunk:
    """Memory of a stretch of L steps, flat leaves each."""

    steps: int
    """L."""
    inputs: list[Tensor]
    """L x ..., contiguous."""
    states: list[Tensor]
    """L+1 x ..., contiguous, row 0 given; of a loop-invariant state, which every step passes on unchanged, no rows."""
    outputs: list[Tensor]
    """L x ..., contiguous."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of a chunk: those given, and buffers for those computed."""

    outputs: list[Tensor]
    """L x ..., contiguous."""
    states: list[Tensor | None]
    """L x ..., of the states after each step; None for zeros."""
    carried: list[Tensor]
    """Of the state after the last step; becomes that of the state before the first."""
    inputs: list[Tensor | None]
    """L x ..., to be written; None where there is none."""
    parameters: list[Tensor | None]
    """To be added to; None where there is none."""


@runtime_checkable
class Backend(Protocol):
    """A derived plan, made runnable.

    Attributes:
        captured: the step that the plan was derived from.
        chunk_steps: the length of a chunk.
        missing: how many rows a batch has fewer than the plan is for.
    """

    captured: StepGraph
    chunk_steps: int
    missing: int

    def begin(self) -> Any:
        """Constants: values that depend on the references only, computed once per call of the network."""
        ...

    def forward(self, constants: Any, chunk: Chunk, keep: bool) -> Any:
        """Write states and outputs; with `keep`, return what else `backward` reads."""
        ...

    def recompute(self, constants: Any, chunk: Chunk) -> Any:
        """Return what `forward` would have kept, given all states."""
        ...

    def backward(self, constants: Any, chunk: Chunk, kept: Any, gradients: Gradients) -> None:
        """Compute the gradients; `kept` is unchanged."""
        ...

    def release(self, kept: Any) -> None:
        """End the use of `kept`: its memory may serve the next chunk."""
        ...

    def kept_bytes(self, steps: int) -> int:
        """Bytes that `forward` keeps for so many steps."""
        ...

    def work_bytes(self, steps: int) -> int:
        """Bytes that a call needs while it runs over a chunk, and constants."""
        ...

    def explain(self) -> str:
        """For a person: what runs step by step, and what was moved out of the loops."""
        ...


def chunk_length(step_bytes: int, rows: int) -> int:
    """Steps in a chunk, from the bytes that a step takes and its rows."""
    return max(CHUNK_BYTES // max(step_bytes, 1), -(-CHUNK_ROWS // max(rows, 1)), 1)


Memory = Literal["full", "states", "sqrt"] | int
NAMES: tuple[Literal["full", "states", "sqrt"], ...] = ("full", "states", "sqrt")


@dataclass(frozen=True)
class MemoryPolicy:
    """How a sequence is saved: in segments of `segment` chunks; without, all states, and all values if `values`."""

    values: bool
    segment: int | None = None

    def __str__(self) -> str:
        if self.segment is not None:
            return f"segments of {self.segment} chunk{'s' * (self.segment > 1)}"
        return "full" if self.values else "states"


@dataclass(frozen=True)
class SequenceSize:
    """The memory that a sequence takes, in bytes."""

    steps: int
    chunk: int
    state_row: int
    lone_state_row: int
    """Of the states that are no outputs."""
    output_row: int
    """Of the outputs that are no states."""
    input_row: int
    """Of the inputs that have a gradient."""
    fixed: int
    """Of the parameters' gradients, the carried gradients, and what a call needs besides."""
    kept: int
    """Saved by a chunk."""

    def peak(self, policy: MemoryPolicy) -> int:
        """The most bytes that a call with its backward holds at a time, besides what it was given.

        Outputs, states and the gradients that it returns count.
        """
        outputs = (self.steps + 1) * (self.output_row + self.state_row - self.lone_state_row)
        total = outputs + self.steps * self.input_row + self.fixed
        chunks = len(chunk_bounds(self.steps, self.chunk)) - 1
        if policy.segment is None:
            total += (self.steps + 1) * self.lone_state_row
            return total + (chunks if policy.values else 1) * self.kept
        longest = min(policy.segment * self.chunk, self.steps)
        inside = longest * (self.state_row + self.output_row) + self.state_row
        total += math.ceil(chunks / policy.segment) * self.state_row + inside
        return total + min(policy.segment, chunks) * self.kept


def size_of(backend: Backend, steps: int, states: Sequence[Tensor]) -> SequenceSize:
    """The memory of a sequence of so many steps on this backend."""
    signature = backend.captured.signature
    invariant, same = backend.captured.invariant, backend.captured.aliases
    chunk = max(b - a for a, b in pairwise(chunk_bounds(steps, backend.chunk_steps)))
    moving = [each for k, each in enumerate(states) if k not in invariant]
    lone = [each for k, each in enumerate(states) if k not in invariant and k not in same.values()]
    outputs = [node.meta["val"] for i, node in enumerate(signature.outputs) if node is not None and i not in same]
    inputs = [node.meta["val"] for node in signature.input_gradients if node is not None]
    parameters = [node.meta["val"] for node in signature.parameter_gradients if node is not None]
    drawn = sum(math.prod(each.shape) * each.dtype.itemsize for each in backend.captured.draws)
    # A chunk of the outputs' gradients is made contiguous.
    given = [node.meta["val"] for node in signature.outputs if node is not None]
    # Twice what is carried, and once more what comes in for the state after the last step.
    fixed = _bytes(parameters) + 4 * _bytes(states) + backend.work_bytes(chunk) + chunk * _bytes(given) + steps * drawn
    return SequenceSize(
        steps, chunk, _bytes(moving), _bytes(lone), _bytes(outputs), _bytes(inputs), fixed, backend.kept_bytes(chunk)
    )


def choose_policy(memory: Memory, size: SequenceSize) -> MemoryPolicy:
    """Choose how to save a sequence. Raises UsageError if no way keeps within the bytes."""
    if memory in ("full", "states"):
        return MemoryPolicy(values=memory == "full")
    shortest = min(_segments(size), key=size.peak)
    if memory == "sqrt":
        return shortest
    assert isinstance(memory, int)
    ways = (MemoryPolicy(values=True), MemoryPolicy(values=False), shortest)
    for each in ways:
        if size.peak(each) <= memory:
            return each
    least = min(ways, key=size.peak)
    raise UsageError(
        f"memory={memory} bytes are too few for {size.steps} steps: the least is {size.peak(least)} bytes ({least}), "
        "outputs, states and gradients that are returned included; give more, or run the sequence in parts"
    )


def chunk_bounds(steps: int, chunk: int) -> list[int]:
    """The bounds of chunks: as few as possible, of one length but for the last, which may be shorter."""
    count = max(1, -(-steps // max(chunk, 1)))
    length = -(-steps // count)
    return [*range(0, steps, length), steps] if steps else [0, 0]


def _segments(size: SequenceSize) -> list[MemoryPolicy]:
    """Ways to keep heads of segments only, the one with the lowest peak among them.

    Heads cost s a segment, and the segment that is run again costs c a chunk: the sum is least at sqrt(chunks s / c).
    """
    chunks = len(chunk_bounds(size.steps, size.chunk)) - 1
    inside = size.kept + size.chunk * (size.state_row + size.output_row)
    best = math.sqrt(chunks * size.state_row / max(inside, 1))
    near = {min(max(each, 1), chunks) for each in (math.floor(best), math.ceil(best))}
    return [MemoryPolicy(values=False, segment=each) for each in sorted(near)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
