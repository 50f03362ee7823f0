"""The entry of a server in the directory: announced at the start, renewed in a thread, withdrawn at the end."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchweft.core.errors import UsageError
from torchweft.experts.discovery import Directory
from torchweft.experts.discovery.registration import LeaseHeartbeat, LeaseStatistics
from torchweft.experts.errors import AlreadyDeclaredError
from torchweft.experts.server.background import LEAST_SECONDS, BackgroundTasks


class ServerLease:
    """Lists the experts of a server in ``directory`` (None: nowhere) for as long as it serves.

    ``seconds``: of the lease. It is renewed three times as often, by tasks in ``background``.
    """

    def __init__(self, directory: Directory | None, seconds: float, background: BackgroundTasks) -> None:
        self.heartbeat: LeaseHeartbeat | None = None
        self._directory = directory
        self._seconds = seconds
        self._background = background

    def start(self, uids: Callable[[], Sequence[str]], address: str, replicated: Callable[[str], bool]) -> None:
        """List the experts at ``address``, and keep them listed. Raises as `announce`."""
        if self._directory is None:
            return
        self.heartbeat = LeaseHeartbeat(self._directory, uids, address, self._seconds, replicated)
        self._background.on_close(self.heartbeat.close)
        self.announce()
        # Two threads: a directory that hangs in `look` must not delay the renewal.
        third = self._seconds / 3
        self._background.start_periodic("lease", third, third / 10, self.heartbeat.turn)
        self._background.start_periodic("directory", third, third, self.heartbeat.look)

    def announce(self) -> None:
        """List the present experts now. If the directory is unavailable, the lease thread keeps trying.

        Raises ``UsageError`` for experts that another server still lists when the lease of a dead one would have ended.
        """
        deadline = time.monotonic() + 1.5 * self._seconds
        while self.heartbeat is not None:
            try:
                self.heartbeat.turn()
                self.heartbeat.look()
                return
            except ConnectionError:  # the directory is unavailable, which does not prevent serving
                return
            except AlreadyDeclaredError as error:
                if time.monotonic() >= deadline:
                    raise UsageError(str(error)) from None
            # Random, because two servers that withdraw for each other would otherwise retry in step.
            time.sleep(self._seconds * random.uniform(0.05, 0.15))

    def withdraw(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.withdraw()
        self._background.stop_periodic("lease", LEAST_SECONDS)  # a turn that still runs declares nothing after this

    def statistics(self) -> tuple[tuple[str, ...], dict[str, Any] | None, LeaseStatistics | None]:
        """The listed experts, as far as is known, and statistics of the directory and of the lease."""
        own = self.heartbeat
        return ((), None, None) if own is None else (own.listed, own.directory_statistics(), own.statistics())
