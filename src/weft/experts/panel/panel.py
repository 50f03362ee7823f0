"""The panel of one server: what is asked for by which path, and who may ask.

    GET /               the page              GET /status.json         Server.status(), as ``weft status --json`` has it
    GET /metrics        for Prometheus        GET /status.json?page    what the page's script wants

It has no passwords, so it listens where it is told to, which had better be 127.0.0.1. There it answers only to
names of this machine: a page elsewhere, whose name was made to point here, would read it in a visitor's browser (DNS
rebinding). All answers within a fifth of a second are of one status, so that asking often costs the experts little.
"""

import ipaddress
import json
import time
from collections.abc import Callable

from weft.experts.panel.answer import HTML, JSON, Answer, plain
from weft.experts.panel.listener import Bounds, Listener
from weft.experts.panel.metrics import exposition
from weft.experts.panel.page import page, parts, title
from weft.experts.panel.request import Request, host_name
from weft.experts.panel.summary import Status
from weft.experts.service.address import split

FRESH = 0.2
"""Seconds for which a status is shown again."""


class Panel:
    """Made, started and stopped in the loop's thread.

    Args:
        address: host and port to listen at; port 0 takes a free one.
        status: called in the loop's thread; must not wait.
        bounds: on clients.

    Raises ``UsageError`` for an address that is none.
    """

    def __init__(self, address: str, status: Callable[[], Status], bounds: Bounds | None = None) -> None:
        self.host, self._port = split(address)
        self.port = 0
        self._status = status
        self._listener = Listener(self.respond, bounds)
        self._seen: Status | None = None
        self._made: dict[str, Answer] = {}
        self._until = 0.0
        self._local = _is_loopback(self.host)

    @property
    def url(self) -> str:
        """Where the page is; after the start."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    async def start(self) -> None:
        """Listen. Raises ``UsageError`` if the address cannot be had."""
        self.port = await self._listener.start(self.host, self._port)

    async def stop(self) -> None:
        """Listen no more."""
        await self._listener.stop()

    def respond(self, request: Request) -> Answer:
        """The answer to a request."""
        if self._local and not _is_here(host_name(request.fields.get("host", "localhost"))):
            return plain(421, "this panel is for its own machine: ask for it by 127.0.0.1 or localhost")
        wanted = _wanted(request)
        if wanted not in _MAKERS:
            return plain(404, "there is nothing here but /, /status.json and /metrics")
        status = self._fresh()
        if wanted not in self._made:
            self._made[wanted] = _MAKERS[wanted](status)
        return self._made[wanted]

    def _fresh(self) -> Status:
        now = time.monotonic()
        if self._seen is None or now >= self._until:
            self._made.clear()
            self._seen, self._until = self._status(), now + FRESH
        return self._seen


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_here(host: str) -> bool:
    """A number cannot be made to point elsewhere, and neither can localhost."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return True


def _wanted(request: Request) -> str:
    """A key of the table below: the path, and what else decides. No path has a question mark."""
    if request.path == "/metrics" and "application/openmetrics-text" in request.fields.get("accept", ""):
        return "/metrics?open"
    return "/status.json?page" if (request.path, request.query) == ("/status.json", "page") else request.path


def _page(status: Status) -> Answer:
    return Answer(200, page(status).encode(), HTML)


def _json(status: Status) -> Answer:
    return Answer(200, json.dumps(status).encode(), JSON)


def _parts(status: Status) -> Answer:
    return Answer(200, json.dumps({"title": title(status), "parts": parts(status), "status": status}).encode(), JSON)


def _metrics(status: Status) -> Answer:
    return Answer(200, *exposition(status, openmetrics=False))


def _open_metrics(status: Status) -> Answer:
    return Answer(200, *exposition(status, openmetrics=True))


_MAKERS: dict[str, Callable[[Status], Answer]] = {
    "/": _page,
    "/status.json": _json,
    "/status.json?page": _parts,
    "/metrics": _metrics,
    "/metrics?open": _open_metrics,
}
