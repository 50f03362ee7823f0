"""Addresses: one rule for all of them, and none that gRPC would take for another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.server.test_signals import CONFIG
from weft.core.errors import UsageError
from weft.experts.address import address_fault, is_wildcard, split
from weft.experts.discovery import LocalDirectory
from weft.experts.registry import make_expert
from weft.experts.server import Server
from weft.experts.server.config import build

HOSTS = {"127.0.0.1": "127.0.0.1", "localhost": "localhost", "gpu-7.example": "gpu-7.example", "[::1]": "::1"}
WILD = ["0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]", "0"]
NONE = ["x", "", ":0", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:٣", "127.0.0.1:+7", "127.0.0.1:7 "]
NONE += ["unix:/tmp/s.sock", "::1:0", "[::1]", "[x]:1", "[127.0.0.1]:1", "http://127.0.0.1:1", "dns:///a:1", "a b:1"]
NONE += ["127.0.0.1\0:0", "a\n:1", "[fe80::1:1", "not an address"]


@pytest.mark.parametrize("host", HOSTS)
@given(port=st.integers(-3, 70_000))
def test_an_address_is_a_host_and_a_port_that_there_can_be(host: str, port: int) -> None:
    address = f"{host}:{port}"
    if 0 <= port <= 65535:
        assert split(address) == (HOSTS[host], port)
    else:
        with pytest.raises(UsageError, match="host:port"):
            split(address)
    assert (not address_fault("it", address, free=True)) == (0 <= port <= 65535)
    assert (not address_fault("it", address)) == (0 < port <= 65535)


def test_what_is_none_is_refused_before_anything_listens(subtests: pytest.Subtests) -> None:
    for address in [*NONE, "127.0.0.1:70000", "127.0.0.1:-1"]:
        with subtests.test(address=address):
            with pytest.raises(UsageError):
                split(address)
            with pytest.raises(UsageError, match=r"(?s)invalid address.*address is") as caught:
                Server([make_expert("ffn", hidden=4).backend("f")], address=address)
            assert repr(address) in str(caught.value)
            with pytest.raises(UsageError, match="advertise is"):
                Server([], directory=LocalDirectory(), advertise=address)


def test_what_no_directory_would_list_is_not_advertised() -> None:
    with pytest.raises(UsageError, match="advertise= and no directory"):
        Server([], advertise="gpu-7:1")


@pytest.mark.parametrize("host", WILD)
def test_a_directory_lists_no_address_that_nobody_can_call(host: str) -> None:
    address = f"{host}:0"
    assert is_wildcard(split(address)[0]) and not any(is_wildcard(each) for each in HOSTS.values())
    assert build({**CONFIG, "address": address, "insecure": True}).experts  # without a directory nobody is told of it
    for more in ({}, {"advertise": f"{host}:7070"}, {"advertise": "gpu-7:0"}):
        with pytest.raises(UsageError, match=next(iter(more), r"address is .*advertise = ")):
            build({**CONFIG, "address": address, "directory": "local", **more})
    directory = LocalDirectory()
    with pytest.raises(UsageError, match="no address that others could call"):
        Server([], address=address, directory=directory)
    if host in ("0.0.0.0", "[::]"):
        with Server(
            [make_expert("ffn", hidden=4).backend("f")], address=address, advertise="gpu-7:1", directory=directory
        ):
            assert directory.get().experts == {"f": ("gpu-7:1",)}
    directory.close()
