"""Background work of a server: everything that it starts, and the reverse order in which all of it ends.

A plain list of threads would not be enough. A thread can hang in a module, a disk or a directory, so all threads
together share one deadline, and each gets at least a moment of it even if those before it took all the time.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from torchweft.core.errors import escape
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.runtime import Runtime
from torchweft.experts.telemetry import RuntimeStatistics

_LOG = logging.getLogger("torchweft.experts.server")
LEAST_SECONDS = 0.1  # for each thread to end, even if the deadline has passed


class PeriodicTask:
    """A thread that calls ``act`` every ``seconds``, counted from the start of one turn to the start of the next.

    After an error it is called again in ``retry_seconds``: a full disk or an unavailable directory can recover. Of
    several failures in a row, the log shows the first, and then that the task works again.
    """

    def __init__(self, name: str, seconds: float, retry_seconds: float, act: Callable[[], object]) -> None:
        self.last_failure: Exception | None = None
        self._name, self._seconds, self._retry_seconds, self._act = name, seconds, retry_seconds, act
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_turns, name=f"torchweft-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Prevent further turns. Return whether the current one ended within ``timeout``. A second call never waits."""
        waited = self._stop.is_set()
        self._stop.set()
        if self._thread.ident is not None:  # None: it was never started, and cannot be joined
            self._thread.join(0.0 if waited else max(0.0, timeout))
        return not self._thread.is_alive()

    def run_turn(self) -> None:
        self._act()

    def _run_turns(self) -> None:
        pause = self._seconds
        while not self._stop.wait(pause):
            start, pause = time.monotonic(), self._seconds
            try:
                self.run_turn()
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
    """Periodic tasks and closing callbacks. `close` ends them in reverse order of their start, within one deadline."""

    def __init__(self) -> None:
        self.periodic: dict[str, PeriodicTask] = {}
        self._closing, self._owned = ExitStack(), ExitStack()
        self._closing.enter_context(self._owned)  # entered first, so closed last
        self._deadline = 0.0

    def own(self, close: Callable[[], None]) -> None:
        """Call ``close`` after everything that was started has ended."""
        self._owned.callback(close)

    def on_close(self, close: Callable[[], object]) -> None:
        """Call ``close`` before the end of everything that was started earlier."""
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
        """Seconds until the deadline of `close`, and at least `LEAST_SECONDS`."""
        return max(LEAST_SECONDS, self._deadline - time.monotonic())

    def close(self, seconds: float) -> None:
        """End everything in about ``seconds``. A thread that hangs in a module or a directory is not waited for."""
        self._deadline = time.monotonic() + seconds
        self._closing.close()


class DeviceRuntimes:
    """One `Runtime` per device, started with the first expert on that device, and ended by ``background``."""

    def __init__(self, background: BackgroundTasks) -> None:
        self._background = background
        self._by_device: dict[str, Runtime] = {}

    @property
    def lost(self) -> str | None:
        return next(iter(self.failures().values()), None)

    def add(self, backend: ExpertBackend) -> None:
        device = str(backend.device)
        if device not in self._by_device:
            runtime = self._by_device[device] = Runtime(name=device)
            self._background.on_close(lambda: runtime.shutdown(drain=False, timeout=self._background.seconds_left()))
            runtime.start()
        self._by_device[device].add(backend)

    def remove(self, backend: ExpertBackend, timeout: float) -> bool:
        """Finish the accepted tasks of this expert. Return whether that ended in time."""
        return self._by_device[str(backend.device)].remove(backend, timeout=timeout)

    def finish(self, deadline: float) -> bool:
        """Finish all accepted tasks. Return whether that ended before ``deadline`` (`time.monotonic`)."""
        return all([runtime.shutdown(timeout=max(0.0, deadline - time.monotonic())) for runtime in self._all()])

    def failures(self) -> dict[str, str]:
        return {runtime.name: runtime.lost for runtime in self._all() if runtime.lost is not None}

    def statistics(self) -> dict[str, RuntimeStatistics]:
        return {runtime.name: runtime.statistics() for runtime in self._all()}

    def _all(self) -> list[Runtime]:
        return list(self._by_device.values())
