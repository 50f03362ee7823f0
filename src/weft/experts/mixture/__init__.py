"""Mixtures: a router here, and for each sample the k best of a grid of experts at servers.

mixture.py           RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
router.py            scores, top k, weights        grid.py           which experts live, what they take
dispatch.py          rows by expert and back       fanout.py         calls at once, and the wait for a quorum
mixture_function.py  one node of autograd          mini_batch.py     gradients that wait for one commit
mixture_options.py   options, and their checks
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.mixture.fanout import MixtureStatistics
from weft.experts.mixture.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from weft.experts.mixture.router import load_balancing_loss

__all__ = [
    "MixtureStatistics",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "load_balancing_loss",
]
