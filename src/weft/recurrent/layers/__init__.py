"""Layers out of recurrent networks.

lstm.py, gru.py, rnn.py   drop-ins for torch.nn's       drop_in.py, arguments.py   what they have in common
caffe2.py                 Caffe2's LSTM                 steps.py, beside.py        their cells, beside their weights
bidirectional.py          both ways in time             reverse.py, packing.py     time turned round; packed rows
stack.py                  layer upon layer
"""

from weft.recurrent.layers.bidirectional import Bidirectional
from weft.recurrent.layers.caffe2 import Caffe2LSTM, Caffe2Result
from weft.recurrent.layers.rnn import GRU, LSTM, RNN
from weft.recurrent.layers.stack import Stack

__all__ = ["GRU", "LSTM", "RNN", "Bidirectional", "Caffe2LSTM", "Caffe2Result", "Stack"]
