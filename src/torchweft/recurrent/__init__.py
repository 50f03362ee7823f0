"""Recurrent networks from one time step: any cell that plain PyTorch can express.

recurrent.py    Recurrent, recurrent_net; one call       eager.py      the exact loop
sequence.py     time and batch axes, packed sequences    masking.py    lengths, masks, resets
cell.py         cells, step nets over named values, and the initial state
layers/         LSTM, GRU, RNN, Stack, ...               cells/        known cells, and wrappers

A plan replaces the loop:
capture.py, graph.py, passes.py                the graph of one step and its backward
step_plan.py                                   the operators that must run step by step, and those that need not
plan_cache.py, guards.py, verify.py            the calls for which a plan holds, its check, and its backend
sequence_function.py                           a whole sequence, as one autograd node
plan_backends.py, backend_registry.py          the protocol of backends, the values kept for backward; the known ones:
cpp/, triton/                                  loops in C++, kernels for a GPU
python_backend.py, recorded_backend.py         loops in Python; recorded on a GPU, by recordings.py
custom_op.py, traced_networks.py               under torch.compile: one operator
pytorch_internals.py                           the private names of PyTorch that these modules use
"""

from torchweft.recurrent import cells
from torchweft.recurrent.cell import InputWidthError, Window
from torchweft.recurrent.cpp.workspace import release
from torchweft.recurrent.layers import GRU, LSTM, RNN, Bidirectional, Caffe2LSTM, Stack
from torchweft.recurrent.layers.rnn import LayerInputError
from torchweft.recurrent.plan_cache import NoPlanWarning
from torchweft.recurrent.recurrent import Recurrent, Result, recurrent_net

__all__ = [
    "GRU", "LSTM", "RNN", "Bidirectional", "Caffe2LSTM", "InputWidthError", "LayerInputError", "NoPlanWarning",
    "Recurrent", "Result", "Stack", "Window", "cells", "recurrent_net", "release",
]  # fmt: skip
