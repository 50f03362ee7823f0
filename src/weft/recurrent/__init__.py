"""Across time: a recurrent network out of one time step, any cell that plain PyTorch can write.

network.py      Recurrent, what users see     functional.py  recurrent_net, links by name
unrolling.py    one call, in and out          eager.py       the exact loop
sequence.py     time and batch axes           rows.py        lengths, masks, resets
states.py       shapes at a step's border     cells.py, links.py   what a cell is

A plan in place of the loop: capture.py, tidy.py  the graph of one step and its backward
                             parts.py             what must run step by step, and what need not
                             code.py, bulk.py     the loops as source; all steps at once
                             plan.py, derived.py  a whole sequence, as one node of autograd
                             verify.py, backends.py  the check against the loop, and who runs what
"""

from weft.recurrent.functional import recurrent_net
from weft.recurrent.links import Window
from weft.recurrent.network import Recurrent
from weft.recurrent.unrolling import Result

__all__ = ["Recurrent", "Result", "Window", "recurrent_net"]
