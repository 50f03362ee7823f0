r"""Who serves what, as the supervisor tells it in lines: the directory of a trainer, without a server for it.

    {"do": "joined", "address": "127.0.0.1:4711", "uids": [...]}  ──> declare ──┐
    {"do": "left", "address": "127.0.0.1:4711"}                   ──> withdraw ─┼─> LocalDirectory ──> Connections
    {"do": "begin"}  {"do": "finish"}                             ──> events    |
    end of the lines                                              ──> all ends ─┘

The end of the lines is also that of the supervisor, however it came about; so no trainer outlives it.
"""

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

from weft.experts.directory import Lease, LocalDirectory

_LONG = 24 * 3600.0  # seconds of a lease: the supervisor sees processes end, and needs no lease for it


class Following:
    """Reads lines in a thread of its own until they end. `close` waits for that.

    ``ended`` is called at the end of the lines, in that thread.
    """

    def __init__(self, directory: LocalDirectory, lines: Iterable[str], ended: Callable[[], None]) -> None:
        self._directory = directory
        self.begin, self.finish, self.over = threading.Event(), threading.Event(), threading.Event()
        self._leases: dict[str, Lease] = {}
        self._lines, self._ended = lines, ended
        self._thread = threading.Thread(target=self._read, name="weft-demo-following", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the end of the lines."""
        self._thread.join()

    def _read(self) -> None:
        try:
            for line in self._lines:
                self._hear(json.loads(line))
        finally:
            self.over.set()
            self.finish.set()
            self.begin.set()
            self._ended()

    def _hear(self, told: dict[str, Any]) -> None:
        match told["do"]:
            case "joined":
                self._leases[told["address"]] = self._directory.declare(told["uids"], told["address"], _LONG)
            case "left":
                self._directory.withdraw(self._leases.pop(told["address"]))
            case "begin":
                self.begin.set()
            case _:
                self.finish.set()
