"""The head of an HTTP request, as text that a stranger sent: GET or HEAD, or it is refused with the right status.

    GET /status.json?page HTTP/1.1\r\n Host: 127.0.0.1:9090\r\n Accept: ...\r\n\r\n   ->   Request
    anything else                                                                     ->   RefusedRequest

No body is wanted, nothing is decoded beyond ASCII, and whatever could be read in two ways is refused (RFC 9112).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

HEAD_BYTES = 8192
"""The most that a head may take; ``request line`` and the number of fields have limits within it."""
_LINE = 2048
_FIELDS = 64
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(r"/[!-~]*")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")


@dataclass(frozen=True)
class Request:
    """``path`` and ``query`` as they came, in ASCII; names of ``fields`` in lower case."""

    method: str
    path: str
    query: str
    fields: Mapping[str, str]


class RefusedRequest(Exception):
    """Answered with this status and these words. It never leaves this package."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def parse(head: bytes) -> Request:
    """Read a head with the empty line at its end. Raises `RefusedRequest`, and nothing else."""
    line, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if len(line) > _LINE:
        raise RefusedRequest(414, f"the request line takes {len(line)} bytes, at most {_LINE} are read")
    method, target, version = _words(line)
    if len(lines) > _FIELDS:
        raise RefusedRequest(431, f"there are {len(lines)} header fields, at most {_FIELDS} are read")
    fields = _fields(lines)
    if version == "HTTP/1.1" and "host" not in fields:
        raise RefusedRequest(400, "HTTP/1.1 wants a Host field")
    if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
        raise RefusedRequest(413, "no body is read here")
    if method not in ("GET", "HEAD"):
        raise RefusedRequest(405, f"the method is {method}, and only GET and HEAD are answered")
    path, _, query = target.partition("?")
    return Request(method, path, query, fields)


def host_name(value: str) -> str:
    """The name in a Host field, without the port and the brackets of IPv6, in lower case."""
    name = value.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _words(line: str) -> tuple[str, str, str]:
    words = line.split(" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _TARGET.fullmatch(words[1]):
        raise RefusedRequest(400, "the request line is not: METHOD /path HTTP/1.1")
    if words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise RefusedRequest(505 if words[2].startswith("HTTP/") else 400, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    return words[0], words[1], words[2]


def _fields(lines: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise RefusedRequest(400, "a header field is not: Name: value")
        key = name.lower()
        if key in fields and key in ("host", "content-length"):
            raise RefusedRequest(400, f"there are two {name} fields")
        fields[key] = value.strip(" \t")
    return fields
