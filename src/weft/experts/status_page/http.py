"""HTTP server of the panel: Starlette on uvicorn, in a thread and an event loop of its own.

    GET /    the status page, which draws the next    GET /status.json    ``Server.status()``
                                                      GET /metrics        for Prometheus

On loopback it answers only to names of this machine (a web page whose name was made to point here would read it in a
visitor's browser: DNS rebinding), and beyond loopback only to the names in `allowed_hosts` and with the token. It
changes nothing. The thread is apart from the one of gRPC, so that a flood of requests competes with others only.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from operator import attrgetter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.core.errors import UsageError
from weft.core.validation import Validator, token_fault
from weft.experts.address import is_loopback, parse_address
from weft.experts.status_page.metrics import Status, exposition

STATUS_SECONDS = 0.2
"""Age up to which a status is answered again: polling often costs the experts little."""
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 10.0
"""Time for a whole request, from its first byte, or from the connection, to the last byte of the response."""
_MAX_HEAD_BYTES = 8192
_MIN_TOKEN = 16

_PAGE = (files(__package__ or "") / "page.html").read_text("utf-8")


def _source(tag: str) -> str:
    """The page's one element of this kind, as a source of the Content Security Policy."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    digest = hashlib.sha256((found[1] if found else "").encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_source('script')}; style-src {_source('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class PanelOptions:
    """Where the panel listens and who may read it.

    Args:
        address: host and port; port 0 takes a free one.
        allowed_hosts: names by which browsers and scrapers may call it, without port. Numeric addresses are always
            allowed: they cannot be made to point elsewhere. Needed beyond loopback.
        token: at least 16 characters, shown as ``Authorization: Bearer TOKEN``, or as the password of HTTP basic
            authentication (the user's name does not matter), which browsers ask for. Needed beyond loopback.

    The panel speaks plain HTTP: beyond loopback, put it into a private network or behind a proxy with TLS.
    Raises ``UsageError`` that lists all faults.
    """

    address: str
    allowed_hosts: Sequence[str] = ()
    token: str | None = None

    def __post_init__(self) -> None:
        host, _ = parse_address(self.address)
        hosts: Any = self.allowed_hosts
        with Validator("invalid panel options") as check:
            fault = token_fault(self.token)
            check.add(*fault)
            if self.token is not None and not fault:
                size = len(self.token)
                check.that(size >= _MIN_TOKEN, f"token has {size} characters, wanted at least {_MIN_TOKEN}")
            named = not isinstance(hosts, str) and all(isinstance(name, str) and name for name in hosts)
            check.that(named, f"allowed_hosts is {hosts!r}, wanted a list of names such as 'gpu7.example'")
            if not is_loopback(host):
                beyond = f"address {self.address!r} is reached by other machines:"
                check.that(bool(hosts), f"{beyond} name in allowed_hosts how the panel is called there")
                wanted = f"{beyond} give a token that readers have to show, or listen at 127.0.0.1"
                check.that(self.token is not None, wanted)


class StatusServer:
    """The panel of one server, from `start` to `stop`. ``status`` is called in its thread, and must not wait."""

    def __init__(self, options: PanelOptions | str, status: Callable[[], Status]) -> None:
        self._options = PanelOptions(options) if isinstance(options, str) else options
        self._host, self._port = parse_address(self._options.address)
        self._loopback = is_loopback(self._host)
        self._hosts = {host.lower() for host in self._options.allowed_hosts}
        self._status = status
        self._latest: tuple[float, Status] | None = None
        self._thread: threading.Thread | None = None
        self._server: Server | None = None
        handlers = {"/": self._page, "/status.json": self._status_json, "/metrics": self._metrics}
        router = Router([Route(path, handler) for path, handler in handlers.items()], redirect_slashes=False)
        self._app = ServerErrorMiddleware(router, handler=_failed)

    @property
    def url(self) -> str:
        """Where the page is; after the start."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/"

    def start(self) -> None:
        """Listen. Raises ``UsageError`` if the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            where = self._options.address
            raise UsageError(f"the panel cannot listen at {where}: {error}; is the port taken?") from None
        self._port = listener.getsockname()[1]
        config = Config(
            self._answer,
            interface="asgi3",
            http=_Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            backlog=MAX_CONNECTIONS,  # also how many connections one turn of the loop accepts
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )
        self._server = Server(config)
        run = partial(self._server.run, sockets=[listener])  # which closes it at the end
        self._thread = threading.Thread(target=run, name="weft-panel", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop listening, drop all connections, and end the thread. May be called twice, and without a start."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: check host and token, and add the security headers to every response."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(Headers(scope=scope)) or self._app)(scope, receive, with_headers)

    # Handlers are coroutines, so that they run in the loop's own thread and need no pool beside it.

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(_PAGE)

    async def _status_json(self, _: Request) -> Response:
        # In ASCII, since a name may hold lone surrogates, which UTF-8 cannot encode.
        return Response(json.dumps(self._recent()), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        body, kind = exposition(self._recent(), request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": kind})

    def _recent(self) -> Status:
        now = time.monotonic()
        if self._latest is None or now >= self._latest[0] + STATUS_SECONDS:
            self._latest = now, self._status()
        return self._latest[1]

    def _refusal(self, headers: Headers) -> Response | None:
        if not self._is_allowed(headers.get("host", "")):
            wanted = "127.0.0.1 or localhost" if self._loopback else "one of its allowed_hosts"
            return PlainTextResponse(f"this panel is called by another name: use {wanted}\n", 421)
        token = self._options.token
        if token is None or hmac.compare_digest(_shown_token(headers).encode(), token.encode()):
            return None
        asked = {"WWW-Authenticate": 'Basic realm="weft", charset="UTF-8"'}
        return PlainTextResponse("show the panel's token as bearer token, or as password\n", 401, asked)

    def _is_allowed(self, header: str) -> bool:
        value = header.strip().lower()
        host = value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]
        try:
            ipaddress.ip_address(host)
        except ValueError:
            local = self._loopback and (host == "localhost" or host.endswith(".localhost"))
            return local or host in self._hosts
        return True


async def _failed(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"the status cannot be made: {type(error).__name__}\n", 500)  # the next may do better


def _shown_token(headers: Headers) -> str:
    """The token of a request: a bearer token or a password; "" if there is none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return value.strip() if scheme.lower() == "bearer" else ""


class _Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with what it lacks against silent clients: a deadline and a bound.

    Beyond `MAX_CONNECTIONS` the oldest one without a request under way makes room for Prometheus.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _SILENT  # uvicorn would log a line for each invalid request of a stranger
        self.access_log = False
        self._made_at = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._restart_deadline()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [each for each in self.connections if isinstance(each, _Connection) and each._is_idle()]
            min(idle, key=attrgetter("_made_at")).transport.abort()  # there is one: this one has no request yet

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_deadline()

    def _is_idle(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def _restart_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)


_SILENT = logging.getLogger("weft.experts.status_page.requests")
_SILENT.setLevel(logging.CRITICAL)
