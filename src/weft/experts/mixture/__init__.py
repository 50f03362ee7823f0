"""Mixtures: a router here, and for each sample the k best of a grid of experts at servers.

mixture.py           RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
mixture_function.py  one node of autograd       dispatch.py    rows by expert and back
grid.py              names, scores, weights     fanout.py      calls at once, and the wait for a quorum
mini_batch.py        gradients that wait for one commit
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.mixture.fanout import MixtureStatistics
from weft.experts.mixture.grid import load_balancing_loss
from weft.experts.mixture.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts

__all__ = [
    "MixtureStatistics",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "load_balancing_loss",
]
