"""Settings of the memory allocator for servers on the CPU: freed memory stays in the process, on large pages.

a batch ends ── frees 34 MB ──> C library ──> system        the next batch: up to 9000 page faults
                                    '──> the next batch     none
"""

import ctypes
import os

import torch

# mallopt's numbers, as in malloc.h; and by which variable a user may have set the same
_MORE = (1 << 31) - 1
_SETTINGS = (
    (-1, _MORE, "MALLOC_TRIM_THRESHOLD_"),  # never give back what is free at the end of the heap
    (-3, _MORE, "MALLOC_MMAP_THRESHOLD_"),  # large blocks lie there too
    (-8, 1, "MALLOC_ARENA_MAX"),  # and those of all threads: other heaps are at most 64 MB, and always given back
)

_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # PyTorch's


def keep_freed_memory() -> bool:
    """Have glibc keep what this process frees, from now on; its size is then that of its peak. `weft serve` calls it.

    To be called before threads are started. What the environment says of the same (``MALLOC_...``, see mallopt(3)) is
    left alone. Returns whether the C library could be told.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    wanted = [(number, value) for number, value, name in _SETTINGS if name not in os.environ]
    return all([mallopt(number, value) for number, value in wanted])


def use_large_pages() -> None:
    """Have PyTorch ask Linux for large pages (2 MB) for its large tensors on the CPU; `weft serve` calls it.

    To be called before the first tensor is made, for PyTorch decides it once. What the environment says
    (``THP_MEM_ALLOC_ENABLE``) is left alone.
    """
    if _LARGE_PAGES in os.environ:
        return
    os.environ[_LARGE_PAGES] = "1"
    try:
        torch.empty(1, device="cpu")  # here it is decided; what is started from here is not to hear of it
    finally:
        del os.environ[_LARGE_PAGES]
