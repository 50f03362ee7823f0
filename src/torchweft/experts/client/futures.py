"""Futures of calls: one thread of the process drives all calls that nobody waits for.

    remote.submit(x) ── steps ──> CallLoop in the thread of futures ──> ExpertFuture ──> result(), callbacks, await

In asyncio, all results that arrive before the event loop runs again wake it once: a wake-up writes to a pipe, which
costs more than a small answer.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary, ref

from torchweft.experts.client.calls import CallLoop, Steps, StepsRun

_IDLE = 1.0  # seconds without calls after which the thread ends
T = TypeVar("T")


class ExpertFuture(Future[T]):
    """The result of a call that was not waited for. Can be cancelled, also while it runs, and awaited.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)
        >>> with weft.Server([expert]) as server, weft.RemoteExpert("ffn.0", server.address) as remote:
        ...     futures = [remote.submit(torch.randn(1, 8)) for _ in range(3)]
        ...     [future.result().shape for future in futures]
        [torch.Size([1, 8]), torch.Size([1, 8]), torch.Size([1, 8])]
    """

    def __await__(self) -> Generator[Any, Any, T]:
        return _Deliveries.of(asyncio.get_running_loop()).wrap(self).__await__()


class _Deliveries:
    """Results on their way into one asyncio loop. All that come before the loop runs again wake it once."""

    _known: ClassVar["WeakKeyDictionary[asyncio.AbstractEventLoop, _Deliveries]"] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # weak, because the loop is the key of this object
        self._lock = threading.Lock()
        self._done: list[tuple[asyncio.Future[Any], Future[Any]]] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "_Deliveries":
        if loop not in cls._known:
            cls._known[loop] = cls(loop)
        return cls._known[loop]

    def wrap(self, future: "Future[T]") -> "asyncio.Future[T]":
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(lambda done: future.cancel() if done.cancelled() else None)
        future.add_done_callback(partial(self._note_done, waiting))
        return waiting

    def _note_done(self, waiting: "asyncio.Future[Any]", future: "Future[Any]") -> None:
        with self._lock:
            self._done.append((waiting, future))
            is_first = len(self._done) == 1
        loop = self._loop() if is_first else None
        if loop is not None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        for waiting, future in done:
            if waiting.done():
                continue
            if future.cancelled():
                waiting.cancel()
            elif (error := future.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(future.result())


class _FutureThread:
    """The thread that drives the calls of all futures of this process. It ends when it has nothing to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop = CallLoop()
        self._thread: threading.Thread | None = None

    def post(self, act: Callable[[CallLoop], object]) -> None:
        with self._lock:
            # A fork has no threads, and possibly a loop with the calls of its parent.
            if self._thread is None or not self._thread.is_alive():
                self._loop = CallLoop()
                self._thread = threading.Thread(target=self._run, name="torchweft-calls", daemon=True)
                self._thread.start()
            self._loop.post(partial(act, self._loop))

    def _run(self) -> None:
        loop, idle_since = self._loop, time.monotonic()
        while True:
            if loop.drive(time.monotonic() + _IDLE):
                idle_since = time.monotonic()
            elif loop.is_idle:
                with self._lock:  # ending and `post` exclude each other
                    if loop.is_idle and time.monotonic() >= idle_since + _IDLE:
                        self._thread = None
                        return


_futures = _FutureThread()


def submit(steps: Steps[T]) -> ExpertFuture[T]:
    """Run steps without waiting. Callbacks of the future run in a thread of all calls, and must not wait."""
    future: ExpertFuture[T] = ExpertFuture()
    runs: list[StepsRun[T]] = []

    def begin(loop: CallLoop) -> None:
        if not future.cancelled():
            runs.append(StepsRun(loop, steps, partial(_set_outcome, future)))
            runs[0].advance()

    def end(done: "Future[T]") -> None:
        if done.cancelled():
            _futures.post(lambda loop: [run.cancel() for run in runs])
        else:
            runs.clear()  # the run holds the result as well

    future.add_done_callback(end)
    _futures.post(begin)
    return future


def _set_outcome(future: "Future[T]", run: StepsRun[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    error, run.error = run.error, None
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(run.value)  # type: ignore[arg-type]
