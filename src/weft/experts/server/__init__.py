"""The server: experts behind an address, for many clients at once.

server.py      Server, what users see                 options.py    limits and certificates
desk.py        calls in, one answer each              access.py     roles, grants, and the audit of refusals
endpoint.py    gRPC: streams, health, reflection      identity.py   who a connection belongs to
connection.py  one stream, and its answers            served.py     one expert, restored and saved
presence.py    the entry in the directory             repeat.py, loop.py   its threads
statistics.py  what it says of itself                 command.py    ``weft serve``
config.py      what that reads (with config_*.py)     place.py      where it listens and is listed
tls.py         certificates, checked and renewed      budget.py     bytes of all calls together
runtimes.py    a thread for each device               hyperparameters.py   where a checkpoint says otherwise
observed.py    a desk that an observer listens to
replicas.py    experts that others serve too, see weft.experts.replica
neighbours.py  who else is alive
memory.py      what is freed stays in the process; large pages
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.panel.http import PanelOptions
from weft.experts.server.access import Access, Audit, Caller, Grant, Refusal, Role
from weft.experts.server.desk import Desk
from weft.experts.server.memory import keep_freed_memory, use_large_pages
from weft.experts.server.options import ServerOptions, ServerTls
from weft.experts.server.served import Served
from weft.experts.server.server import Server
from weft.experts.server.statistics import KeepingStatistics, ServerStatistics

__all__ = [
    "Access",
    "Audit",
    "Caller",
    "Desk",
    "Grant",
    "KeepingStatistics",
    "PanelOptions",
    "Refusal",
    "Role",
    "Served",
    "Server",
    "ServerOptions",
    "ServerStatistics",
    "ServerTls",
    "keep_freed_memory",
    "use_large_pages",
]
