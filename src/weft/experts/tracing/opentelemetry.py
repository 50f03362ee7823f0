"""Spans for OpenTelemetry, through its API only; which SDK exports them, and where to, is the application's choice.

The package is optional: without opentelemetry-api only the constructor fails.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from weft.core.errors import UsageError
from weft.experts.tracing.spans import Attributes

try:
    from opentelemetry import context, propagate, trace  # pyright: ignore[reportMissingImports]
except ImportError:  # it is optional
    context = propagate = trace = None

_context, _propagate, _trace = cast("Any", context), cast("Any", propagate), cast("Any", trace)


class OpenTelemetryObserver:
    """An `Observer`. ``tracer``: of `opentelemetry.trace.get_tracer`; by default the one called ``weft.experts``.

    Raises ``UsageError`` if opentelemetry-api is not installed.
    """

    def __init__(self, tracer: Any = None) -> None:
        if _trace is None:
            raise UsageError("OpenTelemetryObserver needs opentelemetry-api: pip install opentelemetry-api")
        self._tracer = tracer or _trace.get_tracer("weft.experts")

    @contextmanager
    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> Generator[None]:
        """See `Observer.span`."""
        known = [_extracted(parent) for parent in parents]
        links = [_trace.Link(_trace.get_current_span(each).get_span_context()) for each in known]
        with self._tracer.start_as_current_span(
            name,
            context=None if not known else known[0] if len(known) == 1 else _context.Context(),
            links=links if len(links) > 1 else None,
            attributes=dict(attributes),
            start_time=time.time_ns() - int(waited * 1e9),
        ):
            yield

    def current(self) -> str | None:
        """See `Observer.current`."""
        carrier: dict[str, str] = {}
        _propagate.inject(carrier)
        return carrier.get("traceparent")


def _extracted(traceparent: str) -> Any:
    """The context that a traceparent names; an empty one if it names none."""
    return _propagate.extract({"traceparent": traceparent}, context=_context.Context())
