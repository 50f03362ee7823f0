"""The status as Prometheus metrics, in a registry of its own: two servers in one process know nothing of each other.

    status ──> families ──> CollectorRegistry ──> text, or OpenMetrics if the scraper asks for it

Names end in their unit, and in ``_total`` where they only grow; labels are ``expert``, ``direction`` (forward,
backward, commit), ``reason``, ``kind`` and ``device``. How Prometheus wants names: "Metric and label naming" of its
documentation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from weft.experts.status_page.summary import Status, direction, summary

_POOL_COUNTERS = {
    "submitted": "Tasks that were queued",
    "answered": "Tasks that were answered with results",
    "cancelled": "Tasks whose clients gave up while they waited",
    "expired": "Tasks whose deadline passed while they waited",
    "joined": "Repetitions that got the answer of the first",
}
_POOL_GAUGES = {
    "waiting_tasks": ("weft_queue_tasks", "Tasks that wait"),
    "waiting_rows": ("weft_queue_rows", "Rows of the tasks that wait"),
    "oldest_age": ("weft_queue_oldest_age_seconds", "For how long the oldest task has waited"),
    "running_tasks": ("weft_tasks_running", "Tasks in the batch under way"),
}
_EXPERT_COUNTERS = {
    "steps": ("weft_expert_steps", "Optimizer steps, also before a restart"),
    "retried_batches": ("weft_expert_retried_batches", "Batches that were taken apart because something failed"),
    "used_graphs": ("weft_expert_used_graphs", "Backwards that used a kept graph"),
    "journal_failures": ("weft_expert_journal_failures", "Batches that the journal could not write"),
}
_EXPERT_GAUGES = {
    "open_mini_batches": ("weft_expert_open_mini_batches", "Mini-batches that wait for their commit"),
    "open_mini_batch_bytes": ("weft_expert_open_mini_batch_bytes", "Memory of open mini-batches"),
    "kept_graph_bytes": ("weft_expert_kept_graph_bytes", "Memory of kept graphs and inputs"),
    "buffer_bytes": ("weft_expert_buffer_bytes", "Memory of batch buffers"),
}
_SERVER_GAUGES = {
    "seconds": ("weft_uptime_seconds", "Since the server was started"),
    "connections": ("weft_connections", "Streams that are open"),
    "calls": ("weft_calls_running", "Calls under way"),
    "nbytes": ("weft_calls_running_bytes", "Tensors of the calls under way"),
}
_SERVER_COUNTERS = {
    "accepted": ("weft_connections_accepted", "Streams that were opened"),
    "turned_away": ("weft_connections_turned_away", "Clients that found the server full"),
    "broken": ("weft_connections_broken", "Streams that sent what is no frame"),
}
_SERVER_LABELLED = {
    "answered": ("weft_calls", "kind", "Calls that came"),
    "errors": ("weft_call_errors", "reason", "Errors that were answered"),
    "refusals": ("weft_calls_forbidden", "kind", "Calls that access does not allow"),
}


def exposition(status: Status, accept: str) -> tuple[bytes, str]:
    """The metrics, and their content type: OpenMetrics where the scraper's ``Accept`` field says so, else text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


class _StatusCollector(Collector):
    """One status as families."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from _server(self._status)
        yield from _experts(self._status)
        yield from _pools(self._status)
        yield from _devices(self._status["runtimes"])
        yield from _replicas(self._status["replicas"])
        yield from _directory(self._status)


def _server(status: Status) -> Iterator[Metric]:
    for field, (name, words) in _SERVER_GAUGES.items():
        yield GaugeMetricFamily(name, words, value=status[field])
    yield GaugeMetricFamily(
        "weft_draining", "1 while no new work is taken", value=float(status["draining"] is not None)
    )
    for field, (name, words) in _SERVER_COUNTERS.items():
        yield CounterMetricFamily(name, words, value=status[field])
    for field, (name, label, words) in _SERVER_LABELLED.items():
        yield _counter(name, words, [label], [((key,), value) for key, value in status[field].items()])
    failing = GaugeMetricFamily("weft_failing", "1 while this goes wrong: lease, checkpoints", labels=["what"])
    for what in status["failures"]:
        failing.add_metric([what], 1.0)
    yield failing


def _experts(status: Status) -> Iterator[Metric]:
    experts: Mapping[str, Mapping[str, Any]] = status["experts"]
    for field, (name, words) in _EXPERT_COUNTERS.items():
        yield _counter(name, words, ["expert"], [((uid,), one[field]) for uid, one in experts.items()])
    for field, (name, words) in _EXPERT_GAUGES.items():
        yield _gauge(name, words, ["expert"], [((uid,), one[field]) for uid, one in experts.items()])
    durable = [((uid,), one["durable"]) for uid, one in status["keeping"].items() if one["durable"] is not None]
    yield _gauge("weft_expert_durable_step", "The step that is on the disk", ["expert"], durable)
    batches = [((uid, way), one[f"{way}_batches"]) for uid, one in experts.items() for way in ("forward", "backward")]
    yield _counter("weft_expert_batches", "Batches that counted", ["expert", "direction"], batches)
    refused = [((uid, why), n) for uid, one in experts.items() for why, n in one["refused_gradients"].items()]
    yield _counter("weft_expert_refused_gradients", "Gradients that guards refused", ["expert", "reason"], refused)


def _pools(status: Status) -> Iterator[Metric]:
    pools = [
        ((uid, direction(name)), pool) for uid, one in status["experts"].items() for name, pool in one["pools"].items()
    ]
    labels = ["expert", "direction"]
    for field, words in _POOL_COUNTERS.items():
        yield _counter(f"weft_tasks_{field}", words, labels, [(at, pool[field]) for at, pool in pools])
    for field, words in {"refused": "Tasks that were not let in", "failed": "Tasks that ended with an error"}.items():
        found = [((*at, why), count) for at, pool in pools for why, count in pool[field].items()]
        yield _counter(f"weft_tasks_{field}", words, [*labels, "reason"], found)
    for field, (name, words) in _POOL_GAUGES.items():
        yield _gauge(name, words, labels, [(at, pool[field]) for at, pool in pools])
    yield _counter("weft_batch_rows", "Rows of all batches", labels, [(at, pool["rows"]) for at, pool in pools])
    waited = "For how long batches that could have begun waited for others"
    yield _counter("weft_batch_waited_seconds", waited, labels, [(at, pool["waited"]) for at, pool in pools])
    joined = "Tasks that a batch joined; the sum counts those that have ended"
    sizes = HistogramMetricFamily("weft_batch_tasks", joined, labels=labels)
    for at, pool in pools:
        sizes.add_metric([_clean(each) for each in at], _buckets(pool["merged"]), _ended(pool))
    yield sizes


def _devices(runtimes: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    alive = [((name,), float(one["alive"])) for name, one in runtimes.items()]
    yield _gauge("weft_runtime_alive", "1 while the thread of a device runs", ["device"], alive)
    busy = [((name,), one["busy"]) for name, one in runtimes.items()]
    yield _counter("weft_runtime_busy_seconds", "Time that a device worked on batches", ["device"], busy)
    batches = [((name,), one["batches"]) for name, one in runtimes.items()]
    yield _counter("weft_runtime_batches", "Batches of a device", ["device"], batches)


def _replicas(replicas: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    owned = [((uid,), float(one["role"] == "owner")) for uid, one in replicas.items()]
    yield _gauge("weft_replica_owned", "1 if this server owns the expert, 0 if it follows", ["expert"], owned)
    behind = [((uid,), one["behind"]) for uid, one in replicas.items() if one["behind"] is not None]
    yield _gauge("weft_replica_behind_steps", "Steps that this follower lacks", ["expert"], behind)
    token = [((uid,), one["token"]) for uid, one in replicas.items()]
    yield _gauge("weft_replica_token", "The fencing token of the owner: it grows at every take-over", ["expert"], token)


def _directory(status: Status) -> Iterator[Metric]:
    seen = summary(status)
    if seen.away is not None:
        yield GaugeMetricFamily("weft_directory_servers", "Servers that are listed", value=len(seen.servers))
        yield GaugeMetricFamily("weft_directory_away_seconds", "Since the directory does not answer", value=seen.away)


Samples = Sequence[tuple[Sequence[str], int | float]]


def _counter(name: str, words: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(name, words, labels=labels)
    for values, number in samples:
        family.add_metric([_clean(value) for value in values], number)
    return family


def _gauge(name: str, words: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(name, words, labels=labels)
    for values, number in samples:
        family.add_metric([_clean(value) for value in values], number)
    return family


def _buckets(merged: Mapping[Any, int]) -> list[tuple[str, float]]:
    """Cumulative counts, up to a largest bucket that is the same for all: series with other buckets cannot be added."""
    counts = {int(size): count for size, count in merged.items()}
    bounds = [1 << power for power in range(13)]
    found = [(str(float(bound)), float(sum(n for size, n in counts.items() if size <= bound))) for bound in bounds]
    return [*found, ("+Inf", float(sum(counts.values())))]


def _ended(pool: Mapping[str, Any]) -> float:
    return float(pool["answered"] + sum(pool["failed"].values()))


def _clean(name: str) -> str:
    """A name that UTF-8 can say."""
    return name.encode("utf-8", "backslashreplace").decode()
