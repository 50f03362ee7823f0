"""Background work of a server: everything that it starts, and the reverse order in which all of it ends.

A plain list of threads would not be enough, because a thread can hang in a module, a disk or a directory. All threads
share one deadline. Each gets at least a moment of it, even if those before it took all the time.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torchweft.core.errors import UsageError, escape
from torchweft.experts.discovery import Directory
from torchweft.experts.discovery.registration import LeaseHeartbeat
from torchweft.experts.errors import AlreadyDeclaredError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.statistics import DirectoryStatistics, LeaseStatistics, RuntimeStatistics
from torchweft.experts.task_pool import Runtime

_LOG = logging.getLogger("torchweft.experts.server")
LEAST_SECONDS = 0.1  # for each thread to end, even if the deadline has passed


class PeriodicTask:
    """A thread that calls ``act`` every ``seconds``, counted from the start of one turn to the start of the next."""

    # After an error it is called again in ``retry_seconds``. Of several failures in a row, the log shows the first, and
    # then that the task works again.
    def __init__(self, name: str, seconds: float, retry_seconds: float, act: Callable[[], object]) -> None:
        self.last_failure: Exception | None = None
        self.act = act
        self._name, self._seconds, self._retry_seconds = name, seconds, retry_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_turns, name=f"torchweft-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Prevent further turns. Returns whether the current one ended in time. A second call never waits."""
        waited = self._stop.is_set()
        self._stop.set()
        if self._thread.ident is not None:  # None: it was never started, and cannot be joined
            self._thread.join(0.0 if waited else max(0.0, timeout))
        return not self._thread.is_alive()

    def _run_turns(self) -> None:
        pause = self._seconds
        while not self._stop.wait(pause):
            start, pause = time.monotonic(), self._seconds
            try:
                self.act()
            except Exception as error:
                pause = self._retry_seconds
                if self.last_failure is None:
                    _LOG.warning("%s: %s; tried again every %g s", self._name, escape(error), pause)
                self.last_failure = error
            else:
                if self.last_failure is not None:
                    _LOG.warning("%s: works again", self._name)
                self.last_failure = None
            pause = max(0.0, start + pause - time.monotonic())


class BackgroundTasks:
    """Periodic tasks and closing callbacks, which `close` ends in reverse order of their start."""

    def __init__(self) -> None:
        self.periodic: dict[str, PeriodicTask] = {}
        self._closing, self._owned = ExitStack(), ExitStack()
        self._closing.enter_context(self._owned)  # entered first, so closed last
        self._deadline = 0.0

    def own(self, close: Callable[[], None]) -> None:
        self._owned.callback(close)

    def on_close(self, close: Callable[[], object]) -> None:
        self._closing.callback(close)

    def start_periodic(self, name: str, seconds: float, retry_seconds: float, act: Callable[[], object]) -> None:
        task = self.periodic[name] = PeriodicTask(name, seconds, retry_seconds, act)
        self.on_close(lambda: task.stop(self.seconds_left()))
        task.start()

    def stop_periodic(self, name: str, timeout: float) -> None:
        if name in self.periodic:
            self.periodic[name].stop(timeout)

    def failures(self) -> dict[str, str]:
        tasks = dict(self.periodic)  # a copy, because tasks can be started during the iteration
        return {name: str(task.last_failure) for name, task in tasks.items() if task.last_failure}

    def seconds_left(self) -> float:
        # Each gets at least a moment, even if those before it took all the time.
        return max(LEAST_SECONDS, self._deadline - time.monotonic())

    def close(self, seconds: float) -> None:
        # Within one deadline for all. A thread that hangs in a module or a directory is not waited for.
        self._deadline = time.monotonic() + seconds
        self._closing.close()


class DeviceRuntimes:
    def __init__(self, background: BackgroundTasks) -> None:
        self._background = background
        self._by_device: dict[str, Runtime] = {}

    @property
    def lost(self) -> str | None:
        return next(iter(self.failures().values()), None)

    def add(self, backend: ExpertBackend) -> None:
        device = str(backend.device)
        if device not in self._by_device:
            # Started with the first expert on its device, and ended in reverse order with everything else.
            runtime = self._by_device[device] = Runtime(name=device)
            self._background.on_close(lambda: runtime.shutdown(drain=False, timeout=self._background.seconds_left()))
            runtime.start()
        self._by_device[device].add(backend)

    def remove(self, backend: ExpertBackend, timeout: float) -> bool:
        return self._by_device[str(backend.device)].remove(backend, timeout=timeout)

    def finish(self, deadline: float) -> bool:
        """Finish all accepted tasks. Returns whether that ended before ``deadline`` (`time.monotonic`)."""
        return all([runtime.shutdown(timeout=max(0.0, deadline - time.monotonic())) for runtime in self._all()])

    def failures(self) -> dict[str, str]:
        return {runtime.name: runtime.lost for runtime in self._all() if runtime.lost is not None}

    def statistics(self) -> dict[str, RuntimeStatistics]:
        return {runtime.name: runtime.statistics() for runtime in self._all()}

    def _all(self) -> list[Runtime]:
        return list(self._by_device.values())


class ServerLease:
    """Lists the experts of a server in ``directory`` (None: nowhere) for as long as it serves."""

    def __init__(self, directory: Directory | None, seconds: float, background: BackgroundTasks) -> None:
        self.heartbeat: LeaseHeartbeat | None = None
        self._directory, self._seconds, self._background = directory, seconds, background

    def start(self, uids: Callable[[], Sequence[str]], address: str, replicated: Callable[[str], bool]) -> None:
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
        """List the present experts now. If the directory is unavailable, the lease thread keeps trying."""
        # Raises ``UsageError`` only after the lease of a dead server would have ended.
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

    def statistics(self) -> tuple[tuple[str, ...], DirectoryStatistics | None, LeaseStatistics | None]:
        own = self.heartbeat
        return ((), None, None) if own is None else (own.listed, own.directory_statistics(), own.statistics())
