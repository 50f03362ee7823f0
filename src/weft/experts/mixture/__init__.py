"""Mixtures: a router here, and for each sample the k best of a grid of experts that live elsewhere.

mixture.py    RemoteMixtureOfExperts            switch.py     RemoteSwitchMixtureOfExperts
grid.py       experts on a grid, who lives      routing.py    the exact top k
dispatch.py   rows by expert                    gathering.py  calls at once, and how long to wait
passage.py    one node of autograd              shelf.py      where answers are laid down
weighing.py   weights, load-balancing loss      layout.py     what the experts take and return
calls.py      calls, sent again by rule         link.py       who lives, how to call them, what they take
keys.py       of each forward and backward   recall.py     recomputation calls nobody
minibatch.py  gradients that wait              commit.py     one step for all of them
terms.py      the arguments about waiting      arguments.py  what is wrong with any
tally.py
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.errors import AnomalyError, MixtureCommitError, NoExpertsError, TooFewAnswersError
from weft.experts.mixture.mixture import RemoteMixtureOfExperts
from weft.experts.mixture.switch import RemoteSwitchMixtureOfExperts
from weft.experts.mixture.tally import MixtureStatistics
from weft.experts.mixture.weighing import load_balancing_loss

__all__ = [
    "AnomalyError",
    "MixtureCommitError",
    "MixtureStatistics",
    "NoExpertsError",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "TooFewAnswersError",
    "load_balancing_loss",
]
