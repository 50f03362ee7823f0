"""Replication over mutual TLS: a server without a valid certificate and role gets no state."""

import re
from collections.abc import Iterator

import pytest

from tests.experts.certificates import Authority
from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import weights
from tests.experts.server.replica_cases import backend_of, expert, make, role, same_steps, step
from torchweft.experts.client import ClientTls, Connections, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server import Access, Grant, Role, Server, ServerTls

ACCESS = Access([Grant("server", "*", Role.ADMIN), Grant("trainer", "*", Role.TRAIN)])


def secured(directory: LocalDirectory, authority: Authority, own: ClientTls | None) -> Server:
    """Server that requires client certificates, and presents ``own`` to the servers that it follows."""
    replicas = ReplicaOptions(follow_seconds=0.05, follow_steps=1, first_seconds=0.5, tls=own)
    tls = ServerTls(*authority.issue("server"), authority.pem)
    return make(directory, expert(), replicas=replicas, tls=tls, access=ACCESS, address="localhost:0")


@pytest.fixture
def owner(authority: Authority) -> Iterator[tuple[Server, LocalDirectory]]:
    directory = LocalDirectory()
    with secured(directory, authority, authority.client("server")) as server:
        wait_until(lambda: role(server) == "owner")
        with Connections(directory, tls=authority.client("trainer")) as connections:
            step(RemoteExpert("fussy", connections))
        yield server, directory


def test_a_server_with_a_certificate_follows(owner: tuple[Server, LocalDirectory], authority: Authority) -> None:
    first, directory = owner
    with (
        secured(directory, authority, authority.client("server")) as second,
        Connections(directory, tls=authority.client("trainer")) as connections,
    ):
        assert (role(first), role(second)) == ("owner", "follower")
        step(RemoteExpert("fussy", connections), 1)
        wait_until(lambda: backend_of(first).steps == 2 and same_steps(first, second))
        assert weights(backend_of(first)) == weights(backend_of(second))
        first.shutdown()
        step(RemoteExpert("fussy", connections), 2)
        assert role(second) == "owner" and backend_of(second).steps == 3


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("plain", "UnreachableError: .* called without TLS"),
        ("nobody", "CertificateError: .* no certificate was sent"),
        ("stranger", "CertificateError: .* check the certificates of both ends"),
        ("expired", "(?s)UsageError: .* the other end will reject the certificate: certificate has expired"),
        ("mistrusts", "CertificateError: .* check the certificates of both ends"),
        ("trainer", "ForbiddenError: .* client 'trainer' has role ADMIN for no expert"),
        ("intern", "ForbiddenError: .* nothing is granted to client 'intern'"),
    ],
)
def test_server_with_wrong_credentials_gets_no_state(
    owner: tuple[Server, LocalDirectory], authority: Authority, who: str, words: str
) -> None:
    first, directory = owner
    other = Authority("other")
    tls = {
        "plain": None,
        "nobody": ClientTls(authority.pem),
        "stranger": ClientTls(authority.pem, *other.issue("server")),
        "expired": authority.client("server", days=(-3, -1)),
        "mistrusts": ClientTls(other.pem, *authority.issue("server")),
        "trainer": authority.client("trainer"),
        "intern": authority.client("intern"),
    }[who]
    with secured(directory, authority, tls) as second:
        wait_until(lambda: re.match(words, second.statistics().replicas["fussy"].failure or ""))
        replica = second.statistics().replicas["fussy"]
        assert (replica.role, replica.steps, replica.received) == ("follower", 0, 0)
        assert role(first) == "owner" and not first.statistics().replicas["fussy"].followers
