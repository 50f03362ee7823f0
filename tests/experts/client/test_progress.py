"""Steps of an expert as reported by its answers, and the warning about lost steps."""

import pytest

from tests.experts.client.test_retry import Scripted
from torchweft.experts.client import Connections, StepsLostWarning
from torchweft.experts.client.calls import FixedResolver
from torchweft.experts.client.connections import DirectoryResolver
from torchweft.experts.client.stub import ExpertProgress, RequestBuilder
from torchweft.experts.compression import Policy
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.discovery.fencing import token_of
from torchweft.experts.errors import MalformedError, NotOwnerError
from torchweft.experts.wire import Call, Header, Kind, decode, encode
from torchweft.experts.wire.service import StepReceipt, read_receipt


def new_progress() -> ExpertProgress:
    return ExpertProgress("ffn.0", FixedResolver(Scripted(address="10.0.0.7:7070")))


def test_reordered_answers_do_not_decrease_the_step() -> None:
    progress = new_progress()
    assert progress.steps is None and progress.receipt is None and progress.durable_step is None
    progress.update(4, StepReceipt(3, 1))
    progress.update(2, StepReceipt(1, 1))
    assert progress.steps == 4


def test_restart_with_all_steps_loses_none() -> None:
    progress = new_progress()
    progress.update(9, StepReceipt(5, 1))
    progress.update(9, StepReceipt(9, 2))
    assert progress.steps == 9 and progress.durable_step == 9 and progress.steps_lost == 0


def test_restart_with_older_weights_warns_once() -> None:
    progress = new_progress()
    progress.update(9, StepReceipt(5, 1))
    with pytest.warns(StepsLostWarning, match="'ffn.0' went back from step 9 to step 5.* at 10.0.0.7:7070") as warned:
        progress.update(5, StepReceipt(5, 2))
        progress.update(6, StepReceipt(5, 2))
    warning = warned[0].message
    assert len(warned) == 1 and isinstance(warning, StepsLostWarning)
    assert (warning.uid, warning.before, warning.after, warning.server) == ("ffn.0", 9, 5, "10.0.0.7:7070")
    progress.update(9, StepReceipt(5, 1))  # a stale answer
    assert (progress.steps, progress.durable_step, progress.steps_lost) == (6, 5, 4)
    with pytest.warns(StepsLostWarning, match="from step 6 to step 0"):
        progress.update(0, StepReceipt(None, 3))
    assert progress.steps_lost == 10


def test_lost_steps_warn_without_a_known_server() -> None:
    with Connections(LocalDirectory()) as connections:
        progress = ExpertProgress("ffn.0", DirectoryResolver("ffn.0", connections))
        progress.update(9, StepReceipt(5, 1))
        with pytest.warns(StepsLostWarning, match="an unknown address"):
            progress.update(5, StepReceipt(5, 2))


class OwnedResolver(FixedResolver):
    """Resolver of an expert that an owner with ``token`` has claimed."""

    def __init__(self, token: int) -> None:
        self._token = token

    def owner_token(self) -> int:
        return self._token


def test_commit_has_token_incarnation_and_client_name() -> None:
    data = RequestBuilder("me", Policy()).commit("a", "m", 5, 7).header.data
    assert read_receipt(data) == StepReceipt(None, 5, 7) and RequestBuilder("me", Policy()).client == "me"
    assert len({RequestBuilder("", Policy()).client for _ in range(9)}) == 9


def accept_answer(owner: int, data: bytes) -> ExpertProgress:
    (received,) = decode(encode([Call(Header(kind=Kind.RESULT, call_id=1, uid="a", data=data))]))
    progress = ExpertProgress("a", OwnedResolver(owner))
    progress.accept(received)
    return progress


@pytest.mark.parametrize("number", [0, 6, 7, 8])
def test_answer_of_a_replaced_owner_is_rejected(number: int) -> None:
    for owner, epoch in ((0, 0), (9, 3), (3, 9)):
        receipt = StepReceipt(3, 5, token_of(epoch, number))
        if owner == epoch and number >= 7:
            assert accept_answer(token_of(owner, 7), receipt.to_bytes()).receipt == receipt
        else:
            with pytest.raises(NotOwnerError, match=f"'a' .* token {number}, but its owner has 7"):
                accept_answer(token_of(owner, 7), receipt.to_bytes())
    with pytest.raises(MalformedError, match="receipt"):
        accept_answer(0, b"")
