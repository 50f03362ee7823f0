"""Commands of an administrator: the text of ``torchweft status``, and operations on living experts.

torchweft server 10.0.0.7:7070, up 1:02:03, 12 connections, 3 calls under way
expert   steps   durable  batches    waiting  refused
ffn.0      412       400     1033          0        2

`RemoteExpert.set` and `RemoteExpert.state_dict` are operations for a client with the role ``ADMIN``.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchweft.core.errors import UsageError, escape
from torchweft.experts.client.transport import GrpcTransport, Transport
from torchweft.experts.errors import DeadlineError, UnreachableError
from torchweft.experts.serialization import deserialize
from torchweft.experts.statistics import Status, count_expert, waiting_tasks
from torchweft.experts.tls import ClientTls
from torchweft.experts.wire.service import Operation


def status(
    address: str,
    *,
    tls: ClientTls | None = None,
    token: str | None = None,
    as_json: bool = False,
    timeout: float = 10.0,
) -> str:
    """The text of a server's status. Raises ``UnreachableError``, ``ForbiddenError`` or ``DeadlineError``."""
    with GrpcTransport(address, tls=tls, token=token) as transport:
        statistics = json.loads(transport.status(timeout))
    return json.dumps(statistics) if as_json else shown(statistics)


def watch(address: str, seconds: float, **options: Any) -> Iterator[str]:
    """`status` again and again, with a pause of ``seconds``. While the server is away, its error takes the place."""
    while True:
        try:
            yield status(address, **options)
        except (UnreachableError, DeadlineError) as error:  # a server that is restarted comes back
            text = f"{escape(error)}; asked again every {seconds:g} s"
            yield json.dumps({"error": text}) if options.get("as_json") else text
        time.sleep(seconds)


def shown(status: Status) -> str:
    """The status as lines."""
    state = f", draining: {status['draining']}" if status["draining"] else ""
    head = (
        f"torchweft server {status['address']}, up {timedelta(seconds=round(status['seconds']))}, "
        f"{status['connections']} connections, {status['calls']} calls under way{state}"
    )
    rows = [("expert", "steps", "durable", "batches", "waiting", "refused")]
    rows += [_expert_row(name, expert, status["keeping"][name]) for name, expert in sorted(status["experts"].items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines += [f"{name} goes wrong: {why}" for name, why in status["failures"].items()]
    lines += [f"{uid}: {note}" for uid, keeping in status["keeping"].items() for note in keeping.get("notes", ())]
    refusals = sorted(_refusal_counts(status), key=lambda refusal: (-refusal[0], refusal))
    lines += [f"refused {count} times: {reason} ({where})" for count, where, reason in refusals]
    lines += [f"{uid}: {_replica_text(replica)}" for uid, replica in sorted(status.get("replicas", {}).items())]
    if lease := status.get("lease"):
        left = f"{lease['left']:.1f} of {lease['seconds']:g} s left"
        lines.append(f"lease: {left}, last renewed {lease['late']:.2f} s late, at worst {lease['latest']:.2f} s")
    if directory := status.get("directory"):
        others = sorted(directory["servers"].items())
        here = directory["here"]
        lines += [f"alive: {where}, {server['experts']} experts" for where, server in others if where != here]
    # Names come from other machines, and could contain line breaks or control sequences of the terminal.
    return "\n".join(escape(line) for line in [head, *lines])


def _expert_row(name: str, expert: Status, keeping: Status) -> tuple[str, ...]:
    counts = count_expert(expert)
    durable = "-" if keeping["durable"] is None else keeping["durable"]
    batches = counts["forward_batches"] + counts["backward_batches"]
    return (escape(name), *map(str, (expert["steps"], durable, batches, waiting_tasks(expert), counts["refused"])))


def _refusal_counts(status: Status) -> Iterator[tuple[int, str, str]]:
    tasks: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for expert in status["experts"].values():
        gradients.update(expert["refused_gradients"])
        for pool in expert["pools"].values():
            tasks.update(pool["refused"])
    connections = {"server full": status["turned_away"], "no frame": status["broken"]}
    groups = {"task": tasks, "gradients": gradients, "not allowed": status["refusals"], "connection": connections}
    for where, counts in groups.items():
        yield from ((count, where, reason) for reason, count in counts.items() if count)


def _replica_text(replica: Status) -> str:
    token = f"with token {replica['token']}"
    if replica["role"] == "owner":
        others = ", ".join(f"{name} ({steps} steps behind)" for name, steps in sorted(replica["followers"].items()))
        lapsed = "" if replica["lasts"] else ", its lease has lapsed"
        text = f"owner {token}{lapsed}; followed by {others or 'no replica'}"
    elif replica["role"] == "follower":
        behind = "its state is not here yet" if replica["behind"] is None else f"{replica['behind']} steps behind"
        text = f"follows {replica['owner']} {token}, {behind}" if replica["owner"] else "has no owner"
    else:
        text = f"is taking over {token}"
    return text + (f"; goes wrong: {replica['failure']}" if replica["failure"] else "")


def set_hyperparameters(
    transport: Transport, uid: str, values: Mapping[str, Any], group: int | None, timeout: float
) -> dict[str, Any]:
    """Set them between two batches. Returns the ``steps`` of the expert, and the ``durable`` one."""
    operation = Operation("set", uid, {"values": dict(values), "group": group})
    return _administrative(transport, uid).operate(operation, timeout)[0]


def fetch_state(transport: Transport, uid: str, timeout: float) -> dict[str, Any]:
    """The weights and buffers of the module, all of one step."""
    return deserialize(_administrative(transport, uid).operate(Operation("export", uid), timeout)[1])


def export(transport: Transport, uid: str, path: Path, timeout: float) -> int:
    """Write the weights and buffers of the module as a safetensors file. Returns their step."""
    results, data = _administrative(transport, uid).operate(Operation("export", uid), timeout)
    # Written under another name first, so that an interrupted export does not leave half a file.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return int(results["steps"])


def _administrative(transport: Transport, uid: str) -> GrpcTransport:
    if not isinstance(transport, GrpcTransport):
        raise UsageError(f"expert {uid!r} is administered over gRPC, and this is a {type(transport).__name__}")
    return transport
