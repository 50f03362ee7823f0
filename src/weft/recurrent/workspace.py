"""Memory that is kept from call to call: fresh memory costs a page fault for every 4 KiB.

    take(bytes) -> a buffer, one that was given back if there is a fitting one;  give(buffer)

The pool holds at most an eighth of the memory that the machine has free, asked anew from time to time; what is more
goes back to the system at once. `release()` empties it. A buffer whose owner forgets it is simply collected.
"""

import mmap
import os
import threading
import time

import torch
from torch import Tensor

PAGES_OF_ITS_OWN = 1 << 18
"""Bytes."""
SHARE = 8
WASTE = 2
"""A buffer may be so many times larger than what is asked for: a last, shorter chunk takes those of the others."""
ASK_AGAIN = 0.5
"""Seconds for which an answer about free memory holds."""


class Workspaces:
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
            fitting = min((n for like, n in self._free if like == kind and size <= n <= WASTE * size), default=None)
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
            if now - self._asked > ASK_AGAIN:
                self._asked, self._limit = now, _free_memory() // SHARE
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
    if size < PAGES_OF_ITS_OWN:
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


pool = Workspaces()
"""The pool of this process."""
os.register_at_fork(after_in_child=pool.forked)


def release() -> None:
    """Give the idle workspaces of recurrent networks back to the system."""
    pool.release()
