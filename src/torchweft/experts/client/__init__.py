"""The client: experts of other processes and machines as layers.

remote.py   RemoteExpert, gather, many at once  remote_function.py  calls as an autograd node; anchor; recompute cache
stub.py     signature, requests, progress       transport.py        gRPC's stream, calls in flight
calls.py    the machine that drives all calls   connections.py      transports by server, resolvers; in process
futures.py  submit, await                       retry.py            rule for retries
commit.py   of several experts, in two phases   status.py           commands of an administrator
"""

from torchweft.experts import extras as extras  # reports missing packages
from torchweft.experts.client.commit import commit, discard
from torchweft.experts.client.connections import Connections, LocalTransport
from torchweft.experts.client.futures import ExpertFuture
from torchweft.experts.client.remote import RemoteExpert, create_remote_experts, gather
from torchweft.experts.client.retry import NEVER, Retry
from torchweft.experts.client.transport import GrpcTransport, Transport, TransportStatistics
from torchweft.experts.errors import StepsLostWarning
from torchweft.experts.tls import ClientTls

__all__ = [
    "NEVER",
    "ClientTls",
    "Connections",
    "ExpertFuture",
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
    "gather",
]
