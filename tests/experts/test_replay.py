"""The log of an expert, run again from the state before it, gives the same bytes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.experts.expert_cases import TROUBLE, fussy_backend, rows, weights, work
from weft.core.errors import SpecError, UsageError
from weft.experts import Entry, GraphBudget, Journal, Member, read_journal, replay
from weft.experts.errors import ReplayError
from weft.experts.task import Task


class Store:
    """Remembers the tensors of every task that counted."""

    def __init__(self) -> None:
        self.tensors: dict[int, Sequence[Tensor]] = {}

    def __call__(self, entry: Entry, tasks: Sequence[Task]) -> None:
        for member, task in zip(entry.members, tasks, strict=True):
            self.tensors[member.number] = [tensor.clone() for tensor in task.tensors]

    def fetch(self, member: Member) -> Sequence[Tensor]:
        return self.tensors[member.number]


ACTS = ("forward", "backward", "backward", "bad", "add", "add", "commit", "work")


@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(2, 4)), max_size=16), st.booleans(), st.booleans())
def test_a_replay_gives_the_same_bytes(history: list[tuple[str, int]], dropout: bool, graphs: bool) -> None:
    store = Store()
    journal = Journal(listener=store)
    options = {"dropout": 0.4 * dropout, "norm": not graphs}
    live = fussy_backend(journal=journal, keep_graphs=GraphBudget(1 << 20) if graphs else None, **options)
    for number, (act, size) in enumerate(history):
        x, g = rows(size, number), rows(size, number + 100)
        if act == "forward":
            live.forward_pool.submit_task(x, key=str(number))
        elif act == "backward":
            live.backward_pool.submit_task(x, g, key=str(number))
            if graphs:  # the next one uses the graph of its forward
                work(live)
                live.forward_pool.submit_task(x, key=f"kept {number}")
                work(live)
                live.backward_pool.submit_task(x, g, key=f"kept {number}")
                work(live)
        elif act == "bad":
            live.backward_pool.submit_task(torch.full_like(x, TROUBLE), g)
        elif act == "add":
            live.backward_pool.submit_task(x, g, client="ann", mini_batch="m")
        elif act == "commit":
            live.commit("m", client="ann")
        else:
            work(live)
    work(live)
    lines = [entry.to_json() for entry in journal.entries()]
    again = fussy_backend(**options)
    assert replay(again, read_journal(lines), store.fetch) == len(lines)
    assert weights(again) == weights(live)
    assert live.statistics().used_graphs == graphs * sum(act == "backward" for act, _ in history)


def logged(tmp_path: Path) -> tuple[Path, Store]:
    """The file of two steps."""
    store = Store()
    with Journal(tmp_path / "log", listener=store, limit=1) as journal:
        backend = fussy_backend(journal=journal)
        for number in range(2):
            backend.backward_pool.submit_task(rows(2, number), rows(2, number + 9), client="ann", key=str(number))
            work(backend)
        assert len(journal.entries()) == 1
        assert backend.statistics().journal_failures == 0
    backend.backward_pool.submit_task(rows(2, 0), rows(2, 1))
    work(backend)  # the step counts, though nobody can log it
    assert backend.statistics().journal_failures == 1 and backend.steps == 3
    return tmp_path / "log", store


def test_a_journal_goes_through_a_file_and_tells_who_was_in_a_batch(tmp_path: Path) -> None:
    path, store = logged(tmp_path)
    entries = read_journal(path.read_text().splitlines())
    assert [(e.kind, e.step, e.members[0].client, e.members[0].key, e.members[0].rows) for e in entries] == [
        ("backward", 1, "ann", "0", 2),
        ("backward", 2, "ann", "1", 2),
    ]
    assert replay(fussy_backend(), entries, store.fetch) == 2
    with pytest.raises(UsageError, match="no line of an expert's journal"):
        read_journal(['{"kind": "backward"}'])
    with pytest.raises(UsageError, match="limit is -1"):
        Journal(limit=-1)


def test_a_log_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, store = logged(tmp_path)
    first, second = read_journal(path.read_text().splitlines())
    with pytest.raises(ReplayError, match="the expert is at step 0, but the batch led from 1 to 2"):
        replay(fussy_backend(), [second], store.fetch)
    with pytest.raises(SpecError, match="the replay of Member"):
        replay(fussy_backend(), [first], lambda member: [rows(2, 0)])
    with pytest.raises(ReplayError, match="have 3 rows, but had 2"):
        replay(fussy_backend(), [first], lambda member: [rows(3, 0), rows(3, 1)])


def test_what_follows_an_optimizer_that_raised_is_not_replayed() -> None:
    journal = Journal()
    backend = fussy_backend(journal=journal)

    def fails() -> None:
        raise ZeroDivisionError("mine")

    backend.apply_gradients = fails  # type: ignore[method-assign]
    backend.backward_pool.submit_task(rows(2, 0), rows(2, 1))
    work(backend)
    [entry] = journal.entries()
    assert entry.failed
    with pytest.raises(ReplayError, match="the optimizer raised"):
        replay(fussy_backend(), [entry], lambda member: [])
