"""Two layers at once: layer 1 works on a chunk of time while layer 0 is at the next one, each on a core of its own.

    in turn      0 0 0 0 1 1 1 1       one layer after the other: 8 units of time
    wavefront    0 0 0 0               4 chunks: 5 units, so 1.6 times as fast at best
                   1 1 1 1

Beside it, the other way to use two cores: one layer after the other, every operator on two threads.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.harness import progress
from benchmarks.recurrent.cells import LSTMCell, by_torch
from benchmarks.recurrent.racing import race_for
from benchmarks.recurrent.work import Forward, Work, agree, threads, training
from benchmarks.table import Row, Table, at_least
from weft.recurrent import Recurrent
from weft.recurrent.layers import Stack

STEPS, BATCHES, WIDTHS, LAYERS = 500, (1, 8, 16), (128, 256), 2
CHUNKS = 4
WANTED = 1.5
IN_TURN, IN_TURN_2, WAVE = "in turn", "in turn, 2 threads", "wavefront"


def run(quick: bool) -> Table:
    """Speed of two LSTM layers as a wavefront, relative to one layer after the other in one thread."""
    steps, batches, widths, seconds = (40, (2,), (32,), 0.0) if quick else (STEPS, BATCHES, WIDTHS, 5.0)
    rows: list[Row] = []
    for width in widths:
        for batch in batches:
            progress(f"batch {batch}, width {width}")
            rows += _rows(steps, batch, width, seconds)
    ideal = LAYERS * CHUNKS / (CHUNKS + LAYERS - 1)
    title = f"two LSTM layers, T {steps}, forward and backward: speed; at best {ideal:g} with {CHUNKS} chunks"
    return Table(title, rows, [f"  {IN_TURN} = 1; more is faster; a wavefront has one thread for each layer"])


def _rows(steps: int, batch: int, width: int, seconds: float) -> list[Row]:
    candidates = _candidates(steps, batch, width)
    with threads(1):  # every candidate sets its own number, which ends here
        agree(candidates)
        agree(candidates)  # once more: the first wave of a kind is walked in the caller's thread
        found = race_for(candidates, seconds)
    rows: list[Row] = []
    for name in candidates:
        speed = 1 / found.ratio(name, IN_TURN)
        rows.append(
            {
                "batch": f"{batch}",
                "width": f"{width}",
                "run by": name,
                "ms": f"{found.median(name) * 1e3:.2f}",
                "speed": f"{speed:.2f}",
                "spread": found.spread(name),
                **(at_least(speed, WANTED) if name == WAVE else {"wanted": "", "verdict": ""}),
                "rounds": found.note(),
            }
        )
    return rows


def _candidates(steps: int, batch: int, width: int) -> dict[str, Work]:
    torch.manual_seed(0)
    peer = nn.LSTM(width, width, LAYERS)
    cells = [_cell(peer, layer) for layer in range(LAYERS)]
    x = torch.randn(steps, batch, width, requires_grad=True)
    zeros = (torch.zeros(batch, width), torch.zeros(batch, width))
    seeds = [torch.randn_like(x)]
    theirs = [each for layer in range(LAYERS) for each in _weights(peer, layer).values()]
    ours = [x, *(each for cell in cells for each in cell.parameters())]
    wave = -(-steps // CHUNKS)

    def stacked(wavefront: Literal["auto"] | int | None) -> Forward:
        stack = Stack([Recurrent(cell) for cell in cells], wavefront=wavefront)

        def forward() -> Sequence[Tensor]:
            return [stack(x, [zeros] * LAYERS).outputs]

        return forward

    torchs = training(by_torch(peer, x, zeros), [x, *theirs], seeds)
    return {
        IN_TURN: _on(1, training(stacked(None), ours, seeds)),
        IN_TURN_2: _on(2, training(stacked(None), ours, seeds)),
        WAVE: _on(1, training(stacked(wave), ours, seeds)),
        "nn.LSTM": _on(1, torchs),
        "nn.LSTM, 2 threads": _on(2, torchs),
    }


def _weights(peer: nn.LSTM, layer: int) -> dict[str, Tensor]:
    """By the names that they have in our cell, in its order."""
    names = {"of_input.weight": "weight_ih", "of_input.bias": "bias_ih"}
    names |= {"of_state.weight": "weight_hh", "of_state.bias": "bias_hh"}
    return {ours: getattr(peer, f"{theirs}_l{layer}") for ours, theirs in names.items()}


def _cell(peer: nn.LSTM, layer: int) -> LSTMCell:
    cell = LSTMCell(peer.hidden_size, peer.hidden_size)
    cell.load_state_dict(_weights(peer, layer))
    return cell


def _on(count: int, work: Work) -> Work:
    """With so many intra-op threads."""

    def threaded() -> Sequence[Tensor]:
        torch.set_num_threads(count)
        return work()

    return threaded
