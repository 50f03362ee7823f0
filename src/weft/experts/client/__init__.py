"""The client: experts of other processes and machines, as layers.

remote.py        RemoteExpert               group.py      many at once: created, committed, discarded
autograd.py      a call as an autograd node; the anchor; the recompute cache
signature.py     what a call looks like     stub.py       info, forward, backward, commit as requests
retry.py         deadlines and retries      connections.py  which server, and one transport per server
transport.py     over gRPC, or in process   stream.py     gRPC's stream, and calls in flight
status.py        ``weft status``
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.client.connections import Connections
from weft.experts.client.group import commit, create_remote_experts, discard
from weft.experts.client.remote import RemoteExpert
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
