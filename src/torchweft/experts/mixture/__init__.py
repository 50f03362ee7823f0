"""Mixtures: a local router selects for each sample the k best of a grid of experts at servers.

mixture.py   RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts    mixture_function.py  autograd node, mini-batches
routing.py   scores, weights, rows by expert and back                fanout.py            calls at once, quorum
"""

from torchweft.experts import extras as extras  # reports missing packages
from torchweft.experts.mixture.fanout import MixtureStatistics
from torchweft.experts.mixture.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from torchweft.experts.mixture.routing import load_balancing_loss

__all__ = ["MixtureStatistics", "RemoteMixtureOfExperts", "RemoteSwitchMixtureOfExperts", "load_balancing_loss"]
