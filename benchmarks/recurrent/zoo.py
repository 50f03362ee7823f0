"""Every cell and wrapper of the zoo, wide enough that its first call is a real one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.recurrent import zoo

WIDTH, SOURCE, MEMORY = 64, 6, 32


@dataclass(frozen=True)
class Entry:
    """How to make a cell, and the shape of a row of its inputs."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (WIDTH,)

    def state(self, cell: nn.Module, rows: int) -> Any:
        """A state to begin with, for a cell that must be given one: those with an encoded source."""
        attention = next((each for each in cell.modules() if isinstance(each, zoo.AttentionCell)), None)
        if attention is None:
            return None
        source: Tensor = torch.randn(SOURCE, rows, MEMORY, requires_grad=True)
        return attention.begin(source, [SOURCE - row % SOURCE for row in range(rows)])


def _attention(score: str) -> nn.Module:
    return zoo.AttentionCell(zoo.GRUCell(WIDTH + MEMORY, WIDTH), MEMORY, WIDTH, 16, score)


def _lstm(**options: float) -> nn.Module:
    return zoo.LSTMCell(WIDTH, WIDTH, **options)


ZOO: dict[str, Entry] = {
    "Elman": Entry(lambda: zoo.ElmanCell(WIDTH, WIDTH)),
    "Elman relu": Entry(lambda: zoo.ElmanCell(WIDTH, WIDTH, nonlinearity="relu")),
    "RHN": Entry(lambda: zoo.RHNCell(WIDTH, WIDTH, depth=3)),
    "LSTM": Entry(_lstm),
    "LSTM without bias": Entry(lambda: zoo.LSTMCell(WIDTH, WIDTH, bias=False)),
    "LSTM recurrent dropout": Entry(lambda: _lstm(recurrent_dropout=0.4)),
    "peephole LSTM": Entry(lambda: zoo.PeepholeLSTMCell(WIDTH, WIDTH)),
    "layer norm LSTM": Entry(lambda: zoo.LayerNormLSTMCell(WIDTH, WIDTH)),
    "MI-LSTM": Entry(lambda: zoo.MILSTMCell(WIDTH, WIDTH)),
    "GRU": Entry(lambda: zoo.GRUCell(WIDTH, WIDTH)),
    "GRU recurrent dropout": Entry(lambda: zoo.GRUCell(WIDTH, WIDTH, recurrent_dropout=0.4)),
    "reset before GRU": Entry(lambda: zoo.ResetBeforeGRUCell(WIDTH, WIDTH)),
    "minimal gated": Entry(lambda: zoo.MinimalGatedCell(WIDTH, WIDTH)),
    "light GRU": Entry(lambda: zoo.LightGRUCell(WIDTH, WIDTH)),
    "ConvLSTM": Entry(lambda: zoo.ConvLSTMCell(4, 4), shape=(4, 8, 8)),
    "sLSTM": Entry(lambda: zoo.SLSTMCell(WIDTH, WIDTH)),
    "sLSTM two heads": Entry(lambda: zoo.SLSTMCell(WIDTH, WIDTH, heads=2)),
    "additive attention": Entry(lambda: _attention("additive")),
    "dot attention": Entry(lambda: _attention("dot")),
    "residual": Entry(lambda: zoo.Residual(zoo.GRUCell(WIDTH, WIDTH))),
    "zoneout": Entry(lambda: zoo.Zoneout(_lstm(), (0.5, 0.1))),
    "zoneout of attention": Entry(lambda: zoo.Zoneout(_attention("dot"), 0.2)),
    "sequence dropout": Entry(lambda: zoo.SequenceDropout(_lstm(), inputs=0.3, states=(0.3, 0.0))),
    "torch's LSTM, residual": Entry(lambda: zoo.Residual(nn.LSTMCell(WIDTH, WIDTH))),
}
