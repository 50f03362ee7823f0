"""Addresses: one rule for every interface, which rejects text that gRPC would take for another address."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.server.test_signals import CONFIG
from torchweft.core.errors import UsageError
from torchweft.experts.address import address_fault, is_wildcard, parse_address
from torchweft.experts.client import Connections, GrpcTransport, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.discovery.etcd import EtcdDirectory
from torchweft.experts.registry import make_expert
from torchweft.experts.server import Server
from torchweft.experts.server.config import build

HOSTS = {name: name for name in ("127.0.0.1", "localhost", "ffn-0.experts.svc.cluster.local", "a_b")}
HOSTS |= {"[::1]": "::1", "[fe80::1%eth0]": "fe80::1%eth0"}
WILD = ["0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]", "0"]
BAD = ["x", "", ":0", ":80", "127.0.0.1", "a:", "a:http", "a:-1", "a:65536", "a:0x10", "a:٣", "a:７0", "a:+7", "a:80 "]
BAD += [" a:80", "a b:80", "a\n:80", "a\0:0", "a,b:80", "a/b:80", "unix:/tmp/s.sock", "http://a:1", "dns:///a:1"]
BAD += ["::1:80", "[::1]", "[::1:80", "::1]:80", "[x]:1", "[127.0.0.1]:1", "not an address"]
CALLS: list[Callable[[str], object]] = [
    parse_address,
    GrpcTransport,
    lambda address: RemoteExpert("x", address),
    lambda address: Connections().transport_to(address),
    lambda address: EtcdDirectory([address]),
    lambda address: Server(address=address),
    lambda address: Server(panel=address),
    lambda address: Server(directory=LocalDirectory(), advertise=address),
]


@given(st.sampled_from(sorted(HOSTS)), st.integers(-3, 70_000))
def test_address_is_a_host_and_a_port_in_range(host: str, port: int) -> None:
    address = f"{host}:{port}"
    if 0 <= port <= 65535:
        assert parse_address(address) == (HOSTS[host], port)
    else:
        with pytest.raises(UsageError, match="host:port"):
            parse_address(address)
    assert (not address_fault("it", address, free=True)) == (0 <= port <= 65535)
    assert (not address_fault("it", address)) == (0 < port <= 65535)


def test_every_interface_rejects_invalid_addresses(subtests: pytest.Subtests) -> None:
    for address in [*BAD, None, 5, b"a:80", ("a", 80)]:
        (fault,) = address_fault("where", address)
        assert fault.startswith("where is ") and repr(address) in fault and "wanted host:port" in fault
    for address, make in product(BAD, CALLS):
        with subtests.test(address=address, make=make):
            with pytest.raises(UsageError, match="wanted host:port") as caught:
                make(address)
            assert repr(address) in str(caught.value)


@pytest.mark.parametrize("host", WILD)
def test_uncallable_address_is_not_listed(host: str) -> None:
    address = f"{host}:0"
    assert is_wildcard(parse_address(address)[0]) and not any(is_wildcard(name) for name in HOSTS.values())
    assert build({**CONFIG, "address": address, "insecure": True}).experts  # without a directory it is not listed
    for more in ({}, {"advertise": f"{host}:7070"}, {"advertise": "gpu-7:0"}):
        with pytest.raises(UsageError, match=next(iter(more), r"address is .*advertise = ")):
            build({**CONFIG, "address": address, "directory": "local", **more})
    directory = LocalDirectory()
    with pytest.raises(UsageError, match="which others cannot call"):
        Server(address=address, directory=directory)
    with pytest.raises(UsageError, match="advertise= and no directory"):
        Server(advertise="gpu-7:1")
    if host in ("0.0.0.0", "[::]"):
        with Server(
            [make_expert("ffn", hidden=4).backend("f")], address=address, advertise="gpu-7:1", directory=directory
        ):
            assert directory.get().experts == {"f": ("gpu-7:1",)}
    directory.close()
