"""The HTTP server: what a stranger can do to it, and that the experts do not notice."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.experts.panel.panel_cases import PATIENCE, address, exchange
from weft.core.errors import UsageError
from weft.experts.panel.answer import Answer
from weft.experts.panel.listener import Bounds, Listener
from weft.experts.panel.request import Request
from weft.experts.server.loop import LoopThread

pytestmark = pytest.mark.timeout(30)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Listening = Callable[..., str]


def respond(request: Request) -> Answer:
    if request.path == "/broken":
        raise RuntimeError("secret")
    return Answer(200, b"x" * 20_000_000 if request.path == "/large" else b"hello")


@pytest.fixture
def listening() -> Iterator[Listening]:
    loop = LoopThread("panel")
    made: list[Listener] = []

    def start(**bounds: float) -> str:
        found = Listener(respond, Bounds(**bounds))  # type: ignore[arg-type]
        made.append(found)
        return f"http://127.0.0.1:{loop.run(found.start('127.0.0.1', 0), PATIENCE)}/"

    yield start
    for each in made:
        loop.run(each.stop(), PATIENCE)
        assert not each._tasks
    assert loop.close(PATIENCE)


def test_one_request_one_answer_and_the_end(listening: Listening) -> None:
    found = exchange(listening(), GET + GET)
    assert found.startswith(b"HTTP/1.1 200 OK\r\n") and found.endswith(b"\r\n\r\nhello") and found.count(b"HTTP") == 1


def test_head_is_told_the_length_and_nothing_else(listening: Listening) -> None:
    found = exchange(listening(), b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"Content-Length: 5\r\n" in found and found.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"DELETE / HTTP/1.1\r\nHost: a\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000, b"431"),
        (b"a" * 60_000, b"431"),
        (b"GET /broken HTTP/1.1\r\nHost: a\r\n\r\n", b"500"),
    ],
)
def test_what_is_wrong_gets_its_status(listening: Listening, sent: bytes, status: bytes) -> None:
    url = listening()
    found = exchange(url, sent)
    assert found.split()[1] == status and b"secret" not in found
    assert exchange(url, GET).endswith(b"hello")


def test_a_405_says_what_is_allowed(listening: Listening) -> None:
    assert b"Allow: GET, HEAD\r\n" in exchange(listening(), b"PUT / HTTP/1.1\r\nHost: a\r\n\r\n")


def test_who_sends_slowly_is_told_and_left(listening: Listening) -> None:
    start = time.monotonic()
    with socket.create_connection(address(listening(head_seconds=0.2)), timeout=PATIENCE) as stream:
        stream.sendall(b"GET / HTT")
        assert stream.recv(4096).startswith(b"HTTP/1.1 408 ")
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(4096):
            pass
    assert 0.15 < time.monotonic() - start < 5.0


def test_who_takes_its_answer_slowly_is_left(listening: Listening) -> None:
    with socket.create_connection(address(listening(send_seconds=0.3)), timeout=PATIENCE) as stream:
        stream.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(1.0)
        taken = 0
        while chunk := stream.recv(1 << 20):
            taken += len(chunk)
        assert taken < 20_000_000  # what it lacks, Content-Length tells


def test_more_connections_than_allowed_are_turned_away_until_some_end(listening: Listening) -> None:
    url = listening(connections=3)
    held = [socket.create_connection(address(url), timeout=PATIENCE) for _ in range(3)]
    time.sleep(0.1)
    with socket.create_connection(address(url), timeout=PATIENCE) as stream:
        assert stream.recv(4096).startswith(b"HTTP/1.1 503 ")
    for each in held:
        each.close()
    end = time.monotonic() + PATIENCE
    found = b""
    while b"hello" not in found:
        assert time.monotonic() < end, found
        with suppress(ConnectionResetError):  # turned away while it was sending
            found = exchange(url, GET)


def test_stop_does_not_wait_for_anybody() -> None:
    loop = LoopThread("panel")
    listener = Listener(respond)
    port = loop.run(listener.start("127.0.0.1", 0), PATIENCE)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stream:
        stream.sendall(b"GET")
        time.sleep(0.05)
        start = time.monotonic()
        loop.run(listener.stop(), PATIENCE)
        assert stream.recv(4096) == b"" and time.monotonic() - start < 2.0
    assert loop.close(PATIENCE)


def test_a_port_that_is_taken_is_misuse(listening: Listening) -> None:
    _, port = address(listening())
    loop = LoopThread("panel")
    try:
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*taken"):
            loop.run(Listener(respond).start("127.0.0.1", port), PATIENCE)
    finally:
        assert loop.close(PATIENCE)
