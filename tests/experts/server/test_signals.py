"""Signals that end a served process, in any thread and at any moment."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.concurrency import wait_until
from torchweft.cli import main
from torchweft.core.errors import UsageError
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import DirectoryUnavailableError
from torchweft.experts.registry import make_expert
from torchweft.experts.server import Server, command
from torchweft.experts.server.command import serve
from torchweft.experts.server.config import parse_expert

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="the signals of POSIX")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CONFIG: dict[str, Any] = {"address": "127.0.0.1:0", "experts": [parse_expert("f=ffn:hidden=8")]}


@pytest.fixture(autouse=True)
def default_sighup() -> Iterator[None]:
    """Give SIGHUP its default action, because the tests can run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def signalled(capsys: pytest.CaptureFixture[str], send: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        said: list[str] = []
        wait_until(lambda: "serving" in (said.append(capsys.readouterr().out) or "".join(said)))
        send()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_to_another_thread_ends_the_server(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = handlers()
    thread = signalled(capsys, lambda: signal.pthread_kill(threading.get_ident(), number))
    serve(CONFIG)
    thread.join()
    assert handlers() == before


def test_ignored_sighup_stays_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    def send() -> None:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        thread = signalled(capsys, send)
        serve(CONFIG)
        thread.join()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_handler_takes_no_lock() -> None:
    entered: list[str] = []
    stop, before = command._StopSignal(), sys.gettrace()
    stop.finish_start()
    sys.settrace(lambda frame, event, value: entered.append(frame.f_code.co_filename))
    try:
        stop(signal.SIGTERM, None)
    finally:
        sys.settrace(before)
    assert threading.__file__ not in entered  # the module of an Event's lock


@pytest.mark.parametrize("moment", ["build", "start"])
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_during_the_start_closes_everything(
    moment: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: list[Server] = []
    closed: list[bool] = []

    class Slow(LocalDirectory):
        def declare(self, uids: Any, address: str, ttl: float) -> Any:
            os.kill(os.getpid(), number)
            return super().declare(uids, address, ttl)

        def watch(self, prefix: str = "") -> Any:  # the shutdown must not depend on the directory
            raise DirectoryUnavailableError("it does not answer")

    def close() -> None:
        os.kill(os.getpid(), number)  # a second signal does not disturb the shutdown
        closed.append(True)

    def build(config: Any) -> Server:
        if moment == "build":
            os.kill(os.getpid(), number)
        servers.append(Server([make_expert("ffn", hidden=8).backend("f")], directory=directory))
        servers[0].own(close)
        return servers[0]

    before = handlers()
    monkeypatch.setattr(command.ServeConfig, "server", build)
    with closing(Slow()) as directory:
        with pytest.raises(SystemExit) as stop:
            serve(CONFIG)
        assert stop.value.code == 0 and handlers() == before
        if moment == "start":
            assert closed and servers[0].shutdown()
            with pytest.raises(UsageError, match="started once"):
                servers[0].start()
            assert directory.get().experts == {}
    assert capsys.readouterr().err == ""


def test_late_failure_of_a_start_closes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stepping(LocalDirectory):  # a server listens before it is listed, so clients can call it
        def declare(self, uids: Any, address: str, ttl: float) -> Any:
            backend.backward_pool.submit_task(torch.ones(2, 8), torch.ones(2, 8)).result(10)
            return super().declare(uids, address, ttl)

    with socket.create_server(("127.0.0.1", 0)) as taken, closing(Stepping()) as directory:
        panel = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemExit) as stop:
            main(["serve", "--expert", "f=ffn:hidden=8", "--address", "127.0.0.1:0", "--panel", panel])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.startswith("torchweft: ") and panel in said and "Traceback" not in said
        backend = make_expert("ffn", hidden=8).backend("f", torch.optim.Adam)
        store = FolderCheckpointStore(tmp_path)
        server = Server([backend], panel=panel, directory=directory, checkpoints=store)
        with pytest.raises(UsageError, match=panel):
            server.start()
        assert store.steps("f")[0] == 1 and directory.get().experts == {}
        assert server.shutdown() and server.drain()


def test_closed_pipe_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    lines: list[str] = []

    def head() -> None:  # as `| head -1`
        with os.fdopen(reader) as pipe:
            lines.append(pipe.readline())
        os.kill(os.getpid(), signal.SIGTERM)

    reading = threading.Thread(target=head)
    reading.start()
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        serve(CONFIG)
        reading.join()
        stdout.flush()  # as the interpreter does when it ends
    assert "torchweft: serving" in lines[0]
