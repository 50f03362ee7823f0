"""Layers made of recurrent networks.

rnn.py          LSTM, GRU, RNN: drop-in replacements for those of torch.nn
composite.py    both directions in time, and stacks of layers
caffe2.py       Caffe2's LSTM
"""

from torchweft.recurrent.layers.caffe2 import Caffe2LSTM, Caffe2Result
from torchweft.recurrent.layers.composite import Bidirectional, Stack
from torchweft.recurrent.layers.rnn import GRU, LSTM, RNN

__all__ = ["GRU", "LSTM", "RNN", "Bidirectional", "Caffe2LSTM", "Caffe2Result", "Stack"]
