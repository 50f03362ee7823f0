"""Across time: a recurrent network out of one time step, any cell that plain PyTorch can write.

network.py      Recurrent, what users see     functional.py  recurrent_net, links by name
layers/         LSTM, GRU, RNN, Stack, ...    cells/         known cells, and wrappers
unrolling.py    one call, in and out          eager.py       the exact loop
sequence.py     time and batch axes           rows.py        lengths, masks, resets
states.py       shapes at a step's border     cells.py, links.py   what a cell is

A plan in place of the loop: conditions.py, draws.py   lengths and random numbers as inputs of the step
                             capture.py, tidy.py  the graph of one step and its backward
                             parts.py             what must run step by step, and what need not
                             engine.py            a stretch of time, whichever way it is run:
                             cpp/                 as a loop in C++
                             python_engine.py, plan.py, code.py, bulk.py  as loops in Python
                             derived.py, room.py, memory.py, workspace.py  a whole sequence, as one node of autograd
                             verify.py, backends.py, owned.py  the check against the loop, and who runs what
"""

from weft.recurrent.backends import NoPlanWarning
from weft.recurrent.buffers import release
from weft.recurrent.cell import InputWidthError
from weft.recurrent.layers import GRU, LSTM, RNN, Bidirectional, Caffe2LSTM, Stack
from weft.recurrent.layers.rnn import LayerInputError
from weft.recurrent.links import Window
from weft.recurrent.recurrent import Recurrent, Result, recurrent_net

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bidirectional",
    "Caffe2LSTM",
    "InputWidthError",
    "LayerInputError",
    "NoPlanWarning",
    "Recurrent",
    "Result",
    "Stack",
    "Window",
    "recurrent_net",
    "release",
]
