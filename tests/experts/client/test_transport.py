"""Facts about every transport to an expert: gRPC, within the process, and fake."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.experts.client.transport_cases import WAYS, reached
from tests.experts.concurrency import blocking_expert
from tests.experts.expert_cases import TROUBLE, WIDTH, fussy_backend, rows
from torchweft.core.errors import SpecError, UsageError
from torchweft.experts.client import ClientTls, GrpcTransport, LocalTransport, Transport
from torchweft.experts.compression import Compression
from torchweft.experts.errors import DeadlineError, ExpertFailedError, LostError, UnknownExpertError, UnreachableError
from torchweft.experts.server import Server
from torchweft.experts.server.grpc_server import GrpcHandlers
from torchweft.experts.tls import explain_failure
from torchweft.experts.wire import Call, Header, Kind
from torchweft.experts.wire.service import read_receipt

PATIENCE = 10.0


def forward(x: torch.Tensor, uid: str = "fussy") -> Call:
    return Call(Header(kind=Kind.FORWARD, call_id=0, uid=uid), [x])


@pytest.fixture(params=WAYS)
def there(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Transport]]:
    with reached(request.param, fussy_backend()) as server_and_transport:
        yield server_and_transport


def test_every_caller_gets_its_own_answer(there: tuple[Server, Transport]) -> None:
    module = fussy_backend().module
    inputs = [rows(1 + seed % 4, seed) for seed in range(40)]
    futures = [there[1].submit(forward(x), PATIENCE) for x in inputs]
    for x, future in zip(inputs, futures, strict=True):
        answer = future.result(PATIENCE)
        assert torch.allclose(answer.tensors()[0], module(x), rtol=0, atol=1e-12)
        assert answer.header.kind is Kind.RESULT and read_receipt(answer.header.data).durable is None


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (forward(rows(2, 0), "nobody"), UnknownExpertError),
        (forward(rows(2, 0, WIDTH + 1)), SpecError),
        (forward(rows(2, 0).float()), SpecError),
        (Call(Header(kind=Kind.FORWARD, call_id=0, uid="fussy")), SpecError),
        (forward(torch.full((1, WIDTH), TROUBLE, dtype=torch.float64)), ExpertFailedError),
        (Call(Header(kind=Kind.COMMIT, call_id=0, uid="fussy")), UsageError),
    ],
)
def test_error_reaches_only_its_caller(there: tuple[Server, Transport], call: Call, error: type[Exception]) -> None:
    good = [there[1].submit(forward(rows(2, 0)), PATIENCE) for _ in range(2)]
    bad = there[1].submit(call, PATIENCE)
    good.append(there[1].submit(forward(rows(2, 0)), PATIENCE))
    assert type(bad.exception(PATIENCE)) is error
    assert all(future.exception(PATIENCE) is None for future in good)


def test_answer_has_the_requested_compression(there: tuple[Server, Transport]) -> None:
    header = Header(kind=Kind.FORWARD, call_id=0, uid="fussy", reply=Compression.BF16)
    answer = there[1].submit(Call(header, [rows(3, 0)]), PATIENCE).result(PATIENCE)
    assert answer.descriptors[0].compression is Compression.BF16
    assert torch.allclose(answer.tensors()[0], fussy_backend().module(rows(3, 0)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("way", ["grpc", "local"])
def test_a_call_ends_at_its_deadline_whatever_the_expert_does(way: str) -> None:
    gate, backend = blocking_expert()
    with reached(way, backend) as (_, transport), gate:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"0\.3 s"):
            transport.submit(forward(rows(1, 0), "gate"), 0.3).result(PATIENCE)
        assert time.monotonic() - start > 0.25
        assert transport.statistics().waiting == 0


@pytest.mark.parametrize("way", ["grpc", "local"])
def test_close_wakes_all_waiting_callers(way: str) -> None:
    gate, backend = blocking_expert()
    with reached(way, backend) as (_, transport):
        futures = [transport.submit(forward(rows(1, 0), "gate"), 25.0) for _ in range(5)]
        assert gate.entered.wait(PATIENCE)
        closing = threading.Thread(target=transport.close)
        closing.start()
        errors = [future.exception(PATIENCE) for future in futures]
        gate.go.set()
        closing.join()
        assert all(isinstance(error, LostError | UnreachableError) for error in errors)
        with pytest.raises(UsageError, match="closed"):
            transport.submit(forward(rows(1, 0), "gate"), 1.0)


@pytest.mark.parametrize("way", ["grpc", "local"])
def test_unreferenced_transport_ends_its_threads(way: str) -> None:
    with Server([fussy_backend()]) as server:
        transport: Transport = GrpcTransport(server.address) if way == "grpc" else LocalTransport(server.handler())
        transport.submit(forward(rows(2, 0)), PATIENCE).result(PATIENCE)
        del transport  # a fixture fails the test if a thread stays alive


@pytest.mark.parametrize("there", ["grpc", "local"], indirect=True)
def test_statistics_count_calls_and_errors(there: tuple[Server, Transport]) -> None:
    there[1].submit(forward(rows(2, 0)), PATIENCE).result(PATIENCE)
    there[1].submit(forward(rows(2, 0), "nobody"), PATIENCE).exception(PATIENCE)
    seen = there[1].statistics()
    assert (seen.calls, seen.answered, seen.waiting, dict(seen.failed)) == (2, 1, 0, {"UnknownExpertError": 1})


def test_stream_that_never_opens_executes_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.experts.client.transport.OPENING", 0.2)
    opened = threading.Event()

    async def silent(self: GrpcHandlers, messages: object, context: Any) -> None:
        opened.set()
        await asyncio.sleep(PATIENCE)

    monkeypatch.setattr(GrpcHandlers, "_serve_stream", silent)
    with Server([fussy_backend()]) as server, GrpcTransport(server.address) as transport:
        future = transport.submit(forward(rows(1, 0)), PATIENCE)
        with pytest.raises(UnreachableError, match=r"did not answer the opening of a stream within 0\.2 s"):
            future.result(PATIENCE)
        assert opened.is_set() and transport.statistics().streams == 1
        assert transport.submit(forward(rows(1, 0)), PATIENCE).exception(PATIENCE) is not None
        assert transport.statistics().streams == 2


CLOSED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.7:7070: Socket closed"


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (None, "called without TLS"),
        (ClientTls(b"authority"), "no certificate was sent"),
        (ClientTls(b"authority", b"key", b"certificate"), "check the certificates of both ends"),
    ],
)
def test_closed_handshake_names_certificate_and_option(tls: ClientTls | None, words: str) -> None:
    explanation = explain_failure(CLOSED, tls)
    assert explanation.startswith(f"{CLOSED}; ") and words in explanation and "(tls=)" in explanation
    other = explain_failure(CLOSED, tls, "this server", "tls= of ReplicaOptions")
    assert "(tls= of ReplicaOptions)" in other and "this client" not in other


def test_wrong_host_name_gets_advice_and_other_errors_none() -> None:
    for text in ("Name or service not known", "Deadline Exceeded"):
        assert explain_failure(text, None) == text
    silent = "connection attempt timed out before receiving SETTINGS frame"
    assert "it was called without TLS" in explain_failure(silent, None)
    assert explain_failure("Connection refused", None) == "Connection refused; is `torchweft serve` running there?"
    text = "Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed."
    explanation = explain_failure(text, ClientTls(b"authority"), "this server", "tls= of ReplicaOptions")
    assert explanation.startswith(text) and "server_name= (tls= of ReplicaOptions)" in explanation
