"""Replicas: one expert at several servers, of which one owns it and steps, and the others follow and take over.

options.py    which experts, how closely they follow     standing.py   owner or follower, and under which fence
replica.py    one expert's state: taken, loaded, newer   mark.py       how far a state is, and what is said of it
feed.py       the owner's side of the stream of states   link.py       the follower's side
keeper.py     claims, follows, takes over, hands over    statistics.py what is said of all that
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.replica.feed import Feed
from weft.experts.replica.keeper import Keeper
from weft.experts.replica.options import ReplicaOptions
from weft.experts.replica.replica import Replica
from weft.experts.replica.standing import Standing
from weft.experts.replica.statistics import ReplicaStatistics

__all__ = ["Feed", "Keeper", "Replica", "ReplicaOptions", "ReplicaStatistics", "Standing"]
