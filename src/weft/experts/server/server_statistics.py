"""Statistics of a server, as `Server.statistics` returns them and the status page shows them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.experts.discovery.registration import LeaseStatistics
from weft.experts.replication import ReplicaStatistics
from weft.experts.telemetry import BackendStatistics, RuntimeStatistics


@dataclass(frozen=True)
class CheckpointStatistics:
    """One expert. ``durable``: the step on the disk (None: no checkpoint). ``restored``: the step it started from.

    ``notes``: differences between the configuration and the checkpoint, whose values are used.
    """

    durable: int | None
    restored: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerStatistics:
    """``connections``, ``calls`` and ``nbytes`` are those of this moment. The other numbers count since the start.

    Args:
        seconds: since the start.
        draining: why no new work is taken; None while it is.
        turned_away: clients that found the server full.
        broken: clients that sent an invalid frame.
        answered, refusals: calls, and forbidden calls, by kind.
        errors: answered errors, by reason.
        failures: the errors of tasks that fail now (directory, checkpoints, devices), and checkpoints that could not
            be read at the start. Empty if everything works.
        keeping: checkpoints, by expert.
        directory: the live servers, by address. None without a directory, as is ``lease``.
        lease: how the renewals keep up.
    """

    address: str
    seconds: float
    draining: str | None
    incarnation: int
    connections: int
    calls: int
    nbytes: int
    accepted: int
    turned_away: int
    broken: int
    answered: Mapping[str, int]
    errors: Mapping[str, int]
    refusals: Mapping[str, int]
    failures: Mapping[str, str]
    listed: tuple[str, ...]
    experts: Mapping[str, BackendStatistics]
    keeping: Mapping[str, CheckpointStatistics]
    runtimes: Mapping[str, RuntimeStatistics]
    directory: Mapping[str, Any] | None = None
    lease: LeaseStatistics | None = None
    replicas: Mapping[str, ReplicaStatistics] = field(default_factory=dict[str, ReplicaStatistics])

    def to_json(self) -> dict[str, Any]:
        """A copy that consists of dicts, lists, numbers and strings."""
        return json.loads(json.dumps(self, default=vars))
