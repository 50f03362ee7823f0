"""What pools, experts and runtimes say of themselves: plain numbers, taken at one moment.

Every long-lived object here has ``statistics()`` (trio's custom), which returns one of these. They are values:
nothing changes in them later, and they hold no tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass


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
