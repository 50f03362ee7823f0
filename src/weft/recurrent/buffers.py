"""Memory of a sequence: buffers of its outputs and states, and a pool of workspaces that outlive a call.

    rows of a state     initial | after step 1 | ... | after step T      an output that is a state lies there as well
    chunk of steps 4-7                 '── row 4 to row 8 ──'             begins with the state before it

A state that passes through the cell unchanged has no rows; one that is not kept whole has none either, but `heads`:
what each segment begins with.

Workspaces are used again because fresh memory costs a page fault for every 4 KiB. The pool holds at most an eighth of
the memory that the machine has free, asked anew from time to time; what is more goes back to the system at once.
`release()` empties it. A workspace whose owner forgets it is simply collected.
"""

import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.recurrent.engine import Chunk, Engine, borders

_OWN_PAGES = 1 << 18
"""Bytes."""
_SHARE = 8
_WASTE = 2
"""A buffer may be so many times larger than what is asked for: a last, shorter chunk takes those of the others."""
_ASK_AGAIN = 0.5
"""Seconds for which an answer about free memory holds."""


@dataclass
class Buffers:
    """Outputs and states over a stretch of steps: None for a state that is not kept whole; `heads`: see above."""

    outputs: list[Tensor]
    states: list[Tensor | None]
    heads: list[list[Tensor]]


class SequenceBuffers:
    """The memory of one sequence. Holds its inputs and initial states until `release`."""

    def __init__(self, engine: Engine, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self.inputs = [each.detach().resolve_neg() for each in inputs]
        self.states = [each.detach().resolve_neg().contiguous() for each in states]
        self.steps = len(inputs[0])
        self.borders = borders(self.steps, engine.chunk_steps())
        self.still = engine.captured.passing
        self._captured, self._same = engine.captured, engine.captured.aliases

    @property
    def device(self) -> torch.device:
        """That of all of it."""
        return self.inputs[0].device

    def release(self) -> None:
        """Hold nothing any more."""
        self.inputs.clear()
        self.states.clear()

    def allocate(self, steps: int, *, whole: bool) -> Buffers:
        """SequenceBuffers for so many steps: all states, or only those that are outputs as well."""
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
        return Buffers(outputs, rows, [])

    def spare(self, buffers: Buffers) -> dict[int, Tensor]:
        """SequenceBuffers for one chunk of every state that is not kept whole, by its number.

        Used for all chunks: blocks of this size, freed and asked for again between small ones, would never fit where
        the last one lay, and a process would grow by one for each chunk.
        """
        longest = max(end - start for start, end in pairwise(self.borders))
        return {
            k: each.new_empty(longest + 1, *each.shape)
            for k, (each, whole) in enumerate(zip(self.states, buffers.states, strict=True))
            if whole is None and k not in self.still
        }

    def chunk(
        self,
        buffers: Buffers,
        start: int,
        end: int,
        first: Sequence[Tensor],
        spare: Mapping[int, Tensor],
        offset: int = 0,
    ) -> Chunk:
        """A chunk to be run. `first` are the states that it begins with; `offset` the step where `buffers` begin.

        `spare`: rows of the states that have none of their own.
        """
        inputs = [each[start:end].contiguous() for each in self.inputs]
        states: list[Tensor] = []
        for k, (state, whole) in enumerate(zip(first, buffers.states, strict=True)):
            if k in self.still:
                states.append(self.states[k])
                continue
            part = spare[k][: end - start + 1] if whole is None else whole[start - offset : end - offset + 1]
            part[0].copy_(state)
            states.append(part)
        outputs = [
            states[self._same[i]][1:] if i in self._same else each[start - offset : end - offset]
            for i, each in enumerate(buffers.outputs)
        ]
        return Chunk(inputs, states, outputs)

    def chunk_of(self, buffers: Buffers, start: int, end: int) -> Chunk:
        """A chunk that was run, of which all states were kept."""
        inputs = [each[start:end].contiguous() for each in self.inputs]
        states = [
            s if whole is None else whole[start : end + 1] for s, whole in zip(self.states, buffers.states, strict=True)
        ]
        return Chunk(inputs, states, [each[start:end] for each in buffers.outputs])

    def after_steps(self, buffers: Buffers, k: int) -> Tensor:
        """A state after every step."""
        whole = buffers.states[k]
        return self.states[k].expand(self.steps, *self.states[k].shape) if whole is None else whole[1:]

    def read_again(self, buffers: Buffers) -> list[tuple[str, Tensor]]:
        """What backward reads and others can write to: each tensor with its name."""
        parts = {
            "input": self.inputs,
            "output": buffers.outputs,
            "state": [each for each in buffers.states if each is not None],
            "initial state": [self.states[k] for k in sorted(self.still)],
            "parameter": self._captured.parameters,
            "constant": self._captured.constants,
        }
        return [(f"{what} {i}", each) for what, values in parts.items() for i, each in enumerate(values)]


class WorkspacePool:
    """A pool of byte buffers on the CPU, shared by all networks of a process; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[str, int], list[Tensor]] = {}
        self._held = 0
        self._limit = 0
        self._asked = float("-inf")
        self._reused = 0
        self._made = 0

    def take(self, size: int, kind: str = "") -> Tensor:
        """A buffer of at least `size` bytes, its content arbitrary; of those that were given back as of this kind."""
        size = rounded(size)
        with self._lock:
            fitting = min((n for like, n in self._free if like == kind and size <= n <= _WASTE * size), default=None)
            if fitting is not None:
                return self._out(kind, fitting)
            self._made += 1
        try:
            return _fresh(size)
        except (RuntimeError, OSError):  # out of memory: give up what is idle, and try once more
            self.release()
            return _fresh(size)

    def give(self, buffer: Tensor, kind: str = "") -> None:
        """The buffer is read no more. Kinds are apart, so that what is kept long does not take what is used often."""
        size = buffer.numel()
        with self._lock:
            now = time.monotonic()
            if now - self._asked > _ASK_AGAIN:
                self._asked, self._limit = now, _free_memory() // _SHARE
                if self._held > self._limit:
                    self._drop()
            if self._held + size <= self._limit:
                self._free.setdefault((kind, size), []).append(buffer)
                self._held += size

    def release(self) -> None:
        """Let go of every buffer that is idle."""
        with self._lock:
            self._drop()

    def forked(self) -> None:
        """In a child: another thread may have held the lock, and the parent's buffers are not needed."""
        self._lock = threading.Lock()
        self._drop()

    def statistics(self) -> dict[str, int]:
        """Bytes held idle, and how many buffers were made and used again."""
        with self._lock:
            return {"held_bytes": self._held, "limit_bytes": self._limit, "made": self._made, "reused": self._reused}

    def _out(self, kind: str, size: int) -> Tensor:
        buffers = self._free[kind, size]
        buffer = buffers.pop()
        if not buffers:
            del self._free[kind, size]
        self._held -= size
        self._reused += 1
        return buffer

    def _drop(self) -> None:
        self._free.clear()
        self._held = 0


def rounded(size: int) -> int:
    """What a buffer for so many bytes takes: up to 1/8 of a power of two, so that sizes which differ a little share."""
    size = max(size, 1)
    grain = max(64, 1 << max(size.bit_length() - 4, 0))
    return -(-size // grain) * grain


def _fresh(size: int) -> Tensor:
    """Memory of the system's own; a large one in pages of its own, which go back to the system when it is collected.

    An allocator would keep them, so that a byte budget were exceeded by what nobody uses.
    """
    if size < _OWN_PAGES:
        return torch.empty(size, dtype=torch.uint8)
    # Private: shared pages would be the same memory in a forked child. By an operator in the end, so that who counts
    # the memory of PyTorch's tensors sees this one too.
    return torch.frombuffer(
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    ).detach()


def _free_memory() -> int:
    """Bytes that new allocations could get without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


pool = WorkspacePool()
"""The pool of this process."""
os.register_at_fork(after_in_child=pool.forked)


def release() -> None:
    """Give the idle workspaces of recurrent networks back to the system.

    Example:
        >>> weft.recurrent.release()
    """
    pool.release()
