"""Statistics of a server, as `Server.statistics` returns them and the status page shows them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchweft.experts.discovery.registration import LeaseStatistics
from torchweft.experts.replication import ReplicaStatistics
from torchweft.experts.telemetry import BackendStatistics, RuntimeStatistics


@dataclass(frozen=True)
class CheckpointStatistics:
    """One expert. ``durable``: the step on the disk (None: no checkpoint). ``restored``: the step it started from.

    ``notes``: differences between the configuration and the checkpoint. The values of the checkpoint are used.
    """

    durable: int | None
    restored: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerStatistics:
    """``connections``, ``calls`` and ``nbytes`` are those of this moment. The other numbers count since the start.

    ``draining``: why no new work is taken, or None. ``turned_away``: clients that found the server full. ``broken``:
    clients that sent an invalid frame. ``failures``: present errors of directory, checkpoints and devices, and
    checkpoints that the start could not read. ``keeping``: checkpoints by expert.
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
        return json.loads(json.dumps(self, default=vars))
