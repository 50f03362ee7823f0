"""What is saved between forward and backward, and what is recomputed: `memory=`.

    "full"      every value that backward reads                          nothing is made again
    "states"    the states of all steps                                  the other values, chunk by chunk
    "sqrt"      the state at the head of every segment of ~ sqrt(T)      a segment, step by step, then back through it
    bytes       the fastest of these that fits

                |----- segment -----|----- segment -----|----- segment -----|
    forward     *                   *                   *                         kept: the state at each *
    backward                                             forward again, keeping all; back; give the memory back

Trading time for memory at sqrt(T) is Griewank's (1992) and Chen et al.'s (2016); that states alone suffice to make the
rest of all steps at once is what a recurrent net has and a deep one has not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor

from weft.core.errors import UsageError
from weft.recurrent.backends import Backend

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

    def peak(self, choose_policy: MemoryPolicy) -> int:
        """The most bytes that a call with its backward holds at a time, besides what it was given.

        Outputs, states and the gradients that it returns count.
        """
        outputs = (self.steps + 1) * (self.output_row + self.state_row - self.lone_state_row)
        total = outputs + self.steps * self.input_row + self.fixed
        if choose_policy.segment is None:
            chunks = len(chunk_bounds(self.steps, self.chunk)) - 1
            total += (self.steps + 1) * self.lone_state_row
            return total + (chunks if choose_policy.values else 1) * self.kept
        whole = chunk_bounds(self.steps, self.chunk)
        segments = math.ceil((len(whole) - 1) / choose_policy.segment)
        longest = min(choose_policy.segment * self.chunk, self.steps)
        inside = longest * (self.state_row + self.output_row) + self.state_row
        return total + segments * self.state_row + inside + min(choose_policy.segment, len(whole) - 1) * self.kept


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
    given = [
        node.meta["val"] for node in signature.outputs if node is not None
    ]  # a chunk of their gradients, contiguous
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
