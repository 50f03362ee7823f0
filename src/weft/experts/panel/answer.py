"""An HTTP response, and the headers that keep a page to itself.

The page may run its own script and no other, known by its hash; it may ask its own server and nobody else; no other
page may hold it in a frame. All of that is told to the browser with every answer (Content Security Policy 3).
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from weft.experts.panel.script import SCRIPT
from weft.experts.panel.style import STYLE

TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"


def _hash(words: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(words.encode()).digest()).decode()}'"


POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hash(SCRIPT)}",
        f"style-src {_hash(STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_ALWAYS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


@dataclass(frozen=True)
class Answer:
    """A status, a body of this kind, and header fields beyond those that every answer has."""

    status: int
    body: bytes
    kind: str = TEXT
    fields: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_bytes(self, *, bare: bool = False) -> bytes:
        """As it is sent; ``bare``: without the body, as HEAD wants it."""
        fields = {"Content-Type": self.kind, "Content-Length": str(len(self.body)), **_ALWAYS, **self.fields}
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
        return head if bare else head + self.body


def plain(status: int, words: str) -> Answer:
    """A sentence, for whoever did not get what it asked for."""
    allowed = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
    return Answer(status, f"{words}\n".encode(), TEXT, allowed)
