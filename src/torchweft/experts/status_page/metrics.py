"""Metrics of a server for Prometheus and the status page, made from the table in `statistics`.

    statistics.py ── METRICS ──┬── exposition() ──> text for Prometheus, or OpenMetrics if the scraper asks for it
                               '── page_status() ─> status of a server with the page's tables of connections and experts

prometheus_client's registry would be the usual place. It is global, so two servers of one process would add to each
other's numbers. Labels are ``expert``, ``direction`` (forward, backward, commit), ``reason``, ``kind``, ``what`` and
``device``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder

from torchweft.experts import statistics
from torchweft.experts.statistics import Metric, Status, metrics_of
from torchweft.experts.status_page.recent import RecentCounters

Parts = Iterable[tuple[Sequence[str], Status]]  # Parts of a status, with the values of their labels
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def _pools(status: Status) -> Parts:
    experts = status["experts"].items()
    return [((uid, name.rpartition(".")[2]), pool) for uid, one in experts for name, pool in one["pools"].items()]


def _by_name(field: str) -> Callable[[Status], Parts]:
    return lambda status: [((name,), part) for name, part in status[field].items()]


# By class of a part: the names of its labels, and such parts of a status.
_PARTS: dict[type, tuple[Sequence[str], Callable[[Status], Parts]]] = {
    statistics.ServerStatistics: ((), lambda status: [((), status)]),
    statistics.BackendStatistics: (("expert",), _by_name("experts")),
    statistics.CheckpointStatistics: (("expert",), _by_name("keeping")),
    statistics.PoolStatistics: (("expert", "direction"), _pools),
    statistics.RuntimeStatistics: (("device",), _by_name("runtimes")),
    statistics.ReplicaStatistics: (("expert",), _by_name("replicas")),
    statistics.DirectoryStatistics: ((), lambda status: [((), status["directory"])] if status.get("directory") else []),
}
METRICS = {metric: (field, part) for part in _PARTS for field, metric in metrics_of(part)}


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
    return part[METRICS[metric][0]] if metric.read is None else metric.read(part)


def _make_family(metric: Metric, status: Status) -> Family:
    names, parts_of = _PARTS[METRICS[metric][1]]
    labels = [*names, metric.label] if metric.label else names
    family: Any = _FAMILIES[metric.kind](f"torchweft_{metric.name}", metric.help, labels=labels)
    for values, part in parts_of(status):
        value = _read(metric, part)
        if metric.kind == "histogram":
            buckets = _cumulative_buckets(value, metric.bounds)
            family.add_metric(_clean_labels(values), buckets, float(metric.total(part)))
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
