"""The server: experts at an address, for many clients at once.

server.py         Server: the order of start and end     options.py            quotas, addresses, memory
grpc_server.py    gRPC: streams, health, reflection      server_stream.py      one stream, its answers, bytes of all
auth.py           callers, roles, grants, audit          dispatcher.py         calls in, one answer each
hosted_expert.py  one expert, restored and saved         background.py         threads and the lease, and how they end
config.py         the file of ``torchweft serve``        command.py            ``torchweft serve``
"""

from torchweft.experts import extras as extras  # reports missing packages before they are imported
from torchweft.experts.server.auth import Access, Audit, Caller, Grant, Refusal, Role
from torchweft.experts.server.dispatcher import RequestDispatcher
from torchweft.experts.server.hosted_expert import HostedExpert
from torchweft.experts.server.options import ServerOptions, keep_freed_memory, use_large_pages
from torchweft.experts.server.server import Server
from torchweft.experts.statistics import CheckpointStatistics, ServerStatistics
from torchweft.experts.status_page.http import PanelOptions
from torchweft.experts.tls import ServerTls

__all__ = [
    "Access",
    "Audit",
    "Caller",
    "CheckpointStatistics",
    "Grant",
    "HostedExpert",
    "PanelOptions",
    "Refusal",
    "RequestDispatcher",
    "Role",
    "Server",
    "ServerOptions",
    "ServerStatistics",
    "ServerTls",
    "keep_freed_memory",
    "use_large_pages",
]
