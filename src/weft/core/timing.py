"""Time of work on devices. A GPU works after the call that launched the work has returned."""

import time
from collections.abc import Iterable

import torch


def time_after(devices: Iterable[torch.device]) -> float:
    """Seconds of `time.perf_counter` after these devices have finished all work launched on them so far."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()
