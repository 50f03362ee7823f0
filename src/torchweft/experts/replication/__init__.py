"""Replication: one expert at several servers. The owner (leader) steps it, the others follow and can take over.

manager.py   claims, follows, takes over, hands over     replica.py   options; one expert, role, versioned state
streams.py   states from a leader to its followers
"""

from torchweft.experts import extras as extras  # says what is not installed
from torchweft.experts.replication.manager import ReplicationManager
from torchweft.experts.replication.replica import Leadership, Replica, ReplicaOptions
from torchweft.experts.replication.streams import LeaderStreams
from torchweft.experts.statistics import ReplicaStatistics

__all__ = ["LeaderStreams", "Leadership", "Replica", "ReplicaOptions", "ReplicaStatistics", "ReplicationManager"]
