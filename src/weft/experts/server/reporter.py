"""Statistics of a server: one value of plain numbers, and the same as JSON for people, pages and Prometheus.

    dispatcher, gRPC server, experts, devices, directory ──> Reporter ──> ServerStatistics ──> JSON

Nothing here waits for a module. Its expert's lock is held while it computes, so the numbers that only this lock keeps
together are read under it where it is free, and one by one where it is not. So a module that hangs can be seen.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, cast

from weft.experts.discovery.registration import DirectoryStatistics, LeaseHeartbeat, LeaseStatistics
from weft.experts.expert import ExpertBackend
from weft.experts.replication import ReplicaStatistics
from weft.experts.runtime import Runtime
from weft.experts.server.dispatcher import RequestDispatcher
from weft.experts.server.grpc_server import GrpcServer
from weft.experts.server.threads import PeriodicTask
from weft.experts.telemetry import BackendStatistics, RuntimeStatistics


@dataclass(frozen=True)
class CheckpointStatistics:
    """``durable``: the step on the disk (None: no checkpoints). ``restored``: the step that this start went on from.

    ``notes``: where the checkpoint it went on from says something else than the configuration.
    """

    durable: int | None
    restored: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerStatistics:
    """``connections`` are open now, with ``calls`` and ``nbytes`` under way; the others count since the start.

    ``turned_away`` clients found the server full, ``broken`` ones sent what is no frame, ``refusals`` were forbidden;
    all by kind of call, ``errors`` by reason. ``seconds`` since the start. ``failures``: what last went wrong with
    the directory or the checkpoints, empty if nothing does now; and damaged checkpoints that the start passed over.
    ``directory``: the live servers; ``lease``: how its renewals keep up. None without one.
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
    directory: DirectoryStatistics | None = None
    lease: LeaseStatistics | None = None
    replicas: Mapping[str, ReplicaStatistics] = field(default_factory=dict[str, ReplicaStatistics])

    def to_json(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and texts."""
        return _plain(self)


class Reporter:
    """Collects the numbers of one server. Thread-safe; never waits for a module, a disk or a network."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        grpc_server: GrpcServer,
        runtimes: dict[str, Runtime],
        tasks: dict[str, PeriodicTask],
    ) -> None:
        self.began: float | None = None
        self.heartbeat: LeaseHeartbeat | None = None
        self.replicas: Callable[[], dict[str, ReplicaStatistics]] = dict
        self._dispatcher = dispatcher
        self._grpc_server = grpc_server
        self._runtimes = runtimes
        self._tasks = tasks
        self._last: dict[str, BackendStatistics] = {}

    def statistics(self, address: str) -> ServerStatistics:
        """What was done since the start, and what is under way."""
        grpc_server, dispatcher, served = self._grpc_server, self._dispatcher, self._dispatcher.experts()
        connections = list(grpc_server.connections)
        answered, errors = dispatcher.counts()
        failures = {name: str(each.last_failure) for name, each in dict(self._tasks).items() if each.last_failure}
        failures |= {f"restore of {uid}": one.failure for uid, one in served.items() if one.failure is not None}
        self._last = {uid: self._expert(one.backend) for uid, one in served.items()}
        return ServerStatistics(
            address=address,
            seconds=0.0 if self.began is None else time.monotonic() - self.began,
            draining=dispatcher.draining,
            incarnation=dispatcher.incarnation,
            connections=len(connections),
            calls=sum(each.calls for each in connections),
            nbytes=sum(each.nbytes for each in connections),
            accepted=grpc_server.accepted,
            turned_away=grpc_server.turned_away,
            broken=grpc_server.broken,
            answered=answered,
            errors=errors,
            refusals=dispatcher.audit.counts(),
            failures=failures,
            listed=() if self.heartbeat is None else self.heartbeat.listed,
            experts=dict(self._last),
            keeping={uid: CheckpointStatistics(one.durable, one.restored, one.notes) for uid, one in served.items()},
            runtimes={name: runtime.statistics() for name, runtime in dict(self._runtimes).items()},
            directory=None if self.heartbeat is None else self.heartbeat.directory_statistics(),
            lease=None if self.heartbeat is None else self.heartbeat.statistics(),
            replicas=self.replicas(),
        )

    def _expert(self, backend: ExpertBackend) -> BackendStatistics:
        executor = backend.executor
        if executor.lock.acquire(blocking=False):
            try:
                return backend.statistics()
            finally:
                executor.lock.release()
        return _while_busy(backend, self._last.get(backend.name))


def _while_busy(backend: ExpertBackend, last: BackendStatistics | None) -> BackendStatistics:
    """Without the expert's lock: each number is true by itself, and may be of another moment than its neighbour.

    The memory of open mini-batches is a sum over what the batch may change, so it is that of the last look.
    """
    executor = backend.executor
    kept = executor.graphs
    live: dict[str, Any] = {
        "steps": backend.steps,
        "forward_batches": executor.forward_batches,
        "backward_batches": executor.backward_batches,
        "retried_batches": executor.retried,
        "refused_gradients": dict(executor.refused),
        "open_mini_batches": len(executor.mini_batches),
        "kept_graphs": len(kept),
        "kept_graph_bytes": kept.nbytes,
        "used_graphs": kept.used,
        "buffer_bytes": executor.buffer_bytes,
        "records": backend.records.statistics(),
        "pools": {pool.name: pool.statistics() for pool in backend.pools},
    }
    if last is None or last.name != backend.name:
        return BackendStatistics(name=backend.name, open_mini_batch_bytes=0, journal_failures=0, **live)
    return replace(last, **live)


def _plain(value: Any) -> Any:
    """By hand: `dataclasses.asdict` copies deeply, and the panel asks again and again."""
    if value is None or isinstance(value, int | float | str):
        return value
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return value
