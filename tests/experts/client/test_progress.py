"""How far an expert is, as its answers tell."""

from weft.experts.client.progress import Progress
from weft.experts.service import Receipt


def test_answers_that_overtake_each_other_do_not_count_backwards() -> None:
    progress = Progress()
    assert progress.steps is None and progress.receipt is None and progress.durable_step is None
    progress.heard(4, Receipt(3, 1))
    progress.heard(2, Receipt(1, 1))
    assert progress.steps == 4


def test_a_server_that_was_started_again_is_believed() -> None:
    progress = Progress()
    progress.heard(9, Receipt(5, 1))
    progress.heard(5, Receipt(5, 2))
    assert progress.steps == 5 and progress.durable_step == 5
