"""Roles of clients: the best matching grant counts, and refusals are reported and logged."""

import logging

import pytest

from torchweft.core.errors import UsageError
from torchweft.experts.errors import ForbiddenError
from torchweft.experts.server import Access, Audit, Caller, Grant, RequestDispatcher, Role
from torchweft.experts.server.auth import authenticate

ACCESS = Access(
    [
        Grant("trainer-*", "ffn.*", Role.TRAIN),
        Grant("trainer-7", "*", Role.FORWARD),
        Grant("root", "*", Role.ADMIN),
        Grant("", "open.*", Role.FORWARD),
    ],
    {"s3cret": "trainer-1"},
)


@pytest.mark.parametrize(
    ("client", "expert", "role"),
    [
        ("trainer-1", "ffn.0", Role.TRAIN),
        ("trainer-1", "cnn.0", Role.NONE),
        ("trainer-7", "cnn.0", Role.FORWARD),
        ("trainer-7", "ffn.0", Role.TRAIN),
        ("root", "anything", Role.ADMIN),
        ("", "open.1", Role.FORWARD),
        ("", "ffn.0", Role.NONE),
        ("stranger", "open.1", Role.NONE),
    ],
)
def test_best_matching_grant_counts(client: str, expert: str, role: Role) -> None:
    assert ACCESS.role(client, expert) is role
    dispatcher = RequestDispatcher(ACCESS)
    for required in (Role.FORWARD, Role.TRAIN, Role.ADMIN):
        if role >= required:
            dispatcher.check_role(Caller(client, "peer"), expert, required, "something", "INFO")
        else:
            with pytest.raises(ForbiddenError, match=required.name):
                dispatcher.check_role(Caller(client, "peer"), expert, required, "something", "INFO")


def test_without_grants_every_client_can_do_everything() -> None:
    """If there are grants, a client without one is refused."""
    assert Access().role("", "x") is Role.ADMIN and Access().admits("")
    assert not ACCESS.admits("stranger") and ACCESS.admits("") and ACCESS.admits("trainer-99")
    with pytest.raises(ForbiddenError, match="'stranger'"):
        authenticate(ACCESS, {"x509_common_name": [b"stranger"]}, None, "p")
    with pytest.raises(UsageError, match="tokens and no grants"):  # without grants, every client could do everything
        Access(tokens={"s3cret": "me"})
    assert not Access([], {"s3cret": "me"}).admits("me")


def test_certificate_takes_precedence_over_token() -> None:
    certificate = {"x509_common_name": [b"root"]}
    token = (("authorization", "Bearer s3cret"),)
    assert authenticate(ACCESS, certificate, token, "p").name == "root"
    assert authenticate(ACCESS, {}, token, "p").name == "trainer-1"
    assert authenticate(ACCESS, {}, None, "p") == Caller("", "p")


@pytest.mark.parametrize("word", ["Bearer wrong", "Bearer ", "s3cret", "Basic s3cret", "Bearer s3cret "])
def test_an_unknown_token_is_refused(word: str) -> None:
    with pytest.raises(ForbiddenError, match="authorization"):
        authenticate(ACCESS, {}, (("authorization", word),), "p")


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "s3cr\u00e9t", "s3c\tret"])
def test_token_that_no_header_can_carry_is_misuse(token: str) -> None:
    """The error does not print the token."""
    with pytest.raises(UsageError, match="of client 'me': token ") as caught:
        Access([Grant()], tokens={"fine": "you", token: "me"})
    assert token.strip() not in str(caught.value) and "'you'" not in str(caught.value)
    for tokens in ({"": "x"}, {"x": ""}):
        with pytest.raises(UsageError, match="empty"):
            Access(tokens=tokens)
    assert "s3cret" not in repr(ACCESS)


def test_refusals_are_logged_counted_and_remembered(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit()
    with caplog.at_level(logging.WARNING, "torchweft.experts.audit"):
        for number in range(300):
            audit.refused(Caller("eve", "1.2.3.4:5"), f"ffn.{number}", "BACKWARD", "no role")
    assert audit.counts() == {"BACKWARD": 300} and len(audit.last()) == 256
    assert audit.last()[-1].expert == "ffn.299" and "'eve'" in caplog.text and "1.2.3.4:5" in caplog.text
