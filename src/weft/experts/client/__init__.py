"""The client: experts of other processes and machines, as layers.

remote.py       RemoteExpert, what users see          group.py       many at once
journey.py      a call as one node of autograd        anchor.py      by which autograd finds it
signature.py    what a call looks like                key.py         of a forward and its backward
arguments.py    what is wrong with options            command.py     ``weft status``
asking.py       info, forward, backward, commit       accumulation.py, remembered.py   mini-batches, recomputation
fencing.py      who asks, and under which fence       progress.py    what answers tell of the expert
line.py         deadlines, repetition                 retry.py       the rule of repetition
route.py        which server to ask                   connections.py one connection per server
fixed.py        addresses that never change
transport.py    the protocol of a way                 local.py       the one without a network
channel.py      the one over gRPC                     stream.py      its stream          pending.py   who waits
tls.py          how a client shows itself             refusal.py     what to do when it is turned away
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.client.asking import CallOptions
from weft.experts.client.channel import GrpcTransport
from weft.experts.client.connections import Connections
from weft.experts.client.group import commit, create_remote_experts, discard
from weft.experts.client.local import LocalTransport
from weft.experts.client.remote import RemoteExpert
from weft.experts.client.retry import NEVER, Retry
from weft.experts.client.transport import Transport, TransportStatistics
from weft.experts.errors import StepsLostWarning
from weft.experts.tls import ClientTls

__all__ = [
    "NEVER",
    "CallOptions",
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
