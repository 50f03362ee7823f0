"""Text of ``weft status``: the numbers of a server's status page, for a terminal.

weft server 10.0.0.7:7070, up 1:02:03, 12 connections, 3 calls under way
expert   steps   durable  batches    waiting  refused
ffn.0      412       400     1033          0        2
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from weft.core.errors import escaped
from weft.experts.client.transport import GrpcTransport
from weft.experts.tls import ClientTls

Json = Mapping[str, Any]


def status(address: str, *, tls: ClientTls | None = None, token: str | None = None, as_json: bool = False) -> str:
    """The text of a server's status. Raises ``UnreachableError``, ``ForbiddenError`` or ``DeadlineError``."""
    with GrpcTransport(address, tls=tls, token=token) as transport:
        found = json.loads(transport.status())
    return json.dumps(found) if as_json else shown(found)


def shown(status: Json) -> str:
    """A status as lines."""
    state = f", draining: {status['draining']}" if status["draining"] else ""
    head = (
        f"weft server {status['address']}, up {timedelta(seconds=round(status['seconds']))}, "
        f"{status['connections']} connections, {status['calls']} calls under way{state}"
    )
    rows = [("expert", "steps", "durable", "batches", "waiting", "refused")]
    rows += [_row(name, one, status["keeping"][name]) for name, one in sorted(status["experts"].items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines += [f"{name} goes wrong: {why}" for name, why in status["failures"].items()]
    lines += [f"{uid}: {note}" for uid, one in status["keeping"].items() for note in one.get("notes", ())]
    refusals = sorted(_refusals(status), key=lambda each: (-each[0], each))
    lines += [f"refused {count} times: {reason} ({where})" for count, where, reason in refusals]
    lines += [f"{uid}: {_replica(one)}" for uid, one in sorted(status.get("replicas", {}).items())]
    if lease := status.get("lease"):
        left = f"{lease['left']:.1f} of {lease['seconds']:g} s left"
        lines.append(f"lease: {left}, last renewed {lease['late']:.2f} s late, at worst {lease['latest']:.2f} s")
    if directory := status.get("directory"):
        others = sorted(directory["servers"].items())
        lines += [f"alive: {where}, {one['experts']} experts" for where, one in others if where != directory["here"]]
    return "\n".join(escaped(each) for each in [head, *lines])  # a line of the table is one line, whatever names hold


def _row(name: str, one: Json, keeping: Json) -> tuple[str, ...]:
    pools = one["pools"].values()
    refused = sum(one["refused_gradients"].values()) + sum(sum(pool["refused"].values()) for pool in pools)
    batches, waiting = one["forward_batches"] + one["backward_batches"], sum(pool["waiting_tasks"] for pool in pools)
    durable = "-" if keeping["durable"] is None else keeping["durable"]
    return (escaped(name), *map(str, (one["steps"], durable, batches, waiting, refused)))


def _refusals(status: Json) -> Iterator[tuple[int, str, str]]:
    tasks: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for one in status["experts"].values():
        gradients.update(one["refused_gradients"])
        for pool in one["pools"].values():
            tasks.update(pool["refused"])
    connections = {"server full": status["turned_away"], "no frame": status["broken"]}
    groups = {"task": tasks, "gradients": gradients, "not allowed": status["refusals"], "connection": connections}
    for where, counts in groups.items():
        yield from ((count, where, reason) for reason, count in counts.items() if count)


def _replica(found: Json) -> str:
    token = f"with token {found['token']}"
    if found["role"] == "owner":
        others = ", ".join(f"{name} ({steps} steps behind)" for name, steps in sorted(found["followers"].items()))
        lapsed = "" if found["lasts"] else ", its lease has lapsed"
        text = f"owner {token}{lapsed}; followed by {others or 'nobody'}"
    elif found["role"] == "follower":
        behind = "its state is not here yet" if found["behind"] is None else f"{found['behind']} steps behind"
        text = f"follows {found['owner']} {token}, {behind}" if found["owner"] else "has no owner"
    else:
        text = f"is taking over {token}"
    return text + (f"; goes wrong: {found['failure']}" if found["failure"] else "")
