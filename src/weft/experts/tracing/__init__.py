"""Spans of the work: what an `Observer` hears of receiving, queueing, batches and optimizer steps.

spans.py           Observer, the protocol; Shielded, which keeps its faults to itself
opentelemetry.py   OpenTelemetryObserver, if opentelemetry-api is installed

``Server(..., observer=...)`` tells it; ``GrpcTransport(..., trace=observer.current)`` sends the trace along.
"""

from weft.experts.tracing.opentelemetry import OpenTelemetryObserver
from weft.experts.tracing.spans import Attributes, Observer, Shielded

__all__ = ["Attributes", "Observer", "OpenTelemetryObserver", "Shielded"]
