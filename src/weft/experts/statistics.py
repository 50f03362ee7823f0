"""What pools, experts and runtimes say of themselves: plain numbers, taken at one moment.

Every long-lived object here has ``statistics()`` (trio's custom), which returns one of these. They are values:
nothing changes in them later, and they hold no tensor.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.experts.errors import ExpiredError, reason_of


@dataclass(frozen=True)
class PoolStatistics:
    """``merged`` counts batches by how many tasks they joined, up to the next power of two. Ages are seconds, and so is
    ``waited``: how long batches that could have begun have waited for others, in all."""

    name: str
    submitted: int
    answered: int
    failed: Mapping[str, int]
    refused: Mapping[str, int]
    cancelled: int
    expired: int
    joined: int
    batches: int
    rows: int
    merged: Mapping[int, int]
    waited: float
    waiting_tasks: int
    waiting_rows: int
    running_tasks: int
    oldest_age: float


@dataclass(frozen=True)
class RecordsStatistics:
    """The memory of idempotency keys: ``results`` are still held, ``keys`` are known to be applied."""

    running: int
    keys: int
    results: int
    result_bytes: int
    repeated: int


@dataclass(frozen=True)
class BackendStatistics:
    """One expert: optimizer ``steps``, batches run, refusals of gradients by reason, graphs kept and used.

    ``kept_graph_bytes`` count inputs that are kept for their backward as well.
    """

    name: str
    steps: int
    forward_batches: int
    backward_batches: int
    retried_batches: int
    refused_gradients: Mapping[str, int]
    open_mini_batches: int
    open_mini_batch_bytes: int
    kept_graphs: int
    kept_graph_bytes: int
    used_graphs: int
    journal_failures: int
    buffer_bytes: int
    records: RecordsStatistics
    pools: Mapping[str, PoolStatistics]


@dataclass(frozen=True)
class RuntimeStatistics:
    """One device: ``busy`` of its ``seconds`` since the start it worked on batches."""

    name: str
    alive: bool
    pools: int
    batches: int
    busy: float
    seconds: float
    working_on: str | None


@dataclass
class Tally:
    """The counters behind a `PoolStatistics`; its pool holds the lock."""

    submitted: int = 0
    answered: int = 0
    cancelled: int = 0
    expired: int = 0
    joined: int = 0
    batches: int = 0
    rows: int = 0
    failed: "Counter[str]" = field(default_factory=Counter["str"])
    refused: "Counter[str]" = field(default_factory=Counter["str"])
    merged: "Counter[int]" = field(default_factory=Counter["int"])

    def ended(self, found: object) -> None:
        """One task is over, with this answer."""
        if isinstance(found, ExpiredError):
            self.expired += 1
        elif isinstance(found, BaseException):
            self.failed[reason_of(found)] += 1
        else:
            self.answered += 1

    def took(self, tasks: int, rows: int) -> None:
        """A batch of so many tasks was handed out."""
        self.batches += 1
        self.rows += rows
        self.merged[1 << (tasks - 1).bit_length()] += 1

    def seen(self, name: str, **now: Any) -> PoolStatistics:
        """What was counted, with what is so ``now``."""
        return PoolStatistics(
            name=name,
            submitted=self.submitted,
            answered=self.answered,
            failed=dict(self.failed),
            refused=dict(self.refused),
            cancelled=self.cancelled,
            expired=self.expired,
            joined=self.joined,
            batches=self.batches,
            rows=self.rows,
            merged=dict(self.merged),
            **now,
        )
