"""Calls that wait for an answer, and the clock that sees to it that none waits for ever.

    open ──> entry: future, deadline, owner ──┬── settle: the answer came, or its error
                                              ├── fail(owner): the connection that it left by is gone
                                              ├── the clock: its deadline passed
                                              └── close

Whoever comes first takes the entry out and ends the future; the others find nothing.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

from weft.core.errors import UsageError
from weft.experts.checks import LONGEST, seconds_fault
from weft.experts.wire import Call, DeadlineError, LostError, Received, UnreachableError

TICK = 0.02
"""Seconds by which a deadline may be noticed late."""
_IDLE = 50  # ticks without a call before the clock stops
_JOIN = 5.0


@dataclass(eq=False, slots=True)
class Entry:
    """One call that waits. ``sent``: it may have left."""

    number: int
    call: Call
    timeout: float
    deadline: float
    future: "Future[Received]"
    owner: object = None
    sent: bool = False


Outcome = Received | Exception


class Pending:
    """All that waits on one transport. Thread-safe. ``address`` is for errors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._numbers = count(1)
        self._entries: dict[int, Entry] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._calls = self._answered = 0
        self._failed: Counter[str] = Counter()
        self._clock: threading.Thread | None = None
        self._asleep = False

    def open(self, call: Call, timeout: float) -> Entry:
        """A new entry. Raises ``UsageError`` after `close`, and for a timeout that nobody can wait for."""
        if not 0 < timeout <= LONGEST:  # asked at every call, so in short
            raise UsageError(*seconds_fault("a call's timeout", timeout))
        entry = Entry(next(self._numbers), call, timeout, time.monotonic() + timeout, Future())
        with self._changed:
            if self._closed:
                raise UsageError(f"the way to {self.address} was closed; make a new one")
            self._entries[entry.number] = entry
            self._calls += 1
            if self._clock is None:
                self._clock = threading.Thread(target=self._run, name=f"weft-clock-{self.address}", daemon=True)
                self._clock.start()
            elif self._asleep:
                self._changed.notify_all()
        return entry

    def settle(self, number: int, outcome: Outcome) -> None:
        """The answer to a call, or its error. A call that nobody waits for any more is passed over."""
        with self._changed:
            entry = self._entries.pop(number, None)
        if entry is not None:
            self._end(entry, outcome)

    def fail(self, owner: object, error: Callable[[bool], Exception]) -> None:
        """End every call of this owner; ``error`` is told of each whether it may have been sent."""
        with self._changed:
            entries = [entry for entry in self._entries.values() if entry.owner is owner]
            for entry in entries:
                del self._entries[entry.number]
        for entry in entries:
            self._end(entry, error(entry.sent))

    def close(self) -> None:
        """End everything that waits, and the clock."""
        with self._changed:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
            self._changed.notify_all()
        for entry in entries:
            kind = LostError if entry.sent else UnreachableError
            self._end(entry, kind(f"the way to {self.address} was closed while {named(entry.call)} waited"))
        if self._clock is not None and self._clock is not threading.current_thread():
            self._clock.join(_JOIN)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def numbers(self) -> tuple[int, int, int, dict[str, int]]:
        """Calls so far, answers so far, calls that wait, errors by class."""
        with self._changed:
            return self._calls, self._answered, len(self._entries), dict(self._failed)

    def _end(self, entry: Entry, outcome: Outcome) -> None:
        future = entry.future
        if not future.set_running_or_notify_cancel():
            return
        with self._changed:
            if isinstance(outcome, Exception):
                self._failed[type(outcome).__name__] += 1
            else:
                self._answered += 1
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _run(self) -> None:
        """The clock. It sleeps when nothing has waited for a while."""
        quiet = 0
        while True:
            with self._changed:
                quiet = 0 if self._entries else quiet + 1
                self._asleep = quiet > _IDLE
                if not self._closed:
                    self._changed.wait(None if self._asleep else TICK)
                quiet = 0 if self._asleep else quiet
                self._asleep = False
                if self._closed:
                    return
                now = time.monotonic()
                late = [entry for entry in self._entries.values() if entry.deadline <= now or entry.future.cancelled()]
                for entry in late:
                    del self._entries[entry.number]
            for entry in late:
                self._end(entry, _late(entry, self.address))


def named(call: Call) -> str:
    """A call in words."""
    return f"the {call.header.kind.name.lower()} of expert {call.header.uid!r}"


def _late(entry: Entry, address: str) -> DeadlineError:
    state = "whether it was carried out is not known" if entry.sent else "it was not sent"
    return DeadlineError(f"{named(entry.call)} had no answer from {address} within {entry.timeout:g} s; {state}")
