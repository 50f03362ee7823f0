"""Over a network that delays, cuts and loses data, every step happens once and calls end by their deadline."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from benchmarks.experts.survive_steps import Trainers, counted, marks
from tests.experts.expert_cases import fussy_backend
from tests.experts.faulty_proxy import FaultyProxy, NetworkFaults
from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport, LocalTransport, RemoteExpert, Retry, Transport
from torchweft.experts.errors import DeadlineError
from torchweft.experts.server import Server

ROUGH = NetworkFaults(late=0.003, cut=0.03, silent=0.02, silent_seconds=0.3, stall=0.02, stall_seconds=0.2)
PATIENT = Retry(attempts=100_000, first=0.005, longest=0.1, attempt_seconds=2.0)
STEPS = 25
LONG = 100.0


@pytest.fixture
def echo() -> Iterator[str]:
    """Address of an echo server that serves one connection at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    one, _ = listener.accept()
                    with one:
                        while data := one.recv(1 << 16):
                            one.sendall(data)
                except ConnectionError:  # the proxy cut the connection
                    continue
                except OSError:  # the listener was closed
                    return

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def connect(network: FaultyProxy) -> socket.socket:
    host, port = network.address.split(":")
    return socket.create_connection((host, int(port)), 20.0)


def read(one: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (data := one.recv(count - len(received))):
        received += data
    return received


def has_ended(one: socket.socket) -> bool:
    """Wait for the next byte or the end of the connection. Returns whether it ended first."""
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_delayed_data_arrives_complete_and_in_order(echo: str) -> None:
    sent = torch.randint(256, (300_000,), dtype=torch.uint8).numpy().tobytes()
    with (
        FaultyProxy(echo, NetworkFaults(late=0.002, stall=0.1, stall_seconds=0.01)) as network,
        connect(network) as one,
    ):
        sender = threading.Thread(target=one.sendall, args=(sent,))
        sender.start()
        assert read(one, len(sent)) == sent
        sender.join()


def test_cut_connection_ends_and_a_new_one_works(echo: str) -> None:
    with FaultyProxy(echo, NetworkFaults(cut=1.0)) as network:
        for cut in (True, False):
            with connect(network) as one:
                one.sendall(b"hello")
                assert has_ended(one) if cut else read(one, 5) == b"hello"
            network.network_faults = NetworkFaults()
        assert (network.connections, network.cuts) == (2, 1)


def test_silent_connection_returns_nothing_until_it_ends(echo: str) -> None:
    with FaultyProxy(echo, NetworkFaults(silent=1.0)) as network:
        with connect(network) as one:
            one.sendall(b"hello")
            one.settimeout(0.2)
            with pytest.raises(TimeoutError):
                one.recv(1)
            one.sendall(b"are you there?")  # succeeds, as if half open
        network.network_faults = NetworkFaults(silent=1.0, silent_seconds=0.1)
        with connect(network) as one:
            one.sendall(b"hello")
            assert has_ended(one)
        assert network.silences == 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_bad_network_changes_no_weights(seed: int) -> None:
    plain = fussy_backend()
    with Server([plain]) as server, LocalTransport(server.handler()) as transport:
        expected = train(transport, plain.name)
    remote = fussy_backend()
    with (
        Server([remote]) as server,
        FaultyProxy(server.address, ROUGH, seed) as network,
        GrpcTransport(network.address) as transport,
    ):
        results = train(transport, remote.name)
        harm = network.cuts + network.silences
    assert harm > 0
    assert remote.steps == plain.steps == STEPS
    assert all(map(torch.equal, results, expected))
    assert same_weights(remote.module, plain.module)


def train(transport: Transport, uid: str) -> list[torch.Tensor]:
    draw, seen = torch.Generator().manual_seed(0), list[torch.Tensor]()
    expert = RemoteExpert(uid, transport, timeout=LONG, retry=PATIENT)
    for _ in range(STEPS):
        x = torch.randn(3, 4, dtype=torch.float64, generator=draw, requires_grad=True)
        y = expert(x)
        y.square().sum().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad]
    return seen


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_concurrent_keys_step_once_each(seed: int) -> None:
    backend = marks(120)
    with (
        Server([backend]) as server,
        FaultyProxy(server.address, ROUGH, seed) as network,
        GrpcTransport(network.address) as transport,
    ):
        trainers = Trainers(transport, threads=3, most=120, seconds=LONG, retry=PATIENT)
        trainers.join()
    assert network.cuts + network.silences > 0
    assert not trainers.faults and len(trainers.heard) == 120
    weight = next(iter(backend.module.parameters())).detach()
    assert backend.steps == 120 and counted(weight, backend.steps).good and bool((weight == -1).all())


def test_call_on_a_silent_connection_ends_at_its_deadline(backend: ExpertBackend) -> None:
    with (
        Server([backend]) as server,
        FaultyProxy(server.address) as network,
        GrpcTransport(network.address) as transport,
    ):
        expert = RemoteExpert(backend.name, transport, timeout=1.0, retry=PATIENT)
        with torch.no_grad():
            expert(torch.zeros(2, 4, dtype=torch.float64))
        network.network_faults = NetworkFaults(silent=1.0)
        start = time.monotonic()
        with pytest.raises(DeadlineError), torch.no_grad():
            expert(torch.zeros(2, 4, dtype=torch.float64))
        assert 0.9 < time.monotonic() - start < 20.0
        assert network.silences >= 1
