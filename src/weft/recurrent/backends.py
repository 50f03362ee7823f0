"""The protocol of backends: what runs a derived plan over a chunk of time.

    sequence   |  chunk  |  chunk  |  chunk  |      a plan knows one step; T is an argument of each call
    states     h0 ...... h ....... h ....... hT     T + 1 rows; a chunk reads its first row and writes the others

Sequences are always run in chunks of a length that depends on the plan alone. So the values of a chunk are still in
the cache when they are read again, and values recomputed to save memory have the same bits as before.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

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
    """

    captured: StepGraph
    chunk_steps: int

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
