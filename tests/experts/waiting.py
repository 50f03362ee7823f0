"""Waiting for what other threads and processes bring about, and a time that nobody has to wait for."""

import time
from collections.abc import Callable

import pytest


class Clock:
    """A time that passes when told, in place of `time` in modules that go by it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def rules(self, patch: pytest.MonkeyPatch, *modules: str) -> "Clock":
        """From now on for these modules."""
        for module in modules:
            patch.setattr(f"{module}.time", self)
        return self


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Fails if that does not come true within so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds:g} s for nothing"
        time.sleep(0.005)
