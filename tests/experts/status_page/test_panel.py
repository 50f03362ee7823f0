"""The panel of a running server: its contents, its paths, and that it never waits for a module."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.concurrency import blocking_expert, wait_until
from tests.experts.status_page.panel_cases import NASTY, PATIENCE, address, get, layer, train
from torchweft.cli import main
from torchweft.core.errors import UsageError
from torchweft.experts.client import LocalTransport, RemoteExpert
from torchweft.experts.client.status import status
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.server import Server, ServerOptions
from torchweft.experts.server.config import build, parse_expert
from torchweft.experts.status_page import http
from torchweft.experts.wire import Call, Header, Kind

LOCAL = "127.0.0.1:0"


def url(server: Server) -> str:
    address = server.panel_url
    assert address is not None
    return address


@pytest.fixture(autouse=True)
def uncached_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request a new status for each page, so that tests need not wait for it."""
    monkeypatch.setattr(http, "STATUS_SECONDS", 0.0)


def fetch_status(server: Server) -> dict[str, Any]:
    return json.loads(get(url(server), "/status.json")[2])


def test_page_json_metrics_and_terminal_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STATUS_SECONDS", 100.0)  # one status for all pages
    with Server([layer("a"), layer("b")], panel=LOCAL) as server:
        train(server, "a", 2)
        code, fields, page = get(url(server))
        assert code == 200 and fields["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in fields["content-security-policy"]
        assert "/status.json" in page
        answer = json.loads(get(url(server), "/status.json")[2])
        assert answer["experts"] == json.loads(status(server.address, as_json=True))["experts"]
        assert 'torchweft_expert_steps_total{expert="a"} 2.0' in get(url(server), "/metrics")[2]
        assert status(server.address).splitlines()[2].split() == ["a", "2", "-", "4", "0", "0"]
    assert server.panel_url is not None


def test_panel_has_no_other_paths_and_no_writes() -> None:
    with Server([layer(NASTY.replace("\ud800", ""))], panel=LOCAL) as server:
        paths = ("/x", "/metrics/", "//", "/", "/status.json", "/status.json?page=1", "/metrics", "/?page")
        assert [get(url(server), path)[0] for path in paths] == [404, 404, 404, 200, 200, 200, 200, 200]
        assert get(url(server), method="POST")[0] == 405
        code, fields, body = get(url(server), method="HEAD")
        assert code == 200 and int(fields["content-length"]) > 1000 and body == ""
        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        assert get(url(server), "/metrics", Accept=accept)[1]["content-type"].startswith("application/openmetrics-text")
        assert get(url(server), "/metrics")[1]["content-type"].startswith("text/plain")


def test_panel_works_while_a_module_hangs() -> None:
    gate, backend = blocking_expert()
    with Server([backend, layer("a")], panel=LOCAL) as server, LocalTransport(server.handler()) as transport:
        train(server, "a", 2)
        x = torch.ones(1, 4, dtype=torch.float64)
        calls = [transport.submit(Call(Header(kind=Kind.FORWARD, call_id=0, uid="gate"), [x]), 20.0)]
        assert gate.entered.wait(PATIENCE)
        calls += [transport.submit(Call(Header(kind=Kind.FORWARD, call_id=0, uid="gate"), [x]), 20.0) for _ in range(3)]
        try:
            start = time.monotonic()
            wait_until(lambda: fetch_status(server)["experts"]["gate"]["pools"]["gate.forward"]["oldest_age"] > 0.2)
            answer = fetch_status(server)
            assert get(url(server))[0] == 200
            metrics = get(url(server), "/metrics")[2]
            text = status(server.address)
            assert time.monotonic() - start < 15.0
            pool = answer["experts"]["gate"]["pools"]["gate.forward"]
            assert pool["running_tasks"] == 1 and pool["waiting_tasks"] == 3 and pool["oldest_age"] > 0.2
            assert answer["runtimes"]["cpu"]["working_on"] == "gate.forward" and answer["experts"]["a"]["steps"] == 2
            assert 'torchweft_queue_tasks{direction="forward",expert="gate"} 3.0' in metrics
            assert text.splitlines()[3].split() == ["gate", "0", "-", "0", "3", "0"]
        finally:
            gate.go.set()
        for call in calls:
            assert call.result(PATIENCE) is not None
        wait_until(lambda: fetch_status(server)["experts"]["gate"]["forward_batches"] == 2)


def test_panel_lists_live_servers(directory: LocalDirectory) -> None:
    options = ServerOptions(lease_seconds=0.3)
    with Server([layer("a")], directory=directory, panel=LOCAL, options=options) as server:
        with Server([layer("b"), layer("c")], directory=directory, options=options) as other:
            wait_until(lambda: other.address in fetch_status(server)["directory"]["servers"])
            servers = fetch_status(server)["directory"]["servers"]
            assert servers == {server.address: {"experts": 1, "owns": 0}, other.address: {"experts": 2, "owns": 0}}
            assert f"alive: {other.address}, 2 experts" in status(server.address)
        wait_until(lambda: other.address not in fetch_status(server)["directory"]["servers"])
    directory.close()


def test_unavailable_directory_still_shows_its_servers(directory: LocalDirectory) -> None:
    with Server([layer("a")], directory=directory, options=ServerOptions(lease_seconds=0.3), panel=LOCAL) as server:
        directory.close()
        wait_until(lambda: fetch_status(server)["directory"]["away_seconds"])
        shown = fetch_status(server)["directory"]
        assert list(shown["servers"]) == [server.address]


def test_bad_clients_of_the_panel_do_not_delay_the_experts() -> None:
    stop = threading.Event()

    def flood(place: tuple[str, int]) -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(place, timeout=1.0) as stream:
                stream.sendall(b"\x00" * 9000 + b"\r\n\r\n")

    with Server([layer("a")], panel=LOCAL) as server, RemoteExpert("a", server.address) as remote:
        place = address(url(server))
        held = [socket.create_connection(place, timeout=PATIENCE) for _ in range(80)]  # more than it accepts
        threads = [threading.Thread(target=flood, args=(place,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        took: list[float] = []
        for _ in range(40):
            start = time.monotonic()
            remote(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            took.append(time.monotonic() - start)
        stop.set()
        for thread in threads:
            thread.join()
        for connection in held:
            connection.close()
        assert sorted(took)[len(took) // 2] < 0.5  # usually 1 ms, unless it waits for the other clients

        def answered() -> bool:
            with suppress(OSError, ValueError, IndexError):
                return get(url(server))[0] == 200
            return False

        wait_until(answered)
        assert server.statistics().experts["a"].steps == 40


def test_serve_prints_the_address_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    pages: list[str] = []
    said: list[str] = []

    def look() -> None:
        try:
            wait_until(lambda: "page at" in (said.append(capsys.readouterr().out) or "".join(said)))
            pages.append(get("".join(said).split()[-1])[2])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    looking = threading.Thread(target=look)
    looking.start()
    assert main(["serve", "--expert", "f=ffn:hidden=8", "--address", LOCAL, "--panel", LOCAL]) == 0
    looking.join()
    first, second = "".join(said).splitlines()
    assert "torchweft: serving 1 expert" in first and "torchweft: status page at http://127.0.0.1:" in second
    assert "<title>torchweft server</title>" in pages[0]


def test_panel_ends_with_its_server() -> None:
    """A server does not start if the port of its panel is taken."""
    with Server([layer("a")], panel=LOCAL) as server:
        taken = url(server).removeprefix("http://").rstrip("/")
        second = Server([layer("b")], panel=taken)
        with pytest.raises(UsageError, match="taken"):
            second.start()
    with pytest.raises(OSError, match="refused"):
        get(url(server))


def test_panel_is_configured_by_file_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"address": LOCAL, "panel": LOCAL, "experts": [parse_expert("f=ffn:hidden=8")]}
    with build(config) as server, RemoteExpert("f", server.address) as remote:
        remote(torch.ones(2, 8))
        assert "torchweft server" in get(url(server))[2]
    secret = tmp_path / "token"
    secret.write_text("a-token-of-20-characters\n")
    config["panel"] = {"address": "0.0.0.0:0", "allowed_hosts": ["gpu7.example"], "token_file": str(secret)}
    with build(config) as server:
        fields = {"Host": "gpu7.example", "Authorization": "Bearer a-token-of-20-characters"}
        assert get(url(server).replace("0.0.0.0", "127.0.0.1"), **fields)[0] == 200
    for panel, words in [
        ("0.0.0.0:9090", "token"),
        ({"address": LOCAL, "token_file": str(tmp_path / "none")}, "token_file"),
        ({"address": LOCAL, "colour": "red"}, "colour"),
        ({"allowed_hosts": []}, "no address"),
    ]:
        with pytest.raises(UsageError, match=words):
            build({**config, "panel": panel})
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--expert", "f=ffn:hidden=8", "--address", LOCAL, "--panel", "nowhere"])
    assert stop.value.code == 2 and "panel is 'nowhere'" in capsys.readouterr().err
