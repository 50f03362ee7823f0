"""The log of an expert: which tasks made which batch, in which order.

    {"kind": "backward", "step": 7, "seed": 123, "members": [{"client": "a", "key": "k1", "rows": 4}, ...], ...}
    {"kind": "backward", "step": 8, ...}

The weights of an expert depend on its backward batches alone: their tensors, their order, their random seed, and
nothing else (see `weft.experts.effects`). So this log and the tasks' tensors, wherever those are kept, are enough to
compute the same bytes again; `weft.experts.replay` does. Batches that were taken apart are logged as they finally ran.

    1 2 3 4 5 ── restored at 3 ── 4 5        a state of step 3 was loaded: the first 4 and 5 led to nothing

Who goes on from an older state leaves batches behind that did not lead to what came after. A line says so, and
`read_journal` drops them.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import torch

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, is_whole
from weft.experts.errors import ClosedError
from weft.experts.logfile import LogFile
from weft.experts.task import Task


@dataclass(frozen=True)
class Member:
    """One task of a batch. ``number`` tells tasks of one process apart."""

    client: str | None
    key: str | None
    rows: int
    number: int


@dataclass(frozen=True)
class Entry:
    """One batch that counted: ``step`` is the number of optimizer steps after it, ``threads`` the intra-op threads.

    ``failed`` says that the optimizer raised on it: what came after cannot be replayed. ``batch`` is the number of
    backward batches after it. A ``state_dict`` lies where its ``steps`` and ``backward_batches`` are those of an entry.
    ``restored`` is no batch: a state that lies there was loaded. ``evaluation``: the module ran as after ``eval()``.
    """

    kind: Literal["backward", "commit", "restored"]
    step: int
    seed: int
    mini_batch: str | None
    members: tuple[Member, ...]
    threads: int
    failed: bool = False
    batch: int = 0
    evaluation: bool = False

    @staticmethod
    def of(
        kind: Literal["backward", "commit"],
        tasks: Sequence[Task],
        step: int,
        seed: int,
        failed: bool = False,
        batch: int = 0,
    ) -> "Entry":
        """What is to be said of these tasks."""
        members = tuple(Member(task.client, task.key, task.rows, task.number) for task in tasks)
        one, threads = tasks[0], torch.get_num_threads()
        return Entry(kind, step, seed, one.mini_batch, members, threads, failed, batch, one.evaluation)

    @property
    def place(self) -> tuple[int, int]:
        """Where the expert was after it: ``step`` and ``batch``."""
        return (self.step, self.batch)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> "Entry":
        """The inverse of `to_json`. Raises ``UsageError`` that lists all that is wrong, if the line is none."""
        found, faults = _parsed(line)
        if faults:
            raise UsageError(listed(f"this is no line of an expert's journal: {line[:80]!r}", faults))
        members = tuple(Member(**member) for member in found.pop("members"))
        return Entry(members=members, **found)


Listener = Callable[[Entry, Sequence[Task]], None]
"""Hears of every batch, in the runtime's thread, with its tasks: the place to put their tensors somewhere."""


class Journal:
    """Keeps the last ``limit`` entries, appends all to the file ``path`` if there is one, and tells ``listener``.

    Use it as a context manager, or call `close`, when it has a file. Thread-safe.
    """

    def __init__(
        self, path: "str | PathLike[str] | None" = None, *, limit: int = 10_000, listener: Listener | None = None
    ) -> None:
        faults = count_fault("limit", limit, zero=True)
        if faults:
            raise UsageError(listed("a journal cannot be kept like this:", faults))
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._listener = listener
        self._file = None if path is None else LogFile(Path(path), _BEGINS, _is_whole)
        self._mark = ""
        self._closed = False
        self._lock = threading.Lock()

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
            if self._listener is not None:
                self._listener(entry, tasks)

    def restored(self, step: int, batch: int) -> None:
        """The expert goes on from there, as a new one does from ``(0, 0)``: what came later led to nothing.

        The file says so before its next entry; `entries` forgets them at once.
        """
        mark = Entry("restored", step, 0, None, (), torch.get_num_threads(), batch=batch)
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


def read_journal(lines: Iterable[str]) -> list[Entry]:
    """The entries in the lines of a file that led to the last of them, one after another.

    Left out are those before a return to an older state that did not lead to it, and a last line that a crash tore.
    Raises ``UsageError`` for any other line that is none.
    """
    found: list[Entry] = []
    given = [line for line in lines if line.strip()]
    if given and _is_torn(given[-1]):
        given.pop()
    for entry in map(Entry.from_json, given):
        if entry.kind == "restored":
            _go_back(found, entry)
        else:
            found.append(entry)
    return found


def _go_back(entries: "list[Entry] | deque[Entry]", mark: Entry) -> None:
    """Drop what did not lead to where the mark is: the later ones, or all if none led there.

    The mark stays if mini-batches were open there, for they are not part of a state.
    """
    while entries and entries[-1].place != mark.place:
        entries.pop()
    unfinished: set[tuple[str | None, str | None]] = set()
    for entry in entries:
        owners = {(member.client, entry.mini_batch) for member in entry.members if entry.mini_batch is not None}
        unfinished = unfinished | owners if entry.kind == "backward" else unfinished - owners
    if unfinished:
        entries.append(mark)


def _is_torn(line: str) -> bool:
    """Whether a line may be the beginning of one, and is not a whole one."""
    start = line.rstrip("\0")
    begins = start.startswith(_BEGINS) or _BEGINS.startswith(start)
    return begins and not line.endswith("\n") and _loaded(line) is None


def _is_whole(line: str) -> bool:
    return not _parsed(line)[1]


# What is in a line. Its first field is always the same.

_BEGINS = '{"kind": '


def _is_int(value: Any, least: int) -> bool:
    return is_whole(value) and value >= least


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, str)


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": ("'backward', 'commit' or 'restored'", lambda value: value in ("backward", "commit", "restored")),
    "step": ("an int of at least 0", lambda value: _is_int(value, 0)),
    "seed": ("an int from 0 to 2 ** 64 - 1", lambda value: _is_int(value, 0) and value < 1 << 64),
    "mini_batch": ("a str or null", _is_word),
    "members": ("a list", lambda value: isinstance(value, list)),
    "threads": ("an int of at least 1", lambda value: _is_int(value, 1)),
    "failed": ("true or false", lambda value: isinstance(value, bool)),
    "batch": ("an int of at least 0", lambda value: _is_int(value, 0)),
    "evaluation": ("true or false", lambda value: isinstance(value, bool)),
    "client": ("a str or null", _is_word),
    "key": ("a str or null", _is_word),
    "rows": ("an int of at least 1", lambda value: _is_int(value, 1)),
    "number": ("an int of at least 0", lambda value: _is_int(value, 0)),
}


def _loaded(line: str) -> Any:
    """The value of a line of JSON; None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _parsed(line: str) -> tuple[Any, list[str]]:
    """The fields of a line, and what is wrong with them."""
    found = _loaded(line)
    faults = _field_faults(Entry, found, "")
    if not faults:
        for place, member in enumerate(found["members"]):
            faults += _field_faults(Member, member, f"members[{place}]")
    return found, faults


def _field_faults(kind: type[Entry | Member], value: Any, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where or 'it'} is no JSON object"]
    given = cast("Mapping[str, Any]", value)
    known = {one.name: one.default is MISSING for one in fields(kind)}
    at = f"{where}." if where else ""
    faults = [f"{at}{name} is missing" for name, needed in known.items() if needed and name not in given]
    faults += [f"{at}{name} is too much: nothing is called so" for name in given if name not in known]
    for name in given:
        wanted, fits = _CHECKS.get(name, ("", bool))
        if name in known and wanted and not fits(given[name]):
            faults.append(f"{at}{name} is {given[name]!r}, wanted {wanted}")
    return faults
