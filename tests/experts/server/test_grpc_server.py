"""Invalid gRPC traffic of one client does not affect the calls of others."""

import threading
from collections.abc import Iterator

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.concurrency import blocking_expert, wait_until
from tests.experts.expert_cases import TROUBLE, WIDTH, fussy_backend, rows, weights
from tests.experts.server.raw_stream import PATIENCE, RawStream, raw_stream
from tests.experts.server.server_cases import backend_of
from tests.experts.wire_cases import frames
from torchweft.core.errors import SpecError
from torchweft.experts.client import GrpcTransport
from torchweft.experts.errors import (
    DrainingError,
    ExpertFailedError,
    ExpiredError,
    GradientError,
    LimitError,
    MalformedError,
    TruncatedError,
    UnknownExpertError,
)
from torchweft.experts.server import Server, ServerOptions
from torchweft.experts.wire import Call, Header, Kind, Limits, decode, encode, encode_parts, read_fault
from torchweft.experts.wire.service import INFO


def forward(number: int, x: torch.Tensor | None = None, uid: str = "fussy") -> Call:
    return Call(Header(kind=Kind.FORWARD, call_id=number, uid=uid), [rows(2, 0) if x is None else x])


GOOD = encode([forward(1)])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server([fussy_backend()], options=ServerOptions(limits=Limits(frame_bytes=1 << 20))) as server:
        yield server


@pytest.fixture
def stream(server: Server) -> Iterator[RawStream]:
    with raw_stream(server.address) as stream:
        yield stream


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"", MalformedError),
        (b"hello, server", MalformedError),
        (GOOD[:-1], TruncatedError),
        (GOOD + b"x", TruncatedError),
        (b"HTTP" + GOOD[4:], MalformedError),
        (encode([Call(Header(Kind.PING, i)) for i in range(257)], Limits(calls=300)), LimitError),
        (next(encode_parts([Call(Header(Kind.FORWARD, 1), [torch.empty(1 << 18, 2)])])), LimitError),
    ],
)
def test_invalid_frame_ends_only_its_stream(
    server: Server, stream: RawStream, bad: bytes, error: type[Exception]
) -> None:
    """The stream gets an error for call 0."""
    with raw_stream(server.address) as other:
        other.send(forward(1))
        assert other.receive()[0].header.kind is Kind.RESULT
        stream.send(GOOD, bad, GOOD)
        answers: dict[int, Exception | None] = {}
        while 0 not in answers:
            for answer in stream.receive():
                fault = read_fault(answer.header.data) if answer.header.kind is Kind.ERROR else None
                answers[answer.header.call_id] = fault
        assert type(answers[0]) is error and stream.ended() is grpc.StatusCode.OK
        other.send(forward(2))
        assert other.receive()[0].header.kind is Kind.RESULT


@given(frames(), st.integers(0, 1 << 20), st.integers(0, 255))
def test_server_survives_arbitrary_bytes(server: Server, frame: bytes, place: int, byte: int) -> None:
    spoiled = bytearray(frame)
    if spoiled:
        spoiled[place % len(spoiled)] = byte
    with raw_stream(server.address) as stream:
        stream.send(bytes(spoiled))
        stream.finish()
        assert stream.ended() is grpc.StatusCode.OK
    with raw_stream(server.address) as stream:
        stream.send(forward(1))
        assert stream.receive()[0].header.kind is Kind.RESULT


def test_a_message_beyond_the_limit_is_refused_before_it_is_read(server: Server, stream: RawStream) -> None:
    stream.send(bytes(2 << 20))
    assert stream.ended() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bad_calls_do_not_affect_good_ones(server: Server, stream: RawStream) -> None:
    backend = backend_of(server)
    before = weights(backend)
    nan = torch.full((2, WIDTH), float("nan"), dtype=torch.float64)
    bad: list[tuple[Call, type[Exception]]] = [
        (forward(10, uid="nobody"), UnknownExpertError),
        (forward(11, rows(2, 0, WIDTH + 1)), SpecError),
        (forward(12, rows(2, 0).float()), SpecError),
        (forward(13, torch.full((1, WIDTH), TROUBLE, dtype=torch.float64)), ExpertFailedError),
        (Call(Header(kind=Kind.BACKWARD, call_id=14, uid="fussy"), [rows(2, 0), nan]), GradientError),
        (Call(Header(kind=Kind.BACKWARD, call_id=15, uid="fussy"), [rows(2, 0)]), SpecError),
        (Call(Header(kind=Kind.RESULT, call_id=16, uid="fussy"), [rows(2, 0)]), MalformedError),
        (Call(Header(kind=Kind.GOAWAY, call_id=17)), MalformedError),
        (Call(Header(Kind.FORWARD, 18, "fussy", deadline_ms=0), [rows(2, 0)]), ExpiredError),
    ]
    calls = [forward(number) for number in range(1, 6)]
    stream.send(encode([*calls[:3], *(call for call, _ in bad), *calls[3:]]))
    answers = {}
    while len(answers) < len(calls) + len(bad):
        answers |= {answer.header.call_id: answer for answer in stream.receive()}
    assert all(answers[number].header.kind is Kind.RESULT for number in range(1, 6))
    for call, error in bad:
        assert type(read_fault(answers[call.header.call_id].header.data)) is error, call.header.call_id
    assert weights(backend) == before and backend.steps == 0


@pytest.mark.long
def test_thousands_of_bad_calls_leave_nothing_behind(server: Server, stream: RawStream) -> None:
    count, size = 4000, 200
    for start in range(0, count, size):
        stream.send(encode([forward(1 + start + i, rows(1, 0, 3)) for i in range(size)]))
    seen = 0
    while seen < count:
        seen += len(stream.receive())
    wait_until(lambda: (server.statistics().calls, server.statistics().nbytes) == (0, 0))
    statistics = server.statistics()
    assert all(pool.waiting_tasks == 0 for pool in statistics.experts["fussy"].pools.values())


@pytest.mark.parametrize("count", [1, 2, 300])
def test_half_closed_stream_gets_every_answer(server: Server, stream: RawStream, count: int) -> None:
    """A client that ends its side before an answer has left still gets one answer per call."""
    stream.send(*[forward(number) for number in range(1, count + 1)])
    stream.finish()
    seen: list[int] = []
    while len(seen) < count:
        seen += [answer.header.call_id for answer in stream.receive()]
    assert sorted(seen) == list(range(1, count + 1)) and stream.ended() is grpc.StatusCode.OK


def test_info_is_a_unary_call_too(server: Server) -> None:
    ask = encode([Call(Header(kind=Kind.INFO, call_id=i, uid=uid)) for i, uid in ((1, "fussy"), (2, "no"))])
    with grpc.insecure_channel(server.address) as channel:
        good, bad = decode(channel.unary_unary(INFO)(ask, timeout=PATIENCE))
        assert b'"fussy"' in good.header.data and isinstance(read_fault(bad.header.data), UnknownExpertError)
        (wrong,) = decode(channel.unary_unary(INFO)(encode([forward(3)]), timeout=PATIENCE))
        assert isinstance(read_fault(wrong.header.data), MalformedError)
        (broken,) = decode(channel.unary_unary(INFO)(b"nonsense", timeout=PATIENCE))
        assert broken.header.call_id == 0 and isinstance(read_fault(broken.header.data), MalformedError)


def test_client_beyond_the_limit_is_rejected() -> None:
    with Server([fussy_backend()], options=ServerOptions(connections=2)) as server:
        with raw_stream(server.address) as a, raw_stream(server.address) as b:
            for one in (a, b):
                one.send(forward(1))
                one.receive()
            with raw_stream(server.address) as c:
                assert c.ended() is grpc.StatusCode.RESOURCE_EXHAUSTED
            a.send(forward(2))
            assert a.receive()[0].header.kind is Kind.RESULT
        wait_until(lambda: not server.statistics().connections)
        with raw_stream(server.address) as d:
            d.send(forward(1))
            assert d.receive()[0].header.kind is Kind.RESULT
        assert server.statistics().turned_away == 1


def test_disconnect_cancels_waiting_calls() -> None:
    gate, backend = blocking_expert()
    with Server([backend]) as server, gate:
        with raw_stream(server.address) as stream:
            stream.send(forward(1, rows(1, 0), "gate"))
            assert gate.entered.wait(PATIENCE)
            stream.send(*[forward(number, rows(1, 0), "gate") for number in range(2, 8)])
            wait_until(lambda: backend.forward_pool.statistics().waiting_tasks == 6)
        wait_until(lambda: backend.forward_pool.statistics().waiting_tasks == 0)
        assert backend.forward_pool.statistics().cancelled == 6


def test_client_that_does_not_read_slows_no_other() -> None:
    options = ServerOptions(connection_calls=8, connection_bytes=1 << 20)
    with (
        Server([fussy_backend()], options=options) as server,
        raw_stream(server.address) as slow,
        GrpcTransport(server.address) as quick,
    ):
        for number in range(1, 200):
            slow.send(forward(number, rows(4000, 0)))  # 128 kB in each direction
        for _ in range(20):
            quick.submit(forward(0), PATIENCE).result(PATIENCE)
        connection = max(server._grpc_server.handlers.connections, key=lambda stream: stream.nbytes)
        assert connection.calls <= 8 + 1 and connection.nbytes <= 4 << 20
        seen = 0
        while seen < 199:  # it gets all answers once it reads
            seen += len(slow.receive())


def test_draining_answers_only_accepted_calls() -> None:
    gate, backend = blocking_expert()
    with Server([backend, fussy_backend()]) as server, raw_stream(server.address) as stream, gate:
        stream.send(forward(1, rows(1, 0), "gate"))
        assert gate.entered.wait(PATIENCE)
        ending = threading.Thread(target=server.shutdown)
        ending.start()
        assert stream.receive()[0].header.kind is Kind.GOAWAY
        stream.send(forward(2))
        answers = {answer.header.call_id: answer for answer in stream.receive()}
        gate.go.set()
        while len(answers) < 2:
            answers |= {answer.header.call_id: answer for answer in stream.receive()}
        assert answers[1].header.kind is Kind.RESULT
        assert isinstance(read_fault(answers[2].header.data), DrainingError)
        assert stream.ended() is grpc.StatusCode.OK
        ending.join()


def test_an_event_for_a_server_that_has_ended_is_dropped() -> None:
    """All servers of a process share gRPC's poller, so an exception for one would lose events of the others."""
    server = Server([fussy_backend()])
    server.start()
    loop = server._grpc_server._loop
    assert loop is not None
    server.shutdown()
    assert loop.is_closed() and loop.call_soon_threadsafe(print) is None
