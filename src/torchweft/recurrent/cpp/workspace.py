"""The workspace pool: byte buffers on the CPU, reused from call to call by all networks and threads of a process.

PyTorch's allocator on the CPU returns a large buffer to the system when it is freed. Fresh memory then costs a page
fault for every 4 KiB. An allocator that keeps all idle memory would exceed a byte budget without notice. So the pool
keeps buffers, but only up to a fraction of the memory that is free.
"""

import mmap
import os
import threading
import time
from contextlib import suppress

import torch
from torch import Tensor

_OWN_PAGES = 1 << 18  # bytes from which a buffer is mapped by itself
_SHARE = 8  # the pool holds at most this fraction of the free memory
_WASTE = 2  # a buffer can be this many times larger than requested: the last, shorter chunk uses those of the others
_ASK_AGAIN = 0.5  # seconds for which a reading of free memory is valid


class WorkspacePool:
    """Byte buffers that calls use one after another."""

    # The pool holds at most an eighth of the memory that the machine has free, which it reads again from time to time.
    # Buffers beyond that return to the system at once. A buffer that is never given back is simply collected.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[str, int], list[Tensor]] = {}
        self._held = 0
        self._limit = 0
        self._asked = float("-inf")
        self._reused = 0
        self._made = 0

    def acquire(self, size: int, kind: str = "") -> Tensor:
        """A buffer of at least `size` bytes with arbitrary content. Only buffers of the same kind are reused."""
        size = rounded(size)
        with self._lock:
            # The smallest that fits: a larger one can serve the next, larger request.
            fitting = min((n for like, n in self._free if like == kind and size <= n <= _WASTE * size), default=None)
            if fitting is not None:
                buffers = self._free[kind, fitting]
                buffer = buffers.pop()
                if not buffers:  # an empty list would only make the search longer
                    del self._free[kind, fitting]
                self._held -= fitting
                self._reused += 1
                return buffer
            self._made += 1
        # Outside of the lock: mapping memory can take long, and the second attempt releases buffers under the lock.
        try:
            return _new_buffer(size)
        except (RuntimeError, OSError):  # out of memory
            self.release()
            return _new_buffer(size)

    def give(self, buffer: Tensor, kind: str = "") -> None:
        """Return a buffer. Kinds are separate, so that long-lived buffers do not take those of short-lived use."""
        size = buffer.numel()
        with self._lock:
            # The limit is read rarely, because parsing /proc/meminfo takes longer than a small chunk.
            now = time.monotonic()
            if now - self._asked > _ASK_AGAIN:
                self._asked, self._limit = now, _free_memory() // _SHARE
                if self._held > self._limit:
                    self._drop_all()
            if self._held + size <= self._limit:
                self._free.setdefault((kind, size), []).append(buffer)
                self._held += size

    def release(self) -> None:
        with self._lock:
            self._drop_all()

    def reset_in_child(self) -> None:
        """After a fork: another thread could have held the lock, and the parent's buffers are not needed."""
        self._lock = threading.Lock()
        self._drop_all()

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"held_bytes": self._held, "limit_bytes": self._limit, "made": self._made, "reused": self._reused}

    def _drop_all(self) -> None:
        self._free.clear()
        self._held = 0


def rounded(size: int) -> int:
    """Size class of a buffer: rounded up to 1/8 of a power of two, so that similar sizes share buffers."""
    size = max(size, 1)
    grain = max(64, 1 << max(size.bit_length() - 4, 0))
    return -(-size // grain) * grain


def _new_buffer(size: int) -> Tensor:
    if size < _OWN_PAGES:
        return torch.empty(size, dtype=torch.uint8)
    # Pages of its own return to the system when the buffer is freed. An allocator would keep them, and idle memory
    # would exceed a byte budget. The pages are private, because a forked child would write into shared ones.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # An operator makes the memory visible to modes that count the bytes of PyTorch's tensors.
    return torch.frombuffer(pages, dtype=torch.uint8).detach()


def _free_memory() -> int:
    """Bytes that new allocations can get without swapping."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


pool = WorkspacePool()  # the pool of this process
os.register_at_fork(after_in_child=pool.reset_in_child)


def release() -> None:
    """Give the idle workspaces of recurrent networks back to the system.

    Example:
        >>> weft.recurrent.release()
    """
    pool.release()
