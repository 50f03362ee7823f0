"""gRPC options of client and server: the two ends are compatible, and each option has its effect."""

import threading
from contextlib import ExitStack

import pytest

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import fussy_backend
from tests.experts.faulty_proxy import NO_FAULTS, FaultyProxy, NetworkFaults
from torchweft.experts.client import GrpcTransport, Retry
from torchweft.experts.client.calls import FixedResolver, RetryingCaller
from torchweft.experts.server import Server
from torchweft.experts.wire import LIMITS, Call, Header, Kind, Limits
from torchweft.experts.wire.frame import MESSAGE_BYTES
from torchweft.experts.wire.service import Options, client_options, server_options

PING = Call(Header(kind=Kind.PING, call_id=0))
CLIENT = dict(client_options(LIMITS))
SOON = Retry(attempts=100_000, first=0.01, longest=0.05)


def number(options: dict[str, int | str], name: str) -> int:
    return int(options[f"grpc.{name}"])


def faster(options: Options, times: float) -> Options:
    """Divide all options in milliseconds by ``times``, so that a misspelt option, which has no effect, fails a test."""
    return [(name, max(1, int(int(value) / times)) if name.endswith("_ms") else value) for name, value in options]


@pytest.mark.long
def test_server_tolerates_keepalive_pings_of_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection lasts. By default, gRPC closes it after more than one ping in 5 minutes."""
    ms = 100

    def of_client(limits: Limits) -> Options:
        return [(name, ms if name == "grpc.keepalive_time_ms" else value) for name, value in client_options(limits)]

    def of_server(limits: Limits, connections: int) -> Options:
        return faster(server_options(limits, connections), number(CLIENT, "keepalive_time_ms") / ms)

    monkeypatch.setattr("torchweft.experts.wire.service.client_options", of_client)
    monkeypatch.setattr("torchweft.experts.wire.service.server_options", lambda *_: [])
    with ExitStack() as stack:
        default = stack.enter_context(Server([fussy_backend()]))
        monkeypatch.setattr("torchweft.experts.wire.service.server_options", of_server)
        ours = stack.enter_context(Server([fussy_backend()]))
        kept = stack.enter_context(GrpcTransport(ours.address))
        RetryingCaller(FixedResolver(kept), SOON).call(PING, 30.0)
        for _ in range(2):  # `kept` outlasts two connections that are closed in turn
            closed = stack.enter_context(GrpcTransport(default.address))
            RetryingCaller(FixedResolver(closed), SOON).call(PING, 30.0)
            wait_until(lambda stream=closed._streams[0]: stream.is_gone)
        assert not kept._streams[0].is_gone


def test_frames_arrive_whole_or_in_parts() -> None:
    limits = Limits(frame_bytes=12_345_678)
    client, server = dict(client_options(limits)), dict(server_options(limits, 9))
    assert all(number(options, "max_send_message_length") >= 12_345_678 for options in (client, server))
    assert number(client, "max_receive_message_length") >= 12_345_678
    assert MESSAGE_BYTES <= number(server, "max_receive_message_length") < 2 * MESSAGE_BYTES


def test_unresponsive_connection_is_closed_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")

    def hasty(limits: Limits) -> Options:
        return [(name, 300 if name.endswith(times) else value) for name, value in client_options(limits)]

    monkeypatch.setattr("torchweft.experts.wire.service.client_options", hasty)
    with (
        Server([fussy_backend()]) as server,
        FaultyProxy(server.address) as network,
        GrpcTransport(network.address) as transport,
    ):
        caller = RetryingCaller(FixedResolver(transport), SOON)
        caller.call(PING, 30.0)
        network.network_faults = NetworkFaults(silent=1.0)

        def calm() -> None:  # for the next connection, while the first one stays silent
            while not network.silences:
                threading.Event().wait(0.01)
            network.network_faults = NO_FAULTS

        waiting = threading.Thread(target=calm)
        waiting.start()
        caller.call(PING, 30.0)
        waiting.join()
        assert network.connections == 2 and transport.statistics().streams == 2


def test_client_finds_a_server_restarted_at_its_address() -> None:
    with Server([fussy_backend()]) as first, GrpcTransport(first.address) as transport:
        caller = RetryingCaller(FixedResolver(transport), SOON)
        caller.call(PING, 30.0)
        first.shutdown()
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(caller.call(PING, 30.0)))
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
