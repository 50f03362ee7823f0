"""Across time: a recurrent network out of one time step, any cell that plain PyTorch can write.

network.py      Recurrent, what users see     functional.py  recurrent_net, links by name
unrolling.py    one call, in and out          eager.py       the exact loop
sequence.py     time and batch axes           rows.py        lengths, masks, resets
states.py       shapes at a step's border     cells.py, links.py   what a cell is
"""

from weft.recurrent.functional import recurrent_net
from weft.recurrent.links import Window
from weft.recurrent.network import Recurrent
from weft.recurrent.unrolling import Result

__all__ = ["Recurrent", "Result", "Window", "recurrent_net"]
