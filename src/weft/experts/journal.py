"""The log of an expert: which tasks made which batch, in which order.

The weights of an expert depend on its backward batches alone: their tensors, their order, their random seed, and
nothing else (see `weft.experts.effects`). So this log and the tasks' tensors, wherever those are kept, are enough to
compute the same bytes again; `weft.experts.replay` does. Batches that were taken apart are logged as they finally ran.

    1 2 3 4 5 ── restored at 3 ── 4 5        a state of step 3 was loaded: the first 4 and 5 led to nothing

Who goes on from an older state leaves batches behind that did not lead to what came after. A line says so, and
`read_journal` drops them. Both runs have a state of step 5: what ran from one load to the next is a branch with a name,
which entries and states carry, so that none is taken for the other, nor for one that another server made.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault
from weft.experts.entry import BEGINS, Entry, is_line, is_torn
from weft.experts.errors import ClosedError
from weft.experts.logfile import LogFile, numbered
from weft.experts.task import Task

_Owners = frozenset[tuple[str | None, str | None]]
"""Clients, and the names of their mini-batches."""

Listener = Callable[[Entry, Sequence[Task]], None]
"""Hears of every batch, in the runtime's thread, with its tasks: the place to put their tensors somewhere."""


class Journal:
    """Keeps the last ``limit`` entries, appends all to the file ``path`` if there is one, and tells ``listener``.

    It is that of one expert, whose name no line says. Use it as a context manager, or call `close`, when it has a file.
    Thread-safe.

    Args:
        path: of the file, which only the user of this process may read.
        limit: number of entries in memory.
        listener: hears of every batch.
        max_file_bytes: the size at which ``path`` becomes ``path.1``, that ``path.2`` and so on; None: never.
        max_files: number of these files; older ones are removed.

    Raises ``UsageError`` that lists all that makes no sense, or if the file is no journal, and what opening it raises.
    """

    def __init__(
        self,
        path: "str | PathLike[str] | None" = None,
        *,
        limit: int = 10_000,
        listener: Listener | None = None,
        max_file_bytes: int | None = None,
        max_files: int = 4,
    ) -> None:
        faults = count_fault("limit", limit, zero=True) + count_fault("max_file_bytes", max_file_bytes, none=True)
        faults += count_fault("max_files", max_files)
        if max_files == 1:
            faults.append("max_files is 1, wanted at least 2: a new file begins empty")
        if max_file_bytes is not None and path is None:
            faults.append("max_file_bytes is for a file, and there is no path")
        if faults:
            raise UsageError(listed("a journal cannot be kept like this:", faults))
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._listener = listener
        self._file = (
            None
            if path is None
            else LogFile(Path(path), BEGINS, is_line, max_bytes=max_file_bytes, max_files=max_files)
        )
        self._mark = ""
        self._owner: str | None = None
        self._closed = False
        self._lock = threading.Lock()

    def own(self, name: str) -> None:
        """From now on it is that of this expert. Raises ``UsageError`` if it is another's."""
        with self._lock:
            if self._owner not in (None, name):
                raise UsageError(
                    f"expert {name!r} was given the journal of expert {self._owner!r}, and no line says whose it is; "
                    "give each expert a journal of its own"
                )
            self._owner = name

    def write(self, entry: Entry, tasks: Sequence[Task]) -> None:
        """Log a batch that has just counted. What goes wrong here is raised; the batch stays as it is."""
        with self._lock:
            if self._closed:
                raise ClosedError("the journal is closed, but its expert goes on; close it after the runtime")
            self._entries.append(entry)
        try:
            with self._lock:
                if self._file is not None:
                    self._file.append(self._mark + entry.to_json() + "\n")
                    self._mark = ""
        finally:  # the batch counts, whether or not the disk is full
            if self._listener is not None and entry.kind != "dropped":
                self._listener(entry, tasks)

    def restored(self, step: int, batch: int, branch: str = "") -> None:
        """The expert goes on from there, as a new one does from ``(0, 0)``: what came later led to nothing.

        ``branch``: that of the state; an entry of another branch did not lead to it.

        The file says so before its next entry; `entries` forgets them at once.
        """
        mark = Entry("restored", step, 0, None, (), torch.get_num_threads(), batch=batch, branch=branch)
        with self._lock:
            _go_back(self._entries, mark)
            self._mark = mark.to_json() + "\n"

    def entries(self) -> list[Entry]:
        """The last ones, oldest first."""
        with self._lock:
            return list(self._entries)

    def close(self) -> None:
        """Close the file; nothing more is logged."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._closed = True

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def journal_lines(path: "str | PathLike[str]") -> Generator[str]:
    """The lines of a journal's files, oldest first: of ``path.2``, ``path.1`` and ``path``."""
    count = 0
    while numbered(Path(path), count + 1).exists():
        count += 1
    for number in range(count, -1, -1):
        with numbered(Path(path), number).open(encoding="utf-8") as file:
            yield from file


def read_journal(lines: Iterable[str]) -> list[Entry]:
    """The entries in the lines of a file that led to the last of them, one after another; see `journal_lines`.

    Left out are those before a return to an older state that did not lead to it, and a last line that a crash tore.
    Raises ``UsageError`` for any other line that is none.
    """
    last: _Node | None = None
    known: dict[tuple[tuple[int, int], str], _Node] = {}
    given = [line for line in lines if line.strip()]
    if given and is_torn(given[-1]):
        given.pop()
    for entry in map(Entry.from_json, given):
        if entry.kind == "restored":
            last = known.get((entry.place, entry.branch)) or _last_at(entry, last)
            if last is None or not last.unfinished:
                continue
        last = _Node(entry, last, _unfinished(entry, frozenset() if last is None else last.unfinished))
        if entry.kind != "restored" and entry.branch:
            known[entry.place, entry.branch] = last
    return _path(last)


@dataclass(frozen=True)
class _Node:
    """An entry, what led to it, and which mini-batches were open after it."""

    entry: Entry
    before: "_Node | None"
    unfinished: _Owners


def _path(last: _Node | None) -> list[Entry]:
    found: list[Entry] = []
    while last is not None:
        found.append(last.entry)
        last = last.before
    return found[::-1]


def _last_at(mark: Entry, last: _Node | None) -> _Node | None:
    while last is not None and not last.entry.ends_at(mark):
        last = last.before
    return last


def _go_back(entries: deque[Entry], mark: Entry) -> None:
    """Drop what did not lead to where the mark is: the later ones, or all if none led there.

    The mark stays if mini-batches were open there, for they are not part of a state.
    """
    while entries and not entries[-1].ends_at(mark):
        entries.pop()
    unfinished: _Owners = frozenset()
    for entry in entries:
        unfinished = _unfinished(entry, unfinished)
    if unfinished:
        entries.append(mark)


def _unfinished(entry: Entry, before: _Owners) -> _Owners:
    """Whose mini-batches are open after an entry, by those that were before it."""
    if entry.kind == "restored":
        return frozenset()
    if entry.mini_batch is None:
        return before
    owners = {(member.client, entry.mini_batch) for member in entry.members}
    return before | owners if entry.kind == "backward" else before - owners
