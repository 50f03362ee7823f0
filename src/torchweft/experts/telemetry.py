"""Telemetry: spans around the work of a server, reported to a `SpanObserver`. Its numbers are in `statistics`.

    client     | network thread          | runtime thread
    trace ─────┼─> receive ──────────────┼─> queue (arrival to now) ─> batch ── step within it
      traceparent, in the header of the  |     one for each task         one for all of them, which links
      call: its trace, or none           |                               to every task that it joined

``Server(..., observer=...)`` opens the spans, with names such as ``torchweft.queue``. ``GrpcTransport(...,
trace=observer.current)`` propagates the trace, a W3C ``traceparent``. opentelemetry-api is optional.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol, cast, runtime_checkable

from torchweft.core.errors import UsageError
from torchweft.experts.task import Answer, Results, Task

try:
    from opentelemetry import context, propagate, trace  # pyright: ignore[reportMissingImports]
except ImportError:
    context = propagate = trace = None

_context, _propagate, _trace = cast("Any", context), cast("Any", propagate), cast("Any", trace)
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_LOG = logging.getLogger("torchweft.experts.telemetry")
# ``torchweft.expert``, ``torchweft.direction``, ``torchweft.client``, ``torchweft.tasks``, ``torchweft.rows``,
# ``torchweft.steps``.
Attributes = Mapping[str, str | int | float]


@runtime_checkable
class SpanObserver(Protocol):
    """Receives the spans of a server, in the thread that does the work. It must not block."""

    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> AbstractContextManager[object]:
        """A context around a piece of work. It must let the errors of the work pass.

        ``parents`` are traceparents: one is the parent, several are links. Without any, the parent is the span that is
        open in this thread. The work began ``waited`` seconds ago.
        """
        ...

    def current(self) -> str | None: ...


@runtime_checkable
class WorkObserver(Protocol):
    def process(
        self, process: Callable[[Sequence[Task]], Sequence[Answer]], pool: str, tasks: Sequence[Task]
    ) -> Sequence[Answer]:
        """Return ``process(tasks)``, the answers of a batch."""
        ...

    def step_span(self, expert: str, step: int) -> AbstractContextManager[object]:
        """``step``: the number of steps after this one."""
        ...


class SafeObserver:
    """Wraps an observer, so that its errors are logged at ``weft.experts.telemetry`` and do not reach the work."""

    def __init__(self, observer: SpanObserver) -> None:
        self._observer = observer

    @contextmanager
    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> Generator[None]:
        stack, failure = ExitStack(), None
        try:
            stack.enter_context(self._observer.span(name, attributes, parents=parents, waited=waited))
        except Exception:
            _LOG.exception("an observer failed at the start of %s", name)
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            # Not a `with` statement: the errors of the observer must be told apart from those of the work.
            try:
                stack.__exit__(type(failure), failure, failure.__traceback__) if failure else stack.close()
            except Exception as error:
                if error is not failure:  # a context manager is allowed to raise the error of the work again
                    _LOG.exception("an observer failed at the end of a span")

    def current(self) -> str | None:
        try:
            return self._observer.current()
        except Exception:
            _LOG.exception("an observer failed to return its traceparent")
            return None


class OpenTelemetryObserver:
    """A `SpanObserver` for opentelemetry-api. ``tracer``: by default the one called ``torchweft.experts``."""

    def __init__(self, tracer: Any = None) -> None:
        if _trace is None:
            raise UsageError("OpenTelemetryObserver needs opentelemetry-api: pip install opentelemetry-api")
        self._tracer = tracer or _trace.get_tracer("torchweft.experts")

    @contextmanager
    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> Generator[None]:
        # Extracted into an empty context: a span that is open in this thread belongs to another client.
        empty = _context.Context()
        contexts = [_propagate.extract({"traceparent": parent}, context=empty) for parent in parents]
        links = [_trace.Link(_trace.get_current_span(parent).get_span_context()) for parent in contexts]
        with self._tracer.start_as_current_span(
            name,
            context=None if not contexts else contexts[0] if len(contexts) == 1 else empty,
            links=links if len(links) > 1 else None,
            attributes=dict(attributes),
            start_time=time.time_ns() - int(waited * 1e9),
        ):
            yield

    def current(self) -> str | None:
        carrier: dict[str, str] = {}
        _propagate.inject(carrier)
        return carrier.get("traceparent")


class ServerSpans:
    """A `WorkObserver` that opens spans around the calls, batches and steps of a server. Thread-safe.

    An error passes through the span of the work that failed, as observers expect: ``receive`` if the call was refused,
    else ``batch``, and a ``failure`` in the trace of each task that failed.
    """

    def __init__(self, observer: SpanObserver) -> None:
        self._observer = SafeObserver(observer)
        # Held for a whole `receive`: the runtime can take a task before its trace is stored, and must wait for it.
        # Reentrant, because an answer can arrive within it.
        self._lock = threading.RLock()
        self._traces: dict[Future[Results], str] = {}  # by the futures that wait for tasks

    def receive(
        self, dispatch: Callable[[], "Future[Results] | None"], attributes: Attributes, parent: str
    ) -> "Future[Results] | None":
        """Return ``dispatch()``, the future of a call that was made within the trace ``parent``, if it is valid."""
        parents = (parent,) if _TRACEPARENT.fullmatch(parent) else ()
        with self._lock, self._observer.span("torchweft.receive", attributes, parents=parents):
            future, trace = dispatch(), self._observer.current()
            if future is not None and trace is not None and not future.done():
                self._traces[future] = trace
                future.add_done_callback(lambda done: self._traces.pop(done, None))
        return future

    def process(
        self, process: Callable[[Sequence[Task]], Sequence[Answer]], pool: str, tasks: Sequence[Task]
    ) -> Sequence[Answer]:
        expert, _, direction = pool.rpartition(".")
        attributes = {"torchweft.expert": expert, "torchweft.direction": direction}
        traces, now = [self._traces_of(task) for task in tasks], time.monotonic()
        for task, known in zip(tasks, traces, strict=True):
            rows = {**attributes, "torchweft.rows": task.rows}
            with self._observer.span("torchweft.queue", rows, parents=known[:1], waited=max(0.0, now - task.arrival)):
                pass
        size = {**attributes, "torchweft.tasks": len(tasks), "torchweft.rows": sum(task.rows for task in tasks)}
        answers: Sequence[Answer] = []
        failure: BaseException | None = None
        try:
            parents = [trace for known in traces for trace in known]
            with self._observer.span("torchweft.batch", size, parents=parents):
                answers = process(tasks)
                failure = next((answer for answer in answers if isinstance(answer, BaseException)), None)
                if failure is not None:  # so that the span ends with the error
                    raise failure
        except BaseException as error:
            if error is not failure:
                raise
        for task, answer in zip(tasks, answers, strict=False):
            if isinstance(answer, BaseException):
                parents = self._traces_of(task)
                with suppress(BaseException), self._observer.span("torchweft.failure", attributes, parents=parents):
                    raise answer
        return answers

    def step_span(self, expert: str, step: int) -> AbstractContextManager[object]:
        return self._observer.span("torchweft.step", {"torchweft.expert": expert, "torchweft.steps": step})

    def _traces_of(self, task: Task) -> list[str]:
        with self._lock:
            return [self._traces[waiter] for waiter in task.waiters if waiter in self._traces]
