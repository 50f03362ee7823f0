"""A client that is turned away without a word hears what it has shown, and what to look for."""

import pytest

from weft.experts.client.transport import explained
from weft.experts.tls import ClientTls

CLOSED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.7:7070: Socket closed"


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (None, "called without TLS"),
        (ClientTls(b"authority"), "shown no certificate"),
        (ClientTls(b"authority", b"key", b"certificate"), "check both ends' certificates"),
    ],
)
def test_what_was_shown_is_said_with_who_showed_it_and_where_it_is_set(tls: ClientTls | None, words: str) -> None:
    told = explained(CLOSED, tls)
    assert told.startswith(f"{CLOSED}; ") and words in told and "(tls=)" in told
    other = explained(CLOSED, tls, "this server", "tls= of ReplicaOptions")
    assert "(tls= of ReplicaOptions)" in other and "this client" not in other


@pytest.mark.parametrize("text", ["Connection refused", "Name or service not known", "Deadline Exceeded"])
def test_what_is_no_matter_of_certificates_is_left_as_it_is(text: str) -> None:
    assert explained(text, None) == text


def test_a_certificate_for_another_name_is_told_as_one() -> None:
    text = "Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed."
    told = explained(text, ClientTls(b"authority"), "this server", "tls= of ReplicaOptions")
    assert told.startswith(text) and "server_name= (tls= of ReplicaOptions)" in told
