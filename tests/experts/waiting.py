"""Waiting for what other threads and processes bring about."""

import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Fails if that does not come true within so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds:g} s for nothing"
        time.sleep(0.005)
