"""Limits of the memory that a stranger, or a client with half-sent frames, can make resident."""

import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import h2.events
import h2.exceptions
import h2.settings
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import fussy_backend, rows
from tests.experts.security.raw_http2 import RawHttp2, framed
from tests.experts.security.serve_process import ADMITTED, Served, served
from tests.experts.server.raw_stream import raw_stream
from tests.experts.server.server_cases import budget_of
from torchweft.experts.client import GrpcTransport, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import QuotaError, TruncatedError
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server import Access, Grant, Server, ServerOptions
from torchweft.experts.wire import Call, Header, Kind, Limits, encode_parts, read_fault
from torchweft.experts.wire.service import INFO, MESSAGE_BYTES, SERVICE, STATE, STATUS, STREAM

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")
MB = 1 << 20
PROMISED = 64 * MB
UNFINISHED = framed(bytes(4 * MB), length=60 * MB)
HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OPEN_TO_ALL = [f"{HEALTH}/Check"]
CLOSED = [STREAM, INFO, STATUS, STATE, REFLECTION, "/no.such/Method"]


def pour(
    server: Served, paths: list[str], data: bytes, connections: int, calls: int, window: int = 65_535, **how: object
) -> list[RawHttp2]:
    """Open ``calls`` calls per path and connection, and send as much of ``data`` as the server accepts."""
    clients: list[RawHttp2] = []
    for _ in range(connections):
        clients.append(client := RawHttp2(server.address, window=window))
        client.socket.settimeout(0.02)
        for path in paths * calls:
            with suppress(h2.exceptions.ProtocolError, OSError):  # closed, or the window is full
                stream = client.open(path, **how)  # type: ignore[arg-type]
                client.send(stream, data)
    return clients


@pytest.mark.long
def test_a_stranger_makes_at_most_64_mib_resident(tmp_path: Path) -> None:
    """In all: by health checks and by calls that are refused, whether it reads the answers or not."""
    with served(tmp_path) as server, ExitStack() as stack:
        with RawHttp2(server.address) as client:  # one-time allocations of a first connection
            client.ping()
        before = server.resident
        for paths in (OPEN_TO_ALL, CLOSED):
            for window in (65_535, 0):
                for client in pour(server, paths, UNFINISHED, 4, 80 // len(paths), window):
                    stack.callback(client.close)
                grown = server.resident - before
                assert grown <= PROMISED, f"{grown / MB:.0f} MB after calls of {paths}, window {window}"
        with RemoteExpert("f", server.address, token="s3cret") as remote:  # other clients still work
            assert remote(torch.ones(2, 8)).shape == (2, 8)


def test_a_stranger_is_refused_before_a_message_of_it_is_read() -> None:
    access, directory = Access([Grant("trainer")], {"s3cret": "trainer"}), LocalDirectory()
    with (
        Server(access=access, directory=directory, replicas=ReplicaOptions()) as server,
        RawHttp2(server.address) as client,
    ):
        for path in (STREAM, INFO, STATUS, STATE, REFLECTION):  # no message is ever sent
            assert client.status(client.open(path)) == grpc.StatusCode.UNAUTHENTICATED.value[0], path


@pytest.mark.long
def test_half_sent_frames_of_clients_stay_within_total_bytes(tmp_path: Path) -> None:
    most, of_grpc = 32 * MB, 16 * MB
    call = Call(Header(kind=Kind.FORWARD, call_id=1, uid="f"), [torch.zeros(24 * MB // 32, 8)])
    parts = b"".join(framed(part) for part in list(encode_parts([call]))[:-8])
    unfinished = framed(bytes(MESSAGE_BYTES - 1), MESSAGE_BYTES)
    with served(tmp_path, f"options = {{ total_bytes = {most} }}") as server, ExitStack() as stack:
        before = server.resident
        for path, data, calls in ((STREAM, parts, 2), (STREAM, unfinished, 8), (INFO, unfinished, 8)):
            for client in pour(server, [path], data, 2, calls, metadata=ADMITTED):
                stack.callback(client.close)
        grown = server.resident - before
        assert 10 * MB < grown <= most + of_grpc, f"{grown / MB:.0f} MB"


def test_health_check_reads_no_message() -> None:
    with Server([fussy_backend()]) as server, RawHttp2(server.address) as client:
        check = client.open(f"{HEALTH}/Check")  # no message is ever sent
        assert client.status(check) == 0
        with grpc.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service="whatever")
            assert health.Check(asked, timeout=10.0).status == health_pb2.HealthCheckResponse.SERVING
            server.drain()
            assert health.Check(asked, timeout=10.0).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as caught:
                next(health.Watch(asked, timeout=10.0))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_streams_of_one_connection_are_bounded() -> None:
    with Server() as server, RawHttp2(server.address) as client:
        client.ping()
        settings = next(event for event in client.events if isinstance(event, h2.events.RemoteSettingsChanged))
        assert settings.changed_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS].new_value == 128


def test_unread_health_checks_are_bounded() -> None:
    with Server() as server, RawHttp2(server.address, window=0) as client:
        streams = [client.open(f"{HEALTH}/Check") for _ in range(9)]
        assert client.status(streams[8]) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        client.close()
        with RawHttp2(server.address) as other:
            wait_until(lambda: other.status(other.open(f"{HEALTH}/Check")) == 0)


def test_reflection_needs_admission() -> None:
    access = Access([Grant("trainer")], {"s3cret": "trainer"})
    with Server(access=access) as server, grpc.insecure_channel(server.address) as channel:
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            list(ask(iter([request]), timeout=10.0))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        (answer,) = ask(iter([request]), timeout=10.0, metadata=ADMITTED)
        assert {SERVICE, "grpc.health.v1.Health"} <= {service.name for service in answer.list_services_response.service}


def test_a_frame_of_several_messages_is_one_call() -> None:
    x = rows(40_000, 0)  # 1.3 MB, three messages
    with Server([fussy_backend(max_batch_size=40_000)]) as server, GrpcTransport(server.address) as transport:
        whole = transport.submit(Call(Header(kind=Kind.FORWARD, call_id=0, uid="fussy"), [x]), 10.0).result(10.0)
        half = transport.submit(Call(Header(kind=Kind.FORWARD, call_id=0, uid="fussy"), [x[:100]]), 10.0).result(10.0)
        assert torch.equal(whole.tensors()[0][:100], half.tensors()[0])
        wait_until(lambda: budget_of(server).held == 0)


FIRST, SECOND, _ = encode_parts([Call(Header(kind=Kind.FORWARD, call_id=1, uid="fussy"), [rows(40_000, 0)])])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([FIRST, b"\x12\x0a0123456789"], "got a part of 10 bytes"),
        ([FIRST, b""], "got a part of 0 bytes"),
        ([FIRST, FIRST], "got another frame"),
        ([FIRST, SECOND, SECOND], "got a part of"),
        ([FIRST[: MESSAGE_BYTES - 1]], "the frame ends at byte"),
        ([FIRST, None], "the body of a frame ends after"),
    ],
)
def test_invalid_parts_end_their_stream_and_free_memory(parts: list[bytes | None], words: str) -> None:
    with Server([fussy_backend()]) as server, raw_stream(server.address) as stream:
        for part in parts:
            if part is None:
                stream.finish()
            else:
                stream.send(part)
        (answer,) = stream.receive()
        error = read_fault(answer.header.data)
        assert isinstance(error, TruncatedError) and words in str(error) and answer.header.call_id == 0
        wait_until(lambda: (budget_of(server).held, budget_of(server).streams) == (0, 0))


def test_stalled_frame_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.experts.server.server_stream._PART_SECONDS", 0.05)
    with Server([fussy_backend()]) as server, raw_stream(server.address) as stream:
        stream.send(FIRST)
        (answer,) = stream.receive()
        assert "was not sent in time" in str(read_fault(answer.header.data))
        wait_until(lambda: budget_of(server).held == 0)


def test_half_sent_frames_of_one_client_leave_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.experts.server.server_stream._ROOM_SECONDS", 0.05)
    with Server([fussy_backend()], options=ServerOptions(total_bytes=13 * MB)) as server, ExitStack() as stack:
        streams = [stack.enter_context(raw_stream(server.address)) for _ in range(8)]
        for stream in streams[:7]:
            stream.send(FIRST)
        wait_until(lambda: budget_of(server).held > 8 * MB)  # seven streams, as an eighth exceeds three quarters
        streams[7].send(FIRST)
        (answer,) = streams[7].receive()
        assert isinstance(read_fault(answer.header.data), QuotaError)
    wait_until(lambda: budget_of(server).held == 0)


@pytest.mark.parametrize("path", [INFO, REFLECTION, STREAM])
def test_open_calls_of_one_client_leave_room_to_others(path: str) -> None:
    """A client that opens calls and sends no byte cannot take the memory that other clients' streams need."""
    options = ServerOptions(total_bytes=8 * MESSAGE_BYTES)
    access = Access([Grant("*"), Grant("trainer")], {"s3cret": "trainer"})
    with (
        Server([fussy_backend()], options=options, access=access) as server,
        RawHttp2(server.address) as eve,
        RawHttp2(server.address) as other,
    ):
        calls = [eve.open(path) for _ in range(9)]
        assert eve.status(calls[8]) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert budget_of(server).streams == 6 * MESSAGE_BYTES  # three quarters
        assert other.answered(other.open(STREAM, metadata=ADMITTED))[":status"] == "200"
        with RemoteExpert("fussy", server.address, token="s3cret") as remote:
            assert remote(rows(2, 0)).shape == (2, 4)


@pytest.mark.parametrize("path", [INFO, REFLECTION])
def test_short_call_without_a_message_is_ended(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.experts.server.grpc_server._REQUEST_SECONDS", 0.05)
    with Server([fussy_backend()]) as server, RawHttp2(server.address) as eve:
        assert eve.status(eve.open(path)) == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        wait_until(lambda: budget_of(server).streams == 0)


def test_short_calls_of_one_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.experts.server.grpc_server._CLIENT_REQUESTS", 2)
    with Server([fussy_backend()]) as server, RawHttp2(server.address) as eve:
        calls = [eve.open(INFO), eve.open(REFLECTION), eve.open(INFO)]
        assert eve.status(calls[2]) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def test_stream_beyond_the_budget_is_rejected() -> None:
    options = ServerOptions(total_bytes=2 * MESSAGE_BYTES + 1000, limits=Limits(frame_bytes=MESSAGE_BYTES))
    access = Access([Grant("*")], {"s3cret": "trainer"})
    with (
        Server([fussy_backend()], options=options, access=access) as server,
        raw_stream(server.address, ADMITTED) as one,
        raw_stream(server.address) as two,
    ):
        for stream in (one, two):
            stream.send(Call(Header(kind=Kind.FORWARD, call_id=1, uid="fussy"), [rows(1, 0)]))
            assert stream.receive()[0].header.kind is Kind.RESULT
        with raw_stream(server.address) as three:
            assert three.ended() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.statistics().turned_away == 1
