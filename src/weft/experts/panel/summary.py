"""The numbers of a status that people look at first: one reading of it, for the page and for the terminal.

status (JSON) ──> Summary ──┬──> the page         so both show the same
                            '──> weft status
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Status = Mapping[str, Any]
"""What ``Server.status()`` returns, also after a way through JSON."""


@dataclass(frozen=True)
class ExpertLine:
    """One expert. ``waiting`` tasks are queued, the oldest for ``oldest`` seconds; ``running`` are being worked on.

    ``durable`` is the step on the disk (None: no checkpoints), ``merged`` counts batches by how many tasks they
    joined, up to the next power of two. ``refused`` counts tasks and gradients, ``failed`` tasks by their errors.
    """

    name: str
    steps: int
    durable: int | None
    forward: int
    backward: int
    waiting: int
    running: int
    oldest: float
    refused: int
    failed: int
    merged: Mapping[int, int]

    @property
    def batches(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class ServerLine:
    """A server that the directory lists: how many experts it serves, and how many of them it owns."""

    address: str
    experts: int
    owns: int
    here: bool


@dataclass(frozen=True)
class Summary:
    """All of it; ``refusals`` are (where, reason, count), the most frequent first."""

    address: str
    seconds: float
    draining: str | None
    connections: int
    calls: int
    nbytes: int
    experts: tuple[ExpertLine, ...]
    refusals: tuple[tuple[str, str, int], ...]
    servers: tuple[ServerLine, ...]
    away: float | None
    failures: Mapping[str, str]

    @property
    def steps(self) -> int:
        """Of all experts."""
        return sum(one.steps for one in self.experts)

    @property
    def waiting(self) -> int:
        """Tasks in all queues."""
        return sum(one.waiting for one in self.experts)

    @property
    def oldest(self) -> float:
        """Seconds that the oldest task of all queues has waited."""
        return max((one.oldest for one in self.experts), default=0.0)

    @property
    def refused(self) -> int:
        """Whatever was refused, by anybody."""
        return sum(count for _, _, count in self.refusals)


def summary(status: Status) -> Summary:
    """Read a status."""
    directory = status.get("directory")
    return Summary(
        address=status["address"],
        seconds=status["seconds"],
        draining=status["draining"],
        connections=status["connections"],
        calls=status["calls"],
        nbytes=status["nbytes"],
        experts=tuple(_expert(name, one, status["keeping"][name]) for name, one in sorted(status["experts"].items())),
        refusals=tuple(sorted(_refusals(status), key=lambda each: (-each[2], each))),
        servers=() if directory is None else tuple(_servers(directory, status)),
        away=None if directory is None else directory["away_seconds"],
        failures=status["failures"],
    )


def direction(pool: str) -> str:
    """``forward``, ``backward`` or ``commit``, out of the name of a pool."""
    return pool.rpartition(".")[2]


def _expert(name: str, one: Mapping[str, Any], keeping: Mapping[str, Any]) -> ExpertLine:
    pools: list[Mapping[str, Any]] = list(one["pools"].values())
    merged: Counter[int] = Counter()
    for pool in pools:
        merged.update({int(size): count for size, count in pool["merged"].items()})
    return ExpertLine(
        name=name,
        steps=one["steps"],
        durable=keeping["durable"],
        forward=one["forward_batches"],
        backward=one["backward_batches"],
        waiting=sum(pool["waiting_tasks"] for pool in pools),
        running=sum(pool["running_tasks"] for pool in pools),
        oldest=max((pool["oldest_age"] for pool in pools), default=0.0),
        refused=sum(sum(pool["refused"].values()) for pool in pools) + sum(one["refused_gradients"].values()),
        failed=sum(sum(pool["failed"].values()) for pool in pools),
        merged=dict(sorted(merged.items())),
    )


def _refusals(status: Status) -> Iterable[tuple[str, str, int]]:
    tasks: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for one in status["experts"].values():
        gradients.update(one["refused_gradients"])
        for pool in one["pools"].values():
            tasks.update(pool["refused"])
    groups: list[tuple[str, Mapping[str, int]]] = [
        ("task", tasks),
        ("gradients", gradients),
        ("not allowed", status["refusals"]),
        ("connection", {"server full": status["turned_away"], "no frame": status["broken"]}),
    ]
    return [(where, reason, count) for where, counts in groups for reason, count in counts.items() if count]


def _servers(directory: Mapping[str, Any], status: Status) -> list[ServerLine]:
    found: Mapping[str, Mapping[str, int]] = directory["servers"]
    return [
        ServerLine(address, one["experts"], one["owns"], address == directory["here"])
        for address, one in sorted(found.items())
    ]
