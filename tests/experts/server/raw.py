"""A client that sends any bytes, for servers that must survive them; and certificates for a day, or for yesterday."""

import queue
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weft.experts.client import ClientTls
from weft.experts.wire import Call, Received, decode, encode
from weft.experts.wire.service import STREAM

PATIENCE = 10.0


class Raw:
    """One stream, spoken to in bytes."""

    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(STREAM)(iter(self._queue.get, None), timeout=PATIENCE, metadata=metadata)

    def send(self, *messages: bytes | Call) -> None:
        for message in messages:
            self._queue.put(message if isinstance(message, bytes) else encode([message]))

    def receive(self) -> list[Received]:
        """The answers of the next frame."""
        return decode(next(self._call))

    def ended(self) -> Any:
        """The status with which the server ends the stream; answers before it are passed over."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass
        return self._call.code()

    def finish(self) -> None:
        """End this side."""
        self._queue.put(None)

    def close(self) -> None:
        self._queue.put(None)
        self._call.cancel()


@contextmanager
def raw(address: str, metadata: Sequence[tuple[str, str]] = ()) -> Generator[Raw]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:
        stream = Raw(channel, metadata)
        try:
            yield stream
        finally:
            stream.close()


class Authority:
    """Signs certificates. ``pem`` is its own."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(self._name, self._key, days=(-1, 1))
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str, *, days: tuple[int, int] = (-1, 1)) -> tuple[bytes, bytes]:
        """A key and a certificate for this common name and for localhost, valid between these days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
        certificate = self._builder(subject, key, days).add_extension(names, critical=False)
        pem = certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        plain = serialization.NoEncryption()
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return secret, pem

    def client(self, name: str, *, days: tuple[int, int] = (-1, 1)) -> ClientTls:
        """How a client of this name shows itself, who trusts this authority."""
        return ClientTls(self.pem, *self.issue(name, days=days))

    def _builder(self, subject: x509.Name, key: Any, days: tuple[int, int]) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1]))
        )
