"""Certificates, tokens and roles over gRPC: a client without a valid one is refused before a tensor is parsed."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest
import torch

from tests.experts.certificates import Authority
from tests.experts.expert_cases import fussy_backend, rows
from tests.experts.server.raw_stream import raw_stream
from tests.type_checks import without_type_checks
from torchweft.core.errors import UsageError
from torchweft.experts.client import NEVER, ClientTls, GrpcTransport, RemoteExpert
from torchweft.experts.errors import CertificateError, CommitError, ForbiddenError, UnreachableError
from torchweft.experts.server import Access, Grant, Role, Server, ServerTls
from torchweft.experts.wire import Call, Header, Kind, Received
from torchweft.experts.wire import frame as frame_module

ACCESS = Access(
    [Grant("reader", "*", Role.FORWARD), Grant("trainer", "*", Role.TRAIN), Grant("boss", "*", Role.ADMIN)],
    {"r-token": "reader", "t-token": "trainer", "b-token": "boss"},
)


@pytest.fixture(scope="module")
def secured(authority: Authority) -> Iterator[Server]:
    key, certificate = authority.issue("server")
    with Server(
        [fussy_backend()], address="localhost:0", access=ACCESS, tls=ServerTls(key, certificate, authority.pem)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def by_token() -> Iterator[Server]:
    with Server([fussy_backend()], access=ACCESS) as server:
        yield server


def expert(server: Server, **options: Any) -> RemoteExpert:
    return RemoteExpert("fussy", server.address, retry=NEVER, timeout=5.0, **options)


def test_certificate_names_the_client(secured: Server, authority: Authority) -> None:
    with expert(secured, tls=authority.client("reader")) as remote:
        with torch.no_grad():
            assert remote(rows(2, 0)).shape == (2, 4)
        with pytest.raises(ForbiddenError, match="'reader' has role FORWARD"):
            remote(rows(2, 0)).sum().backward()
    with expert(secured, tls=authority.client("trainer")) as remote:
        remote(rows(2, 0)).sum().backward()
        assert remote.steps == 1
    assert secured.audit.counts()["BACKWARD"] == 1 and secured.audit.last()[0].client == "reader"


PING = Call(Header(kind=Kind.PING, call_id=0))


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("nobody", "no certificate was sent.*check the certificates of both ends .tls=."),
        ("stranger", "check the certificates of both ends .tls=."),
        ("mistrusts", "check the certificates of both ends .tls=.: each must be signed by the other's authority="),
        ("plain", "called without TLS: if it requires TLS, give this client certificates .tls=."),
        ("other name", "Hostname Verification"),
    ],
)
def test_wrong_certificate_fails_before_the_deadline(
    secured: Server, authority: Authority, who: str, words: str
) -> None:
    tls = {
        "nobody": ClientTls(authority.pem),
        "stranger": ClientTls(authority.pem, *Authority("other").issue("trainer")),
        "mistrusts": ClientTls(Authority("other").pem, *authority.issue("trainer")),
        "plain": None,
        "other name": ClientTls(authority.pem, *authority.issue("trainer"), server_name="torchweft.example"),
    }[who]
    accepted = secured.statistics().accepted
    with expert(secured, tls=tls) as remote, pytest.raises(UnreachableError, match=words):
        remote.describe()
    with GrpcTransport(secured.address, tls=tls) as transport:
        error = transport.submit(PING, 5.0).exception(5.0)
        assert isinstance(error, UnreachableError) and re.search(words, str(error))
    if tls is not None:
        with RemoteExpert("fussy", secured.address, tls=tls, timeout=600.0) as remote:  # with the default Retry
            for ask in (remote.describe, lambda: remote._stub.caller.call(PING, 600.0)):
                with pytest.raises(CertificateError):
                    ask()
    assert secured.statistics().accepted == accepted


@pytest.mark.parametrize("rsa_key", [False, True])
def test_authority_with_a_new_key_is_rejected_at_once(rsa_key: bool) -> None:
    """An authority with the same name and a new key raises `CertificateError`, whichever end has the new key."""
    old, new = Authority(rsa_key=rsa_key), Authority(rsa_key=rsa_key)
    server_tls = ServerTls(*old.issue("server"), old.pem)
    with Server([fussy_backend()], address="localhost:0", tls=server_tls) as server:
        for authority, signer in ((new, old), (old, new), (new, new)):
            tls = ClientTls(authority.pem, *signer.issue("trainer"))
            rejected = pytest.raises(CertificateError, match="with its present key if that was renewed")
            with RemoteExpert("fussy", server.address, tls=tls, timeout=20.0) as remote, rejected:
                remote.describe()


@pytest.mark.parametrize(("days", "why"), [((-3, -1), "has expired"), ((1, 3), "is not yet valid")])
def test_certificate_with_wrong_dates_is_misuse(authority: Authority, days: tuple[int, int], why: str) -> None:
    with pytest.raises(UsageError, match=f"the other end will reject the certificate: .*{why}"):
        RemoteExpert("fussy", "localhost:1", tls=authority.client("trainer", days=days)).close()


def test_certified_client_without_a_grant_is_refused(secured: Server, authority: Authority) -> None:
    with expert(secured, tls=authority.client("intern")) as remote, pytest.raises(ForbiddenError, match="granted"):
        remote.describe()


def test_client_rejects_a_foreign_server_certificate(authority: Authority) -> None:
    other = Authority("other")
    with Server([fussy_backend()], address="localhost:0", tls=ServerTls(*other.issue("server"))) as server:
        with expert(server, tls=ClientTls(authority.pem)) as remote, pytest.raises(UnreachableError):
            remote.describe()
        with expert(server, tls=ClientTls(other.pem)) as remote:  # TLS without client certificates
            assert remote.describe().name == "fussy"


def test_token_names_the_client(by_token: Server) -> None:
    with expert(by_token, token="r-token") as remote:
        assert not remote(rows(2, 0)).detach().isnan().any()
        with pytest.raises(ForbiddenError):
            remote(rows(2, 0)).sum().backward()
    with expert(by_token, token="t-token", accumulate=True) as remote:
        remote(rows(2, 0)).sum().backward()
        assert remote.commit()


@pytest.mark.parametrize("token", [None, "wrong"])
def test_wrong_token_is_refused_before_a_frame_is_read(by_token: Server, token: str | None) -> None:
    before = by_token.statistics()
    with expert(by_token, token=token) as remote, pytest.raises(ForbiddenError):
        remote.describe()
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    with raw_stream(by_token.address, metadata) as stream:
        stream.send(Call(Header(kind=Kind.FORWARD, call_id=1, uid="fussy"), [rows(1, 0)]))
        assert stream.ended() is grpc.StatusCode.UNAUTHENTICATED
    after = by_token.statistics()
    assert (after.accepted, after.answered) == (before.accepted, before.answered)
    assert by_token.audit.last()[-1].what == "STREAM"


def test_a_forbidden_call_is_refused_before_tensors_are_made(by_token: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    original = frame_module.Received.tensors

    def tensors(self: Received, **options: bool) -> list[torch.Tensor]:
        parsed.append(self.header.kind.name)
        return original(self, **options)

    monkeypatch.setattr(frame_module.Received, "tensors", tensors)
    call = Call(Header(kind=Kind.BACKWARD, call_id=0, uid="fussy"), [rows(1, 0), rows(1, 0)])
    with GrpcTransport(by_token.address, token="r-token") as transport:
        assert isinstance(transport.submit(call, 5.0).exception(5.0), ForbiddenError)
        assert parsed == []


def test_missing_expert_looks_like_a_forbidden_one() -> None:
    access = Access([Grant("", "mine.*", Role.TRAIN)])
    with Server([fussy_backend()], access=access) as server, GrpcTransport(server.address) as transport:
        for uid in ("fussy", "missing"):
            call = Call(Header(kind=Kind.FORWARD, call_id=0, uid=uid), [rows(1, 0)])
            assert isinstance(transport.submit(call, 5.0).exception(5.0), ForbiddenError)


def test_the_status_requires_the_admin_role(by_token: Server) -> None:
    for token, allowed in (("b-token", True), ("t-token", False), (None, False)):
        with GrpcTransport(by_token.address, token=token) as transport:
            if allowed:
                assert '"experts"' in transport.status()
            else:
                with pytest.raises(ForbiddenError):
                    transport.status()


def test_proven_client_cannot_use_a_foreign_key(by_token: Server) -> None:
    """Equal keys of two clients are two backwards, because the client named in a header extends the proven name."""
    steps = by_token.statistics().experts["fussy"].steps
    for token in ("t-token", "b-token", "t-token"):
        header = Header(kind=Kind.BACKWARD, call_id=0, uid="fussy", key="k", client="trainer")
        with GrpcTransport(by_token.address, token=token) as transport:
            transport.submit(Call(header, [rows(1, 0), rows(1, 0)]), 5.0).result(5.0)
    assert by_token.statistics().experts["fussy"].steps == steps + 2


def test_processes_with_one_certificate_keep_mini_batches_apart(by_token: Server) -> None:
    with GrpcTransport(by_token.address, token="t-token") as transport:

        def send(kind: Kind, client: str, *tensors: torch.Tensor) -> BaseException | None:
            header = Header(kind=kind, call_id=0, uid="fussy", client=client, mini_batch="m")
            return transport.submit(Call(header, tensors), 5.0).exception(5.0)

        assert send(Kind.BACKWARD, "process-1", rows(1, 0), rows(1, 0)) is None
        assert isinstance(send(Kind.COMMIT, "process-2"), CommitError)
        assert send(Kind.COMMIT, "process-1") is None


@pytest.mark.parametrize("key", ["as text", None, 5, bytearray(b"x"), "nul\0"])
@pytest.mark.parametrize("make", [ServerTls, partial(ClientTls, b"-----BEGIN")])
def test_invalid_pem_is_misuse_and_is_not_printed(key: Any, make: Any, authority: Authority) -> None:
    pem, certificate = authority.issue("x")
    words = {"nul\0": "cannot be read"}.get(str(key), "is of type")
    if key is None and make is not ServerTls:
        words = "both key= and certificate="
    with without_type_checks(), pytest.raises(UsageError, match=words) as caught:
        tls = make(key=pem.decode() if key == "as text" else key, certificate=certificate)
        if isinstance(tls, ServerTls):
            Server(address="127.0.0.1:0", tls=tls).start()
        GrpcTransport("127.0.0.1:1", tls=tls)
    assert pem.decode()[30:60] not in str(caught.value)


def test_secrets_are_not_printed(authority: Authority) -> None:
    key, certificate = authority.issue("x")
    assert b"PRIVATE" in key and "PRIVATE" not in repr(ServerTls(key, certificate)) + repr(
        ClientTls(authority.pem, key, certificate)
    )
