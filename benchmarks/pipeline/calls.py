"""The bookkeeping of a pipe in calls: those of Python and of C, per micro-batch and stage, in the calling thread.

    (calls of a step of the pipe  -  calls of the same micro-batches in one graph) / (micro-batches * stages)

A count does not depend on the load of the machine. It does not tell how long a call takes: see `overhead`.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.pipeline.work import in_one_graph, pipe_of, step
from benchmarks.table import Row, Table, at_most

STAGES, CHUNKS = 4, 8
# Calls of Python and of C. Half of what commit f4259d75 needed: 123 and 103, with recomputation 206 and 148, by Python
# 3.11. Of the latter, 26 and 16 are the second forward of the layers themselves.
REQUIRED = {"never": (61, 51), "always": (103, 74)}


def run(quick: bool) -> Table:
    """Calls per micro-batch and stage, by checkpoint mode and executor."""
    rows: list[Row] = []
    for checkpoint, (python, c) in REQUIRED.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2 * STAGES)))
        x, parameters = torch.randn(4 * CHUNKS, 8), list(model.parameters())
        plain = count(step(in_one_graph(model, CHUNKS), parameters, x, torch.sum))
        executors = ("serial",) if checkpoint == "never" else ("serial", "graph")
        for executor in executors:
            pipe = pipe_of(model, STAGES, CHUNKS, checkpoint, executor)
            calls = count(step(pipe, parameters, x, torch.sum))
            more = {kind: (calls[kind] - plain[kind]) / (STAGES * CHUNKS) for kind in ("call", "c_call")}
            judged = executor == "serial"
            rows.append(
                {
                    "checkpoint": checkpoint,
                    "run by": executor,
                    "C": f"{more['c_call']:.1f}",
                    "Python": f"{more['call']:.1f}",
                    "C required": f"<= {c}" if judged else "",
                    **(at_most(more["call"], python) if judged else {"required": "", "verdict": ""}),
                }
            )
    return Table(f"calls beyond one graph, {STAGES} stages, {CHUNKS} micro-batches: forward and backward", rows)


def count(work: Callable[[], Any], where: bool = False) -> Counter[Any]:
    """The calls of one warm step, by kind; with `where`, by kind and function."""
    for _ in range(20):  # past the steps in which graphs are searched for foreign parameters, the last of them 16
        work()
    calls: Counter[Any] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            function = (
                frame.f_code.co_qualname
                if event == "call"
                else f"{frame.f_code.co_qualname} -> {argument.__qualname__}"
            )
            calls[(event, function) if where else event] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
