"""The overhead of a pipe: layers so small that nearly all the time is bookkeeping.

    (seconds of a step of the pipe  -  seconds of the same micro-batches in one graph) / (micro-batches * stages)

The reference computes each value once. With recomputation the figure includes the second forward, and no limit is
required.
"""

import torch
from torch import nn

from benchmarks.harness import progress, race
from benchmarks.pipeline.work import PEER, agree, decide, in_one_graph, peer_of, pipe_of, step
from benchmarks.table import Row, Table, at_most

STAGES, CHUNKS = 4, 8
REQUIRED = 60.0  # microseconds
REFERENCE = "one graph"


def run(quick: bool) -> Table:
    """Microseconds per micro-batch and stage, by executor and checkpoint mode."""
    rows: list[Row] = []
    for checkpoint in ("never", "always"):
        progress(f"checkpoint {checkpoint}")
        rows += _rows(checkpoint, rounds=2 if quick else 15, sample=0.02 if quick else 0.2)
    title = f"overhead with tiny tensors, {STAGES} stages, {CHUNKS} micro-batches: forward and backward"
    return Table(title, rows)


def _rows(checkpoint: str, rounds: int, sample: float) -> list[Row]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2 * STAGES)]
    model = nn.Sequential(*layers)
    x, parameters = torch.randn(4 * CHUNKS, 8), list(model.parameters())
    pipes = {name: pipe_of(model, STAGES, CHUNKS, checkpoint, name) for name in ("serial", "threads", "auto")}
    models = {REFERENCE: in_one_graph(model, CHUNKS), **pipes}
    if (peer := peer_of(model, STAGES, CHUNKS, checkpoint)) is not None:
        models[PEER] = peer
    candidates = {name: step(forward, parameters, x, torch.sum) for name, forward in models.items()}
    agree(candidates)
    choice = decide(pipes["auto"], candidates["auto"])
    result = race(candidates, rounds=rounds, sample=sample)
    rows: list[Row] = []
    for name in candidates:
        microseconds = result.difference(name, REFERENCE) / (STAGES * CHUNKS) * 1e6
        judged = checkpoint == "never" and name not in (REFERENCE, PEER)
        rows.append(
            {
                "checkpoint": checkpoint,
                "run by": f"auto: {choice}" if name == "auto" else name,
                "ms": f"{result.median(name) * 1e3:.2f}",
                "spread": result.spread(name),
                "us overhead": "" if name == REFERENCE else f"{microseconds:.1f}",
                **(at_most(microseconds, REQUIRED) if judged else {"required": "", "verdict": ""}),
                "rounds": result.note(),
            }
        )
    return rows
