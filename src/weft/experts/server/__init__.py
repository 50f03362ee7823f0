"""The server: experts at an address, for many clients at once.

server.py         Server: the order of start and end     options.py            quotas, addresses, memory
grpc_server.py    gRPC: streams, health, reflection      server_stream.py      one stream, its answers, bytes of all
auth.py           callers, roles, grants, audit          dispatcher.py         calls in, one answer each
hosted_expert.py  one expert, restored and saved         background.py         threads, and how they end
server_lease.py   its entry in the directory             server_statistics.py  counters of a server
config.py         the file of ``weft serve``             command.py            ``weft serve``
"""

from weft.experts import extras as extras  # reports missing packages before they are imported
from weft.experts.server.auth import Access, Audit, Caller, Grant, Refusal, Role
from weft.experts.server.dispatcher import RequestDispatcher
from weft.experts.server.hosted_expert import HostedExpert
from weft.experts.server.options import ServerOptions, keep_freed_memory, use_large_pages
from weft.experts.server.server import Server
from weft.experts.server.server_statistics import CheckpointStatistics, ServerStatistics
from weft.experts.status_page.http import PanelOptions
from weft.experts.tls import ServerTls

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
