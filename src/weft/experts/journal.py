"""The log of an expert: which tasks made which batch, in which order.

    {"kind": "backward", "step": 7, "seed": 123, "members": [{"client": "a", "key": "k1", "rows": 4}, ...], ...}
    {"kind": "backward", "step": 8, ...}

The weights of an expert depend on its backward batches alone: their tensors, their order, their random seed, and
nothing else (see `weft.experts.effects`). So this log and the tasks' tensors, wherever those are kept, are enough to
compute the same bytes again; `weft.experts.replay` does. Batches that were taken apart are logged as they finally ran.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, Literal

import torch

from weft.core.errors import UsageError
from weft.experts.errors import ClosedError
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

    ``failed`` says that the optimizer raised on it: what came after cannot be replayed. ``evaluation``: the module ran
    as after ``eval()``.
    """

    kind: Literal["backward", "commit"]
    step: int
    seed: int
    mini_batch: str | None
    members: tuple[Member, ...]
    threads: int
    failed: bool = False
    evaluation: bool = False

    @staticmethod
    def of(
        kind: Literal["backward", "commit"], tasks: Sequence[Task], step: int, seed: int, failed: bool = False
    ) -> "Entry":
        """What is to be said of these tasks."""
        members = tuple(Member(task.client, task.key, task.rows, task.number) for task in tasks)
        one, threads = tasks[0], torch.get_num_threads()
        return Entry(kind, step, seed, one.mini_batch, members, threads, failed, one.evaluation)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> "Entry":
        """The inverse of `to_json`. Raises ``UsageError`` if the line is none."""
        try:
            fields: dict[str, Any] = json.loads(line)
            members = tuple(Member(**member) for member in fields.pop("members"))
            return Entry(members=members, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"this is no line of an expert's journal: {line[:80]!r} ({error})") from None


Listener = Callable[[Entry, Sequence[Task]], None]
"""Hears of every batch, in the runtime's thread, with its tasks: the place to put their tensors somewhere."""


class Journal:
    """Keeps the last ``limit`` entries, appends all to the file ``path`` if there is one, and tells ``listener``.

    Use it as a context manager, or call `close`, when it has a file. Thread-safe.
    """

    def __init__(
        self, path: "str | PathLike[str] | None" = None, *, limit: int = 10_000, listener: Listener | None = None
    ) -> None:
        if limit < 0:
            raise UsageError(f"a journal wants limit >= 0 entries, but got {limit}")
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._listener = listener
        self._file: IO[str] | None = None if path is None else _opened(path)
        self._closed = False
        self._lock = threading.Lock()

    def write(self, entry: Entry, tasks: Sequence[Task]) -> None:
        """Log a batch that has just counted. What goes wrong here is raised; the batch stays as it is."""
        with self._lock:
            if self._closed:
                raise ClosedError("the journal is closed, but its expert goes on; close it after the runtime")
            self._entries.append(entry)
            if self._file is not None:
                self._file.write(entry.to_json() + "\n")
                self._file.flush()
        if self._listener is not None:
            self._listener(entry, tasks)

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


def _opened(path: "str | PathLike[str]") -> IO[str]:
    return Path(path).open("a", encoding="utf-8")


def read_journal(lines: Iterable[str]) -> list[Entry]:
    """The entries in the lines of a file. Raises ``UsageError`` for a line that is none."""
    return [Entry.from_json(line) for line in lines if line.strip()]
