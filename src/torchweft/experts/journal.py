"""Journal of an expert: an append-only log of its batches, in the order in which they counted.

    {"kind": "backward", "step": 7, "seed": 123, "members": [{"client": "a", "key": "k1", "rows": 4}, ...], ...}

The weights depend only on the backward batches: their tensors, their order and their random seeds (see
`weft.experts.side_effects`). So this log and one state suffice to compute all later states; `weft.experts.replay` does
that. Tensors are not logged: a `Listener` can store them.

    1 2 3 4 5 ── restored at 3 ── 4 5        a state of step 3 was loaded: the first 4 and 5 are abandoned

Both runs contain a state of step 5, so step numbers do not identify a state. The batches between two loads form a
branch with a random name. Entries and saved states carry that name. Lines are read as untrusted data.
"""

import json
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from io import FileIO
from itertools import count, takewhile
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from torchweft.core.errors import UsageError, join_faults
from torchweft.core.validation import Validator
from torchweft.experts.errors import ClosedError
from torchweft.experts.task import Task

_LINE_START = '{"kind": '  # every line: `kind` is the first field, and has no default that `to_json` could leave out
_STRICT: Any = {"strict": True, "extra": "forbid"}  # how pydantic reads a line
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Member:
    """One task of a batch. ``number`` is unique in its process.

    Example:
        >>> weft.experts.Member(client="trainer-1", key="7", rows=4, number=0).rows
        4
    """

    __pydantic_config__ = _STRICT
    client: str | None
    key: str | None
    rows: int
    number: int


@dataclass(frozen=True)
class Entry:
    """One logged event: a batch that counted (``backward``, ``commit``), or a change of state without a batch.

    ``restored``: a state was loaded. ``dropped``: the sum of a mini-batch was discarded, refused or too old. ``step``
    and ``batch`` count optimizer steps and backward batches after the entry. ``threads``: intra-op threads. ``failed``:
    the optimizer raised, so that later batches cannot be replayed. ``evaluation``: the module ran as after ``eval()``.
    ``branch``: see `weft.experts.journal`. ``terms``: backward batches in the sum of a ``commit``.

    Example:
        >>> from torchweft.experts import Entry, Member
        >>> entry = Entry("backward", step=1, seed=0, mini_batch=None, members=(Member("a", "1", 4, 0),), threads=1)
        >>> Entry.from_json(entry.to_json()) == entry
        True
    """

    __pydantic_config__ = _STRICT
    kind: Literal["backward", "commit", "dropped", "restored"]
    step: int
    seed: int
    mini_batch: str | None
    members: tuple[Member, ...]
    threads: int
    failed: bool = False
    batch: int = 0
    evaluation: bool = False
    branch: str = ""
    terms: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return (self.step, self.batch)

    def to_json(self) -> str:
        defaults = {field.name: field.default for field in fields(self)}
        return json.dumps({name: value for name, value in asdict(self).items() if value != defaults[name]})

    @staticmethod
    def from_json(line: str) -> "Entry":
        # Imported here because a process that only writes journals does not need pydantic.
        from pydantic import ValidationError  # noqa: PLC0415

        try:
            return _entry_adapter().validate_json(line)
        except ValidationError as error:
            faults = [
                f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}, seen {str(fault['input'])[:80]!r}"
                for fault in error.errors(include_url=False)
            ]
            raise UsageError(join_faults(f"not a line of an expert's journal: {line[:80]!r}:", faults)) from None


@cache
def _entry_adapter() -> Any:
    from pydantic import TypeAdapter  # noqa: PLC0415

    return TypeAdapter(Entry)


def _is_json(line: str) -> bool:
    with suppress(ValueError, RecursionError):
        return json.loads(line) is not None
    return False


def _numbered_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _open_for_append(path: Path) -> FileIO:
    file = FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    file.seek(0, os.SEEK_END)  # rejects a pipe, because a torn line could not be removed from it
    return file


def _remove_torn_line(path: Path) -> None:
    """Truncate the file after its last whole line. Raises ``UsageError`` if the file is not a journal."""
    with path.open("r+b") as file:
        # After a power loss, some file systems leave zeros in place of data that was not written yet.
        head = file.read(len(_LINE_START)).rstrip(b"\0")
        if not _LINE_START.encode().startswith(head):
            raise UsageError(f"{path} is not a journal, because it begins with {head!r}; give the path of another file")
        # Read backwards in blocks, because a journal can be large and only its last line matters.
        size = end = file.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - _BLOCK)
            file.seek(start)
            tail, end = file.read(end - start) + tail, start
        tail = tail[tail.rfind(b"\n") + 1 :]
        # A complete line that only lacks its line break is kept: its batch has counted.
        if _is_json(tail.decode(errors="replace")):
            file.seek(size)
            file.write(b"\n")
        else:
            file.truncate(size - len(tail))


# Called with every batch and its tasks, in the runtime's thread: the place to store their tensors.
Listener = Callable[[Entry, Sequence[Task]], None]


class Journal(AbstractContextManager["Journal"]):
    """Appends all batches of one expert to the file ``path``, and calls ``listener``. Thread-safe.

    A context manager.

    Args:
        path: the log file. Its mode is 0600.
        max_file_bytes: the size at which ``path`` is renamed to ``path.1``, that file to ``path.2`` and so on. None:
            never.
        max_files: the number of files to keep. Older ones are removed.

    Raises ``UsageError`` for invalid options and for a file that is not a journal, and the errors of opening it.

    Example:
        >>> import pathlib, tempfile
        >>> journal = weft.experts.Journal(pathlib.Path(tempfile.mkdtemp(), "ffn.0.journal"))
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, journal=journal)
        >>> journal.close()  # after the runtime
    """

    def __init__(
        self,
        path: "str | PathLike[str]",
        *,
        listener: Listener | None = None,
        max_file_bytes: int | None = None,
        max_files: int = 4,
    ) -> None:
        with Validator("invalid options of a journal") as check:
            check.count("max_file_bytes", max_file_bytes, optional=True)
            check.count("max_files", max_files, least=2)  # a rotation starts an empty file, so one file would lose all
        self._path, self._max_bytes, self._max_files = Path(path), max_file_bytes, max_files
        self._listener = listener
        if self._path.is_file():
            _remove_torn_line(self._path)
        self._file = _open_for_append(self._path)
        self._restored_line = ""  # written with the next entry, so that unused loads leave no trace in the file
        self._expert: str | None = None
        self._lock = threading.Lock()

    def bind_to(self, name: str) -> None:
        """Make this the journal of the expert ``name``. Raises ``UsageError`` if it is that of another expert."""
        with self._lock:
            if self._expert not in (None, name):
                raise UsageError(f"expert {name!r} has the journal of expert {self._expert!r}; give each its own")
            self._expert = name

    def write(self, entry: Entry, tasks: Sequence[Task]) -> None:
        """Log a batch that has been applied. An error of the disk or the listener does not undo the batch."""
        if self._file.closed:
            raise ClosedError("the journal is closed, but its expert still runs; close it after the runtime")
        try:
            with self._lock:
                self._append((self._restored_line + entry.to_json() + "\n").encode())
                self._restored_line = ""
        finally:  # the batch counts even if the disk is full, so its tensors must be stored
            if self._listener is not None and entry.kind != "dropped":
                self._listener(entry, tasks)

    def restored(self, step: int, batch: int, branch: str = "") -> None:
        """Note that a state of ``branch`` was loaded, or with ``(0, 0)`` that the expert is new."""
        mark = Entry("restored", step, 0, None, (), torch.get_num_threads(), batch=batch, branch=branch)
        with self._lock:
            self._restored_line = mark.to_json() + "\n"

    def entries(self) -> list[Entry]:
        with self._lock:
            return read_journal([*journal_lines(self._path), self._restored_line])

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, lines: bytes) -> None:
        # A line that was written in part, e.g. on a full disk, is removed at once: later lines must not follow it.
        end = self._file.seek(0, os.SEEK_END)
        if self._max_bytes is not None and end and end + len(lines) > self._max_bytes:
            self._rotate()
            end = 0
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
        except BaseException:
            self._file.truncate(end)
            raise

    def _rotate(self) -> None:
        # If this raises, the journal continues in the current file.
        os.fsync(self._file.fileno())  # a reader accepts a torn line only at the end of the newest file
        for number in range(self._max_files - 2, -1, -1):
            if (old := _numbered_path(self._path, number)).exists():
                os.replace(old, _numbered_path(self._path, number + 1))
        full, self._file = self._file, _open_for_append(self._path)
        full.close()


def journal_lines(path: "str | PathLike[str]") -> Generator[str]:
    """The lines of a journal's files, oldest first: of ``path.2``, ``path.1`` and ``path``.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ffn.0.journal")
        >>> weft.experts.Journal(path).close()
        >>> list(weft.experts.journal_lines(path))
        []
    """
    older = takewhile(Path.exists, (_numbered_path(Path(path), number) for number in count(1)))
    for file_path in [*[*older][::-1], Path(path)]:
        with file_path.open(encoding="utf-8") as file:
            yield from file


def read_journal(lines: Iterable[str]) -> list[Entry]:
    """The entries that led to the last one, in order. ``lines``: see `journal_lines`.

    Leaves out a last line that a crash tore. Raises ``UsageError`` for any other invalid line.

    Example:
        >>> from torchweft.experts import Entry, Member
        >>> entry = Entry("backward", step=1, seed=0, mini_batch=None, members=(Member("a", "1", 4, 0),), threads=1)
        >>> [entry.step for entry in weft.experts.read_journal([entry.to_json()])]
        [1]
    """
    filled = [line for line in lines if line.strip()]
    if filled and not filled[-1].endswith("\n") and not _is_json(filled[-1]):
        start = filled[-1].rstrip("\0")
        if start.startswith(_LINE_START) or _LINE_START.startswith(start):
            filled.pop()
    return _select_lineage(map(Entry.from_json, filled))


class _Node(NamedTuple):
    entry: Entry
    parent: "_Node | None"


def _select_lineage(entries: Iterable[Entry]) -> list[Entry]:
    # The chain that ends with the last entry: each load continues from the node that it restored.
    last: _Node | None = None
    nodes: dict[tuple[tuple[int, int], str], _Node] = {}
    for entry in entries:
        if entry.kind == "restored":
            last = nodes.get((entry.place, entry.branch))
        else:
            last = nodes[entry.place, entry.branch] = _Node(entry, last)
    chain: list[Entry] = []
    while last is not None:
        chain.append(last.entry)
        last = last.parent
    return chain[::-1]
