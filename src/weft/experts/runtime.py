"""One thread per device, which works on the most urgent batch of all pools, one after another.

    pool of expert 1, forward   ── oldest task 17 ──┐
    pool of expert 1, backward  ── oldest task 12 ──┼──> 12 is the oldest: that pool's batch goes next
    pool of expert 2, forward   ── empty            ┘

A device does one batch at a time anyway; meanwhile other threads check and queue what comes. The thread does not
outlive its ``with`` block, unless a module hangs, and then `shutdown` says so.
"""

import threading
import time
from collections.abc import Iterable, Sequence

from weft.core.errors import UsageError
from weft.core.validation import LONGEST
from weft.experts.errors import DeviceLostError, ExpertError
from weft.experts.expert import ExpertBackend
from weft.experts.task_pool import TaskPool
from weft.experts.telemetry import RuntimeStatistics

_claiming = threading.Lock()  # of `TaskPool.runtime`, which only that runtime gives up again
_GRACE = 30.0  # seconds that the end of a ``with`` block leaves for what was accepted


class Runtime:
    """Works on the batches of pools, or of all pools of experts.

    Args:
        served: pools and experts; more may be added and removed at any time.
        name: of the thread and in statistics, usually the device.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)
        >>> forward, backward = expert.get_pools()
        >>> with weft.Runtime([expert]):
        ...     (y,) = forward.submit_task(torch.randn(4, 8)).result(10)
        >>> y.shape
        torch.Size([4, 8])
    """

    def __init__(self, served: Iterable[ExpertBackend | TaskPool] = (), *, name: str = "cpu") -> None:
        self.name = name
        self._state = threading.Condition()
        self._pools: dict[TaskPool, bool] = {}  # and whether each is being removed
        self._active: dict[TaskPool, None] = {}
        self._thread: threading.Thread | None = None
        self._ending = False
        self.lost: str | None = None  # the error that ended its thread
        self._working_on: TaskPool | None = None
        self._batches, self._busy, self._began = 0, 0.0, 0.0
        for each in served:
            self.add(each)

    def add(self, *served: ExpertBackend | TaskPool) -> None:
        """Work on these too, or on none: raises ``UsageError`` if one is here, or another runtime works on it."""
        pools = _pools(served)
        with self._state:
            if self.lost is not None:
                raise UsageError(f"runtime {self.name!r} ended with {self.lost}; shut it down and start it again")
            twice = [pool.name for place, pool in enumerate(pools) if pool in self._pools or pool in pools[:place]]
            if twice:
                raise UsageError(f"pool {', '.join(map(repr, twice))} is in runtime {self.name!r} already")
            runs = self._thread is not None
            if runs:
                self._claim(pools)
            self._pools.update(dict.fromkeys(pools, False))
        for pool in pools if runs else ():
            pool.open(self._wake)

    def remove(self, *served: ExpertBackend | TaskPool, drain: bool = True, timeout: float = _GRACE) -> bool:
        """Close these pools, wait until what they accepted is done (with ``drain``), and forget them.

        What is not done after ``timeout`` seconds fails with `ClosedError`; a batch that runs is left to end. Returns
        whether nothing of them runs any more. Raises ``UsageError`` for a pool that is not here.
        """
        pools = list(dict.fromkeys(_pools(served)))
        with self._state:
            strangers = [pool.name for pool in pools if self._pools.get(pool, True)]
            if strangers:
                raise UsageError(f"runtime {self.name!r} has no pools {strangers}, or they are being removed")
            self._pools.update(dict.fromkeys(pools, True))
        end, mine = time.monotonic() + min(timeout, LONGEST), [pool for pool in pools if pool.runtime is self]
        try:
            self._close(mine, "it was removed from its runtime", end if drain else 0.0)
        finally:
            with self._state:
                for pool in pools:
                    del self._pools[pool]
                    self._active.pop(pool, None)
        for pool in mine:
            pool.runtime = None
        return all([pool.drained(max(0.0, end - time.monotonic())) for pool in mine])

    def start(self) -> None:
        """Start the thread. Raises ``UsageError`` if it runs already, or another one that runs has one of the pools."""
        with self._state:
            if self._thread is not None:
                raise UsageError(f"runtime {self.name!r} was started already; shut it down first")
            pools = list(self._pools)
            self._claim(pools)
            self._ending, self._began = False, time.monotonic()
            self._thread = threading.Thread(target=self._run, name=f"weft-runtime-{self.name}", daemon=True)
            self._thread.start()
        for pool in pools:
            pool.open(self._wake)

    def shutdown(self, drain: bool = True, timeout: float = _GRACE) -> bool:
        """Take no more tasks, do what was accepted (with ``drain``), and end the thread. May be called twice.

        What is not done after ``timeout`` seconds fails with `ClosedError`. Returns False if a batch still runs then: a
        module cannot be stopped from outside.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(f"runtime {self.name!r} cannot be shut down from its own thread, which it would wait for")
        end = time.monotonic() + min(timeout, LONGEST)
        with self._state:
            pools, thread = [pool for pool in self._pools if pool.runtime is self], self._thread
        self._close(pools, f"runtime {self.name!r} shuts down", end if drain else 0.0)
        with self._state:
            self._ending = True
            self._state.notify_all()
        for pool in pools:
            pool.runtime = None
        if thread is not None:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return False
            with self._state:
                self._thread = self.lost = None
        return True

    def _close(self, pools: Sequence[TaskPool], why: str, end: float) -> None:
        """Take no more tasks, wait until ``end`` for what was accepted, if a thread works on it, and fail the rest."""
        for pool in pools:
            pool.close(why)
        for pool in pools:
            if self._thread is not None:
                pool.drained(max(0.0, end - time.monotonic()))
            pool.abandon()

    def statistics(self) -> RuntimeStatistics:
        with self._state:
            alive = self._thread is not None and self._thread.is_alive()
            seconds = time.monotonic() - self._began if alive else 0.0
            work = None if self._working_on is None else self._working_on.name
            return RuntimeStatistics(self.name, alive, len(self._pools), self._batches, self._busy, seconds, work)

    def __enter__(self) -> "Runtime":
        self.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if not self.shutdown(drain=kind is None) and kind is None:
            raise ExpertError(
                f"runtime {self.name!r} did not end within {_GRACE:g} s: a batch of pool "
                f"{self.statistics().working_on!r} still runs"
            )

    def _claim(self, pools: Sequence[TaskPool]) -> None:
        """Have these pools to oneself, or raise if another runtime works on any of them."""
        with _claiming:
            others = [pool for pool in pools if pool.runtime not in (None, self)]
            if others:
                told = ", ".join(f"{pool.name!r} is in runtime {pool.runtime.name!r}" for pool in others)
                raise UsageError(
                    f"runtime {self.name!r} cannot work on pools of another: {told}; remove them there first"
                )
            for pool in pools:
                pool.runtime = self

    def _wake(self, pool: TaskPool) -> None:
        with self._state:
            if pool in self._pools:
                self._active[pool] = None
                self._state.notify()

    def _run(self) -> None:
        try:
            while (pool := self._next()) is not None:
                start = time.monotonic()
                worked = pool.run_batch()
                with self._state:
                    if pool.queue.count and pool in self._pools:  # what comes later wakes the runtime itself
                        self._active[pool] = None
                    self._working_on = None
                    self._batches += worked
                    self._busy += time.monotonic() - start
        except BaseException as error:  # should not happen; but every waiter needs an answer
            with self._state:
                self.lost, self._working_on = f"{type(error).__name__}: {error}", None
                pools = list(self._pools)
            for pool in pools:
                pool.perish(f"the thread of runtime {self.name!r} ended with {self.lost}")
            if not isinstance(error, DeviceLostError):
                raise

    def _next(self) -> TaskPool | None:
        """Wait for a pool with a batch that is ready, and choose the one with the oldest task; None at the end."""
        with self._state:
            while not self._ending:
                now = time.monotonic()
                best: tuple[int, TaskPool] | None = None
                wake: float | None = None
                for pool in list(self._active):
                    number, later = pool.urgency(now)
                    if number is not None and (best is None or number < best[0]):
                        best = (number, pool)
                    elif number is None and later is None:
                        del self._active[pool]
                    elif later is not None:
                        wake = later if wake is None else min(wake, later)
                if best is not None:
                    # Before its batch is taken, so that no task comes between a look at its queue and its removal.
                    del self._active[best[1]]
                    self._working_on = best[1]
                    return best[1]
                self._state.wait(None if wake is None else max(0.0, wake - now))
            return None


def _pools(served: Iterable[ExpertBackend | TaskPool]) -> list[TaskPool]:
    return [pool for each in served for pool in ([each] if isinstance(each, TaskPool) else each.pools)]
