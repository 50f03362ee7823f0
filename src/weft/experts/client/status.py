"""Text of ``weft status``: the numbers of a server's status page, for a terminal.

weft server 10.0.0.7:7070, up 1:02:03, 12 connections, 3 calls under way
expert   steps   durable  batches    waiting  refused
ffn.0      412       400     1033          0        2
"""

import json
from datetime import timedelta

from weft.core.errors import escaped
from weft.experts.client.transport import GrpcTransport
from weft.experts.replication.manager import replica_line
from weft.experts.status_page.summary import ExpertLine, Status, summary
from weft.experts.tls import ClientTls


def status(address: str, *, tls: ClientTls | None = None, token: str | None = None, as_json: bool = False) -> str:
    """The text of a server's status. Raises ``UnreachableError``, ``ForbiddenError`` or ``DeadlineError``."""
    with GrpcTransport(address, tls=tls, token=token) as transport:
        found = json.loads(transport.status())
    return json.dumps(found) if as_json else shown(found)


def shown(status: Status) -> str:
    """A status as lines."""
    seen = summary(status)
    state = f", draining: {seen.draining}" if seen.draining else ""
    head = (
        f"weft server {seen.address}, up {timedelta(seconds=round(seen.seconds))}, {seen.connections} connections, "
        f"{seen.calls} calls under way{state}"
    )
    rows = [("expert", "steps", "durable", "batches", "waiting", "refused"), *map(_row, seen.experts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines += [f"{name} goes wrong: {why}" for name, why in seen.failures.items()]
    lines += [f"{uid}: {note}" for uid, one in status["keeping"].items() for note in one.get("notes", ())]
    lines += [f"refused {count} times: {reason} ({where})" for where, reason, count in seen.refusals]
    lines += [replica_line(uid, one) for uid, one in sorted(status.get("replicas", {}).items())]
    if lease := status.get("lease"):
        left = f"{lease['left']:.1f} of {lease['seconds']:g} s left"
        lines.append(f"lease: {left}, last renewed {lease['late']:.2f} s late, at worst {lease['latest']:.2f} s")
    lines += [f"alive: {one.address}, {one.experts} experts" for one in seen.servers if not one.here]
    return "\n".join(escaped(each) for each in [head, *lines])  # a line of the table is one line, whatever names hold


def _row(one: ExpertLine) -> tuple[str, ...]:
    durable = "-" if one.durable is None else str(one.durable)
    return (escaped(one.name), str(one.steps), durable, str(one.batches), str(one.waiting), str(one.refused))
