"""Time of work on devices. The call that launches work on a GPU returns before the work is done."""

import time
from collections.abc import Iterable

import torch


def time_after(devices: Iterable[torch.device]) -> float:
    """Wait until these devices have finished all launched work; return the seconds of `time.perf_counter`."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()
