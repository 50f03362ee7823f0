"""Every cell and wrapper of the zoo, at a realistic width."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.recurrent import cells

WIDTH, SOURCE, MEMORY = 64, 6, 32


@dataclass(frozen=True)
class Entry:
    """Factory of a cell, and the shape of one row of its inputs."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (WIDTH,)

    def state(self, cell: nn.Module, rows: int) -> Any:
        """Initial state of a cell with attention over an encoded source. None for other cells."""
        attention = next((module for module in cell.modules() if isinstance(module, cells.AttentionCell)), None)
        if attention is None:
            return None
        source: Tensor = torch.randn(SOURCE, rows, MEMORY, requires_grad=True)
        return attention.begin(source, [SOURCE - row % SOURCE for row in range(rows)])


def _attention(score: str) -> nn.Module:
    return cells.AttentionCell(cells.GRUCell(WIDTH + MEMORY, WIDTH), MEMORY, WIDTH, 16, score)


def _lstm(**options: float) -> nn.Module:
    return cells.LSTMCell(WIDTH, WIDTH, **options)


ZOO: dict[str, Entry] = {
    "Elman": Entry(lambda: cells.ElmanCell(WIDTH, WIDTH)),
    "Elman relu": Entry(lambda: cells.ElmanCell(WIDTH, WIDTH, nonlinearity="relu")),
    "RHN": Entry(lambda: cells.RHNCell(WIDTH, WIDTH, depth=3)),
    "LSTM": Entry(_lstm),
    "LSTM without bias": Entry(lambda: cells.LSTMCell(WIDTH, WIDTH, bias=False)),
    "LSTM recurrent dropout": Entry(lambda: _lstm(recurrent_dropout=0.4)),
    "peephole LSTM": Entry(lambda: cells.PeepholeLSTMCell(WIDTH, WIDTH)),
    "layer norm LSTM": Entry(lambda: cells.LayerNormLSTMCell(WIDTH, WIDTH)),
    "MI-LSTM": Entry(lambda: cells.MILSTMCell(WIDTH, WIDTH)),
    "GRU": Entry(lambda: cells.GRUCell(WIDTH, WIDTH)),
    "GRU recurrent dropout": Entry(lambda: cells.GRUCell(WIDTH, WIDTH, recurrent_dropout=0.4)),
    "reset before GRU": Entry(lambda: cells.ResetBeforeGRUCell(WIDTH, WIDTH)),
    "minimal gated": Entry(lambda: cells.MinimalGatedCell(WIDTH, WIDTH)),
    "light GRU": Entry(lambda: cells.LightGRUCell(WIDTH, WIDTH)),
    "ConvLSTM": Entry(lambda: cells.ConvLSTMCell(4, 4), shape=(4, 8, 8)),
    "sLSTM": Entry(lambda: cells.SLSTMCell(WIDTH, WIDTH)),
    "sLSTM two heads": Entry(lambda: cells.SLSTMCell(WIDTH, WIDTH, heads=2)),
    "additive attention": Entry(lambda: _attention("additive")),
    "dot attention": Entry(lambda: _attention("dot")),
    "residual": Entry(lambda: cells.Residual(cells.GRUCell(WIDTH, WIDTH))),
    "zoneout": Entry(lambda: cells.Zoneout(_lstm(), (0.5, 0.1))),
    "zoneout of attention": Entry(lambda: cells.Zoneout(_attention("dot"), 0.2)),
    "sequence dropout": Entry(lambda: cells.SequenceDropout(_lstm(), inputs=0.3, states=(0.3, 0.0))),
    "torch's LSTM, residual": Entry(lambda: cells.Residual(nn.LSTMCell(WIDTH, WIDTH))),
}
