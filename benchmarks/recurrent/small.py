"""Tiny networks: the cost of a step with almost no computation.

Without a compiler, Python runs the derived plan. It is compared with the eager loop that it replaces.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness import intra_op_threads, progress
from benchmarks.recurrent.cells import State, by_torch, by_torchweft, eager, with_weights_of
from benchmarks.recurrent.racing import race_for
from benchmarks.recurrent.work import THREADS, Work, agree, training
from benchmarks.table import Row, Table, at_most
from torchweft.recurrent import Recurrent, cells

STEPS, WIDTH = 200, 16
REQUIRED = 5.0  # microseconds per step
REQUIRED_PYTHON = 0.5  # of the eager loop's time
CELLS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[int, int], nn.RNNBase] | None]] = {
    "LSTM": (cells.LSTMCell, nn.LSTM),
    "GRU": (cells.GRUCell, nn.GRU),
    "MI-LSTM": (cells.MILSTMCell, None),
    "Elman": (cells.ElmanCell, nn.RNN),
}
WEFT, PYTHON, EAGER = "torchweft", "torchweft, no compiler", "eager loop"


def run(quick: bool) -> Table:
    """Microseconds per step, by cell, threads and candidate."""
    steps, seconds = (20, 0.0) if quick else (STEPS, 4.0)
    rows: list[Row] = []
    for name in CELLS:
        candidates = _candidates(name, steps)
        agree(candidates)
        for count in THREADS:
            progress(f"{name}, {count} thread(s)")
            with intra_op_threads(count):
                rows += _rows(name, count, candidates, steps, seconds)
    title = f"microseconds per step, forward and backward: T {steps}, batch 1, width {WIDTH}"
    return Table(title, rows, ["  of eager: share of the eager loop's time; PyTorch's networks are not judged"])


def _candidates(name: str, steps: int) -> dict[str, Work]:
    torch.manual_seed(0)
    make, make_peer = CELLS[name]
    cell = make(WIDTH, WIDTH)
    x = torch.randn(steps, 1, WIDTH, requires_grad=True)
    h, c = (torch.randn(1, WIDTH, requires_grad=True) for _ in range(2))
    state: State = (h, c) if "LSTM" in name else h
    leaves: list[Tensor] = [h, c] if "LSTM" in name else [h]
    seeds = [torch.randn(steps, 1, WIDTH), *map(torch.randn_like, leaves)]
    peer = None if make_peer is None else make_peer(WIDTH, WIDTH)
    if peer is not None:
        with_weights_of(peer, cell)
    leaves_and_weights = [x, *leaves, *cell.parameters()]
    candidates = {
        WEFT: training(by_torchweft(Recurrent(cell), x, state), leaves_and_weights, seeds),
        PYTHON: training(by_torchweft(Recurrent(cell, backend="python"), x, state), leaves_and_weights, seeds),
        EAGER: training(eager(cell, x, state), leaves_and_weights, seeds),
    }
    if peer is not None:
        theirs = [x, *leaves, *(getattr(peer, f"{name}_l0") for name, _ in cell.named_parameters())]
        candidates[f"nn.{type(peer).__name__}"] = training(by_torch(peer, x, state), theirs, seeds)
    return candidates


def _rows(cell: str, count: int, candidates: dict[str, Work], steps: int, seconds: float) -> list[Row]:
    result = race_for(candidates, seconds)
    rows: list[Row] = []
    for name in candidates:
        microseconds, share = result.median(name) / steps * 1e6, result.ratio(name, EAGER)
        judged = {WEFT: at_most(microseconds, REQUIRED), PYTHON: at_most(share, REQUIRED_PYTHON)}.get(name, {})
        if name == PYTHON:
            judged["required"] += " of eager"
        rows.append(
            {
                "cell": cell,
                "threads": f"{count}",
                "run by": name,
                "us per step": f"{microseconds:.2f}",
                "of eager": f"{share:.3f}",
                "spread": result.spread(name),
                **({"required": "", "verdict": ""} | judged),
                "rounds": result.note(),
            }
        )
    return rows
