"""The options of both ends go together, and do what they are there for."""

import threading
from contextlib import ExitStack

import pytest

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import fussy_backend
from tests.experts.faulty_proxy import NO_FAULTS, FaultyProxy, NetworkFaults
from torchweft.experts.client import GrpcTransport, Retry
from torchweft.experts.client.retry import FixedResolver, RetryingCaller
from torchweft.experts.server import Server
from torchweft.experts.wire import LIMITS, Call, Header, Kind, Limits
from torchweft.experts.wire.frame import MESSAGE_BYTES
from torchweft.experts.wire.service import Options, client_options, server_options

PING = Call(Header(kind=Kind.PING, call_id=0))
CLIENT = dict(client_options(LIMITS))
SOON = Retry(attempts=100_000, first=0.01, longest=0.05)


def number(options: dict[str, int | str], name: str) -> int:
    return int(options[f"grpc.{name}"])


def sooner(options: Options, times: float) -> Options:
    """As if time went faster: whatever gRPC takes in milliseconds, so that wrong names show."""
    return [(name, max(1, int(int(value) / times)) if name.endswith("_ms") else value) for name, value in options]


@pytest.mark.long
def test_a_client_asks_no_oftener_than_its_server_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection lasts. By itself gRPC bears one question in 5 minutes, and ends who asks oftener."""
    asks = 100

    def of_client(limits: Limits) -> Options:
        return [(name, asks if name == "grpc.keepalive_time_ms" else value) for name, value in client_options(limits)]

    def of_server(limits: Limits, connections: int) -> Options:
        return sooner(server_options(limits, connections), number(CLIENT, "keepalive_time_ms") / asks)

    monkeypatch.setattr("torchweft.experts.client.transport.client_options", of_client)
    monkeypatch.setattr("torchweft.experts.server.grpc_server.server_options", lambda *_: [])
    with ExitStack() as stack:
        bare = stack.enter_context(Server([fussy_backend()]))
        monkeypatch.setattr("torchweft.experts.server.grpc_server.server_options", of_server)
        ours = stack.enter_context(Server([fussy_backend()]))
        borne = stack.enter_context(GrpcTransport(ours.address))
        RetryingCaller(FixedResolver(borne), SOON).call(PING, 30.0)
        for _ in range(2):  # it outlasts two that are ended one after the other
            refused = stack.enter_context(GrpcTransport(bare.address))
            RetryingCaller(FixedResolver(refused), SOON).call(PING, 30.0)
            wait_until(lambda stream=refused._streams[0]: stream.is_gone)
        assert not borne._streams[0].is_gone


def test_frames_arrive_whole_or_in_parts() -> None:
    limits = Limits(frame_bytes=12_345_678)
    client, server = dict(client_options(limits)), dict(server_options(limits, 9))
    assert all(number(each, "max_send_message_length") >= 12_345_678 for each in (client, server))
    assert number(client, "max_receive_message_length") >= 12_345_678
    assert MESSAGE_BYTES <= number(server, "max_receive_message_length") < 2 * MESSAGE_BYTES


def test_unresponsive_connection_is_closed_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")

    def hasty(limits: Limits) -> Options:
        return [(name, 300 if name.endswith(times) else value) for name, value in client_options(limits)]

    monkeypatch.setattr("torchweft.experts.client.transport.client_options", hasty)
    with (
        Server([fussy_backend()]) as server,
        FaultyProxy(server.address) as network,
        GrpcTransport(network.address) as transport,
    ):
        line = RetryingCaller(FixedResolver(transport), SOON)
        line.call(PING, 30.0)
        network.network_faults = NetworkFaults(silent=1.0)

        def calm() -> None:  # for the next connection; the silent one stays silent
            while not network.silences:
                threading.Event().wait(0.01)
            network.network_faults = NO_FAULTS

        waiting = threading.Thread(target=calm)
        waiting.start()
        line.call(PING, 30.0)
        waiting.join()
        assert network.connections == 2 and transport.statistics().streams == 2


def test_a_server_that_is_back_at_its_address_is_found() -> None:
    with Server([fussy_backend()]) as first, GrpcTransport(first.address) as transport:
        line = RetryingCaller(FixedResolver(transport), SOON)
        line.call(PING, 30.0)
        first.shutdown()
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(line.call(PING, 30.0)))
        waiting.start()
        waiting.join(1.0)
        assert not answers
        with Server([fussy_backend()], address=first.address):
            waiting.join(30.0)
            assert len(answers) == 1


def test_slow_network_does_not_prevent_connecting() -> None:
    with (
        Server([fussy_backend()]) as server,
        FaultyProxy(server.address, NetworkFaults(stall=1.0, stall_seconds=0.4)) as network,
        GrpcTransport(network.address) as transport,
    ):
        RetryingCaller(FixedResolver(transport), SOON).call(PING, 30.0)
        assert network.connections == 1
