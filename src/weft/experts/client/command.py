"""``weft status``: what a server says of itself, for a person in a terminal.

weft server 10.0.0.7:7070, up 1:02:03, 12 connections, 3 calls under way
expert   steps   durable  batches    waiting  refused
ffn.0      412       400     1033          0        2
"""

import json
from datetime import timedelta
from typing import Any

from weft.experts.client.channel import ClientTls, GrpcTransport


def status(address: str, *, tls: ClientTls | None = None, token: str | None = None, as_json: bool = False) -> str:
    """The text. Raises ``UnreachableError``, ``ForbiddenError`` or ``DeadlineError``."""
    with GrpcTransport(address, tls=tls, token=token) as transport:
        told = transport.status()
    return told.decode() if as_json else shown(json.loads(told))


def shown(found: dict[str, Any]) -> str:
    """A status as lines."""
    up = timedelta(seconds=round(found["seconds"]))
    state = f", draining: {found['draining']}" if found["draining"] else ""
    head = (
        f"weft server {found['address']}, up {up}, {found['connections']} connections, "
        f"{found['calls']} calls under way{state}"
    )
    rows = [("expert", "steps", "durable", "batches", "waiting", "refused")]
    rows += [_row(uid, one, found["keeping"][uid]) for uid, one in sorted(found["experts"].items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines += [f"{name} goes wrong: {why}" for name, why in found["failures"].items()]
    lines += [f"refused {count} calls: {kind}" for kind, count in found["refusals"].items()]
    return "\n".join([head, *lines])


def _row(uid: str, one: dict[str, Any], keeping: dict[str, Any]) -> tuple[str, ...]:
    pools = one["pools"].values()
    durable = "-" if keeping["durable"] is None else str(keeping["durable"])
    batches = one["forward_batches"] + one["backward_batches"]
    refused = sum(sum(pool["refused"].values()) for pool in pools) + sum(one["refused_gradients"].values())
    waiting = sum(pool["waiting_tasks"] for pool in pools)
    return (uid, str(one["steps"]), durable, str(batches), str(waiting), str(refused))
