"""A process that only sleeps. Its delay is that of the machine, without torchweft.

sleep 5 ms ── measure the delay ── sleep 5 ms ── ...        the largest delay is reported at the end
"""

import subprocess
import sys
from types import TracebackType
from typing import Self

_PROGRAM = """
import sys, threading, time
over, latest = threading.Event(), 0.0
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.is_set():
    start = time.monotonic()
    time.sleep(0.005)
    latest = max(latest, time.monotonic() - start - 0.005)
print(latest)
"""
_DEADLINE = 10.0


class Sleeper:
    """Sleeps during the ``with`` block. ``latest`` is the largest delay in seconds, set after the block."""

    latest = 0.0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.latest = float(self._process.communicate(timeout=_DEADLINE)[0])
        finally:
            self._process.kill()
            self._process.wait()
