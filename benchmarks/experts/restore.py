"""Time in which one expert restores its idempotency keys from a state, as CPU seconds of its thread.

keys of a few clients, in turn ── state_dict ── load_state_dict into an empty table, several times
"""

import statistics
import time

import torch

from benchmarks.harness import progress
from benchmarks.table import Row, Table, at_most
from torchweft.experts.idempotency import IdempotencyOptions, IdempotencyTable
from torchweft.experts.task import Task

CLIENTS = 4
REQUIRED_MS = 100.0


def run(quick: bool) -> Table:
    """Milliseconds to restore one table."""
    keys, times = (1000, 3) if quick else (100_000, 15)
    options = IdempotencyOptions(max_client_keys=keys)
    progress(f"{keys} keys of {CLIENTS} clients")
    table = IdempotencyTable(options)
    for number in range(keys):
        task = Task((), 1, client=f"trainer-{number % CLIENTS}", key=f"{number:032x}")
        table.begin("backward", task)
        table.record("backward", task, [], 0)
        table.abandon("backward", task)
    state, costs = table.state_dict(), list[float]()
    for _ in range(times):
        restored = IdempotencyTable(options)
        start = time.thread_time()  # CPU time, so that other processes do not count
        restored.load_state_dict(state)
        costs.append(1e3 * (time.thread_time() - start))
    if not torch.equal(restored.state_dict()["keys"], state["keys"]):
        raise RuntimeError("the restored keys are not those that were saved")
    cost = statistics.median(costs)
    row: Row = {"keys": str(keys), "ms": f"{cost:.1f}", "fastest": f"{min(costs):.1f}", **at_most(cost, REQUIRED_MS)}
    return Table("time in which an expert restores its idempotency keys", [row])
