"""Replication: one expert at several servers; one owns it and steps (the leader), the others follow and take over.

manager.py   claims, follows, takes over, hands over     replica.py    one expert: its role, its state sent and loaded
leader.py    the leader's side of the stream of states   follower.py   the follower's side, and options
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.replication.follower import ReplicaOptions
from weft.experts.replication.leader import LeaderStreams
from weft.experts.replication.manager import ReplicaStatistics, ReplicationManager
from weft.experts.replication.replica import Leadership, Replica

__all__ = ["LeaderStreams", "Leadership", "Replica", "ReplicaOptions", "ReplicaStatistics", "ReplicationManager"]
