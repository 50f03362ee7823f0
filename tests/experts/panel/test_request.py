"""The head of a request: what is read, and that nothing else gets through or raises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.experts.panel.request import RefusedRequest, Request, host_name, parse

GOOD = b"GET /status.json?page HTTP/1.1\r\nHost: localhost:80\r\nAccept:  text/html \r\n\r\n"


def test_a_good_head_is_read() -> None:
    wanted = Request("GET", "/status.json", "page", {"host": "localhost:80", "accept": "text/html"})
    assert parse(GOOD) == wanted
    assert parse(b"HEAD / HTTP/1.0\r\n\r\n") == Request("HEAD", "/", "", {})


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 70 + b"\r\n", 431),
    ],
)
def test_what_is_refused_and_how(head: bytes, status: int) -> None:
    with pytest.raises(RefusedRequest) as caught:
        parse(head)
    assert caught.value.status == status


@given(st.binary(max_size=300) | st.lists(st.sampled_from([GOOD, b"\r\n", b" ", b":", b"GET", b"\x00"])).map(b"".join))
def test_any_bytes_are_read_or_refused(head: bytes) -> None:
    try:
        found = parse(head)
    except RefusedRequest as error:
        assert 400 <= error.status <= 505
    else:
        assert found.method in ("GET", "HEAD") and found.path.startswith("/") and "?" not in found.path
        assert not any(c in value for value in found.fields.values() for c in "\r\n\x00")


def test_the_name_of_a_host_field() -> None:
    seen = [host_name(value) for value in ("LocalHost:80", "[::1]:80", "127.0.0.1", "[::1]", "")]
    assert seen == ["localhost", "::1", "127.0.0.1", "::1", ""]
