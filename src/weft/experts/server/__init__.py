"""The server: experts behind an address, for many clients at once.

server.py         Server, what users see                options.py     limits, and where it listens
grpc_server.py    gRPC: streams, health, reflection     auth.py        who calls, roles, grants, audit
stream.py         one stream, and its answers           dispatcher.py  calls in, one answer each
hosted_expert.py  one expert, restored and saved        statistics.py  what it reports
threads.py        periodic tasks, an asyncio loop       malloc.py      freed memory stays in the process; large pages
config.py         the file of ``weft serve``            command.py     ``weft serve``
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.panel.http import PanelOptions
from weft.experts.server.auth import Access, Audit, Caller, Grant, Refusal, Role
from weft.experts.server.dispatcher import RequestDispatcher
from weft.experts.server.hosted_expert import HostedExpert
from weft.experts.server.malloc import keep_freed_memory, use_large_pages
from weft.experts.server.options import ServerOptions
from weft.experts.server.server import Server
from weft.experts.server.statistics import KeepingStatistics, ServerStatistics
from weft.experts.tls import ServerTls

__all__ = [
    "Access",
    "Audit",
    "Caller",
    "Grant",
    "HostedExpert",
    "KeepingStatistics",
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
