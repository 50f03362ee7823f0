"""A transformer encoder in two stages: speedup over one thread.

All layers take the same time, so the ideal speedup of 2 stages and 8 micro-batches is 2 * 8 / (8 + 1) = 1.778 on two
cores. The reference runs forward and backward of one micro-batch after another, which is the fastest order in one
thread. The same loop with two intra-op threads shows the gain of a second core without a pipe.
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
REQUIRED = 1.65
PLAIN = "one thread"
PLAIN_BY_TWO = "two threads"
TORCH = "torch 1F1B, 2 processes"


def encoder(sequence: int) -> nn.Sequential:
    """The layers, equal in every process. Short sequences (the quick mode) have narrower layers."""
    torch.manual_seed(0)
    hidden = 4 * WIDTH if sequence > 16 else WIDTH
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, hidden, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def run(quick: bool) -> Table:
    """Speed relative to one thread of plain PyTorch."""
    sequence, rows = (16, 1) if quick else (128, 4)
    model = encoder(sequence)
    x, target = torch.randn(2, rows * CHUNKS, sequence, WIDTH)
    progress("starting a process for each stage of the peer")
    with TorchPeer(_stage, sequence, x, target, CHUNKS) as peer:
        candidates = _candidates(model, x, target)
        candidates[TORCH] = peer.step
        agree(candidates)
        progress(f"{len(candidates)} candidates")
        result = race(candidates, rounds=2 if quick else 9, sample=0.0 if quick else 1.0, helpers=peer.processes)
    rows_of_table: list[Row] = []
    for name in candidates:
        speed = 1 / result.ratio(name, PLAIN)
        ours = name.startswith("torchweft")
        rows_of_table.append(
            {
                "run by": name,
                "ms": f"{result.median(name) * 1e3:.1f}",
                "spread": result.spread(name),
                "speed": f"{speed:.2f}",
                **(at_least(speed, REQUIRED) if ours else {"required": "", "verdict": ""}),
            }
        )
    ideal = STAGES * CHUNKS / (CHUNKS + STAGES - 1)
    title = f"{LAYERS}-layer encoder in {STAGES} stages, {CHUNKS} micro-batches: speedup, at most {ideal:.3f}"
    return Table(title, rows_of_table, [f"  {result.note()}"])


def _candidates(model: nn.Sequential, x: Tensor, target: Tensor) -> dict[str, Work]:
    parameters = list(model.parameters())

    def loss(output: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    gpipe = pipe_of(model, STAGES, CHUNKS, "never", "threads")
    one_f_one_b = pipe_of(model, STAGES, CHUNKS, "never", "threads", schedule="1f1b", loss=nn.MSELoss())
    plain = accumulating_step(model, x, target, CHUNKS, functional.mse_loss)
    candidates = {
        PLAIN: plain,
        PLAIN_BY_TWO: in_two_threads(plain),
        "torchweft gpipe": step(gpipe, parameters, x, loss),
        "torchweft 1f1b": step_with_target(one_f_one_b, x, target),
    }
    if (peer := peer_of(model, STAGES, CHUNKS, "never")) is not None:
        candidates[PEER] = step(peer, parameters, x, loss)
    return candidates


def _stage(sequence: int, rank: int) -> nn.Module:
    """The half of the encoder that rank `rank` of the peer runs."""
    half = LAYERS // STAGES
    return encoder(sequence)[rank * half : (rank + 1) * half]
