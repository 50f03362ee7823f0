"""The protocol of backends, which run a derived plan over a chunk of time.

    sequence   |  chunk  |  chunk  |  chunk  |      a plan knows one step; T is an argument of each call
    states     h0 ...... h ....... h ....... hT     T + 1 rows; a chunk reads its first row and writes the others

Running the whole sequence at once would be simpler. But the values of a chunk are still in the cache when they are read
again, and the length of a chunk depends on the plan alone, so values that are recomputed to save memory have the same
bits as before. `memory=` selects the values that are saved between forward and backward. In segments:

                |----- segment -----|----- segment -----|----- segment -----|
    forward     *                   *                   *                         kept: the state at each *
    backward                                             forward again, keeping all; back; free the memory
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from torchweft.core.errors import UsageError
from torchweft.recurrent.graph import StepGraph

CHUNK_BYTES = 4 << 20  # approximate size of the values of one chunk
CHUNK_ROWS = 1024  # minimum rows of a chunk, steps times batch, so that products over it are efficient


# Classes that are made at every call are not frozen: that makes them three times as expensive.
@dataclass(slots=True)
class Chunk:
    """Memory of a stretch of L steps, flat leaves each."""

    steps: int  # L
    inputs: list[Tensor]  # L x ..., contiguous
    # L+1 x ..., contiguous, row 0 given. A loop-invariant state, which every step passes on unchanged, has no rows.
    states: list[Tensor]
    outputs: list[Tensor]  # L x ..., contiguous


@dataclass(slots=True)
class Gradients:
    """Gradients of a chunk: the incoming ones, and buffers for the computed ones."""

    outputs: list[Tensor]  # L x ..., contiguous
    states: list[Tensor | None]  # L x ..., of the states after each step; None for zeros
    carried: list[Tensor]  # of the state after the last step; becomes that of the state before the first
    inputs: list[Tensor | None]  # L x ..., to be written; None for an input without a gradient
    parameters: list[Tensor | None]  # to be added to; None for a parameter without a gradient


@runtime_checkable
class Backend(Protocol):
    """A derived plan, made runnable."""

    captured: StepGraph  # the step that the plan was derived from
    chunk_steps: int  # the length of a chunk
    missing: int  # the rows that a batch must be filled up with to fit the plan

    # Constants: values that depend on the references only, computed once per call of the network.
    def begin(self) -> Any: ...

    # Write states and outputs. With `keep`, return the other values that `backward` reads.
    def forward(self, constants: Any, chunk: Chunk, keep: bool) -> Any: ...

    # Return the values that `forward` would have kept, given all states.
    def recompute(self, constants: Any, chunk: Chunk) -> Any: ...

    # Compute the gradients. `kept` stays unchanged, because a retained graph runs backward again.
    def backward(self, constants: Any, chunk: Chunk, kept: Any, gradients: Gradients) -> None: ...

    # End the use of `kept`, so that the next chunk can reuse its memory.
    def release(self, kept: Any) -> None: ...

    # Bytes that `forward` keeps for `steps` steps.
    def kept_bytes(self, steps: int) -> int: ...

    # Bytes that a call needs while it runs over a chunk, and constants.
    def work_bytes(self, steps: int) -> int: ...

    # Readable report of the operators that run step by step, and of those moved out of the loops.
    def explain(self) -> str: ...


def copy_bytes(into: Tensor, source: Tensor, row: int = 0) -> None:
    """Copy `source` to a row of `into`, or the first row of `source` to `into`, on the CPU."""
    # Both are contiguous and of one dtype. Bytes, because an operator takes several times as long as the copy of a
    # small state.
    size = min(into.numel(), source.numel()) * source.element_size()
    ctypes.memmove(into.data_ptr() + row * size, source.data_ptr(), size)


def chunk_length(step_bytes: int, rows: int) -> int:
    """Steps in a chunk, from the bytes that a step takes and its rows."""
    return max(CHUNK_BYTES // max(step_bytes, 1), -(-CHUNK_ROWS // max(rows, 1)), 1)


Memory = Literal["full", "states", "sqrt"] | int
MEMORY_MODES: tuple[Literal["full", "states", "sqrt"], ...] = ("full", "states", "sqrt")


@dataclass(frozen=True)
class MemoryPolicy:
    """The values to save: the heads of segments of `segment` chunks, else all states, and with `values` all values."""

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
    lone_state_row: int  # of the states that are not outputs
    output_row: int  # of the outputs that are not states
    input_row: int  # of the inputs that have a gradient
    fixed: int  # of the parameters' gradients, the carried gradients, and the working memory of a call
    kept: int  # saved by a chunk

    def peak(self, policy: MemoryPolicy) -> int:
        """The most bytes that a call with its backward holds at a time, without its arguments."""
        # Outputs, states and the returned gradients count.
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


def size_of(backend: Backend, steps: int, states: Sequence[Tensor], reserved: int = 0) -> SequenceSize:
    """The memory of a sequence of `steps` steps on this backend, and `reserved` bytes of its caller."""
    signature = backend.captured.signature
    invariant, aliases = backend.captured.invariant, backend.captured.aliases
    chunk = max(b - a for a, b in pairwise(chunk_bounds(steps, backend.chunk_steps)))
    moving = [state for k, state in enumerate(states) if k not in invariant]
    lone = [state for k, state in enumerate(states) if k not in invariant and k not in aliases.values()]
    separate = [node.meta["val"] for i, node in enumerate(signature.outputs) if node is not None and i not in aliases]
    inputs = [node.meta["val"] for node in signature.input_gradients if node is not None]
    parameters = [node.meta["val"] for node in signature.parameter_gradients if node is not None]
    outputs = [node.meta["val"] for node in signature.outputs if node is not None]
    fixed = reserved + _total_bytes(parameters) + backend.work_bytes(chunk)
    # The carried gradients, two more rows of them in C, and the gradient that comes in for the last state.
    fixed += 4 * _total_bytes(states)
    fixed += chunk * _total_bytes(outputs)  # a chunk of the outputs' gradients is made contiguous
    fixed += steps * sum(math.prod(draw.shape) * draw.dtype.itemsize for draw in backend.captured.draws)
    rows = (_total_bytes(moving), _total_bytes(lone), _total_bytes(separate), _total_bytes(inputs))
    return SequenceSize(steps, chunk, *rows, fixed, backend.kept_bytes(chunk))


def choose_policy(memory: Memory, size: SequenceSize) -> MemoryPolicy:
    """Choose the values to save. Raises UsageError if no policy keeps within the bytes."""
    if memory in ("full", "states"):
        return MemoryPolicy(values=memory == "full")
    smallest = min(_segment_policies(size), key=size.peak)
    if memory == "sqrt":
        return smallest
    assert isinstance(memory, int)
    policies = (MemoryPolicy(values=True), MemoryPolicy(values=False), smallest)
    for policy in policies:  # the fastest first
        if size.peak(policy) <= memory:
            return policy
    least = min(policies, key=size.peak)
    raise UsageError(
        f"memory={memory} bytes are too few for {size.steps} steps: the least is {size.peak(least)} bytes ({least}), "
        "outputs, states and returned gradients included; give more, or run the sequence in parts"
    )


def chunk_bounds(steps: int, chunk: int) -> list[int]:
    """The bounds of chunks: as few as possible, of equal length, except that the last can be shorter."""
    # Equal lengths: a short remainder would run inefficiently, and on CUDA each length is recorded separately.
    count = max(1, -(-steps // max(chunk, 1)))
    length = -(-steps // count)
    return [*range(0, steps, length), steps] if steps else [0, 0]


def _segment_policies(size: SequenceSize) -> list[MemoryPolicy]:
    """Policies that keep heads of segments only; one of them has the lowest peak."""
    # Heads cost s a segment, and the segment that is run again costs c a chunk. The sum is least at sqrt(chunks s / c).
    chunks = len(chunk_bounds(size.steps, size.chunk)) - 1
    inside = size.kept + size.chunk * (size.state_row + size.output_row)
    best = math.sqrt(chunks * size.state_row / max(inside, 1))
    lengths = {min(max(length, 1), chunks) for length in (math.floor(best), math.ceil(best))}
    return [MemoryPolicy(values=False, segment=length) for length in sorted(lengths)]


def _total_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
