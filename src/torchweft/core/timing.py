"""Time of work on devices. The call that launches work on a GPU returns before the work is done."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def time_after(devices: Iterable[torch.device]) -> float:
    """Wait until these devices have finished all launched work; return the seconds of `time.perf_counter`."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


class LateNumber:
    """A number on a GPU that the host reads one call later. Reading the newest would wait for all work before it."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._ready: Any = None

    def exchange(self, newest: Tensor) -> float | None:
        """Begin to copy `newest` to the host. Returns the number of the call before, or None in the first call."""
        before, ready = self._copy, self._ready
        copy = torch.empty((), dtype=torch.float64, pin_memory=newest.is_cuda)
        self._copy = copy.copy_(newest.detach(), non_blocking=True)
        self._ready = torch.cuda.current_stream(newest.device).record_event() if newest.is_cuda else None
        if ready is not None:
            ready.synchronize()  # it ended long ago, unless the host is more than one call ahead of the GPU
        return None if before is None else before.item()
