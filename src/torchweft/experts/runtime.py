"""Runtime: one thread per device, which works on the most urgent batch of all pools, one after another.

    pool of expert 1, forward   ── oldest task 17 ──┐
    pool of expert 1, backward  ── oldest task 12 ──┼──> 12 is the oldest: that pool's batch is next
    pool of expert 2, forward   ── empty            ┘

A thread per pool would be simpler, but a device runs one batch at a time anyway, and threads would only compete for it
and for the GIL. Other threads check and queue tasks while a batch runs.

Lock order: the state of a runtime before the locks of its pools. Pools call `Runtime.wake_for` without theirs.
"""

import threading
import time
from collections.abc import Iterable, Sequence

from torchweft.core.errors import UsageError
from torchweft.core.validation import MAX_SECONDS
from torchweft.experts.errors import DeviceLostError, ExpertError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.statistics import RuntimeStatistics
from torchweft.experts.task_pool import TaskPool

# One lock for all runtimes: a runtime claims all its pools or none, even if two of them start at the same time.
_claiming = threading.Lock()
_GRACE = 30.0  # seconds that the end of a ``with`` block leaves for accepted tasks


class Runtime:
    """Works on the batches of pools, or of all pools of experts. ``name``: usually the device.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)
        >>> with weft.Runtime([expert]):
        ...     (y,) = expert.get_pools()[0].submit_task(torch.randn(4, 8)).result(10)
    """

    def __init__(self, served: Iterable[ExpertBackend | TaskPool] = (), *, name: str = "cpu") -> None:
        self.name = name
        self.lost: str | None = None  # the error that ended its thread
        self._state = threading.Condition()
        self._pools: dict[TaskPool, bool] = {}  # and whether each is being removed
        self._active: dict[TaskPool, None] = {}  # those with tasks, in the order in which they were woken
        self._thread: threading.Thread | None = None
        self._ending = False
        self._working_on: TaskPool | None = None
        self._batches, self._busy, self._started_at = 0, 0.0, 0.0
        self.add(*served)

    def add(self, *served: ExpertBackend | TaskPool) -> None:
        """Work on these too. Raises ``UsageError``, and adds none, if one is here or another runtime works on it."""
        pools = _pools_of(served)
        with self._state:
            if self.lost is not None:
                raise UsageError(f"runtime {self.name!r} ended with {self.lost}; shut it down and start it again")
            twice = [pool.name for place, pool in enumerate(pools) if pool in self._pools or pool in pools[:place]]
            if twice:
                raise UsageError(f"pool {', '.join(map(repr, twice))} is in runtime {self.name!r} already")
            # A stopped runtime claims its pools when it starts, so several can be prepared for the same pools.
            runs = self._thread is not None
            if runs:
                self._claim_pools(pools)
            self._pools.update(dict.fromkeys(pools, False))
        for pool in pools if runs else ():
            pool.open_pool()

    def remove(self, *served: ExpertBackend | TaskPool, drain: bool = True, timeout: float = _GRACE) -> bool:
        """Close these pools, wait until their accepted tasks are done (with ``drain``), and forget them.

        Tasks that are not done in time fail with `ClosedError`. Returns whether all their batches have ended.
        """
        pools = list(dict.fromkeys(_pools_of(served)))
        with self._state:
            unknown = [pool.name for pool in pools if self._pools.get(pool, True)]
            if unknown:
                raise UsageError(f"runtime {self.name!r} has no pools {unknown}, or they are being removed")
            self._pools.update(dict.fromkeys(pools, True))
        end, claimed = time.monotonic() + min(timeout, MAX_SECONDS), [pool for pool in pools if pool.runtime is self]
        try:
            self._close_pools(claimed, "it was removed from its runtime", end if drain else 0.0)
        finally:
            with self._state:
                for pool in pools:
                    del self._pools[pool]
                    self._active.pop(pool, None)
        # Released last: as long as they were in `_pools`, this thread could have taken one more batch.
        for pool in claimed:
            pool.assign_runtime(None)
        # A list, so that each pool is waited for, even after one that is not idle in time.
        return all([pool.wait_until_idle(max(0.0, end - time.monotonic())) for pool in claimed])

    def start(self) -> None:
        """Start the thread. Raises ``UsageError`` if it runs, or another running runtime has one of the pools."""
        with self._state:
            if self._thread is not None:
                raise UsageError(f"runtime {self.name!r} was started already; shut it down first")
            pools = list(self._pools)
            self._claim_pools(pools)
            self._ending, self._started_at = False, time.monotonic()
            self._thread = threading.Thread(
                target=self._run_batches, name=f"torchweft-runtime-{self.name}", daemon=True
            )
            self._thread.start()
        for pool in pools:
            pool.open_pool()

    def shutdown(self, drain: bool = True, timeout: float = _GRACE) -> bool:
        """Reject new tasks, finish accepted ones (with ``drain``), and end the thread. Can be called again.

        Tasks that are not done in time fail with `ClosedError`. Returns False if a batch still runs then.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(f"runtime {self.name!r} cannot be shut down from its own thread, which it would wait for")
        end = time.monotonic() + min(timeout, MAX_SECONDS)
        with self._state:
            pools, thread = [pool for pool in self._pools if pool.runtime is self], self._thread
        self._close_pools(pools, f"runtime {self.name!r} shuts down", end if drain else 0.0)
        with self._state:
            self._ending = True
            self._state.notify_all()
        for pool in pools:
            pool.assign_runtime(None)
        if thread is not None:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return False
            with self._state:
                self._thread = self.lost = None
        return True

    def wake_for(self, pool: TaskPool) -> None:
        with self._state:
            # Another runtime's pool can call this while it moves, so it must be one of ours.
            if pool in self._pools:
                self._active[pool] = None
                self._state.notify()

    def statistics(self) -> RuntimeStatistics:
        with self._state:
            alive = self._thread is not None and self._thread.is_alive()
            seconds = time.monotonic() - self._started_at if alive else 0.0
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

    def _close_pools(self, pools: Sequence[TaskPool], reason: str, end: float) -> None:
        """Reject new tasks, wait until ``end`` for accepted ones if a thread works on them, and fail the rest."""
        # All are closed before the first wait, so that the wait for one does not let tasks into the others.
        for pool in pools:
            pool.close_pool(reason)
        for pool in pools:
            if self._thread is not None:
                pool.wait_until_idle(max(0.0, end - time.monotonic()))
            pool.fail_waiting()

    def _claim_pools(self, pools: Sequence[TaskPool]) -> None:
        with _claiming:
            owners = [(pool.name, pool.runtime) for pool in pools]
            others = [(pool, owner.name) for pool, owner in owners if owner is not None and owner is not self]
            if others:
                listed = ", ".join(f"{pool!r} is in runtime {runtime!r}" for pool, runtime in others)
                raise UsageError(f"runtime {self.name!r} cannot take pools of others: {listed}; remove them there")
            for pool in pools:
                pool.assign_runtime(self)

    def _run_batches(self) -> None:
        try:
            while (pool := self._next_pool()) is not None:
                start = time.monotonic()
                worked = pool.run_batch()
                with self._state:
                    # Read without the pool's lock: a task that arrives later wakes the runtime itself.
                    if pool.pending.queue.count and pool in self._pools:
                        self._active[pool] = None
                    self._working_on = None
                    self._batches += worked
                    self._busy += time.monotonic() - start
        except BaseException as error:
            # A lost GPU, or a bug. Every waiter still needs an answer.
            with self._state:
                self.lost, self._working_on = f"{type(error).__name__}: {error}", None
                pools = list(self._pools)
            for pool in pools:
                pool.fail_all(f"the thread of runtime {self.name!r} ended with {self.lost}")
            if not isinstance(error, DeviceLostError):
                raise

    def _next_pool(self) -> TaskPool | None:
        """Wait for a pool with a ready batch, and choose the one with the oldest task. None at the end."""
        with self._state:
            while not self._ending:
                now = time.monotonic()
                best: tuple[int, TaskPool] | None = None
                wake: float | None = None
                for pool in list(self._active):
                    number, later = pool.oldest_ready(now)
                    if number is not None and (best is None or number < best[0]):
                        best = (number, pool)
                    elif number is None and later is None:
                        del self._active[pool]
                    elif later is not None:
                        wake = later if wake is None else min(wake, later)
                if best is not None:
                    # Removed before its batch is taken. Otherwise a task that arrives after the batch could activate
                    # the pool first, and this removal would lose it.
                    del self._active[best[1]]
                    self._working_on = best[1]
                    return best[1]
                self._state.wait(None if wake is None else max(0.0, wake - now))
            return None


def _pools_of(served: Iterable[ExpertBackend | TaskPool]) -> list[TaskPool]:
    return [pool for item in served for pool in ([item] if isinstance(item, TaskPool) else item.pools)]
