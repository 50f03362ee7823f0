"""HTTP of the panel: which requests are admitted, and clients that are silent, slow or malformed."""

import base64
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.experts.concurrency import wait_until
from tests.experts.status_page.panel_cases import NASTY, PATIENCE, address, exchange, get, status
from torchweft.core.errors import UsageError
from torchweft.experts.status_page import http
from torchweft.experts.status_page.http import PanelOptions, StatusServer

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
TOKEN = "a-token-of-20-characters"
Listening = Callable[..., str]


@pytest.fixture
def listening() -> Iterator[Listening]:
    servers: list[StatusServer] = []

    def start(options: PanelOptions | str = "127.0.0.1:0", make_status: Callable[[], Any] = status) -> str:
        servers.append(StatusServer(options, make_status))
        servers[-1].start()
        return servers[-1].url.replace("0.0.0.0", "127.0.0.1")

    yield start
    for server in servers:
        server.stop(PATIENCE)
        assert server._thread is not None and not server._thread.is_alive()


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"reader:{password}".encode()).decode()


def test_beyond_loopback_a_panel_needs_hosts_and_a_token() -> None:
    for where in ("0.0.0.0:9090", "[::]:9090", "10.0.0.1:9090", "gpu7.example:9090"):
        with pytest.raises(UsageError, match=r"(?s)invalid panel options.*allowed_hosts.*token"):
            PanelOptions(where)
    with pytest.raises(UsageError, match="16"):
        PanelOptions("127.0.0.1:0", token="short")
    with pytest.raises(UsageError, match="list of names"):
        PanelOptions("127.0.0.1:0", allowed_hosts="gpu7.example")
    PanelOptions("127.0.0.1:0")


def test_only_the_token_opens_a_panel_that_has_one(listening: Listening) -> None:
    url = listening(PanelOptions("0.0.0.0:0", allowed_hosts=["gpu7.example"], token=TOKEN))
    for path in ("/", "/status.json", "/metrics", "/nothing"):
        code, fields, body = get(url, path, Host="gpu7.example")
        assert code == 401 and "Basic" in fields["www-authenticate"] and "torchweft_" not in body
    wrong = ["Bearer wrong", f"Bearer {TOKEN}x", basic(""), "Basic ???", "Bearer", f"Digest {TOKEN}"]
    assert [get(url, Authorization=value)[0] for value in wrong] == [401] * len(wrong)
    assert [get(url, Authorization=value)[0] for value in (f"Bearer {TOKEN}", basic(TOKEN))] == [200, 200]


@pytest.mark.parametrize(
    ("beyond", "host", "code"),
    [
        (True, "gpu7.example:9090", 200),
        (True, "GPU7.example", 200),
        (True, "evil.example", 421),
        (True, "127.0.0.1:1", 200),
        (True, "localhost", 421),
        (False, "evil.example", 421),
        (False, "127.0.0.1.evil.example", 421),
        (False, "localhost:1", 200),
        (False, "[::1]:5", 200),
    ],
)
def test_panel_answers_only_to_its_names(listening: Listening, beyond: bool, host: str, code: int) -> None:
    named = PanelOptions("0.0.0.0:0", allowed_hosts=["gpu7.example"], token=TOKEN)
    url = listening(named) if beyond else listening()
    assert get(url, Host=host, Authorization=f"Bearer {TOKEN}")[0] == code


def test_silent_clients_do_not_keep_prometheus_out(listening: Listening) -> None:
    url = listening()
    held = [socket.create_connection(address(url), timeout=PATIENCE) for _ in range(2 * http.MAX_CONNECTIONS)]
    for connection in held[::2]:
        connection.sendall(b"GET /metrics HT")
    for _ in range(3):
        assert get(url, "/metrics", Connection="close")[0] == 200
    for connection in held:
        connection.close()


def test_a_client_that_sends_or_takes_slowly_is_dropped(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.2)
    url = listening(make_status=lambda: status(address="x" * 20_000_000))
    with socket.create_connection(address(url), timeout=PATIENCE) as silent:
        silent.sendall(b"GET / HT")
        with pytest.raises(ConnectionResetError):
            assert silent.recv(4096) == b""
            raise ConnectionResetError
    with socket.create_connection(address(url), timeout=PATIENCE) as slow:
        slow.sendall(GET.replace(b"GET / ", b"GET /status.json "))
        slow.recv(1)
        time.sleep(0.5)  # longer than the deadline
        taken = 0
        with pytest.raises(ConnectionResetError):
            while chunk := slow.recv(1 << 20):
                taken += len(chunk)
            raise ConnectionResetError
        assert taken < 20_000_000


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000, b"400"),
        (b"a" * 60_000, b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_bad_request_gets_its_status_code(
    listening: Listening, sent: bytes, code: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    url = listening()
    try:
        response = exchange(url, sent.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost"))
    except ConnectionResetError:
        response = b"HTTP/1.1 400 reset while the rest was on its way"
    assert response.split()[1] == code
    assert exchange(url, GET).split()[1] == b"200"
    assert capfd.readouterr().err == ""  # clients cannot fill the log


def test_failed_status_reports_only_the_type(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STATUS_SECONDS", 0.0)
    failures = [RuntimeError("secret")]

    def failing_once() -> Any:
        if failures:
            raise failures.pop()
        return status()

    url = listening(make_status=failing_once)
    code, fields, body = get(url, "/status.json")
    assert code == 500 and "secret" not in body and "content-security-policy" in fields
    assert get(url, "/status.json")[0] == 200
    taken = url.removeprefix("http://").rstrip("/")
    with pytest.raises(UsageError, match=f"{taken}.*taken"):
        StatusServer(taken, status).start()


def test_stop_drops_open_connections(listening: Listening) -> None:
    panel = StatusServer("127.0.0.1:0", status)
    panel.stop(1.0)
    panel.start()
    with socket.create_connection(address(panel.url), timeout=PATIENCE) as stream:
        stream.sendall(b"GET")
        panel.stop(PATIENCE)
        assert panel._thread is not None and not panel._thread.is_alive()
    panel.stop(PATIENCE)


def test_page_without_a_script_lists_the_experts(listening: Listening) -> None:
    """Names are escaped, and those that UTF-8 cannot encode are shown too."""
    url = listening(make_status=lambda: status([NASTY, "b"], seconds=10.0))
    page = get(url)[2].partition("<script>")[0]
    table = page.partition("<table>")[2].partition("</table>")[0]
    assert "&lt;/title&gt;&lt;script&gt;alert(1)" in table and '<th scope="row">b</th>' in table
    assert table.count("<tr>") == 3 and table.count("<td") == 18 and "latency ms" in table
    assert "<noscript>" in page and "<!--" not in page


def test_panel_samples_the_counters_without_readers(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status that fails does not end the panel."""
    monkeypatch.setattr(http, "PERIOD", 0.0)
    asked: list[float] = []

    def failing_first() -> Any:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise RuntimeError("not yet")
        return status(seconds=10.0)

    url = listening(make_status=failing_first)
    wait_until(lambda: len(asked) >= 2)
    assert get(url, "/status.json")[0] == 200
