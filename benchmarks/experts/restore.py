"""Time of one expert to restore its idempotency keys from a state. CPU seconds of the thread that does it.

keys of a few clients, by turns ── state_dict ── load_state_dict into an empty table, several times
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
    """Milliseconds for one table."""
    keys, times = (1000, 3) if quick else (100_000, 15)
    options = IdempotencyOptions(max_client_keys=keys)
    progress(f"{keys} keys of {CLIENTS} clients")
    table = IdempotencyTable(options)
    for number in range(keys):
        task = Task((), 1, client=f"trainer-{number % CLIENTS}", key=f"{number:032x}")
        table.begin("backward", task)
        table.record("backward", task, [], 0)
        table.abandon("backward", task)
    state, taken = table.state_dict(), list[float]()
    for _ in range(times):
        restored = IdempotencyTable(options)
        start = time.thread_time()  # not the time in which other processes have the CPU
        restored.load_state_dict(state)
        taken.append(1e3 * (time.thread_time() - start))
    if not torch.equal(restored.state_dict()["keys"], state["keys"]):
        raise RuntimeError("the restored keys are not those that were saved")
    found = statistics.median(taken)
    row: Row = {"keys": str(keys), "ms": f"{found:.1f}", "fastest": f"{min(taken):.1f}", **at_most(found, REQUIRED_MS)}
    return Table("How long an expert takes to restore its idempotency keys", [row])
