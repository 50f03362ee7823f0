"""The panel's loop in a thread of its own, beside the network thread: neither waits for the other.

start ── thread ── listen        stop ── clients leave ── thread ends
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from weft.experts.panel.panel import Panel
from weft.experts.server.loop import LoopThread


class PanelThread:
    """Runs from `start` to `stop`. Raises ``UsageError`` for an address that is none."""

    def __init__(self, address: str, status: Callable[[], Mapping[str, Any]]) -> None:
        self._panel = Panel(address, status)
        self._loop: LoopThread | None = None

    @property
    def url(self) -> str:
        """Where the page is; after the start."""
        return self._panel.url

    def start(self, seconds: float) -> None:
        """Listen. Raises ``UsageError`` if the address cannot be had, ``TimeoutError`` after so many seconds."""
        self._loop = LoopThread("panel")
        self._loop.run(self._panel.start(), seconds)

    def stop(self, seconds: float) -> None:
        """Listen no more, and end the thread. May be called twice, and without a start."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with suppress(TimeoutError):
                loop.run(self._panel.stop(), seconds)
            loop.close(seconds)
