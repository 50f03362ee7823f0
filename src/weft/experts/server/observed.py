"""A dispatcher that tells an observer what becomes of a call; see `weft.experts.telemetry`.

    take ── weft.receive ──> future, and the trace it belongs to ──┐
    batch of tasks, whose waiters are such futures <───────────────┘ ── weft.queue each ── weft.batch ── weft.step

It stands where the dispatcher stands and in front of what the pools call, and only where somebody observes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from weft.experts.expert import ExpertBackend
from weft.experts.server.auth import Access, Audit, Caller
from weft.experts.server.dispatcher import Reply, RequestDispatcher
from weft.experts.server.hosted_expert import HostedExpert
from weft.experts.task import Answer, Results, Task
from weft.experts.task_pool import Process, TaskPool
from weft.experts.telemetry import Observer, SafeObserver
from weft.experts.wire import Received


def make_dispatcher(
    access: Access | None,
    audit: Audit,
    longest: float,
    observer: Observer | None,
    own: Callable[[Callable[[], None]], None],
) -> RequestDispatcher:
    """The dispatcher of a server; an observed one is to be released at its end, which ``own`` is told."""
    if observer is None:
        return RequestDispatcher(access, audit, longest)
    dispatcher = ObservedDispatcher(SafeObserver(observer), access, audit, longest)
    own(dispatcher.release)
    return dispatcher


class ObservedDispatcher(RequestDispatcher):
    """See `RequestDispatcher`. `release` puts the experts back as they were."""

    def __init__(self, observer: Observer, access: Access | None, audit: Audit, longest: float) -> None:
        super().__init__(access, audit, longest)
        self._observer = observer
        self._taking = threading.RLock()  # a batch waits until the trace of what it holds is known
        self._traces: dict[Future[Results], str] = {}
        self._undo: dict[str, list[Callable[[], object]]] = {}

    def add(self, served: HostedExpert) -> None:
        """See `RequestDispatcher.add`."""
        super().add(served)
        backend = served.backend
        self._undo[backend.name] = [self._watch(backend, pool) for pool in backend.pools]
        self._undo[backend.name].append(self._watch_steps(backend))

    def remove(self, uid: str) -> HostedExpert:
        """See `RequestDispatcher.remove`."""
        served = super().remove(uid)
        self._put_back(uid)
        return served

    def release(self) -> None:
        """Observe nothing any more."""
        for uid in list(self._undo):
            self._put_back(uid)

    def dispatch(self, call: Received, caller: Caller, reply: Reply) -> "Future[Results] | None":
        """See `RequestDispatcher.dispatch`."""
        told = {"weft.expert": call.header.uid, "weft.direction": call.header.kind.name.lower()}
        told["weft.client"] = caller.name or call.header.client
        parents = (caller.trace,) if caller.trace else ()
        with self._taking, self._observer.span("weft.receive", told, parents=parents):
            future = super().dispatch(call, caller, reply)
            trace = self._observer.current()
            if future is not None and trace is not None and not future.done():
                self._traces[future] = trace
                future.add_done_callback(self._forget)
        return future

    def _forget(self, future: "Future[Results]") -> None:
        self._traces.pop(future, None)

    def _put_back(self, uid: str) -> None:
        for undo in self._undo.pop(uid):
            undo()

    def _watch(self, backend: ExpertBackend, pool: TaskPool) -> Callable[[], object]:
        process = pool.process
        pool.process = partial(self._batch, backend.name, pool.name.rpartition(".")[2], process)
        return partial(setattr, pool, "process", process)

    def _watch_steps(self, backend: ExpertBackend) -> Callable[[], object]:
        """`ExpertBackend.apply_gradients` may be replaced on the instance; so it is."""
        held, before, apply = vars(backend), vars(backend).get("apply_gradients"), backend.apply_gradients

        def observed() -> None:
            with self._observer.span("weft.step", {"weft.expert": backend.name, "weft.steps": backend.steps + 1}):
                apply()

        held["apply_gradients"] = observed
        return partial(held.pop, "apply_gradients") if before is None else partial(held.update, apply_gradients=before)

    def _batch(self, expert: str, direction: str, process: Process, tasks: Sequence[Task]) -> Sequence[Answer]:
        told = {"weft.expert": expert, "weft.direction": direction}
        with self._taking:
            traces = [[self._traces[each] for each in task.waiters if each in self._traces] for task in tasks]
        now = time.monotonic()
        for task, known in zip(tasks, traces, strict=True):
            rows = {**told, "weft.rows": task.rows}
            with self._observer.span("weft.queue", rows, parents=known[:1], waited=max(0.0, now - task.arrival)):
                pass
        size: dict[str, str | int] = {"weft.tasks": len(tasks), "weft.rows": sum(task.rows for task in tasks)}
        parents = [trace for known in traces for trace in known]
        with self._observer.span("weft.batch", {**told, **size}, parents=parents):
            return process(tasks)
