"""Observers receive spans with the client's trace, and their errors do not affect the server."""

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import TROUBLE, WIDTH, fussy_backend, rows
from tests.experts.status_page.panel_cases import layer, train
from torchweft.core.errors import SpecError, UsageError
from torchweft.experts import telemetry as adapter
from torchweft.experts.client import GrpcTransport, RemoteExpert
from torchweft.experts.errors import ExpertFailedError
from torchweft.experts.server import Server
from torchweft.experts.telemetry import Attributes, OpenTelemetryObserver, SafeObserver, SpanObserver
from torchweft.experts.wire import Call, Header, Kind

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
X = torch.ones(3, 4, dtype=torch.float64)


class RecordingObserver:
    """Observer that records spans. Their numbers serve as traceparents."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spans: list[dict[str, Any]] = []
        self.current_span = threading.local()

    @contextmanager
    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> Generator[None]:
        outer: str | None = getattr(self.current_span, "now", None)
        with self.lock:
            number = f"{len(self.spans)}"
            span = {"name": name, "outer": outer, "parents": list(parents), "waited": waited, "failed": False}
            self.spans.append({**span, **attributes})
        self.current_span.now = number
        try:
            yield
        except BaseException:
            self.spans[int(number)]["failed"] = True
            raise
        finally:
            self.current_span.now = outer

    def current(self) -> str | None:
        return getattr(self.current_span, "now", None)

    def spans_named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == f"torchweft.{name}"]


def test_backward_has_receive_queue_batch_and_step_spans() -> None:
    recorder = RecordingObserver()
    assert isinstance(recorder, SpanObserver) and isinstance(SafeObserver(recorder), SpanObserver)
    with Server([layer("a")], observer=recorder) as server:
        train(server, "a", 2)
    received, queued = recorder.spans_named("receive"), recorder.spans_named("queue")
    assert [one["torchweft.direction"] for one in received] == ["info"] + ["forward", "backward"] * 2
    assert all(one["torchweft.expert"] == "a" and one["torchweft.client"] for one in received)
    numbers = [str(i) for i, one in enumerate(recorder.spans) if one["name"] == "torchweft.receive"][1:]
    assert [one["parents"] for one in queued] == [[number] for number in numbers]
    assert [one["parents"] for one in recorder.spans_named("batch")] == [[number] for number in numbers]
    assert all(one["waited"] >= 0.0 and one["torchweft.rows"] == 3 for one in queued)
    backwards = [str(i) for i, one in enumerate(recorder.spans) if one["name"] == "torchweft.batch"][1::2]
    assert [(one["outer"], one["torchweft.steps"]) for one in recorder.spans_named("step")] == [
        *zip(backwards, (1, 2), strict=True)
    ]


def test_batch_span_names_all_its_tasks() -> None:
    recorder, backend = RecordingObserver(), layer("a")
    with Server([backend], observer=recorder) as server:
        with backend.executor.lock:  # the first task runs, and the others wait
            threads = [threading.Thread(target=train, args=(server, "a")) for _ in range(4)]
            threads[0].start()
            wait_until(lambda: backend.forward_pool.statistics().running_tasks == 1)
            for thread in threads[1:]:
                thread.start()
            wait_until(lambda: backend.forward_pool.statistics().waiting_tasks == 3)
        for thread in threads:
            thread.join()
    merged = next(one for one in recorder.spans_named("batch") if one["torchweft.tasks"] > 1)
    assert merged["torchweft.tasks"] == 3 == len(merged["parents"]) and merged["torchweft.rows"] == 9
    assert {recorder.spans[int(number)]["name"] for number in merged["parents"]} == {"torchweft.receive"}


def test_each_call_belongs_to_the_trace_that_was_open() -> None:
    """One connection carries calls of several traces, and of none."""
    recorder, other = RecordingObserver(), TRACE.replace("0af7", "1bf7")
    traces: list[str | None] = [TRACE, other, None, "no traceparent", TRACE]
    with Server([layer("a")], observer=recorder) as server:
        remaining = list(traces)
        with GrpcTransport(server.address, trace=lambda: remaining[0]) as transport, torch.no_grad():
            remote = RemoteExpert("a", transport)
            remote.describe()
            while remaining:
                remote(X)
                remaining.pop(0)
            assert transport.statistics().streams == 1
    parents = [one["parents"] for one in recorder.spans_named("receive") if one["torchweft.direction"] == "forward"]
    assert parents == [[TRACE], [other], [], [], [TRACE]]


def test_spans_of_failed_work_end_with_its_error() -> None:
    recorder, backend = RecordingObserver(), fussy_backend()
    bad = torch.full((1, WIDTH), TROUBLE, dtype=torch.float64)
    with Server([backend], observer=recorder) as server, RemoteExpert("fussy", server.address) as remote:
        remote(rows(2, 0))
        with pytest.raises(ExpertFailedError):
            remote(bad)
        with GrpcTransport(server.address) as transport, pytest.raises(SpecError):
            transport.submit(Call(Header(kind=Kind.FORWARD, uid="fussy"), [rows(2, 0, WIDTH + 1)]), 10.0).result(10)
    failed = {name: [one["failed"] for one in recorder.spans_named(name)] for name in ("receive", "batch", "failure")}
    assert failed == {"receive": [False] * 3 + [True], "batch": [False, True], "failure": [True]}
    assert recorder.spans_named("failure")[0]["parents"] == recorder.spans_named("batch")[1]["parents"]


def test_a_removed_expert_is_not_observed() -> None:
    """Its traces are dropped too. A method that the user replaced on the instance still runs within a span."""
    backend, recorder, applied = layer("a"), RecordingObserver(), list[int]()

    def replaced() -> None:
        applied.append(backend.steps)
        type(backend).apply_gradients(backend)

    backend.apply_gradients = replaced  # type: ignore[method-assign]
    with Server([backend], observer=recorder) as server:
        train(server, "a")
        assert len(recorder.spans_named("step")) == len(applied) == 1
        assert not server._dispatcher._spans._traces  # type: ignore[attr-defined]
        assert server.remove("a")
    count = len(recorder.spans)
    with Server([backend]) as server:
        train(server, "a")
    assert len(recorder.spans) == count


class Faulty:
    def __init__(self, place: str) -> None:
        self.place = place

    @contextmanager
    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> Generator[None]:
        self.fail("enter")
        try:
            yield
        finally:
            self.fail("leave")

    def current(self) -> str | None:
        self.fail("current")
        return None

    def fail(self, place: str) -> None:
        if place == self.place:
            raise RuntimeError(f"in {place}")


@pytest.mark.parametrize("place", ["enter", "leave", "current"])
def test_failing_observer_is_logged_and_harmless(place: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.ERROR, "torchweft.experts.telemetry"),
        Server([layer("a")], observer=Faulty(place)) as server,
    ):
        train(server, "a")
        assert server.statistics().experts["a"].steps == 1
    assert f"in {place}" in caplog.text
    with pytest.raises(ValueError, match="mine"), SafeObserver(Faulty(place)).span("torchweft.batch", {}):
        raise ValueError("mine")  # errors of the work itself are passed on


def exported() -> tuple[OpenTelemetryObserver, Any]:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="test_tracing: needs opentelemetry-sdk")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    return OpenTelemetryObserver(provider.get_tracer("test")), memory


def test_opentelemetry_trace_spans_client_and_step() -> None:
    observer, memory = exported()
    with (
        Server([layer("a")], observer=observer) as server,
        observer.span("epoch", {}),
        GrpcTransport(server.address, trace=observer.current) as transport,
    ):
        RemoteExpert("a", transport)(X).sum().backward()
    spans = memory.get_finished_spans()
    by_name = {span.name: span for span in spans if span.attributes.get("torchweft.direction") != "forward"}
    (epoch,) = [span for span in spans if span.name == "epoch"]
    chain = [by_name[f"torchweft.{name}"] for name in ("step", "batch", "receive")] + [epoch]
    for child, parent in pairwise(chain):
        assert child.parent.span_id == parent.context.span_id
    of_one = [span for span in spans if span.attributes.get("torchweft.direction") != "info"]
    assert {span.context.trace_id for span in of_one} == {epoch.context.trace_id}
    queue = by_name["torchweft.queue"]
    assert queue.start_time <= queue.end_time and queue.attributes["torchweft.rows"] == 3


def test_opentelemetry_links_a_batch_to_all_its_tasks() -> None:
    observer, memory = exported()
    other = TRACE.replace("0af7", "1bf7")
    with observer.span("outside", {}), observer.span("torchweft.batch", {}, parents=[TRACE, other]):
        pass
    batch, _ = memory.get_finished_spans()
    assert batch.parent is None and [f"{link.context.trace_id:032x}"[:4] for link in batch.links] == ["0af7", "1bf7"]
    with observer.span("torchweft.receive", {}, parents=["no traceparent"]):
        assert observer.current() is not None
    assert observer.current() is None


def test_missing_opentelemetry_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_trace", None)
    with pytest.raises(UsageError, match="pip install opentelemetry-api"):
        OpenTelemetryObserver()
