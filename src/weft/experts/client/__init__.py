"""The client: experts of other processes and machines, as layers.

remote.py     RemoteExpert; many at once     autograd.py     a call as an autograd node; the anchor; the recompute cache
stub.py       signature, requests, progress  connections.py  the directory, and one transport per server
retry.py      resolvers, deadlines, retries  transport.py    over gRPC, or in process
stream.py     gRPC's stream, calls in flight status.py       ``weft status``
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.client.connections import Connections
from weft.experts.client.remote import RemoteExpert, commit, create_remote_experts, discard
from weft.experts.client.retry import NEVER, Retry
from weft.experts.client.transport import GrpcTransport, LocalTransport, Transport, TransportStatistics
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
