"""The metrics of a server: one table, from which the Prometheus page and the numbers of the status page are made.

    METRICS ── exposition() ──> text for Prometheus, or OpenMetrics if the scraper asks for it
            '─ page_status() ─> status of a server with the page's tables of connections and experts

prometheus_client's registry would be the usual place. It is global, so two servers of one process would add to each
other's numbers. Names end in their unit, and those of counters get ``_total``, as "Metric and label naming" of the
Prometheus documentation demands. Labels are ``expert``, ``direction`` (forward, backward, commit), ``reason``,
``kind``, ``what`` and ``device``.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder

from torchweft.experts.status_page.recent import RecentCounters

Status = Mapping[str, Any]
"""The result of ``Server.status()``, also after a round trip through JSON."""


class Metric(NamedTuple):
    """A row of the table. ``scope``: a key of `_SCOPES`. ``on_page``: the status page shows it among the connections.

    ``value``: a field of that part of the status, or a function of the part. None gives no sample, and a mapping gives
    one sample per key, which becomes the value of ``label``.
    """

    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    scope: str
    value: str | Callable[[Status], Any]
    label: str = ""
    on_page: bool = False


def _pools(status: Status) -> list[tuple[Sequence[str], Status]]:
    experts = status["experts"].items()
    return [((uid, name.rpartition(".")[2]), pool) for uid, one in experts for name, pool in one["pools"].items()]


def _by_name(field: str) -> Callable[[Status], list[tuple[Sequence[str], Status]]]:
    return lambda status: [((name,), part) for name, part in status[field].items()]


# By scope: the names of its labels, and the parts of a status with the values of these labels.
_SCOPES: dict[str, tuple[Sequence[str], Callable[[Status], list[tuple[Sequence[str], Status]]]]] = {
    "server": ((), lambda status: [((), status)]),
    "expert": (("expert",), _by_name("experts")),
    "checkpoint": (("expert",), _by_name("keeping")),
    "pool": (("expert", "direction"), _pools),
    "device": (("device",), _by_name("runtimes")),
    "replica": (("expert",), _by_name("replicas")),
    "directory": ((), lambda status: [((), status["directory"])] if status.get("directory") else []),
}


def _is_draining(status: Status) -> bool:
    return status["draining"] is not None


def _failures(status: Status) -> dict[str, int]:
    return dict.fromkeys(status["failures"], 1)


def _batches(expert: Status) -> dict[str, int]:
    return {direction: expert[f"{direction}_batches"] for direction in ("forward", "backward")}


def _is_owner(replica: Status) -> bool:
    return replica["role"] == "owner"


def _count_servers(directory: Status) -> int:
    return len(directory["servers"])


METRICS = (
    Metric("torchweft_uptime_seconds", Gauge, "Time since the server was started", "server", "seconds"),
    Metric("torchweft_connections", Gauge, "Open streams", "server", "connections", on_page=True),
    Metric("torchweft_calls_running", Gauge, "Running calls", "server", "calls", on_page=True),
    Metric("torchweft_calls_running_bytes", Gauge, "Bytes of running calls", "server", "nbytes", on_page=True),
    Metric("torchweft_connections_accepted", Counter, "Accepted streams", "server", "accepted", on_page=True),
    # The next ones are not rows of the table of connections, because the page counts the same events as refusals.
    Metric("torchweft_connections_turned_away", Counter, "Clients rejected when full", "server", "turned_away"),
    Metric("torchweft_connections_broken", Counter, "Streams with an invalid frame", "server", "broken"),
    Metric("torchweft_call_errors", Counter, "Answered errors", "server", "errors", "reason"),
    Metric("torchweft_calls", Counter, "Received calls", "server", "answered", "kind", on_page=True),
    Metric("torchweft_calls_forbidden", Counter, "Calls that access does not allow", "server", "refusals", "kind"),
    Metric("torchweft_draining", Gauge, "1 while no new work is taken", "server", _is_draining),
    Metric("torchweft_failing", Gauge, "1 while this fails", "server", _failures, "what"),
    Metric("torchweft_expert_steps", Counter, "Optimizer steps, also before a restart", "expert", "steps"),
    Metric(
        "torchweft_expert_retried_batches", Counter, "Batches taken apart after a failure", "expert", "retried_batches"
    ),
    Metric("torchweft_expert_used_graphs", Counter, "Backwards that used a kept graph", "expert", "used_graphs"),
    Metric("torchweft_expert_open_mini_batches", Gauge, "Uncommitted mini-batches", "expert", "open_mini_batches"),
    Metric(
        "torchweft_expert_open_mini_batch_bytes", Gauge, "Bytes of open mini-batches", "expert", "open_mini_batch_bytes"
    ),
    Metric(
        "torchweft_expert_kept_graph_bytes", Gauge, "Memory of kept graphs and inputs", "expert", "kept_graph_bytes"
    ),
    Metric("torchweft_expert_buffer_bytes", Gauge, "Memory of batch buffers", "expert", "buffer_bytes"),
    Metric("torchweft_expert_batches", Counter, "Batches that counted", "expert", _batches, "direction"),
    Metric(
        "torchweft_expert_refused_gradients",
        Counter,
        "Refused gradients",
        "expert",
        "refused_gradients",
        "reason",
    ),
    Metric("torchweft_expert_durable_step", Gauge, "The step that is on the disk", "checkpoint", "durable"),
    Metric("torchweft_tasks_submitted", Counter, "Queued tasks", "pool", "submitted"),
    Metric("torchweft_tasks_answered", Counter, "Tasks that were answered with results", "pool", "answered"),
    Metric("torchweft_tasks_answer_seconds", Histogram, "Time from arrival to answer", "pool", "answer_times"),
    Metric("torchweft_tasks_cancelled", Counter, "Tasks that were cancelled while they waited", "pool", "cancelled"),
    Metric("torchweft_tasks_expired", Counter, "Tasks whose deadline passed while they waited", "pool", "expired"),
    Metric("torchweft_tasks_joined", Counter, "Repetitions that got the answer of the first request", "pool", "joined"),
    Metric("torchweft_tasks_refused", Counter, "Tasks that were not queued", "pool", "refused", "reason"),
    Metric("torchweft_tasks_failed", Counter, "Tasks that ended in errors", "pool", "failed", "reason"),
    Metric("torchweft_tasks_running", Gauge, "Tasks in the running batch", "pool", "running_tasks"),
    Metric("torchweft_queue_tasks", Gauge, "Waiting tasks", "pool", "waiting_tasks"),
    Metric("torchweft_queue_rows", Gauge, "Rows of waiting tasks", "pool", "waiting_rows"),
    Metric("torchweft_queue_oldest_age_seconds", Gauge, "Waiting time of the oldest task", "pool", "oldest_age"),
    Metric("torchweft_batch_rows", Counter, "Rows of all batches", "pool", "rows"),
    Metric(
        "torchweft_batch_waited_seconds", Counter, "Time that ready batches waited for more tasks", "pool", "waited"
    ),
    Metric("torchweft_batch_tasks", Histogram, "Tasks per batch; the sum counts ended tasks", "pool", "merged"),
    Metric("torchweft_runtime_alive", Gauge, "1 while the thread of a device runs", "device", "alive"),
    Metric("torchweft_runtime_busy_seconds", Counter, "Time that a device worked on batches", "device", "busy"),
    Metric("torchweft_runtime_batches", Counter, "Batches of a device", "device", "batches"),
    Metric("torchweft_replica_behind_steps", Gauge, "Steps that this follower lacks", "replica", "behind"),
    Metric("torchweft_replica_token", Gauge, "Fencing token of the owner", "replica", "token"),
    Metric("torchweft_replica_owned", Gauge, "1 for the owner, 0 for a follower", "replica", _is_owner),
    Metric("torchweft_directory_servers", Gauge, "Listed servers", "directory", _count_servers),
    Metric("torchweft_directory_away_seconds", Gauge, "Time without an answer of it", "directory", "away_seconds"),
)


def exposition(status: Status, accept: str) -> tuple[bytes, str]:
    """The metrics and their content type: OpenMetrics if the scraper's ``Accept`` field asks for it, else text."""
    encode, content_type = choose_encoder(accept)
    collector = SimpleNamespace(collect=lambda: (_make_family(metric, status) for metric in METRICS))
    return encode(cast("Any", collector)), content_type


def page_status(status: Status, recent: RecentCounters) -> dict[str, Any]:
    """The status with ``metrics``: help and value of every metric that the page shows as a row, and with ``recent``:
    the counts of the last minute and the table of experts."""
    rows = [{"help": metric.help, "value": _read(metric, status)} for metric in METRICS if metric.on_page]
    return {**status, "metrics": rows, "recent": recent.since(status)}


def _read(metric: Metric, part: Status) -> Any:
    return part[metric.value] if isinstance(metric.value, str) else metric.value(part)


def _make_family(metric: Metric, status: Status) -> Family:
    names, parts_of = _SCOPES[metric.scope]
    labels = [*names, metric.label] if metric.label else names
    family: Any = metric.kind(metric.name, metric.help, labels=labels)
    for values, part in parts_of(status):
        value = _read(metric, part)
        if metric.kind is Histogram:
            if metric.value == "merged":
                total, bounds = part["answered"] + sum(part["failed"].values()), [float(1 << n) for n in range(13)]
            else:
                total, bounds = part["answer_seconds"], [(1 << n) / 1000 for n in range(18)]
            family.add_metric(_clean_labels(values), _cumulative_buckets(value, bounds), float(total))
            continue
        for key, number in value.items() if metric.label else [(None, value)]:
            if number is not None:
                family.add_metric(_clean_labels(values if key is None else [*values, key]), float(number))
    return family


def _cumulative_buckets(merged: Mapping[Any, int], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Cumulative counts. All series have the same buckets, because Prometheus could not add them up otherwise."""
    counts = {float(size): count for size, count in merged.items()}
    buckets = [(str(bound), float(sum(n for size, n in counts.items() if size <= bound))) for bound in bounds]
    return [*buckets, ("+Inf", float(sum(counts.values())))]


def _clean_labels(values: Sequence[str]) -> list[str]:
    """Names that UTF-8 can encode. Different names stay different."""
    return [value.encode("utf-8", "backslashreplace").decode() for value in values]
