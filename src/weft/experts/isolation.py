"""A batch that fails is taken apart, so that only those fail who made it fail.

    a b X c  ── attempt ──> error
    a | b | X | c           each alone: X fails again, and X gets that error
    a b c    ── attempt ──> draft ── apply ──> results, bit for bit as if X had never come

An attempt changes nothing; only `Draft.apply` does. So what is left runs as *one* batch, as it would have run
without the offender, with the same rounding and one optimizer step. If nobody fails alone (too little memory for all
of them, a sum that overflows), every task becomes a batch of its own.

A module whose rows depend on each other (batch norm in training) may fail alone for want of rows; let it batch
more with ``min_batch_size``.
"""

import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from weft.core.errors import WeftError
from weft.experts.errors import ModuleExitError
from weft.experts.task import Answer, Results, Task


@runtime_checkable
class Draft(Protocol):
    """What came out of a batch, before it has any consequence."""

    def apply(self) -> list[Results]:
        """Make it count, and give every task its results. What it raises is final: nothing is tried again."""
        ...


_DEEPEST = 8  # frames of an error that are told

Attempt = Callable[[Sequence[Task]], Draft]
"""Runs a batch without any consequence that stays. It may raise `Offence` if it knows who is at fault."""


class Offence(Exception):
    """Some tasks of a batch are known to be at fault; the others may go on. It never leaves this package."""

    def __init__(self, errors: Mapping[Task, BaseException]) -> None:
        super().__init__(f"{len(errors)} tasks are at fault")
        self.errors = errors


def settle(tasks: Sequence[Task], attempt: Attempt, name: str) -> tuple[list[Answer], int]:
    """An answer for every task, in order, and how many attempts failed on the way. Raises nothing."""
    answers: dict[Task, Answer] = {}
    batches, failures = [list(tasks)], 0
    while batches:
        batch = batches.pop()
        found, complete = _tried(batch, attempt)
        failures += not complete
        if not complete:
            found = found or _offenders(batch, attempt)
            rest = [task for task in batch if task not in found]
            batches += [rest] if found and rest else [[task] for task in reversed(rest)]
        answers.update(found)
    return [_noted(answers[task], task, name) for task in tasks], failures


def _tried(batch: Sequence[Task], attempt: Attempt) -> tuple[dict[Task, Answer], bool]:
    """The answers that one attempt gives, and whether they are all; none where it does not tell who is at fault."""
    try:
        draft = attempt(batch)
    except Offence as offence:
        return dict(offence.errors), False
    except BaseException as error:
        return ({batch[0]: error} if len(batch) == 1 else {}), False
    try:
        return dict(zip(batch, draft.apply(), strict=True)), True
    except BaseException as error:
        return dict.fromkeys(batch, error), True


def _offenders(batch: Sequence[Task], attempt: Attempt) -> dict[Task, Answer]:
    """Who fails alone, with their errors. What succeeds is thrown away: it has had no consequence."""
    found: dict[Task, Answer] = {}
    for task in batch:
        try:
            attempt([task])
        except Offence as offence:
            found.update(offence.errors)
        except BaseException as error:
            found[task] = error
    return found


def _noted(found: Answer, task: Task, name: str) -> Answer:
    """An error says whose task it was and where it was raised, and holds no tensor of the batch."""
    if not isinstance(found, BaseException):
        return found
    where = None if isinstance(found, WeftError) else _told(found)
    if not isinstance(found, Exception):
        found = ModuleExitError(f"the module of expert {name!r} raised {found!r}; a module must not end its process")
    whose = "a client without a name" if task.client is None else f"client {task.client!r}"
    for note in (f"in expert {name!r}, a task of {task.rows} rows from {whose}", where):
        if note is not None and note not in getattr(found, "__notes__", []):
            found.add_note(note)
    _let_go(found)
    return found


def _told(error: BaseException) -> str | None:
    """Where it was raised, as text; None where that was told before. By hand: the library takes a millisecond."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)][-_DEEPEST:]
    if not frames:
        return None
    told = ["it was raised there (innermost last):"]
    for code, line in frames:
        told.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}')
        told.append("    " + linecache.getline(code.co_filename, line).strip())
    return "\n".join(told)


def _let_go(error: BaseException | None) -> None:
    """Forget the frames: through the frame that called them, they hold the whole batch and the error itself."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
