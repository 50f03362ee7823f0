"""The status as Prometheus metrics: text, or OpenMetrics if the scraper asks for it.

No registry is shared, so that two servers in one process know nothing of each other.
Names end in their unit, and in ``_total`` where they only grow; labels are ``expert``, ``direction`` (forward,
backward, commit), ``reason``, ``kind`` and ``device``. How Prometheus wants names: "Metric and label naming" of its
documentation.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

Status = Mapping[str, Any]
"""What ``Server.status()`` returns, also after a way through JSON."""
Kind = type[Counter] | type[Gauge]

_SERVER: dict[str, tuple[Kind, str, str]] = {
    "seconds": (Gauge, "weft_uptime_seconds", "Since the server was started"),
    "connections": (Gauge, "weft_connections", "Streams that are open"),
    "calls": (Gauge, "weft_calls_running", "Calls under way"),
    "nbytes": (Gauge, "weft_calls_running_bytes", "Tensors of the calls under way"),
    "accepted": (Counter, "weft_connections_accepted", "Streams that were opened"),
    "turned_away": (Counter, "weft_connections_turned_away", "Clients that found the server full"),
    "broken": (Counter, "weft_connections_broken", "Streams that sent what is no frame"),
}
_LABELLED = {
    "answered": ("weft_calls", "kind", "Calls that came"),
    "errors": ("weft_call_errors", "reason", "Errors that were answered"),
    "refusals": ("weft_calls_forbidden", "kind", "Calls that access does not allow"),
}
_EXPERT: dict[str, tuple[Kind, str, str]] = {
    "steps": (Counter, "weft_expert_steps", "Optimizer steps, also before a restart"),
    "retried_batches": (Counter, "weft_expert_retried_batches", "Batches taken apart because something failed"),
    "used_graphs": (Counter, "weft_expert_used_graphs", "Backwards that used a kept graph"),
    "journal_failures": (Counter, "weft_expert_journal_failures", "Batches that the journal could not write"),
    "open_mini_batches": (Gauge, "weft_expert_open_mini_batches", "Mini-batches that wait for their commit"),
    "open_mini_batch_bytes": (Gauge, "weft_expert_open_mini_batch_bytes", "Memory of open mini-batches"),
    "kept_graph_bytes": (Gauge, "weft_expert_kept_graph_bytes", "Memory of kept graphs and inputs"),
    "buffer_bytes": (Gauge, "weft_expert_buffer_bytes", "Memory of batch buffers"),
}
_POOL: dict[str, tuple[Kind, str, str]] = {
    "submitted": (Counter, "weft_tasks_submitted", "Tasks that were queued"),
    "answered": (Counter, "weft_tasks_answered", "Tasks that were answered with results"),
    "cancelled": (Counter, "weft_tasks_cancelled", "Tasks whose clients gave up while they waited"),
    "expired": (Counter, "weft_tasks_expired", "Tasks whose deadline passed while they waited"),
    "joined": (Counter, "weft_tasks_joined", "Repetitions that got the answer of the first"),
    "rows": (Counter, "weft_batch_rows", "Rows of all batches"),
    "waited": (Counter, "weft_batch_waited_seconds", "How long batches that could have begun waited for others"),
    "waiting_tasks": (Gauge, "weft_queue_tasks", "Tasks that wait"),
    "waiting_rows": (Gauge, "weft_queue_rows", "Rows of the tasks that wait"),
    "oldest_age": (Gauge, "weft_queue_oldest_age_seconds", "For how long the oldest task has waited"),
    "running_tasks": (Gauge, "weft_tasks_running", "Tasks in the batch under way"),
}
_DEVICE: dict[str, tuple[Kind, str, str]] = {
    "alive": (Gauge, "weft_runtime_alive", "1 while the thread of a device runs"),
    "busy": (Counter, "weft_runtime_busy_seconds", "Time that a device worked on batches"),
    "batches": (Counter, "weft_runtime_batches", "Batches of a device"),
}
_REPLICA: dict[str, tuple[Kind, str, str]] = {
    "behind": (Gauge, "weft_replica_behind_steps", "Steps that this follower lacks"),
    "token": (Gauge, "weft_replica_token", "The fencing token of the owner: it grows at every take-over"),
}


def exposition(status: Status, accept: str) -> tuple[bytes, str]:
    """The metrics, and their content type: OpenMetrics where the scraper's ``Accept`` field says so, else text."""
    encode, kind = choose_encoder(accept)
    return encode(cast("Any", SimpleNamespace(collect=lambda: _collect(status)))), kind


def _collect(status: Status) -> Iterator[Metric]:
    experts = status["experts"]
    pools = [
        ((uid, name.rpartition(".")[2]), pool) for uid, one in experts.items() for name, pool in one["pools"].items()
    ]
    yield from _families(_SERVER, "", [((), status)])
    for field, (name, label, words) in _LABELLED.items():
        yield _family(Counter, name, words, label, [((key,), value) for key, value in status[field].items()])
    draining = float(status["draining"] is not None)
    yield _family(Gauge, "weft_draining", "1 while no new work is taken", "", [((), draining)])
    failing = [((what,), 1.0) for what in status["failures"]]
    yield _family(Gauge, "weft_failing", "1 while this goes wrong: lease, checkpoints", "what", failing)

    yield from _families(_EXPERT, "expert", [((uid,), one) for uid, one in experts.items()])
    durable = [((uid,), one["durable"]) for uid, one in status["keeping"].items()]
    yield _family(Gauge, "weft_expert_durable_step", "The step that is on the disk", "expert", durable)
    batches = [((uid, way), one[f"{way}_batches"]) for uid, one in experts.items() for way in ("forward", "backward")]
    yield _family(Counter, "weft_expert_batches", "Batches that counted", "expert direction", batches)
    refused = [((uid, why), n) for uid, one in experts.items() for why, n in one["refused_gradients"].items()]
    words = "Gradients that guards refused"
    yield _family(Counter, "weft_expert_refused_gradients", words, "expert reason", refused)

    yield from _families(_POOL, "expert direction", pools)
    for field, words in {"refused": "Tasks that were not let in", "failed": "Tasks that ended in errors"}.items():
        found = [((*at, why), count) for at, pool in pools for why, count in pool[field].items()]
        yield _family(Counter, f"weft_tasks_{field}", words, "expert direction reason", found)
    joined = "Tasks that a batch joined; the sum counts those that have ended"
    sizes = HistogramMetricFamily("weft_batch_tasks", joined, labels=["expert", "direction"])
    for at, pool in pools:
        ended = float(pool["answered"] + sum(pool["failed"].values()))
        sizes.add_metric([_clean(each) for each in at], _buckets(pool["merged"]), ended)
    yield sizes

    yield from _families(_DEVICE, "device", [((name,), one) for name, one in status["runtimes"].items()])
    replicas = [((uid,), one) for uid, one in status["replicas"].items()]
    yield from _families(_REPLICA, "expert", replicas)
    owned = [(at, float(one["role"] == "owner")) for at, one in replicas]
    yield _family(Gauge, "weft_replica_owned", "1 if this server owns the expert, 0 if it follows", "expert", owned)
    if directory := status.get("directory"):
        servers, away = len(directory["servers"]), directory["away_seconds"]
        yield _family(Gauge, "weft_directory_servers", "Servers that are listed", "", [((), servers)])
        yield _family(Gauge, "weft_directory_away_seconds", "Since the directory does not answer", "", [((), away)])


Labels = tuple[str, ...]


def _families(
    fields: Mapping[str, tuple[Kind, str, str]], labels: str, tables: Iterable[tuple[Labels, Status]]
) -> Iterator[Metric]:
    """A family for each field that these tables have."""
    found = list(tables)
    for field, (kind, name, words) in fields.items():
        yield _family(kind, name, words, labels, [(at, table[field]) for at, table in found])


def _family(
    kind: Kind, name: str, words: str, labels: str, samples: Iterable[tuple[Labels, int | float | None]]
) -> Metric:
    family = kind(name, words, labels=labels.split())
    for values, number in samples:
        if number is not None:
            family.add_metric([_clean(value) for value in values], float(number))
    return family


def _buckets(merged: Mapping[Any, int]) -> list[tuple[str, float]]:
    """Cumulative counts, up to a largest bucket that is the same for all: series with other buckets cannot be added."""
    counts = {int(size): count for size, count in merged.items()}
    bounds = [1 << power for power in range(13)]
    found = [(str(float(bound)), float(sum(n for size, n in counts.items() if size <= bound))) for bound in bounds]
    return [*found, ("+Inf", float(sum(counts.values())))]


def _clean(name: str) -> str:
    """A name that UTF-8 can say."""
    return name.encode("utf-8", "backslashreplace").decode()
