"""How a client shows itself over TLS."""

from weft.experts.service.certificates import Certificates


class ClientTls(Certificates):
    """Certificates of a client of experts, as PEM bytes or paths; with ``key`` and ``certificate``, mutual TLS."""
