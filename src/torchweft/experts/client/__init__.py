"""The client: experts of other processes and machines as layers.

remote.py        RemoteExpert, one autograd node      layer.py        base of such layers; recompute cache
expert_group.py  gather, commit of several            connections.py  transports by server, resolvers; in process
stub.py          signature, requests, progress        transport.py    gRPC's stream, calls in flight
calls.py         the machine that drives all calls    retry.py        rule for retries
futures.py       submit, await                        status.py       commands of an administrator
"""

from torchweft.experts import extras as extras  # reports missing packages
from torchweft.experts.client.connections import Connections, LocalTransport
from torchweft.experts.client.expert_group import commit, create_remote_experts, discard, gather
from torchweft.experts.client.futures import ExpertFuture
from torchweft.experts.client.remote import RemoteExpert
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
