"""The status page: one self-contained HTML document, and its parts, which the script puts in when they change.

    head      who, since when, draining?        experts      a row for each, with its histogram
    alert     what goes wrong now               replicas     who owns what is elsewhere too
    numbers   those to see first                refusals     by reason, and the last few in words
                                                devices, alive, connections

A pure function from a status to text. Without scripts the page loads itself again.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from weft.core.markup import Markup, join, tag, text
from weft.experts.panel.histogram import histogram
from weft.experts.panel.script import SCRIPT
from weft.experts.panel.style import STYLE
from weft.experts.panel.summary import ExpertLine, Status, Summary, summary

_RELOAD = 5  # seconds, without scripts
_MOST = 500  # rows of a table; /status.json has all
_LAST = 5  # refusals in words


def page(status: Status) -> str:
    """The document, to be sent in UTF-8."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,"><meta name="referrer" content="no-referrer">'
        f'<noscript><meta http-equiv="refresh" content="{_RELOAD}"></noscript>'
        f"<title>{text(title(status))}</title><style>{STYLE}</style>"
    )
    pulse = tag("div", f"loads again every {_RELOAD} s", id="pulse", role="status")
    main = tag("main", parts(status))
    foot = '<footer>The same for programs: <a href="/status.json">/status.json</a>, <a href="/metrics">/metrics</a>'
    return _document(head, f"{pulse}{main}{foot}</footer><script>{SCRIPT}</script>")


def still(status: Status) -> str:
    """The document as it was at one moment, to be kept: it runs nothing, loads nothing and links to nothing."""
    head = f'<meta charset="utf-8"><title>{text(title(status))}</title><style>{STYLE}</style>'
    return _document(head, tag("main", parts(status)))


def title(status: Status) -> str:
    """What the tab says."""
    return f"{'draining: ' if status['draining'] else ''}{status['address']} · weft"


def parts(status: Status) -> Markup:
    """All that changes: elements with an id each."""
    seen = summary(status)
    return join(
        _head(seen, status["incarnation"]),
        _alert(seen),
        _tiles(seen),
        _experts(seen),
        _replicas(status["replicas"]),
        _refusals(seen, status["audit"]),
        _devices(status["runtimes"]),
        _alive(seen),
        _connections(status),
    )


def _document(head: str, body: str) -> str:
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _head(seen: Summary, incarnation: int) -> Markup:
    up = timedelta(seconds=round(seen.seconds))
    state = tag("b", "serving", class_="good") if not seen.draining else tag("b", "draining", class_="bad")
    why = f": {seen.draining}" if seen.draining else ""
    line = tag("p", state, f"{why}, up {up}, incarnation ", tag("code", f"{incarnation:016x}"[:8]))
    return tag("header", tag("h1", tag("small", "weft server "), seen.address), line, id="head")


def _alert(seen: Summary) -> Markup:
    faults = [tag("p", f"{name}: {why}") for name, why in seen.failures.items()]
    if seen.away:
        faults.append(tag("p", f"directory: away for {_seconds(seen.away)}; what it last told is shown"))
    if not faults:
        return Markup("")
    return tag("section", tag("h2", "Goes wrong"), *faults, class_="alert", id="alert", role="alert")


def _tiles(seen: Summary) -> Markup:
    late = seen.oldest > 1.0
    tiles = [
        ("experts", str(len(seen.experts)), False),
        ("optimizer steps", _count(seen.steps), False),
        ("waiting tasks", _count(seen.waiting), late),
        ("oldest waits", _seconds(seen.oldest), late),
        ("calls under way", _count(seen.calls), False),
        ("connections", _count(seen.connections), False),
        ("refused", _count(seen.refused), False),
    ]
    drawn = [
        tag("div", tag("dt", name), tag("dd", value), class_="worrying" if bad else None) for name, value, bad in tiles
    ]
    return tag("section", tag("dl", *drawn, class_="tiles"), id="numbers", aria_label="at a glance")


def _experts(seen: Summary) -> Markup:
    columns = ["expert", "steps", "durable step", "forward batches", "backward batches", "waiting", "oldest", "refused"]
    rows = [_expert(one) for one in seen.experts]
    return _section("Experts", "experts", [*columns, "failed", "tasks per batch"], rows, "No expert is served.")


def _expert(one: ExpertLine) -> list[Markup]:
    durable = "–" if one.durable is None else _count(one.durable)
    numbers = [_count(one.steps), durable, _count(one.forward), _count(one.backward), _count(one.waiting)]
    numbers += [_seconds(one.oldest), _count(one.refused), _count(one.failed)]
    return [named(one.name), *map(text, numbers), histogram(one.merged)]


def _replicas(replicas: Mapping[str, Mapping[str, Any]]) -> Markup:
    if not replicas:
        return Markup("")
    columns = ["expert", "role here", "owner", "token", "steps behind", "steps its followers lack", "goes wrong"]
    rows = [
        [
            named(uid),
            tag("span", one["role"], class_="good" if one["role"] == "owner" else None),
            text(one["owner"] or "nobody known"),
            text(str(one["token"])),
            text("–" if one["behind"] is None else _count(one["behind"])),
            text(", ".join(f"{where}: {lacks}" for where, lacks in sorted(one["followers"].items())) or "–"),
            tag("span", one["failure"], class_="bad") if one["failure"] else text("–"),
        ]
        for uid, one in sorted(replicas.items())
    ]
    return _section("Replicas", "replicas", columns, rows, "")


def _refusals(seen: Summary, audit: Sequence[dict[str, Any]]) -> Markup:
    rows = [[text(reason), text(where), text(_count(count))] for where, reason, count in seen.refusals]
    last = [
        [
            text(time.strftime("%H:%M:%S", time.gmtime(each["time"])) + " UTC"),
            named(each["client"] or each["peer"]),
            text(each["what"].lower()),
            named(each["expert"]) if each["expert"] else text("–"),
        ]
        for each in reversed(audit[-_LAST:])
    ]
    found = _section("Refusals", "refusals", ["reason", "of what", "count"], rows, "Nothing was refused.")
    if not last:
        return found
    return join(found, _section("Last not allowed", "audit", ["when", "client", "call", "expert"], last, ""))


def _devices(runtimes: dict[str, dict[str, Any]]) -> Markup:
    rows = [
        [
            text(name),
            tag("span", "alive", class_="good") if one["alive"] else tag("span", "ended", class_="bad"),
            text("–") if one["working_on"] is None else named(one["working_on"]),
            text(f"{one['busy'] / one['seconds']:.0%}" if one["seconds"] else "–"),
            text(_count(one["batches"])),
        ]
        for name, one in sorted(runtimes.items())
    ]
    return _section("Devices", "devices", ["device", "thread", "works on", "busy", "batches"], rows, "None is used.")


def _alive(seen: Summary) -> Markup:
    if seen.away is None:
        return Markup("")
    rows = [
        [join(one.address, " (this one)" if one.here else ""), text(str(one.experts)), text(str(one.owns))]
        for one in seen.servers
    ]
    columns = ["server", "experts", "of which it owns"]
    return _section("Alive, says the directory", "alive", columns, rows, "The directory lists nobody.")


def _connections(status: Status) -> Markup:
    answered = ", ".join(f"{_count(count)} {kind.lower()}" for kind, count in sorted(status["answered"].items()))
    errors = ", ".join(f"{_count(count)} {reason}" for reason, count in sorted(status["errors"].items()))
    rows = [
        ["open now", _count(status["connections"])],
        ["bytes under way", _count(status["nbytes"])],
        ["accepted so far", _count(status["accepted"])],
        ["turned away, the server was full", _count(status["turned_away"])],
        ["broken off, what came was no frame", _count(status["broken"])],
        ["calls so far", answered or "none"],
        ["errors answered", errors or "none"],
    ]
    made = [[text(name), text(value)] for name, value in rows]
    return _section("Connections", "connections", ["connections and calls", "number"], made, "")


def _section(name: str, key: str, columns: Sequence[str], rows: Sequence[Sequence[Markup]], empty: str) -> Markup:
    """A table under its title. The roles stay what they are when a narrow screen shows it as cards."""
    heading = tag("h2", name, id=f"{key}-title")
    if not rows:
        return tag("section", heading, tag("p", empty), id=key)
    head = tag("tr", *(tag("th", each, scope="col", role="columnheader") for each in columns), role="row")
    body = [_row(columns, row) for row in rows[:_MOST]]
    more = tag("p", f"and {len(rows) - _MOST} more in /status.json") if len(rows) > _MOST else Markup("")
    thead = tag("thead", head, role="rowgroup")
    table = tag("table", thead, tag("tbody", *body, role="rowgroup"), role="table", aria_labelledby=f"{key}-title")
    return tag("section", heading, table, more, id=key)


def _row(columns: Sequence[str], cells: Sequence[Markup]) -> Markup:
    first = tag("th", cells[0], scope="row", role="rowheader")
    rest = [tag("td", cell, data_column=name, role="cell") for name, cell in zip(columns[1:], cells[1:], strict=True)]
    return tag("tr", first, *rest, role="row")


def named(words: str) -> Markup:
    """A name that somebody chose: letters that run from right to left do not turn what stands beside them."""
    return tag("bdi", words or "(empty)")


def _count(number: int) -> str:
    return f"{number:,}".replace(",", "\u202f")


def _seconds(value: float) -> str:
    return "–" if value <= 0 else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
