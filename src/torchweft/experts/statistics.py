"""The numbers of a server: one table, of which its status, metrics, status page and texts are made.

Each class is a part of the status. A field is a number of it, and `Annotated` says how Prometheus reads the number:

    submitted: Annotated[int, counter("tasks_submitted", "Queued tasks")]       torchweft_tasks_submitted_total

    ServerStatistics ── to_json() ──> status ──┬── metrics.py: for Prometheus, and the rows of the page
                                               └── count_expert() ──> the tables of experts: status.py, recent.py

Names of metrics get the prefix ``torchweft_``. They end in their unit, and those of counters get ``_total``, as "Metric
and label naming" of the Prometheus documentation demands. Values are of one moment, never change and hold no tensor.
Ages and times are seconds.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

Status = Mapping[str, Any]  # A part of `Server.status()`, also after a round trip through JSON


@dataclass(frozen=True)
class Metric:
    """A number as Prometheus reads it. ``on_page``: the status page shows it among the connections.

    ``label``: the value is a mapping, whose keys become the values of this label. ``read``: computes the value from the
    part of the status. By default it is the field itself. None gives no sample.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    label: str = ""
    read: Callable[[Status], Any] | None = None
    on_page: bool = False
    bounds: tuple[float, ...] = ()  # of the buckets of a histogram, whose sum is ``total``
    total: Callable[[Status], float] = lambda part: 0.0


counter, gauge, histogram = partial(Metric, "counter"), partial(Metric, "gauge"), partial(Metric, "histogram")


def metrics_of(part: type) -> Iterator[tuple[str, Metric]]:
    """The metrics of a part of the status, with the names of their fields."""
    for name, hint in get_type_hints(part, include_extras=True).items():
        yield from ((name, metric) for metric in getattr(hint, "__metadata__", ()))


def count_expert(expert: Status) -> Counter[str]:
    """The counters of an expert that only grow, summed over its pools. ``batches of N``: those of up to N tasks."""
    total: Counter[Any] = Counter({key: expert[key] for key in ("forward_batches", "backward_batches")})
    total.update(refused=sum(expert["refused_gradients"].values()), failed=0)
    for pool in expert["pools"].values():
        # The task of a refused gradient fails for this reason. It counts once, as refused.
        failed = sum(count for reason, count in pool["failed"].items() if reason != "gradient")
        total.update(refused=sum(pool["refused"].values()), failed=failed + pool["expired"])
        total.update({key: pool[key] for key in ("answered", "answer_seconds")})
        total.update({f"batches of {size}": count for size, count in pool["merged"].items()})
    return total


def waiting_tasks(expert: Status) -> int:
    return sum(pool["waiting_tasks"] for pool in expert["pools"].values())


def _batches(expert: Status) -> dict[str, int]:
    return {direction: expert[f"{direction}_batches"] for direction in ("forward", "backward")}


def _count_servers(directory: Status) -> int:
    return len(directory["servers"])


def _is_owner(replica: Status) -> bool:
    return replica["role"] == "owner"


def _is_draining(server: Status) -> bool:
    return server["draining"] is not None


def _failing(server: Status) -> dict[str, int]:
    return dict.fromkeys(server["failures"], 1)


_answer_times = histogram(
    "tasks_answer_seconds",
    "Time from arrival to answer",
    bounds=tuple((1 << n) / 1000 for n in range(18)),
    total=lambda pool: pool["answer_seconds"],
)
_batch_sizes = histogram(
    "batch_tasks",
    "Tasks per batch; the sum counts ended tasks",
    bounds=tuple(float(1 << n) for n in range(13)),
    total=lambda pool: pool["answered"] + sum(pool["failed"].values()),
)


@dataclass(frozen=True)
class PoolStatistics:
    """One pool. ``merged``: batches by the number of their tasks, rounded up to a power of two.

    ``answer_times``: answered tasks by seconds, rounded up to 1 ms times a power of two. ``answer_seconds``: their sum.
    """

    name: str
    submitted: Annotated[int, counter("tasks_submitted", "Queued tasks")]
    answered: Annotated[int, counter("tasks_answered", "Tasks that were answered with results")]
    answer_seconds: float
    answer_times: Annotated[Mapping[float, int], _answer_times]
    failed: Annotated[Mapping[str, int], counter("tasks_failed", "Tasks that ended in errors", "reason")]
    refused: Annotated[Mapping[str, int], counter("tasks_refused", "Tasks that were not queued", "reason")]
    cancelled: Annotated[int, counter("tasks_cancelled", "Tasks that were cancelled while they waited")]
    expired: Annotated[int, counter("tasks_expired", "Tasks whose deadline passed while they waited")]
    joined: Annotated[int, counter("tasks_joined", "Repetitions that got the answer of the first request")]
    batches: int
    rows: Annotated[int, counter("batch_rows", "Rows of all batches")]
    merged: Annotated[Mapping[int, int], _batch_sizes]
    waited: Annotated[float, counter("batch_waited_seconds", "Time that ready batches waited for more tasks")]
    waiting_tasks: Annotated[int, gauge("queue_tasks", "Waiting tasks")]
    waiting_rows: Annotated[int, gauge("queue_rows", "Rows of waiting tasks")]
    running_tasks: Annotated[int, gauge("tasks_running", "Tasks in the running batch")]
    oldest_age: Annotated[float, gauge("queue_oldest_age_seconds", "Waiting time of the oldest task")]


@dataclass(frozen=True)
class IdempotencyStatistics:
    running: int
    keys: int
    results: int
    result_bytes: int
    repeated: int


@dataclass(frozen=True)
class BackendStatistics:
    name: str
    steps: Annotated[int, counter("expert_steps", "Optimizer steps, also before a restart")]
    forward_batches: Annotated[int, counter("expert_batches", "Batches that counted", "direction", _batches)]
    backward_batches: int
    retried_batches: Annotated[int, counter("expert_retried_batches", "Batches taken apart after a failure")]
    refused_gradients: Annotated[Mapping[str, int], counter("expert_refused_gradients", "Refused gradients", "reason")]
    open_mini_batches: Annotated[int, gauge("expert_open_mini_batches", "Uncommitted mini-batches")]
    open_mini_batch_bytes: Annotated[int, gauge("expert_open_mini_batch_bytes", "Bytes of open mini-batches")]
    kept_graphs: int
    kept_graph_bytes: Annotated[int, gauge("expert_kept_graph_bytes", "Memory of kept graphs and inputs")]
    used_graphs: Annotated[int, counter("expert_used_graphs", "Backwards that used a kept graph")]
    buffer_bytes: Annotated[int, gauge("expert_buffer_bytes", "Memory of batch buffers")]
    idempotency: IdempotencyStatistics
    pools: Mapping[str, PoolStatistics]


@dataclass(frozen=True)
class RuntimeStatistics:
    """One device. ``seconds``: since its start."""

    name: str
    alive: Annotated[bool, gauge("runtime_alive", "1 while the thread of a device runs")]
    pools: int
    batches: Annotated[int, counter("runtime_batches", "Batches of a device")]
    busy: Annotated[float, counter("runtime_busy_seconds", "Time that a device worked on batches")]
    seconds: float
    working_on: str | None


@dataclass(frozen=True)
class CheckpointStatistics:
    """One expert. ``durable``: None without a checkpoint. ``restored``: the step it started from.

    ``notes``: differences between the configuration and the checkpoint. The values of the checkpoint are used.
    """

    durable: Annotated[int | None, gauge("expert_durable_step", "The step that is on the disk")]
    restored: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeaseStatistics:
    """Duration of a lease in ``seconds``, and those ``left`` for steps by this server's clock.

    ``late``: delay of the last renewal after it was due, at a third of the lease. ``latest``: the longest of all.
    """

    seconds: float
    left: float
    late: float
    latest: float


@dataclass(frozen=True)
class DirectoryStatistics:
    """Living ``servers`` by address, with the numbers of experts that each lists and owns. ``here``: this one."""

    here: str
    away_seconds: Annotated[float, gauge("directory_away_seconds", "Time without an answer of it")]
    servers: Annotated[
        Mapping[str, Mapping[str, int]], gauge("directory_servers", "Listed servers", read=_count_servers)
    ]


@dataclass(frozen=True)
class ReplicaStatistics:
    """One replicated expert at one server.

    ``role``: "owner", "taking over", or "follower". ``owner``: its address, "" if unknown, with the number of its
    fencing ``token``. ``lasts``: whether this server's lease lasts. ``behind``: according to the owner's report
    ``heard_seconds`` ago. ``followers``: steps that each lacks, by address.
    """

    role: Annotated[str, gauge("replica_owned", "1 for the owner, 0 for a follower", read=_is_owner)]
    owner: str
    token: Annotated[int, gauge("replica_token", "Fencing token of the owner")]
    lasts: bool
    steps: int
    behind: Annotated[int | None, gauge("replica_behind_steps", "Steps that this follower lacks")]
    heard_seconds: float | None
    followers: Mapping[str, int]
    sent: int
    received: int
    received_bytes: int
    failure: str


@dataclass(frozen=True)
class ServerStatistics:
    """``connections``, ``calls`` and ``nbytes`` are those of this moment. The other numbers count since the start.

    ``draining``: why no new work is taken, or None. ``failures``: present errors of directory, checkpoints and devices,
    and checkpoints that the start could not read. ``keeping``: checkpoints by expert.
    """

    # ``turned_away`` and ``broken`` are not rows of the page, which counts the same events as refusals.
    address: str
    seconds: Annotated[float, gauge("uptime_seconds", "Time since the server was started")]
    draining: Annotated[str | None, gauge("draining", "1 while no new work is taken", read=_is_draining)]
    incarnation: int
    connections: Annotated[int, gauge("connections", "Open streams", on_page=True)]
    calls: Annotated[int, gauge("calls_running", "Running calls", on_page=True)]
    nbytes: Annotated[int, gauge("calls_running_bytes", "Bytes of running calls", on_page=True)]
    accepted: Annotated[int, counter("connections_accepted", "Accepted streams", on_page=True)]
    turned_away: Annotated[int, counter("connections_turned_away", "Clients rejected when full")]
    broken: Annotated[int, counter("connections_broken", "Streams with an invalid frame")]
    answered: Annotated[Mapping[str, int], counter("calls", "Received calls", "kind", on_page=True)]
    errors: Annotated[Mapping[str, int], counter("call_errors", "Answered errors", "reason")]
    refusals: Annotated[Mapping[str, int], counter("calls_forbidden", "Calls that access does not allow", "kind")]
    failures: Annotated[Mapping[str, str], gauge("failing", "1 while this fails", "what", _failing)]
    listed: tuple[str, ...]
    experts: Mapping[str, BackendStatistics]
    keeping: Mapping[str, CheckpointStatistics]
    runtimes: Mapping[str, RuntimeStatistics]
    directory: DirectoryStatistics | None = None
    lease: LeaseStatistics | None = None
    replicas: Mapping[str, ReplicaStatistics] = field(default_factory=dict[str, ReplicaStatistics])

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(self, default=vars))
