"""The promise of replication, over random histories: see `tests.experts.replication_model`."""

import pytest

from tests.experts.replication_model import Node, Replication, check_histories
from torchweft.experts.replication import Leadership


def test_histories_keep_one_owner_and_every_durable_step() -> None:
    check_histories(25)


@pytest.mark.long
def test_more_histories_keep_the_promise() -> None:
    check_histories(300)


def test_model_reaches_a_takeover_and_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in which nothing happens would keep every promise."""
    model = Replication()
    try:
        model.all_work()
        model.all_work()
        (owner,) = [node for node in model.nodes if node.replica.leadership.may_step]
        model.step(model.nodes.index(owner))
        model.begin_save(model.nodes.index(owner))
        model.finish_save(model.nodes.index(owner))
        model.follow()
        model.paused.append(owner)
        model.pass_time(6.0)
        for _ in range(4):
            model.all_work()
        (new,) = [node for node in model.nodes if node.replica.leadership.may_step]
        assert isinstance(new, Node) and new is not owner and new.backend.content == [1]
        model.one_server_can_step()
        new.backend.content.clear()
        with pytest.raises(AssertionError, match="a durable step is lost"):
            model.one_server_can_step()
        monkeypatch.setattr(Leadership, "lasts", True)
        with pytest.raises(AssertionError, match="two servers can step"):
            model.one_server_can_step()
    finally:
        model.teardown()
