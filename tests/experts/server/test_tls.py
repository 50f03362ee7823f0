"""Certificates of a server: faults are reported precisely, and renewed files are reloaded at run time."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization

from tests.experts.certificates import Authority
from tests.experts.expert_cases import fussy_backend, rows
from torchweft.core.errors import UsageError
from torchweft.experts.client import NEVER, ClientTls, GrpcTransport, RemoteExpert
from torchweft.experts.discovery.etcd import EtcdDirectory, EtcdTls
from torchweft.experts.errors import CertificateError, LostError, UnreachableError
from torchweft.experts.server import Server, ServerOptions, ServerTls
from torchweft.experts.wire.service import age_options

LOCAL = "localhost:0"


def call(server: Server, tls: ClientTls) -> None:
    with RemoteExpert("fussy", server.address, tls=tls, retry=NEVER, timeout=5.0) as remote, torch.no_grad():
        remote(rows(2, 0))


def encrypted(key: bytes) -> bytes:
    secret: Any = serialization.load_pem_private_key(key, None)
    encryption = serialization.BestAvailableEncryption(b"password")
    return secret.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


CUT = "the key or the certificate cannot be read"
BEGUN = b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("end", ["server", "server with files", "client", "directory"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("other key", "the key is that of another certificate"),
        ("password", "the key is encrypted with a password"),
        ("cut", CUT),
        ("cut key", CUT),
        ("swapped", CUT),
        ("authority", "the authority cannot be read"),
        ("cut and authority", rf"(?s){CUT}.*the authority cannot be read"),
        ("missing", "none.pem' cannot be read"),
        ("no pem", "no PEM block"),
    ],
)
def test_invalid_certificates_fail_before_any_call(
    wrong: str, words: str, end: str, authority: Authority, tmp_path: Path
) -> None:
    key, certificate = authority.issue("server")
    changes: dict[str, dict[int, Any]] = {
        "other key": {0: authority.issue("other")[0]},
        "password": {0: encrypted(key)},
        "cut": {1: certificate[:200]},
        "cut key": {0: key[:60]},
        "swapped": {0: certificate, 1: key},
        "authority": {2: BEGUN},
        "cut and authority": {1: certificate[:200], 2: BEGUN},
        "missing": {0: tmp_path / "none.pem"},
        "no pem": {0: b"nothing"},
    }
    pems: list[Any] = [changes[wrong].get(index, pem) for index, pem in enumerate((key, certificate, authority.pem))]
    if end == "server with files":
        for index, value in enumerate(pems):
            if isinstance(value, bytes):
                pems[index] = tmp_path / f"{index}.pem"
                pems[index].write_bytes(value)
    with pytest.raises(UsageError, match=words) as caught:
        if end == "directory":
            EtcdDirectory(["localhost:1"], tls=EtcdTls(pems[2], *pems[:2]))
        elif end == "client":
            RemoteExpert("fussy", "localhost:1", tls=ClientTls(pems[2], *pems[:2])).close()
        else:
            Server([fussy_backend()], address=LOCAL, tls=ServerTls(*pems)).start()
    assert "port" not in str(caught.value)


def test_server_name_selects_the_certificate(authority: Authority) -> None:
    with Server([fussy_backend()], address="127.0.0.1:0", tls=ServerTls(*authority.issue("server"))) as server:
        with pytest.raises(UnreachableError, match=r"Hostname Verification.*server_name= .tls=."):
            call(server, ClientTls(authority.pem))
        call(server, ClientTls(authority.pem, server_name="localhost"))


@pytest.mark.parametrize(
    ("days", "why"), [((-3, -1), "certificate has expired"), ((1, 2), "certificate is not yet valid"), ((-1, 1), "")]
)
def test_certificate_with_wrong_dates_is_not_served(
    days: tuple[int, int], why: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue("server", days=days)
    if why:
        with pytest.raises(UsageError, match=f"{why}; renew it, or .* allow_expired=True"):
            Server(address=LOCAL, tls=ServerTls(*pair)).start()
    tls = ServerTls(*pair, allow_expired=bool(why))
    with caplog.at_level(logging.WARNING, "torchweft.experts.tls"), Server(address=LOCAL, tls=tls):
        pass
    assert (why in caplog.text) if why else not caplog.text


def test_renewed_certificates_are_reloaded(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [tmp_path / name for name in ("key", "certificate", "authority")]

    def write(*pems: bytes) -> None:
        for file, pem in zip(files, pems, strict=False):
            file.write_bytes(pem)

    new = Authority("new")
    mine = authority.client("me")
    write(*authority.issue("server"), authority.pem)
    with Server([fussy_backend()], address=LOCAL, tls=ServerTls(*files)) as server:
        call(server, mine)
        key, certificate = new.issue("server")
        write(key)  # only the key is new, so the old pair stays in use
        with caplog.at_level(logging.WARNING, "torchweft.experts.tls"):
            call(server, mine)
            call(server, mine)
        assert caplog.text.count("that of another certificate") == 1
        write(key, certificate, new.pem)
        call(server, new.client("me"))
        with pytest.raises(UnreachableError):
            call(server, mine)
        for file in files:
            file.unlink()
        call(server, new.client("me"))


def test_removed_authority_ends_open_connections(authority: Authority, tmp_path: Path) -> None:
    """A connection has a greatest age. Until its certificate fails, a client notices nothing of a new connection."""
    files = [tmp_path / name for name in ("key", "certificate", "authority")]
    for file, pem in zip(files, (*authority.issue("server"), authority.pem), strict=True):
        file.write_bytes(pem)
    options = ServerOptions(connection_age_seconds=0.2)
    with (
        Server([fussy_backend()], address=LOCAL, tls=ServerTls(*files), options=options) as server,
        GrpcTransport(server.address, tls=authority.client("me")) as transport,
    ):
        remote = RemoteExpert("fussy", transport, timeout=20.0)
        calls = 0
        while transport.statistics().streams < 4:
            remote(rows(2, 0)).sum().backward()
            calls += 1
        assert remote.steps == calls
        files[2].write_bytes(Authority("new").pem)
        with pytest.raises((UnreachableError, LostError)):  # lost, if the connection ended during a call
            while True:
                remote(rows(2, 0))
        with pytest.raises(CertificateError):
            remote(rows(2, 0))


def test_default_age_of_a_connection_is_an_hour() -> None:
    options = dict(age_options(ServerOptions().connection_age_seconds))
    assert options == {"grpc.max_connection_age_ms": 3_600_000, "grpc.max_connection_age_grace_ms": 30_000}
