"""A journal replays to the same bytes, also after a crash, a full disk or a return to an older state."""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.expert_cases import TROUBLE, fussy_backend, rows, weights, work
from torchweft.core.errors import SpecError, UsageError
from torchweft.experts import (
    Entry,
    ExpertBackend,
    GraphBudget,
    Journal,
    Member,
    TensorSpec,
    journal_lines,
    read_journal,
    replay,
)
from torchweft.experts import journal as logfile
from torchweft.experts.errors import ReplayError
from torchweft.experts.task import Task


class Store:
    def __init__(self) -> None:
        self.tensors: dict[int, Sequence[Tensor]] = {}

    def __call__(self, entry: Entry, tasks: Sequence[Task]) -> None:
        for member, task in zip(entry.members, tasks, strict=True):
            self.tensors[member.number] = [tensor.clone() for tensor in task.tensors]

    def fetch(self, member: Member) -> Sequence[Tensor]:
        return self.tensors[member.number]


def new_path() -> Path:
    return Path(tempfile.mkdtemp(), "log")


ACTS = ("forward", "backward", "backward", "bad", "add", "add", "commit", "work")


@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(2, 4)), max_size=16), st.booleans(), st.booleans())
def test_a_replay_gives_the_same_bytes(history: list[tuple[str, int]], dropout: bool, graphs: bool) -> None:
    store = Store()
    journal = Journal(new_path(), listener=store)
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
    journal.close()
    lines = [entry.to_json() for entry in journal.entries()]
    again = fussy_backend(**options)
    assert replay(again, read_journal(lines), store.fetch) == len(lines)
    assert weights(again) == weights(live)
    assert live.statistics().used_graphs == graphs * sum(act == "backward" for act, _ in history)


def logged(tmp_path: Path) -> tuple[Path, Store]:
    store = Store()
    with Journal(tmp_path / "log", listener=store) as journal:
        backend = fussy_backend(journal=journal)
        for number in range(2):
            backend.backward_pool.submit_task(rows(2, number), rows(2, number + 9), client="ann", key=str(number))
            work(backend)
        assert len(journal.entries()) == 2
        assert backend.statistics().journal_failures == 0
    backend.backward_pool.submit_task(rows(2, 0), rows(2, 1))
    work(backend)  # the step counts, although the journal is closed
    assert backend.statistics().journal_failures == 1 and backend.steps == 3
    return tmp_path / "log", store


def test_journal_file_lists_the_members_of_a_batch(tmp_path: Path) -> None:
    path, store = logged(tmp_path)
    entries = read_journal(path.read_text().splitlines())
    assert [(e.kind, e.step, e.members[0].client, e.members[0].key, e.members[0].rows) for e in entries] == [
        ("backward", 1, "ann", "0", 2),
        ("backward", 2, "ann", "1", 2),
    ]
    assert replay(fussy_backend(), entries, store.fetch) == 2
    with pytest.raises(UsageError, match="not a line of an expert's journal"):
        read_journal(['{"kind": "backward"}'])


def test_journal_of_another_state_is_rejected(tmp_path: Path) -> None:
    path, store = logged(tmp_path)
    first, second = read_journal(path.read_text().splitlines())
    with pytest.raises(ReplayError, match="the expert is at step 0, but the batch led from 1 to 2"):
        replay(fussy_backend(), [second], store.fetch)
    with pytest.raises(SpecError, match="the replay of Member"):
        replay(fussy_backend(), [first], lambda member: [rows(2, 0)])
    with pytest.raises(ReplayError, match="have 3 rows, but had 2"):
        replay(fussy_backend(), [first], lambda member: [rows(3, 0), rows(3, 1)])


def test_failed_optimizer_step_is_not_replayed() -> None:
    journal = Journal(new_path())
    backend = fussy_backend(journal=journal)

    def fails() -> None:
        raise ZeroDivisionError("mine")

    backend.apply_gradients = fails  # type: ignore[method-assign]
    backend.backward_pool.submit_task(rows(2, 0), rows(2, 1))
    work(backend)
    journal.close()
    [entry] = journal.entries()
    assert entry.failed
    with pytest.raises(ReplayError, match="the optimizer failed after step 0"):
        replay(fussy_backend(), [entry], lambda member: [])


def entry(step: int) -> Entry:
    return Entry("backward", step, 7, None, (Member("ann", f"k{step}", 3, step),), 1, batch=step)


def steps(path: Path) -> list[int]:
    with path.open(encoding="utf-8") as file:
        return [entry.step for entry in read_journal(file)]


def write_entries(path: Path, *numbers: int, since: int) -> None:
    """Write entries as one process that starts from the state of step ``since``."""
    with Journal(path) as journal:
        journal.restored(since, since)
        for number in numbers:
            journal.write(entry(number), [])


@pytest.mark.parametrize("zeros", [0, 5])
def test_torn_journal_keeps_all_whole_lines(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "log"
    write_entries(path, 1, 2, since=0)
    data = path.read_bytes()
    ends = [place for place, byte in enumerate(data) if byte == ord("\n")]
    for size in sorted({0, 1, 9, 10, *range(0, len(data), 30), *[end + more for end in ends for more in (-1, 0, 1)]}):
        path.write_bytes(data[:size] + b"\0" * zeros)
        whole = [number for number in (1, 2) if data.find(f'"k{number}"'.encode()) < data.rfind(b"\n", 0, size)]
        if not zeros and data[size : size + 1] == b"\n" and size > data.find(b'"k1"'):
            whole = [*whole, len(whole) + 1]  # complete except for its line end
        assert steps(path) == whole
        write_entries(path, 3, since=len(whole))
        assert steps(path) == [*whole, 3]


def test_only_the_last_line_can_be_torn() -> None:
    good, torn = entry(1).to_json(), entry(2).to_json()[:30]
    assert [whole.step for whole in read_journal([good, torn])] == [1]
    for lines in ([torn, good], [good, torn + "\n"], [good, "hello"], [good, "{}"], [good, '{"kind": "backward"}']):
        with pytest.raises(UsageError, match="not a line of an expert's journal"):
            read_journal(lines)


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"name": 1}\n', b"\x80\x02weights"])
def test_file_of_another_kind_is_not_written_to(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is not a journal"):
        Journal(path)
    assert path.read_bytes() == content


class FullFile:
    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 100])
def test_full_disk_leaves_no_part_of_a_line(tmp_path: Path, room: int) -> None:
    """The listener is called nevertheless."""
    path, listened = tmp_path / "log", list[int]()
    with Journal(path, listener=lambda entry, tasks: listened.append(entry.step)) as journal:
        backend = fussy_backend(journal=journal)
        for number in range(3):
            log: Any = journal
            if number == 1:
                log._file = FullFile(log._file, room)
            elif number == 2:
                log._file = log._file.file
            backend.backward_pool.submit_task(rows(2, number), rows(2, number + 9))
            work(backend)
        assert backend.statistics().journal_failures == 1 and backend.steps == 3
        assert listened == [1, 2, 3]
    assert steps(path) == [1, 3]


def test_failed_mark_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_entries(path, 1, 2, 3, since=0)
    with Journal(path) as journal:
        journal.restored(1, 1)
        log: Any = journal
        log._file = FullFile(log._file, 20)
        with pytest.raises(OSError, match="No space"):
            journal.write(entry(2), [])
        log._file = log._file.file
        journal.write(entry(2), [])
    assert steps(path) == [1, 2]


def test_a_journal_is_bounded_and_its_files_read_as_one(tmp_path: Path) -> None:
    path, size = tmp_path / "log", len(entry(1).to_json()) + 1
    with pytest.raises(UsageError, match=r"(?s)max_file_bytes is 0.*max_files is 1"):
        Journal(path, max_file_bytes=0, max_files=1)
    for first in (1, 11):  # a second process continues
        with Journal(path, max_file_bytes=4 * size, max_files=3) as journal:
            journal.restored(first - 1, first - 1)
            for number in range(first, first + 10):
                journal.write(entry(number), [])
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 4 * size + 10 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    left = [entry.step for entry in read_journal(journal_lines(path))]
    assert left == list(range(left[0], 21)) and 7 <= len(left) <= 12


def test_failed_rotation_continues_in_the_full_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise PermissionError("not now")

    path = tmp_path / "log"
    with Journal(path, max_file_bytes=1, max_files=2) as journal:
        journal.write(entry(1), [])
        with monkeypatch.context() as patch:
            patch.setattr(logfile.os, "replace", fail)
            with pytest.raises(PermissionError):
                journal.write(entry(2), [])
        journal.write(entry(3), [])
    assert [read.step for read in read_journal(journal_lines(path))] == [1, 3]


class Life:
    """Expert that is saved, reloaded and recreated after crashes, with one journal file throughout."""

    def __init__(self, norm: bool) -> None:
        self.norm, self.store, self.path = norm, Store(), new_path()
        self.saved: dict[str, dict[str, Any]] = {}
        self.is_whole: dict[str, bool] = {}
        self.number, self.name = 0, 0
        self.begin()

    def __del__(self) -> None:
        self.journal.close()

    def begin(self) -> None:
        self.journal = Journal(self.path, listener=self.store)
        self.live = fussy_backend(norm=self.norm, journal=self.journal)

    @classmethod
    def of(cls, history: str, norm: bool = False) -> "Life":
        life = cls(norm)
        life.act(*history.split(", "))
        return life

    def is_replayed(self, entries: Sequence[Entry], count: int, state: Any = None) -> bool:
        """Whether the ``count`` batches of these entries lead from ``state`` to the bytes of the expert."""
        again = fussy_backend(norm=self.norm)
        if state is not None:
            again.load_state_dict(state)
        same = replay(again, entries, self.store.fetch) == count and weights(again) == weights(self.live)
        return same and again.state_dict()["branch"] == self.live.state_dict()["branch"]

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def act(self, *acts: str) -> None:
        for what in acts:
            self._act(what)

    def _act(self, what: str) -> None:
        self.number += 1
        task = rows(2, self.number), rows(2, self.number + 100)
        if what == "step":
            self.live.backward_pool.submit_task(*task, client="ann")
        elif what == "add":
            self.live.backward_pool.submit_task(*task, client="ann", mini_batch=str(self.name))
        elif what == "commit":
            self.live.commit(str(self.name), client="ann")
            self.name += 1
        elif what == "discard":
            self.live.discard(str(self.name), client="ann")
            self.live.statistics()  # removes the discarded mini-batch
            self.name += 1
        elif what.startswith("save"):
            self.saved[what[4:]] = self.live.state_dict()
            self.is_whole[what[4:]] = not len(self.live.executor.mini_batches)
        elif what == "crash":
            self.journal.close()
            self.begin()
            self.name = 0  # reuse the names from before the crash
        saved = self.saved.get(what[4:] if what.startswith("load") else "")
        if what.startswith(("load", "crash")) and saved is not None:
            self.live.load_state_dict(saved)
            self.name += what != "crash"
        work(self.live)


TURNS = ["step", "step", "add", "add", "commit", "discard", "save", "save b", "load", "load b", "crash"]


@given(st.lists(st.sampled_from(TURNS), max_size=30), st.booleans())
@example(["step", "save", "step", "save b", "load", "step", "load b"], False)  # two states of step 2, one after another
@example(["add", "save", "crash", "add", "commit"], False)  # an open mini-batch does not come back, but its name does
def test_replay_after_any_loads_gives_the_same_bytes(history: list[str], norm: bool) -> None:
    life = Life(norm)
    life.act(*history, "step")
    entries = read_journal(life.lines)
    batches = [entry for entry in entries if entry.kind in ("backward", "commit")]
    assert [entry.place for entry in batches] == sorted({entry.place for entry in batches})
    assert life.is_replayed(entries, len(batches))
    for name, saved in life.saved.items():
        place = (saved["steps"], saved["backward_batches"])
        led = any(entry.place == place and entry.branch == saved["branch"] for entry in batches)
        if led and life.is_whole[name]:  # otherwise the state lacks a part of an open mini-batch
            count = sum(entry.place > place for entry in batches)
            assert life.is_replayed([entry for entry in entries if entry.place > place], count, saved)


def test_many_discarded_mini_batches_replay() -> None:
    life = Life.of("add, add, discard, " * 20 + "add, commit, step")
    entries = read_journal(life.lines)
    assert [entry.kind for entry in entries].count("dropped") == 20 and life.is_replayed(entries, 43)
    without_drops = [entry for entry in entries if entry.kind != "dropped"]  # the format of older journals
    with pytest.raises(ReplayError, match=r"the backward batch .* cannot be replayed .* QuotaError: .* mini-batches"):
        replay(fussy_backend(), without_drops, life.store.fetch)


def test_mini_batch_begun_before_the_state_is_not_replayed() -> None:
    life = Life.of("add, save, add, commit")
    entries = [entry for entry in read_journal(life.lines) if entry.place > (0, 1)]
    again = fussy_backend()
    again.load_state_dict(life.saved[""])
    with pytest.raises(ReplayError, match="1 of the 2 backward batches of mini-batch '0' ran"):
        replay(again, entries, life.store.fetch)


def test_state_of_another_expert_at_the_same_step_is_rejected() -> None:
    other = fussy_backend()
    for number in range(2):
        other.backward_pool.submit_task(rows(2, number), rows(2, number + 50))
        work(other)
    life = Life.of("step, step, step")
    life.live.load_state_dict(other.state_dict())  # like a follower that leads again
    life.act("step")
    assert [entry.step for entry in life.journal.entries()] == [3] == [entry.step for entry in read_journal(life.lines)]
    other.load_state_dict(other.state_dict())
    assert replay(other, life.journal.entries(), life.store.fetch) == 1
    assert weights(other) == weights(life.live)


def test_failed_commit_is_not_part_of_the_state_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad() -> None:
        raise ArithmeticError("no step")

    life = Life.of("step, add, save")
    with monkeypatch.context() as patch:
        patch.setattr(life.live, "apply_gradients", bad)
        life.act("commit")
    life.act("load", "step")
    for entries in (life.journal.entries(), read_journal(life.lines)):
        assert [entry.kind for entry in entries] == ["backward"] * 3 and life.is_replayed(entries, 3)


def test_entries_forget_abandoned_batches_at_once() -> None:
    """The listener is called for batches only."""
    life = Life.of("step, save, step, step, load")
    assert [entry.step for entry in life.journal.entries()] == [1]
    assert len(life.store.tensors) == 3
    life.act("step")
    assert [entry.step for entry in life.journal.entries()] == [1, 2] and len(life.store.tensors) == 4
    kinds = [Entry.from_json(line).kind for line in life.lines]
    assert kinds == ["restored", "backward", "backward", "backward", "restored", "backward"]


def test_unknown_state_starts_a_new_lineage() -> None:
    marks = [Entry("restored", step, 0, None, (), 1, batch=step) for step in (2, 9)]
    lines = [one.to_json() for one in (entry(1), entry(2), entry(3), marks[0], entry(3), marks[1], entry(10))]
    assert [entry.step for entry in read_journal(lines[:5])] == [1, 2, 3]
    assert [entry.step for entry in read_journal(lines)] == [10]


def test_replay_detects_missing_and_abandoned_batches() -> None:
    life = Life.of("add, step, save, step, load, step")
    with pytest.raises(ReplayError, match="`read_journal` drops"):
        replay(fussy_backend(), [*map(Entry.from_json, life.lines)], life.store.fetch)
    with pytest.raises(ReplayError, match="0 backward batches ran on the expert, but 1 before this batch"):
        replay(fussy_backend(), read_journal(life.lines)[1:2], life.store.fetch)


WRONG: dict[str, list[Any]] = {
    "kind": ["foo", None, []],
    "step": ["x", True, 1.5],
    "seed": ["1", None],
    "mini_batch": [1, []],
    "threads": ["2", None],
    "failed": [0, "no"],
    "batch": [1.5, None],
    "branch": [None, 5],
    "terms": ["2"],
    "members": [None, {}, "ab", [1], [{}], [{"client": 1}], [None]],
    "new": [0],
}


@pytest.mark.parametrize("field", WRONG)
def test_every_wrong_field_of_a_line_is_named(field: str) -> None:
    good = json.loads(entry(1).to_json())
    for value in WRONG[field]:
        with pytest.raises(UsageError, match=f"not a line of an expert's journal.*\n  - {field}"):
            Entry.from_json(json.dumps({**good, field: value}))


def test_every_fault_of_a_line_is_listed() -> None:
    member = {"client": 1, "key": 2, "rows": 0, "number": "x", "more": 1}
    lines = {
        json.dumps({"kind": "foo", "step": "x", "seed": 1, "mini_batch": None, "members": [], "more": 1}): 4,
        json.dumps({**json.loads(entry(1).to_json()), "members": [member, {}]}): 8,
        "[" * 100_000: 1,
        "[1, 2]": 1,
        "null": 1,
    }
    for line, count in lines.items():
        with pytest.raises(UsageError) as caught:
            Entry.from_json(line)
        assert len(str(caught.value).splitlines()) == 1 + count, str(caught.value)
    assert Entry.from_json(entry(3).to_json()) == entry(3)


def test_journal_belongs_to_one_expert() -> None:
    journal = Journal(new_path())
    make = partial(ExpertBackend, module=nn.Linear(4, 4), args_schema=(TensorSpec((None, 4), torch.float32),))
    make("one", journal=journal)
    journal.write(entry(1), [])
    with pytest.raises(UsageError, match=r"'other' has the journal of expert 'one'; give each its own"):
        make("other", journal=journal)
    assert len(journal.entries()) == 1
    make("one", journal=journal)  # a new expert of that name starts from its initial weights
    assert not journal.entries()
    journal.close()
