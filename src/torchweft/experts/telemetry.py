"""Telemetry: spans around the work of a server, reported to a `SpanObserver`. Its numbers are in `statistics`.

    client     | network thread          | runtime thread
    trace ─────┼─> receive ──────────────┼─> queue (arrival to now) ─> batch ── step within it
      traceparent, in the header of the  |     one for each task         one for all of them, which links
      call: its trace, or none           |                               to every task that it joined

``Server(..., observer=...)`` opens the spans, with names such as ``torchweft.queue``. ``GrpcTransport(...,
trace=observer.current)`` propagates the trace, a W3C ``traceparent``. opentelemetry-api is optional.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from torchweft.core.errors import UsageError
from torchweft.experts.task import Task

try:
    from opentelemetry import context, propagate, trace  # pyright: ignore[reportMissingImports]
except ImportError:
    context = propagate = trace = None

_context, _propagate, _trace = cast("Any", context), cast("Any", propagate), cast("Any", trace)
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
    def batch_span(self, pool: str, tasks: Sequence[Task]) -> AbstractContextManager[object]: ...

    def task_failed(self, pool: str, task: Task, error: BaseException) -> None: ...

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


def process_observed(
    process: Callable[[Sequence[Any]], Sequence[Any]], pool: str, tasks: Sequence[Any], observer: WorkObserver
) -> Sequence[Any]:
    """Process the tasks of a batch in a span of the observer, which ends with the first error among the answers."""
    answers: Sequence[Any] = []
    failure: BaseException | None = None
    try:
        with observer.batch_span(pool, tasks):
            answers = process(tasks)
            failure = next((answer for answer in answers if isinstance(answer, BaseException)), None)
            if failure is not None:  # so that the span ends with the error
                raise failure
    except BaseException as error:
        if error is not failure:
            raise
    for task, answer in zip(tasks, answers, strict=False):
        if isinstance(answer, BaseException):
            observer.task_failed(pool, task, answer)
    return answers
