"""Recurrent cells from the literature, in plain PyTorch, to use, to copy, and to change.

A hand-written kernel for each cell would be hard to read and to change. :class:`weft.recurrent.Recurrent` derives a
loop and its gradients from the step instead.

gated.py        ElmanCell, GRUCell, ResetBeforeGRUCell, MinimalGatedCell, LightGRUCell, RHNCell, and their bases
lstm.py         LSTMCell, PeepholeLSTMCell, LayerNormLSTMCell, MILSTMCell, SLSTMCell of xLSTM, ConvLSTMCell over images
attention.py    AttentionCell, over an encoded source
wrappers.py     Residual, Zoneout, SequenceDropout, around any cell

Every cell is a module with a step ``cell(x_t, state) -> (y_t, new_state)``. No step depends on the value of a tensor,
so it can be captured as a graph. `Zoneout` and ``recurrent_dropout`` draw random numbers in a step, in training.
"""

from torchweft.recurrent.cells.attention import Attended, AttentionCell, AttentionState
from torchweft.recurrent.cells.gated import (
    ElmanCell,
    GRUCell,
    LightGRUCell,
    MinimalGatedCell,
    ResetBeforeGRUCell,
    RHNCell,
)
from torchweft.recurrent.cells.lstm import (
    ConvLSTMCell,
    LayerNormLSTMCell,
    LSTMCell,
    MILSTMCell,
    PeepholeLSTMCell,
    SLSTMCell,
)
from torchweft.recurrent.cells.wrappers import Residual, SequenceDropout, Zoneout

__all__ = [
    "Attended", "AttentionCell", "AttentionState", "ConvLSTMCell", "ElmanCell", "GRUCell", "LSTMCell",
    "LayerNormLSTMCell", "LightGRUCell", "MILSTMCell", "MinimalGatedCell", "PeepholeLSTMCell", "RHNCell",
    "ResetBeforeGRUCell", "Residual", "SLSTMCell", "SequenceDropout", "Zoneout",
]  # fmt: skip
