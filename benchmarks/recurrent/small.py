"""Tiny networks: the cost of a step with almost no computation.

And what is left where there is no compiler: the derived plan run by Python, beside the loop that it replaces.
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
WANTED = 5.0  # microseconds per step
WANTED_PYTHON = 0.5  # of the eager loop's time
CELLS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[int, int], nn.RNNBase] | None]] = {
    "LSTM": (cells.LSTMCell, nn.LSTM),
    "GRU": (cells.GRUCell, nn.GRU),
    "MI-LSTM": (cells.MILSTMCell, None),
    "Elman": (cells.ElmanCell, nn.RNN),
}
WEFT, PYTHON, EAGER = "torchweft", "torchweft, no compiler", "eager loop"


def run(quick: bool) -> Table:
    """Microseconds per step, forward and backward."""
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
    return Table(title, rows, ["  a network of PyTorch's is for comparison; the eager loop is 1"])


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
    wants = [x, *leaves, *cell.parameters()]
    found = {
        WEFT: training(by_torchweft(Recurrent(cell), x, state), wants, seeds),
        PYTHON: training(by_torchweft(Recurrent(cell, backend="python"), x, state), wants, seeds),
        EAGER: training(eager(cell, x, state), wants, seeds),
    }
    if peer is not None:
        theirs = [x, *leaves, *(getattr(peer, f"{each}_l0") for each, _ in cell.named_parameters())]
        found[f"nn.{type(peer).__name__}"] = training(by_torch(peer, x, state), theirs, seeds)
    return found


def _rows(cell: str, count: int, candidates: dict[str, Work], steps: int, seconds: float) -> list[Row]:
    found = race_for(candidates, seconds)
    rows: list[Row] = []
    for name in candidates:
        each, share = found.median(name) / steps * 1e6, found.ratio(name, EAGER)
        judged = {WEFT: at_most(each, WANTED), PYTHON: at_most(share, WANTED_PYTHON)}.get(name, {})
        if name == PYTHON:
            judged["wanted"] += " of eager"
        rows.append(
            {
                "cell": cell,
                "threads": f"{count}",
                "run by": name,
                "us per step": f"{each:.2f}",
                "of eager": f"{share:.3f}",
                "spread": found.spread(name),
                **({"wanted": "", "verdict": ""} | judged),
                "rounds": found.note(),
            }
        )
    return rows
