"""Journal of an expert: the log of its batches, in order, and the replay that computes the same weights from it.

{"kind": "backward", "step": 7, "seed": 123, "members": [{"client": "a", "key": "k1", "rows": 4}, ...], ...}
state_dict of step 40 ──> backend ── replay(entries 41, 42, ...) ──> state_dict of step 57, bit for bit

The weights depend on the backward batches alone: their tensors, their order and their random seed; see
`weft.experts.side_effects`. Batches that were taken apart are logged as they finally ran.

    1 2 3 4 5 ── restored at 3 ── 4 5        a state of step 3 was loaded: the first 4 and 5 led to nothing

Both runs have a state of step 5: what ran from one load to the next is a branch with a name, which entries and states
carry, so that none is taken for the other, nor for one that another server made. What is read is checked by pydantic.
A line that a crash tore is cut off by the next opening; one that a full disk tore, at once.
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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.core.validation import Validator
from weft.experts.errors import ClosedError, GradientError, RefusedError, ReplayError
from weft.experts.task import Task

if TYPE_CHECKING:
    from weft.experts.expert import ExpertBackend

_BEGINS = '{"kind": '  # each line: its first field is always the same
_STRICT: Any = {"strict": True, "extra": "forbid"}  # how pydantic reads a line


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
    """One batch that counted: ``step`` is the number of optimizer steps after it, ``threads`` the intra-op threads.

    ``failed``: the optimizer raised on it, so what came after cannot be replayed. ``batch``: the number of backward
    batches after it; a ``state_dict`` lies where its ``steps`` and ``backward_batches`` are those of an entry.
    ``restored`` is no batch: a state that lies there was loaded. Nor is ``dropped``: the sum of this mini-batch was
    discarded, refused or too old. ``evaluation``: the module ran as after ``eval()``. ``terms``: of a ``commit``, the
    backward batches in its sum. ``branch``: the name of what ran from one load of a state to the next.

    Example:
        >>> from weft.experts import Entry, Member
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
        """Where the expert was after it: ``step`` and ``batch``."""
        return (self.step, self.batch)

    def to_json(self) -> str:
        """One line. What has its default is left out: there are many lines."""
        defaults = {one.name: one.default for one in fields(self)}
        return json.dumps({name: value for name, value in asdict(self).items() if value != defaults[name]})

    @staticmethod
    def from_json(line: str) -> "Entry":
        """The inverse of `to_json`. Raises ``UsageError`` that lists all that is wrong, if the line is none."""
        from pydantic import ValidationError  # noqa: PLC0415  (whoever writes a journal needs torch alone)

        try:
            return _reader().validate_json(line)
        except ValidationError as error:
            faults = [
                f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}, seen {str(each['input'])[:80]!r}"
                for each in error.errors(include_url=False)
            ]
            raise UsageError(listed(f"this is no line of an expert's journal: {line[:80]!r}:", faults)) from None


@cache
def _reader() -> Any:
    from pydantic import TypeAdapter  # noqa: PLC0415

    return TypeAdapter(Entry)


def _is_json(line: str) -> bool:
    with suppress(ValueError, RecursionError):
        return json.loads(line) is not None
    return False


_BLOCK = 1 << 16


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _opened(path: Path) -> FileIO:
    file = FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    file.seek(0, os.SEEK_END)  # raises for a pipe, in which a torn line could not be taken back
    return file


def _mend(path: Path) -> None:
    """Have the file end with a whole line, and without what was torn. Raises ``UsageError`` if it is no journal."""
    with path.open("r+b") as file:
        head = file.read(len(_BEGINS)).rstrip(b"\0")  # after a loss of power, some disks hold zeros where it was full
        if not _BEGINS.encode().startswith(head):
            raise UsageError(f"{path} is no journal, for it begins with {head!r}; give the path of another file")
        size = end = file.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - _BLOCK)
            file.seek(start)
            tail, end = file.read(end - start) + tail, start
        tail = tail[tail.rfind(b"\n") + 1 :]
        if _is_json(tail.decode(errors="replace")):
            file.seek(size)
            file.write(b"\n")
        else:
            file.truncate(size - len(tail))


Listener = Callable[[Entry, Sequence[Task]], None]
"""Called with every batch and its tasks, in the runtime's thread: the place to store their tensors."""


class Journal(AbstractContextManager["Journal"]):
    """Appends all batches of one expert to the file ``path``, and calls ``listener``.

    Lines do not contain the expert's name. Close it, or use it as a context manager. Thread-safe.

    Args:
        path: of the file, which only the user of this process may read.
        listener: called with every batch.
        max_file_bytes: the size at which ``path`` becomes ``path.1``, that ``path.2`` and so on; None: never.
        max_files: number of these files; older ones are removed.

    Raises ``UsageError`` that lists all that makes no sense, or if the file is no journal, and what opening it raises.

    Example:
        >>> import pathlib, tempfile
        >>> journal = weft.experts.Journal(pathlib.Path(tempfile.mkdtemp(), "ffn.0.journal"))
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, journal=journal)
        >>> with weft.Runtime([expert]), journal:
        ...     gradients = expert.get_pools()[1].submit_task(torch.ones(4, 8), torch.ones(4, 8)).result(10)
        >>> [(entry.kind, entry.step, entry.members[0].rows) for entry in journal.entries()]
        [('backward', 1, 4)]
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
            check.count("max_files", max_files, least=2)  # a new file begins empty
        self._path, self._max_bytes, self._max_files = Path(path), max_file_bytes, max_files
        self._listener = listener
        if self._path.is_file():
            _mend(self._path)
        self._file = _opened(self._path)
        self._mark = ""
        self._owner: str | None = None
        self._lock = threading.Lock()

    def own(self, name: str) -> None:
        """From now on it is that of this expert. Raises ``UsageError`` if it is another's."""
        with self._lock:
            if self._owner not in (None, name):
                raise UsageError(
                    f"expert {name!r} was given the journal of expert {self._owner!r}; give it one of its own"
                )
            self._owner = name

    def write(self, entry: Entry, tasks: Sequence[Task]) -> None:
        """Log a batch that has just counted. What goes wrong here is raised; the batch stays as it is."""
        if self._file.closed:
            raise ClosedError("the journal is closed, but its expert goes on; close it after the runtime")
        try:
            with self._lock:
                self._append((self._mark + entry.to_json() + "\n").encode())
                self._mark = ""
        finally:  # the batch counts, whether or not the disk is full
            if self._listener is not None and entry.kind != "dropped":
                self._listener(entry, tasks)

    def restored(self, step: int, batch: int, branch: str = "") -> None:
        """The expert goes on from there, as a new one does from ``(0, 0)``: what came later led to nothing.

        ``branch``: that of the state; an entry of another branch did not lead to it. The file says so before its next
        entry; `entries` forgets them at once.
        """
        mark = Entry("restored", step, 0, None, (), torch.get_num_threads(), batch=batch, branch=branch)
        with self._lock:
            self._mark = mark.to_json() + "\n"

    def entries(self) -> list[Entry]:
        """Those in all its files that led to where the expert is now; see `read_journal`."""
        with self._lock:
            return read_journal([*journal_lines(self._path), self._mark])

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, lines: bytes) -> None:
        """Write all of that, or nothing and raise."""
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
        """Begin a new file. If that raises, what is there stays, and is written to as before."""
        os.fsync(self._file.fileno())  # only the newest file may end with a torn line
        for number in range(self._max_files - 2, -1, -1):
            if (old := _numbered(self._path, number)).exists():
                os.replace(old, _numbered(self._path, number + 1))
        before, self._file = self._file, _opened(self._path)
        before.close()


def journal_lines(path: "str | PathLike[str]") -> Generator[str]:
    """The lines of a journal's files, oldest first: of ``path.2``, ``path.1`` and ``path``.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ffn.0.journal")
        >>> weft.experts.Journal(path).close()
        >>> list(weft.experts.journal_lines(path))
        []
    """
    older = takewhile(Path.exists, (_numbered(Path(path), number) for number in count(1)))
    for each in [*[*older][::-1], Path(path)]:
        with each.open(encoding="utf-8") as file:
            yield from file


def read_journal(lines: Iterable[str]) -> list[Entry]:
    """The entries in the lines of a file that led to the last of them, one after another; see `journal_lines`.

    Left out are those before a return to an older state that did not lead to it, and a last line that a crash tore.
    Raises ``UsageError`` for any other line that is none.

    Example:
        >>> from weft.experts import Entry, Member
        >>> entry = Entry("backward", step=1, seed=0, mini_batch=None, members=(Member("a", "1", 4, 0),), threads=1)
        >>> [each.step for each in weft.experts.read_journal([entry.to_json()])]
        [1]
    """
    given = [line for line in lines if line.strip()]
    if given and not given[-1].endswith("\n") and not _is_json(given[-1]):
        start = given[-1].rstrip("\0")
        if start.startswith(_BEGINS) or _BEGINS.startswith(start):
            given.pop()
    return _lineage(map(Entry.from_json, given))


class _Node(NamedTuple):
    entry: Entry
    before: "_Node | None"  # what led to it


def _lineage(entries: Iterable[Entry]) -> list[Entry]:
    """Those that led to the last of them, one after another."""
    last: _Node | None = None
    known: dict[tuple[tuple[int, int], str], _Node] = {}
    for entry in entries:
        if entry.kind == "restored":
            last = known.get((entry.place, entry.branch))
        else:
            last = known[entry.place, entry.branch] = _Node(entry, last)
    found: list[Entry] = []
    while last is not None:
        found.append(last.entry)
        last = last.before
    return found[::-1]


Fetch = Callable[[Member], Sequence[Tensor]]
"""Where the tensors of a task are: its flat inputs and gradients, as they were submitted."""


def replay(backend: "ExpertBackend", entries: Iterable[Entry], fetch: Fetch) -> int:
    """Run logged batches on a backend that is in the state before the first of them; how many ran.

    Those after a ``state_dict`` are the entries whose ``place`` is greater than its ``(steps, backward_batches)``.
    Each runs as it ran then: its members in their order, its random numbers, and the number of intra-op threads, on
    which rounding depends. The same kind of machine and the same PyTorch are up to the caller. Nobody else may use the
    backend meanwhile. Raises `ReplayError` if the log does not fit its state or its options, such as a mini-batch of
    which a part ran before that state, and what module and optimizer raise; the batches before that have run.

    Example:
        >>> from weft.experts import Entry, Member, replay
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows)
        >>> entry = Entry("backward", step=1, seed=0, mini_batch=None, members=(Member("a", "1", 4, 0),), threads=1)
        >>> replay(expert, [entry], lambda member: (torch.ones(4, 8), torch.ones(4, 8)))
        1
    """
    ran, sums = 0, backend.executor.mini_batches
    for entry in entries:
        if entry.branch != backend.executor.stepper.branch:  # a state was loaded, and none has open mini-batches
            sums.clear()
        _check(backend, entry)
        if entry.kind in ("restored", "dropped"):
            for owner in _owners(entry):
                sums.pop(owner, None)
            continue
        tasks = [_task(backend, entry, member, fetch) for member in entry.members]
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(entry.threads)
            backend.executor.redo(entry.kind, tasks, entry.seed, entry.branch)
        except (RefusedError, GradientError) as error:
            raise ReplayError(
                f"the {entry.kind} batch that led to step {entry.step} cannot be replayed on expert "
                f"{backend.name!r}: {type(error).__name__}: {error}"
            ) from error
        finally:
            torch.set_num_threads(threads)
        if backend.steps != entry.step:
            raise ReplayError(f"expert {backend.name!r} is at step {backend.steps} after a batch of step {entry.step}")
        ran += 1
    return ran


def _task(backend: "ExpertBackend", entry: Entry, member: Member, fetch: Fetch) -> Task:
    key, mini_batch = member.key, entry.mini_batch
    if entry.kind == "commit":
        return Task((), 1, client=member.client, key=key, mini_batch=mini_batch)
    tensors = tuple(fetch(member))
    rows = backend.backward_pool.columns.check(tensors, f"the replay of {member}")
    if rows != member.rows:
        raise ReplayError(f"the tensors of {member} have {rows} rows, but had {member.rows} when it was logged")
    return Task(tensors, rows, client=member.client, key=key, mini_batch=mini_batch, evaluation=entry.evaluation)


def _check(backend: "ExpertBackend", entry: Entry) -> None:
    steps = int(
        entry.kind == "commit"
        or (entry.kind == "backward" and entry.mini_batch is None and backend.optimizer is not None)
    )
    before, expected = backend.executor.backward_batches, entry.batch - (entry.kind == "backward")
    sums = [backend.executor.mini_batches.get(owner) for owner in _owners(entry)]
    terms = sums[0].terms if sums and sums[0] is not None else 0
    with Validator(f"a batch cannot be replayed on expert {backend.name!r}", ReplayError) as check:
        if check.that(not entry.failed, f"the optimizer raised after step {entry.step}, and left nobody knows what"):
            check.that(
                backend.steps + steps == entry.step,
                f"the expert is at step {backend.steps}, but the batch led from {entry.step - steps} to {entry.step}",
            )
            check.that(
                before == expected or not entry.batch,
                f"{before} backward batches ran on the expert, but {expected} before this batch",
            )
        if check.faults and entry.kind == "restored":
            check.add("it went on from another state there; `read_journal` drops what did not lead to that")
        check.that(
            entry.kind != "commit" or terms == entry.terms,
            f"{terms} of the {entry.terms} backward batches of mini-batch {entry.mini_batch!r} ran on the expert; "
            "begin with a state from before its first one",
        )
        check.that(bool(entry.members) or entry.kind == "restored", "the batch has no members")


def _owners(entry: Entry) -> list[tuple[str | None, str]]:
    """Whose mini-batch it is."""
    return [(member.client, entry.mini_batch or "") for member in entry.members]
