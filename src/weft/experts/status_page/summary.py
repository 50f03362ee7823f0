"""Summary of a server's status: the numbers to see first, and the content of the status page as data.

    status (JSON) ── summary() ──> Summary ──┬──> content() ──> page.html       so both show the same
                                             '──> ``weft status``

    title, head     address, state, since when        alerts    what fails now
    tiles           the numbers to see first          tables    experts, replicas, refusals, devices, servers ...

Both are pure functions. A cell of a table is a text, or ``{"text", "style"}`` with a style of the page ("good" or
"bad"), or ``{"bars", "label"}``, a histogram.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
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


_MAX_ROWS = 500  # of a table; /status.json has all
_LAST_REFUSALS = 5
_LATE_SECONDS = 1.0

Cell = str | dict[str, Any]
Content = dict[str, Any]


def content(status: Status) -> Content:
    """What the page shows of a status; plain values as JSON has them."""
    seen = summary(status)
    tables = [
        _experts_table(seen),
        _replicas_table(status["replicas"]),
        _refusals_table(seen),
        _audit_table(status["audit"]),
        _devices_table(status["runtimes"]),
        _servers_table(seen),
        _connections_table(status),
    ]
    return {
        "title": f"{'draining: ' if seen.draining else ''}{seen.address} · weft",
        "head": _head(seen, status["incarnation"]),
        "alerts": _alerts(seen),
        "tiles": _tiles(seen),
        "tables": [table for table in tables if table is not None],
    }


def _head(seen: Summary, incarnation: int) -> Content:
    up = timedelta(seconds=round(seen.seconds))
    why = f": {seen.draining}" if seen.draining else ""
    return {
        "address": seen.address,
        "state": "draining" if seen.draining else "serving",
        "style": "bad" if seen.draining else "good",
        "rest": f"{why}, up {up}, incarnation {f'{incarnation:016x}'[:8]}",
    }


def _alerts(seen: Summary) -> list[str]:
    away = [f"directory: away for {_seconds(seen.away)}; its last answer is shown"] if seen.away else []
    return [*(f"{name}: {why}" for name, why in seen.failures.items()), *away]


def _tiles(seen: Summary) -> list[Content]:
    late = seen.oldest > _LATE_SECONDS
    tiles = [
        ("experts", _count(len(seen.experts)), False),
        ("optimizer steps", _count(seen.steps), False),
        ("waiting tasks", _count(seen.waiting), late),
        ("oldest waits", _seconds(seen.oldest), late),
        ("running calls", _count(seen.calls), False),
        ("connections", _count(seen.connections), False),
        ("refused", _count(seen.refused), False),
    ]
    return [{"name": name, "value": value, "late": bad} for name, value, bad in tiles]


def _experts_table(seen: Summary) -> Content:
    columns = ["expert", "steps", "durable step", "forward batches", "backward batches", "waiting", "oldest", "refused"]
    rows = [_expert_row(one) for one in seen.experts]
    return _table("experts", "Experts", [*columns, "failed", "tasks per batch"], rows, "No expert is served.")


def _expert_row(one: ExpertLine) -> list[Cell]:
    durable = "–" if one.durable is None else _count(one.durable)
    numbers = [_count(one.steps), durable, _count(one.forward), _count(one.backward), _count(one.waiting)]
    return [
        _name(one.name), *numbers, _seconds(one.oldest), _count(one.refused), _count(one.failed), _histogram(one.merged)
    ]  # fmt: skip


def _histogram(merged: Mapping[int, int]) -> Content:
    """Batches by the number of tasks that they joined, up to the next power of two."""
    sizes = [1 << power for power in range(max(merged).bit_length())] if any(merged.values()) else []
    counts = [(size, merged.get(size, 0)) for size in sizes]
    return {
        "label": "batches by tasks: " + ", ".join(f"{count} of {_range(size)}" for size, count in counts if count),
        "bars": [
            {
                "size": str(size) if size < 1024 else f"{size >> 10}k",
                "count": count,
                "label": f"{count} batches of {_range(size)}",
            }
            for size, count in counts
        ],
    }


def _range(size: int) -> str:
    low = size // 2 + 1
    return "1 task" if size == 1 else f"{size} tasks" if low >= size else f"{low} to {size} tasks"


def _replicas_table(replicas: Mapping[str, Mapping[str, Any]]) -> Content | None:
    columns = ["expert", "role here", "owner", "token", "steps behind", "steps its followers lack", "failure"]
    rows: list[list[Cell]] = [
        [
            _name(uid),
            _styled(one["role"], "good" if one["role"] == "owner" else None),
            one["owner"] or "unknown",
            str(one["token"]),
            "–" if one["behind"] is None else _count(one["behind"]),
            ", ".join(f"{where}: {lacks}" for where, lacks in sorted(one["followers"].items())) or "–",
            _styled(one["failure"], "bad") if one["failure"] else "–",
        ]
        for uid, one in sorted(replicas.items())
    ]
    return _table("replicas", "Replicas", columns, rows, "") if rows else None


def _refusals_table(seen: Summary) -> Content:
    rows: list[list[Cell]] = [[reason, where, _count(count)] for where, reason, count in seen.refusals]
    return _table("refusals", "Refusals", ["reason", "of what", "count"], rows, "Nothing was refused.")


def _audit_table(audit: Sequence[dict[str, Any]]) -> Content | None:
    rows: list[list[Cell]] = [
        [
            time.strftime("%H:%M:%S", time.gmtime(each["time"])) + " UTC",
            _name(each["client"] or each["peer"]),
            each["what"].lower(),
            _name(each["expert"]) if each["expert"] else "–",
        ]
        for each in reversed(audit[-_LAST_REFUSALS:])
    ]
    return _table("audit", "Last not allowed", ["when", "client", "call", "expert"], rows, "") if rows else None


def _devices_table(runtimes: Mapping[str, Mapping[str, Any]]) -> Content:
    rows: list[list[Cell]] = [
        [
            name,
            _styled("alive", "good") if one["alive"] else _styled("ended", "bad"),
            "–" if one["working_on"] is None else _name(one["working_on"]),
            f"{one['busy'] / one['seconds']:.0%}" if one["seconds"] else "–",
            _count(one["batches"]),
        ]
        for name, one in sorted(runtimes.items())
    ]
    return _table("devices", "Devices", ["device", "thread", "works on", "busy", "batches"], rows, "None is used.")


def _servers_table(seen: Summary) -> Content | None:
    if seen.away is None:
        return None
    rows: list[list[Cell]] = [
        [one.address + (" (this one)" if one.here else ""), str(one.experts), str(one.owns)] for one in seen.servers
    ]
    columns = ["server", "experts", "of which it owns"]
    return _table("servers", "Servers in the directory", columns, rows, "The directory lists none.")


def _connections_table(status: Status) -> Content:
    answered = ", ".join(f"{_count(count)} {kind.lower()}" for kind, count in sorted(status["answered"].items()))
    errors = ", ".join(f"{_count(count)} {reason}" for reason, count in sorted(status["errors"].items()))
    rows: list[list[Cell]] = [
        ["open", _count(status["connections"])],
        ["bytes of running calls", _count(status["nbytes"])],
        ["accepted", _count(status["accepted"])],
        ["turned away, the server was full", _count(status["turned_away"])],
        ["closed after an invalid frame", _count(status["broken"])],
        ["calls", answered or "none"],
        ["errors answered", errors or "none"],
    ]
    return _table("connections", "Connections", ["connections and calls", "number"], rows, "")


def _table(key: str, title: str, columns: Sequence[str], rows: Sequence[list[Cell]], empty: str) -> Content:
    more = len(rows) - _MAX_ROWS
    note = f"and {more} more in /status.json" if more > 0 else "" if rows else empty
    return {"id": key, "title": title, "columns": list(columns), "rows": list(rows[:_MAX_ROWS]), "note": note}


def _styled(text: str, style: str | None) -> Content:
    return {"text": text, "style": style}


def _name(text: str) -> str:
    return text or "(empty)"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", "\u202f")


def _seconds(value: float) -> str:
    return "–" if value <= 0 else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
