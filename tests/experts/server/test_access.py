"""Who may do what: the best grant counts, refusals are told and written down."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import UsageError
from weft.experts.server import Access, Audit, Caller, Grant, Role
from weft.experts.server.auth import authenticate
from weft.experts.wire import ForbiddenError

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
def test_the_best_grant_that_fits_counts(client: str, expert: str, role: Role) -> None:
    assert ACCESS.role(client, expert) is role


@given(st.sampled_from(["trainer-1", "trainer-7", "root", "", "x"]), st.sampled_from(["ffn.0", "open.1"]))
def test_check_passes_what_the_role_allows_and_nothing_else(client: str, expert: str) -> None:
    for wanted in (Role.FORWARD, Role.TRAIN, Role.ADMIN):
        try:
            ACCESS.check(Caller(client, "peer"), expert, wanted, "something")
            assert ACCESS.role(client, expert) >= wanted
        except ForbiddenError as error:
            assert ACCESS.role(client, expert) < wanted and wanted.name in str(error)


def test_without_grants_everybody_may_do_everything() -> None:
    assert Access().role("", "x") is Role.ADMIN and Access().admits("")


def test_who_is_granted_nothing_is_not_admitted() -> None:
    assert not ACCESS.admits("stranger") and ACCESS.admits("") and ACCESS.admits("trainer-99")


def test_a_certificate_goes_before_a_token_and_a_token_names_its_client() -> None:
    certificate = {"x509_common_name": [b"root"]}
    token = (("authorization", "Bearer s3cret"),)
    assert authenticate(ACCESS, certificate, token, "p").name == "root"
    assert authenticate(ACCESS, {}, token, "p").name == "trainer-1"
    assert authenticate(ACCESS, {}, None, "p") == Caller("", "p")


@pytest.mark.parametrize("word", ["Bearer wrong", "Bearer ", "s3cret", "Basic s3cret", "Bearer s3cret "])
def test_an_unknown_token_is_refused(word: str) -> None:
    with pytest.raises(ForbiddenError, match="authorization"):
        authenticate(ACCESS, {}, (("authorization", word),), "p")


def test_a_certificate_that_is_granted_nothing_is_refused() -> None:
    with pytest.raises(ForbiddenError, match="'stranger'"):
        authenticate(ACCESS, {"x509_common_name": [b"stranger"]}, None, "p")


def test_empty_tokens_and_names_are_misuse() -> None:
    for tokens in ({"": "x"}, {"x": ""}):
        with pytest.raises(UsageError, match="empty"):
            Access(tokens=tokens)


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "s3cr\u00e9t", "s3c\tret"])
def test_a_token_that_no_client_can_show_is_misuse_and_is_not_printed(token: str) -> None:
    with pytest.raises(UsageError, match="of client 'me': token ") as caught:
        Access([Grant()], tokens={"fine": "you", token: "me"})
    assert token.strip() not in str(caught.value) and "'you'" not in str(caught.value)


def test_tokens_without_grants_would_leave_everything_open() -> None:
    with pytest.raises(UsageError, match="tokens and no grants"):
        Access(tokens={"s3cret": "me"})
    assert not Access([], {"s3cret": "me"}).admits("me")


def test_secrets_are_not_shown() -> None:
    assert "s3cret" not in repr(ACCESS)


def test_refusals_are_logged_counted_and_remembered(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit()
    with caplog.at_level(logging.WARNING, "weft.experts.audit"):
        for number in range(300):
            audit.refused(Caller("eve", "1.2.3.4:5"), f"ffn.{number}", "BACKWARD", "no role")
    assert audit.counts() == {"BACKWARD": 300} and len(audit.last()) == 256
    assert audit.last()[-1].expert == "ffn.299" and "'eve'" in caplog.text and "1.2.3.4:5" in caplog.text
