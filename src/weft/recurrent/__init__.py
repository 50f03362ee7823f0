"""Across time: a recurrent network out of one time step, any cell that plain PyTorch can write.

recurrent.py    Recurrent, recurrent_net; one call       eager.py      the exact loop
sequence.py     time and batch axes, packed sequences    masking.py    lengths, masks, resets
cell.py         cells, step nets over named values, and states at a step's border
layers/         LSTM, GRU, RNN, Stack, ...               cells/        known cells, and wrappers

A plan in place of the loop:
capture.py, graph.py, passes.py                the graph of one step and its backward
plan.py                                        what must run step by step, and what need not
plan_cache.py, guards.py, verify.py            for which calls a plan holds, its check, and which backend runs it
autograd.py                                    a whole sequence, as one node of autograd
backends.py                                    the protocol of what runs a plan, and what is kept for backward:
cpp/, inductor_backend.py, python_backend.py   a loop in C++, compiled steps, loops in Python
custom_op.py                                   under torch.compile and torch.export: one operator
"""

from weft.recurrent.cell import InputWidthError, Window
from weft.recurrent.cpp.workspace import release
from weft.recurrent.layers import GRU, LSTM, RNN, Bidirectional, Caffe2LSTM, Stack
from weft.recurrent.layers.rnn import LayerInputError
from weft.recurrent.plan_cache import NoPlanWarning
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
