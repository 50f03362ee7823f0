"""Counts of the last minute, as differences of counters that only grow.

A monitoring system stores old values and computes rates itself. The reader of the status page has none, and a rate
since the start hides that a server of many days just became slow. So the panel keeps a sample of every 5 seconds.
"""

from collections.abc import Mapping
from typing import Any

from torchweft.experts.statistics import count_expert, waiting_tasks

WINDOW, PERIOD = 60.0, 5.0
"""Seconds that the counts cover at least, once the server is that old, and from one sample to the next."""

EXPERT_COLUMNS = (
    *(("expert", ""), ("steps", "total"), ("saved", "step"), ("forwards", "/s"), ("backwards", "/s")),
    *(("latency", "ms"), ("waiting", "tasks"), ("oldest", "s"), ("refused", "/min"), ("failed", "/min")),
)
"""Name and unit of each column of the table of experts. Forwards and backwards are batches. Latency is the mean time of
a task from arrival to answer. These, refused and failed are of the last minute."""

_Counts = Mapping[str, int | float]


class RecentCounters:
    """Samples of the counters of a server. At its start all of them are zero."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, Mapping[str, Mapping[str, _Counts]]]] = [(0.0, {})]

    def note(self, status: Mapping[str, Any]) -> None:
        """Keep the counters of a status, at its time since the start."""
        self._drop_old(status["seconds"])
        self._samples.append((status["seconds"], _counters(status)))

    def since(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """The counts up to this status by expert and by device, the ``seconds`` that they cover, and the ``rows`` of
        the table of experts."""
        self._drop_old(status["seconds"])
        then, before = self._samples[0]
        seconds = status["seconds"] - then
        counts: dict[str, dict[str, _Counts]] = {
            part: {name: _growth(now, before.get(part, {}).get(name, {})) for name, now in counters.items()}
            for part, counters in _counters(status).items()
        }
        rows = [
            [name, one["steps"], status["keeping"][name]["durable"], *_numbers(one, counts["experts"][name], seconds)]
            for name, one in sorted(status["experts"].items())
        ]
        return {"seconds": seconds, **counts, "columns": EXPERT_COLUMNS, "rows": rows}

    def _drop_old(self, now: float) -> None:
        """Keep one sample that is at least a minute old, and all newer ones."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            del self._samples[0]


def _numbers(expert: Mapping[str, Any], counts: _Counts, seconds: float) -> list[int | float | None]:
    """The cells of an expert after its steps. None: not known."""
    pools, answered = expert["pools"].values(), counts["answered"]
    return [
        *(_short(counts[f"{kind}_batches"] / seconds) if seconds else None for kind in ("forward", "backward")),
        _short(1e3 * counts["answer_seconds"] / answered) if answered else None,
        waiting_tasks(expert),
        _short(max((pool["oldest_age"] for pool in pools), default=0.0)),
        *(counts["refused"], counts["failed"]),
    ]


def _counters(status: Mapping[str, Any]) -> dict[str, dict[str, _Counts]]:
    fields = ("busy", "seconds", "batches")
    return {
        "experts": {name: count_expert(one) for name, one in status["experts"].items()},
        "devices": {name: {field: one[field] for field in fields} for name, one in status["runtimes"].items()},
    }


def _growth(now: _Counts, before: _Counts) -> _Counts:
    """The differences. A counter that shrank belongs to a new expert of the same name, which began at zero."""
    if any(count < before.get(key, 0) for key, count in now.items()):
        before = {}
    return {key: count - before.get(key, 0) for key, count in now.items()}


def _short(value: int | float) -> int | float:
    return round(value) if value >= 100 else float(f"{value:.3g}")
