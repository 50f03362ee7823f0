"""What happened in the act, and what has to hold of it: plain values and sums, without a process.

    trainers' ledgers    sent, acknowledged by address and expert   ──┐
    servers' statuses    steps, keys of applied backwards, restored ──┴──> Account, Return ──> faults, if any

"Exactly once", in numbers: of the backwards that a server has applied since it listens, none was applied twice, since
it counts different keys; all that were acknowledged are among them; and there are no more than were sent.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

Points = list[tuple[float, float]]


@dataclass
class Trainer:
    """One trainer as it told of itself: loss of every step and accuracy now and then, with their times, and its
    ``result`` at the end; see machines_trainer.py."""

    name: str
    ready: bool = False
    losses: Points = field(default_factory=Points)
    checks: Points = field(default_factory=Points)
    answered: dict[str, float] = field(default_factory=dict[str, float])
    result: dict[str, Any] | None = None

    def account(self, address: str, uid: str) -> dict[str, Any]:
        """What it knows of an expert at an address."""
        accounts: dict[str, dict[str, Any]] = {} if self.result is None else self.result["ledger"]["accounts"]
        return accounts.get(address, {}).get(uid, {"sent": 0, "acknowledged": 0, "step": 0, "durable": None})


@dataclass
class Stay:
    """One server process from when it listens: its status then, and the last that was seen."""

    name: str
    uids: tuple[str, ...]
    address: str = ""
    since: float = 0.0
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None


@dataclass(frozen=True)
class Books:
    """One expert at one server that was there to the end: what it has applied since it listens, and what the trainers
    know of that. ``steps`` may be fewer than ``applied``: what waits at the same time is one batch, and one step."""

    uid: str
    server: str
    steps: int
    applied: int
    repeated: int
    acknowledged: int
    sent: int


@dataclass(frozen=True)
class Return:
    """One expert of the server that was killed. ``reached``: the last step that a trainer has heard of; ``reported``:
    the last that it was told to be durable; ``restored``: where it went on."""

    uid: str
    reached: int
    reported: int
    restored: int

    @property
    def lost(self) -> int:
        """Steps that were taken and are not there any more."""
        return max(0, self.reached - self.restored)


@dataclass
class Story:
    """All of it; times are of one clock. ``dead`` was killed, ``back`` took its experts over."""

    trainers: list[Trainer]
    difference: float = 0.0
    began: float = 0.0
    killed: float = 0.0
    noticed: float = 0.0
    ended: float = 0.0
    dead: Stay = field(default_factory=lambda: Stay("", ()))
    back: Stay = field(default_factory=lambda: Stay("", ()))
    other: Stay = field(default_factory=lambda: Stay("", ()))
    steps: dict[str, Points] = field(default_factory=dict[str, Points])

    @property
    def answered(self) -> float | None:
        """When a trainer had the first answer of an expert that was back."""
        return min(
            (t.answered[self.back.address] for t in self.trainers if self.back.address in t.answered), default=None
        )

    @property
    def seconds_away(self) -> float:
        """From the kill to that answer; infinite without one."""
        return float("inf") if self.answered is None else self.answered - self.killed

    @property
    def given_up(self) -> int:
        """Calls of all trainers that were left without an answer; other experts of the same samples had one."""
        return sum(t.result["given_up"] for t in self.trainers if t.result is not None)

    @property
    def calls(self) -> int:
        """Calls of all trainers, in both directions; a call that is sent again counts once."""
        return sum(t.result["calls"] for t in self.trainers if t.result is not None)

    @property
    def thrown_away(self) -> int:
        """Answers that were thrown away on purpose, so that the call was sent again."""
        return sum(t.result["ledger"]["lost"] for t in self.trainers if t.result is not None)

    def accuracies(self) -> list[float]:
        """On the held-out digits at the end, of each trainer."""
        return [t.result["accuracy"] for t in self.trainers if t.result is not None]

    def returns(self) -> list[Return]:
        """Each expert that died and came back."""
        found: list[Return] = []
        for uid in self.dead.uids:
            accounts = [t.account(self.dead.address, uid) for t in self.trainers]
            reported = max(each["durable"] or 0 for each in accounts)
            restored = _of(self.back.first, "keeping", uid).get("restored") or 0
            found.append(Return(uid, max(each["step"] for each in accounts), reported, restored))
        return found

    def books(self) -> list[Books]:
        """Each expert at the servers that were there to the end."""
        return [self._books(stay, uid) for stay in (self.other, self.back) for uid in stay.uids]

    def faults(self) -> list[str]:
        """What was claimed and does not hold."""
        faults = [
            f"{each.uid} went on from step {each.restored}, but step {each.reported} was reported to be durable"
            for each in self.returns()
            if each.restored < each.reported
        ]
        for each in self.books():
            if not each.acknowledged <= each.applied <= each.sent or each.steps > each.applied:
                faults.append(
                    f"{each.uid} at {each.server} has applied {each.applied} backwards in {each.steps} steps; trainers "
                    f"sent it {each.sent}, and {each.acknowledged} were acknowledged"
                )
        return faults

    def step_seconds(self, start: float, end: float) -> float | None:
        """The median seconds of a step of any trainer within these times; None if there were none."""
        taken = [
            now - before
            for trainer in self.trainers
            for (before, _), (now, _) in pairwise(trainer.losses)
            if start <= before and now <= end
        ]
        return median(taken) if taken else None

    def _books(self, stay: Stay, uid: str) -> Books:
        accounts = [t.account(stay.address, uid) for t in self.trainers]
        then, now = (_of(status, "experts", uid) for status in (stay.first, stay.last))
        return Books(
            uid=uid,
            server=stay.name,
            steps=now["steps"] - then["steps"],
            applied=now["records"]["keys"] - then["records"]["keys"],
            repeated=now["records"]["repeated"] - then["records"]["repeated"],
            acknowledged=sum(each["acknowledged"] for each in accounts),
            sent=sum(each["sent"] for each in accounts),
        )


def _of(status: dict[str, Any] | None, part: str, uid: str) -> dict[str, Any]:
    return {} if status is None else status[part][uid]
