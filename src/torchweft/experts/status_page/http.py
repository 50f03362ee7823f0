"""HTTP server of the panel: Starlette on uvicorn, in a thread and an event loop of its own.

    GET /    the status page, which fetches the next    GET /status.json    `page_status` of ``Server.status()``
             (without a script: the experts)            GET /metrics        for Prometheus

The panel changes nothing. On loopback it answers only requests for names of this machine: a web page whose name was
made to point here could otherwise read it in a visitor's browser (DNS rebinding). Beyond loopback it answers only for
the names in `allowed_hosts`, and with the token. Its thread is not the one of gRPC, so that a flood of requests slows
down the panel and not the experts.
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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
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

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator, token_fault
from torchweft.experts.address import is_loopback, parse_address
from torchweft.experts.status_page.metrics import Status, exposition, page_status
from torchweft.experts.status_page.recent import PERIOD, RecentCounters

STATUS_SECONDS = 0.2
"""Age up to which a status is reused, so that frequent polling costs the experts little."""
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 10.0
"""Time from the connection, or the previous response, to the last byte of the response."""
_MAX_HEAD_BYTES = 8192
_MIN_TOKEN = 16

_PAGE = (files(__package__ or "") / "page.html").read_text("utf-8")
_STATIC = "<!-- experts -->"


def _policy_source(tag: str) -> str:
    """The hash of the page's only element of this kind, as a source of the Content Security Policy."""
    match = re.search(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    digest = hashlib.sha256((match[1] if match else "").encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_policy_source('script')}; "
    f"style-src {_policy_source('style')}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class PanelOptions:
    """Address and readers of the panel.

    Args:
        address: host and port. Port 0 takes a free one.
        allowed_hosts: names by which browsers and scrapers call the panel, without port. Required beyond loopback.
            Numeric addresses are always allowed, because they cannot be made to point elsewhere.
        token: at least 16 characters. Required beyond loopback. Readers send it as ``Authorization: Bearer TOKEN``, or
            as the password of HTTP basic authentication with any user name, which browsers ask for.

    The panel serves plain HTTP. Beyond loopback, use a private network or a proxy with TLS. Raises ``UsageError`` that
    lists every fault.
    """

    address: str
    allowed_hosts: Sequence[str] = ()
    token: str | None = None

    def __post_init__(self) -> None:
        host, _ = parse_address(self.address)
        hosts: Any = self.allowed_hosts
        with Validator("invalid panel options") as check:
            faults = token_fault(self.token)
            check.add(*faults)
            if self.token is not None and not faults:
                size = len(self.token)
                check.require(size >= _MIN_TOKEN, f"token has {size} characters, wanted at least {_MIN_TOKEN}")
            valid = not isinstance(hosts, str) and all(isinstance(name, str) and name for name in hosts)
            check.require(valid, f"allowed_hosts is {hosts!r}, wanted a list of names such as 'gpu7.example'")
            if not is_loopback(host):
                public = f"other machines can reach address {self.address!r}:"
                check.require(bool(hosts), f"{public} list in allowed_hosts the names by which they call the panel")
                check.require(self.token is not None, f"{public} give a token for its readers, or listen at 127.0.0.1")


class StatusServer:
    """The panel of one server, from `start` to `stop`. ``status`` is called in its thread, and must not block."""

    def __init__(self, options: PanelOptions | str, status: Callable[[], Status]) -> None:
        self._options = PanelOptions(options) if isinstance(options, str) else options
        self._host, self._port = parse_address(self._options.address)
        self._loopback = is_loopback(self._host)
        self._hosts = {host.lower() for host in self._options.allowed_hosts}
        self._status = status
        self._latest: tuple[float, Status] | None = None
        self._recent, self._sampled = RecentCounters(), 0.0
        self._thread: threading.Thread | None = None
        self._server: Server | None = None
        handlers = {"/": self._send_page, "/status.json": self._send_status, "/metrics": self._send_metrics}
        router = Router([Route(path, handler) for path, handler in handlers.items()], redirect_slashes=False)
        self._app = ServerErrorMiddleware(router, handler=_report_failure)

    @property
    def url(self) -> str:
        """Address of the page, valid after the start."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/"

    def start(self) -> None:
        """Listen. Raises ``UsageError`` if the address is not available."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            where = self._options.address
            raise UsageError(f"the panel cannot listen at {where}: {error}; is the port taken?") from None
        self._port = listener.getsockname()[1]
        config = Config(
            self._handle_request,
            interface="asgi3",
            http=_Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            backlog=MAX_CONNECTIONS,  # also the number of connections that one turn of the loop accepts
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            callback_notify=self._sample_counters,
            timeout_notify=1,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )
        self._sampled = time.monotonic()
        self._server = Server(config)
        run = partial(self._server.run, sockets=[listener])  # closes the listener at the end
        self._thread = threading.Thread(target=run, name="torchweft-panel", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop listening, drop all connections, and end the thread. Can be called twice, and without a start."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True  # uvicorn's documented way to end it from another thread
            self._thread.join(seconds)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: check host and token, and add the security headers to every response."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._check_access(Headers(scope=scope)) or self._app)(scope, receive, with_headers)

    # The handlers are coroutines: Starlette would run plain functions in a pool of further threads.

    async def _send_page(self, _: Request) -> Response:
        return HTMLResponse(_PAGE.replace(_STATIC, _static_table(page_status(self._current_status(), self._recent))))

    async def _send_status(self, _: Request) -> Response:
        # ASCII, because a name can contain lone surrogates, which UTF-8 cannot encode.
        answer = page_status(self._current_status(), self._recent)
        return Response(json.dumps(answer), media_type="application/json")

    async def _send_metrics(self, request: Request) -> Response:
        body, content_type = exposition(self._current_status(), request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    def _current_status(self) -> Status:
        now = time.monotonic()
        if self._latest is None or now >= self._latest[0] + STATUS_SECONDS:
            self._latest = now, self._status()
        return self._latest[1]

    async def _sample_counters(self) -> None:
        """Called by uvicorn every second."""
        if time.monotonic() >= self._sampled + PERIOD:
            self._sampled = time.monotonic()
            # An exception would end the panel. The next reader gets it as an answer.
            with suppress(Exception):
                self._recent.note(self._current_status())

    def _check_access(self, headers: Headers) -> Response | None:
        """The response for a request that is not allowed; None if it is."""
        if not self._is_known_host(headers.get("host", "")):
            wanted = "127.0.0.1 or localhost" if self._loopback else "one of its allowed_hosts"
            return PlainTextResponse(f"this panel is called by another name: use {wanted}\n", 421)
        token = self._options.token
        if token is None or hmac.compare_digest(_sent_token(headers).encode(), token.encode()):
            return None
        challenge = {"WWW-Authenticate": 'Basic realm="torchweft", charset="UTF-8"'}
        return PlainTextResponse("show the panel's token as bearer token, or as password\n", 401, challenge)

    def _is_known_host(self, header: str) -> bool:
        value = header.strip().lower()
        host = value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]
        try:
            ipaddress.ip_address(host)
        except ValueError:
            local = self._loopback and (host == "localhost" or host.endswith(".localhost"))
            return local or host in self._hosts
        return True


def _static_table(status: Status) -> str:
    """The table of experts without a script, which cannot fetch, sort or filter it."""
    names = [f"{name} {unit}".strip() for name, unit in status["recent"]["columns"]]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows: list[str] = []
    for uid, *numbers in status["recent"]["rows"]:
        cells = ["\u2013" if number is None else f"{number:,}".removesuffix(".0") for number in numbers]
        name = escape(uid.encode("utf-8", "replace").decode())  # lone surrogates cannot be encoded
        pairs = zip(names[1:], cells, strict=True)
        row = "".join(f'<td data-column="{column}"><bdi>{cell}</bdi></td>' for column, cell in pairs)
        rows.append(f'<tr><th scope="row">{name}</th>{row}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


async def _report_failure(_: Request, error: Exception) -> Response:
    # Only the type: a message can quote data that is not for readers of the panel.
    return PlainTextResponse(f"the status cannot be made: {type(error).__name__}\n", 500)


def _sent_token(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return value.strip() if scheme.lower() == "bearer" else ""


class _Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with a deadline and a bound against silent clients.

    Beyond `MAX_CONNECTIONS`, the oldest connection without a running request is dropped, so that silent clients cannot
    lock Prometheus out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _SILENT  # uvicorn would log a line for every invalid request, which strangers can send
        self.access_log = False
        self._made_at = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._restart_deadline()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [other for other in self.connections if isinstance(other, _Connection) and other._is_idle()]
            min(idle, key=attrgetter("_made_at")).transport.abort()  # never empty: this one has no request yet

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


_SILENT = logging.getLogger("torchweft.experts.status_page.requests")
_SILENT.setLevel(logging.CRITICAL)
