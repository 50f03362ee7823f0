"""Content of the status page, as data: what `page.html` draws and a test can read.

    title, head     address, state, since when        alerts    what fails now
    tiles           the numbers to see first          tables    experts, replicas, refusals, devices, servers ...

A pure function of a status. A cell of a table is a text, or ``{"text", "style"}`` with a style of the page ("good" or
"bad"), or ``{"bars", "label"}``, a histogram.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from weft.experts.panel.summary import ExpertLine, Status, Summary, summary

_MAX_ROWS = 500  # of a table; /status.json has all
_LAST_REFUSALS = 5
_LATE_SECONDS = 1.0

Cell = str | dict[str, Any]
Content = dict[str, Any]


def content(status: Status) -> Content:
    """What the page shows of a status; plain values as JSON has them."""
    seen = summary(status)
    tables = [
        _experts(seen),
        _replicas(status["replicas"]),
        _refusals(seen),
        _not_allowed(status["audit"]),
        _devices(status["runtimes"]),
        _servers(seen),
        _connections(status),
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


def _experts(seen: Summary) -> Content:
    columns = ["expert", "steps", "durable step", "forward batches", "backward batches", "waiting", "oldest", "refused"]
    rows = [_expert(one) for one in seen.experts]
    return _table("experts", "Experts", [*columns, "failed", "tasks per batch"], rows, "No expert is served.")


def _expert(one: ExpertLine) -> list[Cell]:
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


def _replicas(replicas: Mapping[str, Mapping[str, Any]]) -> Content | None:
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


def _refusals(seen: Summary) -> Content:
    rows: list[list[Cell]] = [[reason, where, _count(count)] for where, reason, count in seen.refusals]
    return _table("refusals", "Refusals", ["reason", "of what", "count"], rows, "Nothing was refused.")


def _not_allowed(audit: Sequence[dict[str, Any]]) -> Content | None:
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


def _devices(runtimes: Mapping[str, Mapping[str, Any]]) -> Content:
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


def _servers(seen: Summary) -> Content | None:
    if seen.away is None:
        return None
    rows: list[list[Cell]] = [
        [one.address + (" (this one)" if one.here else ""), str(one.experts), str(one.owns)] for one in seen.servers
    ]
    columns = ["server", "experts", "of which it owns"]
    return _table("servers", "Servers in the directory", columns, rows, "The directory lists none.")


def _connections(status: Status) -> Content:
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
