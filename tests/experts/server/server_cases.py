"""Access to private parts of a server."""

from torchweft.experts import ExpertBackend
from torchweft.experts.server import Access, Server
from torchweft.experts.server.server_stream import ByteBudget


def backend_of(server: Server, uid: str = "fussy") -> ExpertBackend:
    return server._dispatcher.experts()[uid].backend


def access_of(server: Server) -> Access:
    return server._dispatcher.access


def budget_of(server: Server) -> ByteBudget:
    return server._grpc_server.handlers.budget
