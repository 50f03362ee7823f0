"""How far an expert is, as its answers tell; and that somebody is told when it goes back."""

import pytest

from weft.experts.client import StepsLostWarning
from weft.experts.client.progress import Progress
from weft.experts.wire import UnreachableError
from weft.experts.wire.service import Receipt


def new() -> Progress:
    return Progress("ffn.0", lambda: "10.0.0.7:7070")


def test_answers_that_overtake_each_other_do_not_count_backwards() -> None:
    progress = new()
    assert progress.steps is None and progress.receipt is None and progress.durable_step is None
    progress.heard(4, Receipt(3, 1))
    progress.heard(2, Receipt(1, 1))
    assert progress.steps == 4


def test_a_server_that_was_started_again_with_all_of_its_steps_is_believed() -> None:
    progress = new()
    progress.heard(9, Receipt(5, 1))
    progress.heard(9, Receipt(9, 2))
    assert progress.steps == 9 and progress.durable_step == 9 and progress.steps_lost == 0


def test_a_server_that_comes_back_with_older_weights_is_told_once_and_counted() -> None:
    progress = new()
    progress.heard(9, Receipt(5, 1))
    with pytest.warns(StepsLostWarning, match="'ffn.0' went back from step 9 to step 5.* at 10.0.0.7:7070") as told:
        progress.heard(5, Receipt(5, 2))
        progress.heard(6, Receipt(5, 2))
    one = told[0].message
    assert len(told) == 1 and isinstance(one, StepsLostWarning)
    assert (one.uid, one.before, one.after, one.server) == ("ffn.0", 9, 5, "10.0.0.7:7070")
    progress.heard(9, Receipt(5, 1))  # late
    assert (progress.steps, progress.durable_step, progress.steps_lost) == (6, 5, 4)
    with pytest.warns(StepsLostWarning, match="from step 6 to step 0"):
        progress.heard(0, Receipt(None, 3))
    assert progress.steps_lost == 10


def test_a_directory_that_knows_no_server_any_more_hurts_no_warning() -> None:
    def nobody() -> str:
        raise UnreachableError("the directory knows no server")

    progress = Progress("ffn.0", nobody)
    progress.heard(9, Receipt(5, 1))
    with pytest.warns(StepsLostWarning, match="an address that is not known now"):
        progress.heard(5, Receipt(5, 2))
