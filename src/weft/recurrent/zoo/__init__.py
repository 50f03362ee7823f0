"""The zoo: known cells in plain PyTorch, to run as they are, to copy, and to change.

gated.py        what most of them share: two weight matrices cut into blocks, and a zero state
elman.py        ElmanCell                                highway.py   RHNCell
lstm.py         LSTMCell, PeepholeLSTMCell               normed.py    LayerNormLSTMCell, MILSTMCell
gru.py          GRUCell, ResetBeforeGRUCell, MinimalGatedCell, LightGRUCell
conv.py         ConvLSTMCell, over images                slstm.py     SLSTMCell, of xLSTM
attention.py    AttentionCell, over an encoded source

wrapper.py      what wrappers of a cell share            rates.py     a rate, or one for each tensor
zoneout.py      Zoneout        residual.py   Residual    dropout.py   SequenceDropout
arguments.py    what their constructors refuse

Every cell is a module ``cell(x_t, state) -> (y_t, new_state)`` and runs under :class:`weft.recurrent.Recurrent`.
None of them looks at the value of a tensor, so a step can be captured as a graph; those that draw random numbers in a
step (`Zoneout` and ``recurrent_dropout`` in training) are the exception.
"""

from weft.recurrent.zoo.attention import Attended, AttentionCell, AttentionState
from weft.recurrent.zoo.conv import ConvLSTMCell
from weft.recurrent.zoo.dropout import SequenceDropout
from weft.recurrent.zoo.elman import ElmanCell
from weft.recurrent.zoo.gru import GRUCell, LightGRUCell, MinimalGatedCell, ResetBeforeGRUCell
from weft.recurrent.zoo.highway import RHNCell
from weft.recurrent.zoo.lstm import LSTMCell, PeepholeLSTMCell
from weft.recurrent.zoo.normed import LayerNormLSTMCell, MILSTMCell
from weft.recurrent.zoo.residual import Residual
from weft.recurrent.zoo.slstm import SLSTMCell
from weft.recurrent.zoo.zoneout import Zoneout

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
