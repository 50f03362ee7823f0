"""What runs a derived plan over a stretch of time, whichever way: one protocol for all backends.

    sequence   |  chunk  |  chunk  |  chunk  |      a plan knows one step; how many there are it is told at each call
    states     h0 ...... h ....... h ....... hT     T + 1 rows; a chunk reads its first row and writes the others

Sequences are always run in chunks of a length that depends on the plan alone. So the values of a chunk are still in
the cache when they are read again, and what is recomputed for want of memory has the bits of what was computed first.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from weft.recurrent.captured import Captured

CHUNK_BYTES = 4 << 20
"""About what the values of one chunk may take."""
CHUNK_ROWS = 1024
"""A chunk has at least so many rows, steps times batch, so that products over it are worth their name."""


@dataclass(frozen=True)
class Chunk:
    """Memory of a stretch of L steps, flat leaves each."""

    inputs: list[Tensor]
    """L x ..., contiguous."""
    states: list[Tensor]
    """L+1 x ..., contiguous, row 0 given; of a state that every step hands on as it is, only that: no rows."""
    outputs: list[Tensor]
    """L x ..., contiguous."""

    @property
    def steps(self) -> int:
        """L."""
        return len(self.inputs[0])


@dataclass(frozen=True)
class Gradients:
    """Of a chunk: what is given, and the places for what is found."""

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
class Engine(Protocol):
    """A derived plan, made runnable."""

    captured: Captured

    def chunk_steps(self) -> int:
        """The length of a chunk."""
        ...

    def begin(self) -> Any:
        """What depends on the references only, once for each call of the network."""
        ...

    def forward(self, constants: Any, chunk: Chunk, keep: bool) -> Any:
        """Write states and outputs; with `keep`, return what `backward` reads besides."""
        ...

    def again(self, constants: Any, chunk: Chunk) -> Any:
        """What `forward` would have kept, all states being known."""
        ...

    def backward(self, constants: Any, chunk: Chunk, kept: Any, gradients: Gradients) -> None:
        """Fill in the gradients; `kept` stays as it is."""
        ...

    def release(self, kept: Any) -> None:
        """`kept` is read no more: its memory may serve the next chunk."""
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


def borders(steps: int, chunk: int) -> list[int]:
    """Where chunks begin and end: as few as possible, of one length but for the last, which may be shorter."""
    count = max(1, -(-steps // max(chunk, 1)))
    length = -(-steps // count)
    return [*range(0, steps, length), steps] if steps else [0, 0]


def chunk_length(step_bytes: int, rows: int) -> int:
    """Steps in a chunk, out of the bytes that a step takes and its rows."""
    return max(CHUNK_BYTES // max(step_bytes, 1), -(-CHUNK_ROWS // max(rows, 1)), 1)
