"""Recurrent cells from the literature, in plain PyTorch, to run as they are, to copy, and to change.

gated.py        ElmanCell, GRUCell, ResetBeforeGRUCell, MinimalGatedCell, LightGRUCell, RHNCell, and their bases
lstm.py         LSTMCell, PeepholeLSTMCell, LayerNormLSTMCell, MILSTMCell, SLSTMCell of xLSTM, ConvLSTMCell over images
attention.py    AttentionCell, over an encoded source
wrappers.py     Residual, Zoneout, SequenceDropout, around any cell

Every cell is a module, one step of which is ``cell(x_t, state) -> (y_t, new_state)``; it runs under
:class:`weft.recurrent.Recurrent`. None of them looks at the value of a tensor, so a step can be captured as a graph;
those that draw random numbers in a step (`Zoneout` and ``recurrent_dropout`` in training) are the exception.
"""

from weft.recurrent.cells.attention import Attended, AttentionCell, AttentionState
from weft.recurrent.cells.gated import ElmanCell, GRUCell, LightGRUCell, MinimalGatedCell, ResetBeforeGRUCell, RHNCell
from weft.recurrent.cells.lstm import ConvLSTMCell, LayerNormLSTMCell, LSTMCell, MILSTMCell, PeepholeLSTMCell, SLSTMCell
from weft.recurrent.cells.wrappers import Residual, SequenceDropout, Zoneout

__all__ = [
    "Attended",
    "AttentionCell",
    "AttentionState",
    "ConvLSTMCell",
    "ElmanCell",
    "GRUCell",
    "LSTMCell",
    "LayerNormLSTMCell",
    "LightGRUCell",
    "MILSTMCell",
    "MinimalGatedCell",
    "PeepholeLSTMCell",
    "RHNCell",
    "ResetBeforeGRUCell",
    "Residual",
    "SLSTMCell",
    "SequenceDropout",
    "Zoneout",
]
