"""The client: experts of other processes and machines as layers.

remote.py   RemoteExpert; many at once         remote_function.py  a call as an autograd node; anchor; recompute cache
stub.py     signature, requests, progress      transport.py        over gRPC, or in process; Connections of one client
retry.py    resolvers, deadlines, retries      stream.py           gRPC's stream, calls in flight
status.py   ``weft status``
"""

from weft.experts import extras as extras  # reports missing packages
from weft.experts.client.remote import RemoteExpert, commit, create_remote_experts, discard
from weft.experts.client.retry import NEVER, Retry
from weft.experts.client.transport import Connections, GrpcTransport, LocalTransport, Transport, TransportStatistics
from weft.experts.errors import StepsLostWarning
from weft.experts.tls import ClientTls

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
