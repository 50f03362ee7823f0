"""Certificate authority that issues short-lived or expired certificates."""

from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from torchweft.experts.client import ClientTls


class Authority:
    """Authorities of the same name have different keys. ``rsa_key``: use RSA instead of an elliptic curve."""

    def __init__(self, name: str = "authority", *, rsa_key: bool = False) -> None:
        self._key: Any = rsa.generate_private_key(65537, 2048) if rsa_key else ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(self._name, self._key, days=(-1, 1))
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str, *, days: tuple[int, int] = (-1, 1)) -> tuple[bytes, bytes]:
        """Return a key and a certificate for this name and localhost. ``days``: validity, relative to now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
        certificate = self._builder(subject, key, days).add_extension(names, critical=False)
        pem = certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        plain = serialization.NoEncryption()
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return secret, pem

    def client(self, name: str, *, days: tuple[int, int] = (-1, 1)) -> ClientTls:
        """TLS options of a client with this name that trusts this authority."""
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
