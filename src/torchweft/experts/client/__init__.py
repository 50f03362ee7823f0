"""The client: experts of other processes and machines as layers.

remote.py   RemoteExpert; many at once         remote_function.py  a call as an autograd node; anchor; recompute cache
stub.py     signature, requests, progress      transport.py        over gRPC, or in process; Connections of one client
retry.py    resolvers, deadlines, retries      stream.py           gRPC's stream, calls in flight
status.py   ``torchweft status``
"""

from torchweft.experts import extras as extras  # reports missing packages
from torchweft.experts.client.remote import RemoteExpert, commit, create_remote_experts, discard
from torchweft.experts.client.retry import NEVER, Retry
from torchweft.experts.client.transport import (
    Connections,
    GrpcTransport,
    LocalTransport,
    Transport,
    TransportStatistics,
)
from torchweft.experts.errors import StepsLostWarning
from torchweft.experts.tls import ClientTls

__all__ = [
    "NEVER",
    "ClientTls",
    "Connections",
    "GrpcTransport",
    "LocalTransport",
    "RemoteExpert",
    "Retry",
    "StepsLostWarning",
    "Transport",
    "TransportStatistics",
    "commit",
    "create_remote_experts",
    "discard",
]
