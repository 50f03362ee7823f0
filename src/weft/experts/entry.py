"""One batch in the log of an expert, and its line: what is read is checked, for anybody may have written it.

{"kind": "backward", "step": 7, "seed": 123, "members": [{"client": "a", "key": "k1", "rows": 4}, ...], ...}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, cast

import torch

from weft.core.errors import UsageError, listed
from weft.experts.checks import is_whole
from weft.experts.task import Task

BEGINS = '{"kind": '
"""What each line begins with: its first field is always the same."""


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
    ``restored`` is no batch: a state that lies there was loaded. Nor is ``dropped``: the sum of this mini-batch was
    discarded, refused or too old. ``evaluation``: the module ran as after ``eval()``. ``terms``: the number of backward
    batches in the sum of a ``commit``; 0 where it is not known.
    ``branch`` is the name of what ran from one load of a state to the next, by which histories are told apart that have
    a place in common; empty where it is not known.
    """

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

    @staticmethod
    def of(
        kind: Literal["backward", "commit"],
        tasks: Sequence[Task],
        step: int,
        seed: int,
        failed: bool = False,
        batch: int = 0,
        branch: str = "",
        terms: int = 0,
    ) -> "Entry":
        """What is to be said of these tasks."""
        members = tuple(Member(task.client, task.key, task.rows, task.number) for task in tasks)
        one, threads = tasks[0], torch.get_num_threads()
        return Entry(kind, step, seed, one.mini_batch, members, threads, failed, batch, one.evaluation, branch, terms)

    @property
    def place(self) -> tuple[int, int]:
        """Where the expert was after it: ``step`` and ``batch``."""
        return (self.step, self.batch)

    def ends_at(self, state: "Entry") -> bool:
        """Whether the expert was in that ``restored`` state after it."""
        known = self.branch and state.branch
        return self.place == state.place and not (known and self.branch != state.branch)

    def to_json(self) -> str:
        """One line. What has its default is left out: there are many lines."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name, MISSING)}
        )

    @staticmethod
    def from_json(line: str) -> "Entry":
        """The inverse of `to_json`. Raises ``UsageError`` that lists all that is wrong, if the line is none."""
        found, faults = _parsed(line)
        if faults:
            raise UsageError(listed(f"this is no line of an expert's journal: {line[:80]!r}", faults))
        members = tuple(Member(**member) for member in found.pop("members"))
        return Entry(members=members, **found)


_DEFAULTS = {one.name: one.default for one in fields(Entry) if one.default is not MISSING}
_KINDS = ("backward", "commit", "dropped", "restored")


def is_torn(line: str) -> bool:
    """Whether a line may be the beginning of one, and is not a whole one."""
    start = line.rstrip("\0")
    begins = start.startswith(BEGINS) or BEGINS.startswith(start)
    return begins and not line.endswith("\n") and _loaded(line) is None


def is_line(line: str) -> bool:
    """Whether a text is one, but for its end."""
    return not _parsed(line)[1]


def _is_int(value: Any, least: int) -> bool:
    return is_whole(value) and value >= least


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, str)


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": (f"one of {', '.join(map(repr, _KINDS))}", lambda value: value in _KINDS),
    "step": ("an int of at least 0", lambda value: _is_int(value, 0)),
    "seed": ("an int from 0 to 2 ** 64 - 1", lambda value: _is_int(value, 0) and value < 1 << 64),
    "mini_batch": ("a str or null", _is_word),
    "members": ("a list", lambda value: isinstance(value, list)),
    "threads": ("an int of at least 1", lambda value: _is_int(value, 1)),
    "failed": ("true or false", lambda value: isinstance(value, bool)),
    "batch": ("an int of at least 0", lambda value: _is_int(value, 0)),
    "evaluation": ("true or false", lambda value: isinstance(value, bool)),
    "branch": ("a str", lambda value: isinstance(value, str)),
    "terms": ("an int of at least 0", lambda value: _is_int(value, 0)),
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
    for name in [name for name in known if name in given]:
        wanted, fits = _CHECKS[name]
        if not fits(given[name]):
            faults.append(f"{at}{name} is {given[name]!r}, wanted {wanted}")
    return faults
