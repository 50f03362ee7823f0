"""What goes with a call that steps, and which answers are taken."""

import pytest

from weft.experts.client.fencing import client_name, fence, fenced
from weft.experts.client.transport import Transport
from weft.experts.directory.token import token_of
from weft.experts.wire import Call, Header, Kind, MalformedError, NotOwnerError, Received, decode, encode
from weft.experts.wire.service import Receipt, read_receipt


class Owned:
    """A route to an expert whose owner has this token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        raise NotImplementedError

    def token(self) -> int:
        return self._token

    def hopeful(self, error: BaseException) -> bool:
        return False


def answer(data: bytes) -> Received:
    (received,) = decode(b"".join(encode([Call(Header(kind=Kind.RESULT, call_id=1, uid="a", data=data))])))
    return received


def test_a_call_tells_the_owners_token_and_the_incarnation() -> None:
    assert read_receipt(fence(Owned(7))) == Receipt(None, 0, 7)
    assert read_receipt(fence(Owned(0), 5)) == Receipt(None, 5, 0)


@pytest.mark.parametrize("token", [0, 6, 7, 8])
def test_an_owner_that_was_replaced_is_not_listened_to(token: int) -> None:
    receipt = Receipt(3, 5, token)
    if token >= 7:
        assert fenced("a", Owned(7), answer(receipt.to_bytes())) == receipt
    else:
        with pytest.raises(NotOwnerError, match=f"'a' .* token {token}, but its owner has 7"):
            fenced("a", Owned(7), answer(receipt.to_bytes()))


@pytest.mark.parametrize("number", [6, 7, 8])
def test_an_owner_of_another_life_of_the_directory_is_not_listened_to(number: int) -> None:
    for one, other in ((3, 9), (9, 3)):
        receipt = Receipt(3, 5, token_of(one, number))
        with pytest.raises(NotOwnerError, match=f"'a' .* token {number}, but its owner has 7"):
            fenced("a", Owned(token_of(other, 7)), answer(receipt.to_bytes()))


def test_an_answer_without_a_receipt_is_malformed() -> None:
    with pytest.raises(MalformedError, match="receipt"):
        fenced("a", Owned(0), answer(b""))


def test_a_client_has_the_name_that_it_wants_or_one_of_its_own() -> None:
    assert client_name("me") == "me"
    assert len({client_name("") for _ in range(9)}) == 9
