"""Layers out of recurrent networks.

rnn.py             LSTM, GRU, RNN: drop-ins for torch.nn's     stack.py     layer upon layer
bidirectional.py   both ways in time                           caffe2.py    Caffe2's LSTM
"""

from weft.recurrent.layers.bidirectional import Bidirectional
from weft.recurrent.layers.caffe2 import Caffe2LSTM, Caffe2Result
from weft.recurrent.layers.rnn import GRU, LSTM, RNN
from weft.recurrent.layers.stack import Stack

__all__ = ["GRU", "LSTM", "RNN", "Bidirectional", "Caffe2LSTM", "Caffe2Result", "Stack"]
