"""Telemetry: statistics as plain numbers, and spans for the work of a server, told to an `SpanObserver`.

Every long-lived object here has ``statistics()`` (trio's custom), which returns one of these classes: values taken at
one moment, which change no more and hold no tensor.

    client          | network thread        | runtime thread
    trace ──────────┼─> weft.receive ───────┼─> weft.queue (arrival to now) ─> weft.batch ── weft.step within it
      traceparent, in the metadata of the   |       one for each task             one for all of them, which links
      connection: its trace, or none        |                                     to every task that it joined

``Server(..., observer=...)`` opens the spans; ``GrpcTransport(..., trace=observer.current)`` propagates the trace. A
trace is a W3C ``traceparent`` (Trace Context, 2021): ``00-<trace>-<span>-<flags>``. opentelemetry-api is optional.
Which SDK exports the spans, and where to, is the application's choice.
"""

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from weft.core.errors import UsageError

try:
    from opentelemetry import context, propagate, trace  # pyright: ignore[reportMissingImports]
except ImportError:  # it is optional
    context = propagate = trace = None

_context, _propagate, _trace = cast("Any", context), cast("Any", propagate), cast("Any", trace)
_LOG = logging.getLogger("weft.experts.telemetry")
Attributes = Mapping[str, str | int | float]
"""``weft.expert``, ``weft.direction``, ``weft.client``, ``weft.tasks``, ``weft.rows``, ``weft.steps``."""


@runtime_checkable
class SpanObserver(Protocol):
    """Is called in the thread that does the work, and must not block."""

    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> AbstractContextManager[object]:
        """A context around a piece of work, whose errors pass through it.

        ``parents`` are traceparents: one is the parent, several are links; without any, the span that is open in this
        thread is the parent. The work began ``waited`` seconds ago.
        """
        ...

    def current(self) -> str | None:
        """The traceparent of the span that is open in this thread."""
        ...


class SafeObserver:
    """An observer whose errors are logged at ``weft.experts.telemetry`` and do not reach the work."""

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
            try:
                stack.__exit__(type(failure), failure, failure.__traceback__) if failure else stack.close()
            except Exception as error:
                if error is not failure:  # a context manager may raise again what it was told
                    _LOG.exception("an observer failed at the end of a span")

    def current(self) -> str | None:
        try:
            return self._observer.current()
        except Exception:
            _LOG.exception("an observer failed to return its traceparent")
            return None


class OpenTelemetryObserver:
    """A `SpanObserver` for opentelemetry-api. Raises ``UsageError`` without it. ``tracer``: by default
    ``weft.experts``.
    """

    def __init__(self, tracer: Any = None) -> None:
        if _trace is None:
            raise UsageError("OpenTelemetryObserver needs opentelemetry-api: pip install opentelemetry-api")
        self._tracer = tracer or _trace.get_tracer("weft.experts")

    @contextmanager
    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> Generator[None]:
        empty = _context.Context()
        known = [_propagate.extract({"traceparent": parent}, context=empty) for parent in parents]
        links = [_trace.Link(_trace.get_current_span(each).get_span_context()) for each in known]
        with self._tracer.start_as_current_span(
            name,
            context=None if not known else known[0] if len(known) == 1 else empty,
            links=links if len(links) > 1 else None,
            attributes=dict(attributes),
            start_time=time.time_ns() - int(waited * 1e9),
        ):
            yield

    def current(self) -> str | None:
        carrier: dict[str, str] = {}
        _propagate.inject(carrier)
        return carrier.get("traceparent")


@dataclass(frozen=True)
class PoolStatistics:
    """``merged`` counts batches by how many tasks they joined, up to the next power of two. Ages are seconds, and so is
    ``waited``: how long batches that could have begun have waited for others, in all."""

    name: str
    submitted: int
    answered: int
    failed: Mapping[str, int]
    refused: Mapping[str, int]
    cancelled: int
    expired: int
    joined: int
    batches: int
    rows: int
    merged: Mapping[int, int]
    waited: float
    waiting_tasks: int
    waiting_rows: int
    running_tasks: int
    oldest_age: float


@dataclass(frozen=True)
class IdempotencyStatistics:
    """The memory of idempotency keys: ``results`` are still held, ``keys`` are known to be applied."""

    running: int
    keys: int
    results: int
    result_bytes: int
    repeated: int


@dataclass(frozen=True)
class BackendStatistics:
    """One expert; ``kept_graph_bytes`` count inputs that are kept for their backward as well."""

    name: str
    steps: int
    forward_batches: int
    backward_batches: int
    retried_batches: int
    refused_gradients: Mapping[str, int]
    open_mini_batches: int
    open_mini_batch_bytes: int
    kept_graphs: int
    kept_graph_bytes: int
    used_graphs: int
    journal_failures: int
    buffer_bytes: int
    idempotency: IdempotencyStatistics
    pools: Mapping[str, PoolStatistics]


@dataclass(frozen=True)
class RuntimeStatistics:
    """One device: ``busy`` of its ``seconds`` since the start it worked on batches."""

    name: str
    alive: bool
    pools: int
    batches: int
    busy: float
    seconds: float
    working_on: str | None
