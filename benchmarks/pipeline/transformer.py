"""A real model in two stages: the gain of running at the same time over one thread.

The encoder's layers take the same time, so a table of 2 stages and 8 micro-batches can gain 2 * 8 / (8 + 1)
= 1.778 on two cores. The reference trains on the same micro-batches one after another, forward and backward of
each in turn, which is the fastest that one thread can do it. The same loop with operators that PyTorch divides over
two threads shows what the second core gives without a pipe.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Work, progress, race
from benchmarks.pipeline.torch_peer import TorchPeer
from benchmarks.pipeline.work import (
    PEER,
    accumulating_step,
    agree,
    in_two_threads,
    peer_of,
    pipe_of,
    step,
    step_with_target,
)
from benchmarks.table import Row, Table, at_least

STAGES, CHUNKS, LAYERS, WIDTH = 2, 8, 4, 256
WANTED = 1.65
PLAIN = "one thread"
PLAIN_BY_TWO = "two threads"
TORCH = "torch 1F1B, 2 processes"


def encoder(sequence: int) -> nn.Sequential:
    """The layers, the same in every process. `sequence` is for the quick mode, which has narrower layers."""
    torch.manual_seed(0)
    hidden = 4 * WIDTH if sequence > 16 else WIDTH
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, hidden, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def run(quick: bool) -> Table:
    """Speed relative to one thread of plain PyTorch."""
    sequence, rows = (16, 1) if quick else (128, 4)
    model = encoder(sequence)
    x, target = torch.randn(2, rows * CHUNKS, sequence, WIDTH)
    progress("a process for each stage of the peer")
    with TorchPeer(_stage, sequence, x, target, CHUNKS) as peer:
        candidates = _candidates(model, x, target)
        candidates[TORCH] = peer.step
        agree(candidates)
        progress(f"{len(candidates)} candidates")
        found = race(candidates, rounds=2 if quick else 9, sample=0.0 if quick else 1.0, helpers=peer.processes)
    rows_of_table: list[Row] = []
    for name in candidates:
        speed = 1 / found.ratio(name, PLAIN)
        ours = name.startswith("torchweft")
        rows_of_table.append(
            {
                "run by": name,
                "ms": f"{found.median(name) * 1e3:.1f}",
                "spread": found.spread(name),
                "speed": f"{speed:.2f}",
                **(at_least(speed, WANTED) if ours else {"wanted": "", "verdict": ""}),
            }
        )
    ideal = STAGES * CHUNKS / (CHUNKS + STAGES - 1)
    title = (
        f"{LAYERS}-layer encoder in {STAGES} stages, {CHUNKS} micro-batches: speed, of {ideal:.3f} that are possible"
    )
    return Table(title, rows_of_table, [f"  {found.note()}"])


def _candidates(model: nn.Sequential, x: Tensor, target: Tensor) -> dict[str, Work]:
    parameters = list(model.parameters())

    def loss(output: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    gpipe = pipe_of(model, STAGES, CHUNKS, "never", "threads")
    early = pipe_of(model, STAGES, CHUNKS, "never", "threads", schedule="1f1b", loss=nn.MSELoss())
    plain = accumulating_step(model, x, target, CHUNKS, functional.mse_loss)
    candidates = {
        PLAIN: plain,
        PLAIN_BY_TWO: in_two_threads(plain),
        "torchweft gpipe": step(gpipe, parameters, x, loss),
        "torchweft 1f1b": step_with_target(early, x, target),
    }
    if (peer := peer_of(model, STAGES, CHUNKS, "never")) is not None:
        candidates[PEER] = step(peer, parameters, x, loss)
    return candidates


def _stage(sequence: int, rank: int) -> nn.Module:
    """One of two halves, for a process of its own."""
    half = LAYERS // STAGES
    return encoder(sequence)[rank * half : (rank + 1) * half]
