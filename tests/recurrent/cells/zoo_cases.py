"""Small cases of every cell and wrapper of the zoo, with inputs, for the laws of all cells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.recurrent import cells

INPUT, HIDDEN, SOURCE, MEMORY = 3, 4, 5, 2


@dataclass(frozen=True)
class ZooCase:
    """A cell to run under `Recurrent`. It is ``random`` if it draws numbers in a step or for its initial state."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (INPUT,)
    random: bool = False

    def cell(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The same cell for each call, in training mode."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make().to(dtype)

    def inputs(self, steps: int, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """The same sequence for each call, T x N x ..., with gradients."""
        draw = torch.Generator().manual_seed(steps * 100 + rows)
        x = torch.randn(steps, rows, *self.shape, generator=draw, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    def state(self, cell: nn.Module, x: Tensor) -> Any:
        """An initial state for cells with attention, whose source has gradients. None for other cells."""
        attention = next((part for part in cell.modules() if isinstance(part, cells.AttentionCell)), None)
        if attention is None:
            return None
        rows = x.shape[1]
        draw = torch.Generator().manual_seed(rows)
        source = torch.randn(SOURCE, rows, MEMORY, generator=draw, dtype=torch.float64).to(x.dtype).requires_grad_()
        return attention.begin(source, [SOURCE - row % SOURCE for row in range(rows)])


def attention(score: str) -> nn.Module:
    return cells.AttentionCell(cells.GRUCell(INPUT + MEMORY, HIDDEN), MEMORY, HIDDEN, 3, score)


ZOO: list[ZooCase] = [
    ZooCase("Elman", lambda: cells.ElmanCell(INPUT, HIDDEN)),
    ZooCase("Elman relu", lambda: cells.ElmanCell(INPUT, HIDDEN, nonlinearity="relu")),
    ZooCase("RHN", lambda: cells.RHNCell(INPUT, HIDDEN, depth=3)),
    ZooCase("LSTM", lambda: cells.LSTMCell(INPUT, HIDDEN)),
    ZooCase("LSTM without bias", lambda: cells.LSTMCell(INPUT, HIDDEN, bias=False)),
    ZooCase("LSTM recurrent dropout", lambda: cells.LSTMCell(INPUT, HIDDEN, recurrent_dropout=0.4), random=True),
    ZooCase("peephole LSTM", lambda: cells.PeepholeLSTMCell(INPUT, HIDDEN)),
    ZooCase("layer norm LSTM", lambda: cells.LayerNormLSTMCell(INPUT, HIDDEN)),
    ZooCase("MI-LSTM", lambda: cells.MILSTMCell(INPUT, HIDDEN)),
    ZooCase("GRU", lambda: cells.GRUCell(INPUT, HIDDEN)),
    ZooCase("GRU recurrent dropout", lambda: cells.GRUCell(INPUT, HIDDEN, recurrent_dropout=0.4), random=True),
    ZooCase("reset before GRU", lambda: cells.ResetBeforeGRUCell(INPUT, HIDDEN)),
    ZooCase("minimal gated", lambda: cells.MinimalGatedCell(INPUT, HIDDEN)),
    ZooCase("light GRU", lambda: cells.LightGRUCell(INPUT, HIDDEN)),
    ZooCase("ConvLSTM", lambda: cells.ConvLSTMCell(2, 2), shape=(2, 3, 4)),
    ZooCase("sLSTM", lambda: cells.SLSTMCell(INPUT, HIDDEN)),
    ZooCase("sLSTM two heads", lambda: cells.SLSTMCell(INPUT, HIDDEN, heads=2)),
    ZooCase("additive attention", lambda: attention("additive")),
    ZooCase("dot attention", lambda: attention("dot")),
    ZooCase("residual", lambda: cells.Residual(cells.GRUCell(HIDDEN, HIDDEN)), shape=(HIDDEN,)),
    ZooCase("zoneout", lambda: cells.Zoneout(cells.LSTMCell(INPUT, HIDDEN), (0.5, 0.1)), random=True),
    ZooCase("zoneout in eval", lambda: cells.Zoneout(cells.LSTMCell(INPUT, HIDDEN), (0.5, 0.1)).eval()),
    ZooCase("zoneout of attention", lambda: cells.Zoneout(attention("dot"), 0.2), random=True),
    ZooCase(
        "sequence dropout",
        lambda: cells.SequenceDropout(cells.LSTMCell(INPUT, HIDDEN), inputs=0.3, states=(0.3, 0.0)),
        random=True,
    ),
    ZooCase("torch's LSTM, residual", lambda: cells.Residual(nn.LSTMCell(HIDDEN, HIDDEN)), shape=(HIDDEN,)),
]

SAMPLE = ("Elman", "layer norm LSTM", "GRU recurrent dropout", "ConvLSTM", "sLSTM two heads", "zoneout of attention")


def sampled(cases: list[ZooCase] = ZOO) -> pytest.MarkDecorator:
    """Parametrize by a few very different cells, for laws that depend little on the cell. The others are `long`."""
    rows = [pytest.param(case, id=case.name, marks=[] if case.name in SAMPLE else [pytest.mark.long]) for case in cases]
    return pytest.mark.parametrize("case", rows)
