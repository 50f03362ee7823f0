"""``torchweft serve``: its log, --check, --print-config and systemd notifications, and the status commands."""

import json
import logging
import os
import re
import signal
import socket
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.certificates import Authority
from tests.experts.concurrency import wait_until
from tests.processes import python
from torchweft.cli import main
from torchweft.core.errors import UsageError
from torchweft.experts.client import RemoteExpert
from torchweft.experts.client.status import watch
from torchweft.experts.registry import make_expert
from torchweft.experts.server import Server
from torchweft.experts.server.command import serve
from torchweft.experts.server.config import ServeConfig
from torchweft.experts.server.config_text import to_toml
from torchweft.experts.tls import ServerTls

LOCAL = "127.0.0.1:0"
EXPERT: dict[str, Any] = {"name": "f", "kind": "ffn", "arguments": {"hidden": 8}, "optimizer": "SGD"}
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) [\w.]+: .+")


class Watched:
    """Output of a server that runs in this thread, read from another thread."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._texts = capsys, list[str]()

    @property
    def text(self) -> str:
        self._texts.append(self._capsys.readouterr().out)
        return "".join(self._texts)

    def serve(self, config: dict[str, Any], act: Any = None, **options: Any) -> list[str]:
        """Serve until ``act`` has run, and return the lines of the log."""

        def run() -> None:
            try:
                wait_until(lambda: "serving" in self.text)
                if act is not None:
                    act(self.text)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=run)
        thread.start()
        serve({"address": LOCAL, "experts": [EXPERT], **config}, **options)
        thread.join()
        return self.text.splitlines()


@pytest.fixture
def watched(capsys: pytest.CaptureFixture[str]) -> Watched:
    return Watched(capsys)


def train(text: str) -> None:
    address = next(line.split()[-1] for line in text.splitlines() if "serving" in line)
    with RemoteExpert("f", address) as remote:
        remote(torch.ones(2, 8)).sum().backward()


def test_log_lines_have_time_level_saved_and_ended(watched: Watched, tmp_path: Path) -> None:
    handlers, level = list(logging.getLogger().handlers), logging.getLogger("torchweft").level
    lines = watched.serve({"checkpoints": str(tmp_path)}, train)
    assert all(LINE.fullmatch(line) for line in lines), lines
    messages = [line.split(" ", 2)[2] for line in lines]
    assert re.fullmatch(r"torchweft: serving 1 expert at 127\.0\.0\.1:\d+", messages[0])
    assert messages[1] == "torchweft: draining"
    assert re.fullmatch(r"torchweft\.experts\.checkpoints: saved expert 'f': step 1, in \d+\.\d\d s", messages[2])
    assert re.fullmatch(r"torchweft: ended after 0:00:\d\d", messages[3]) and len(messages) == 4
    assert logging.getLogger().handlers == handlers and logging.getLogger("torchweft").level == level


def test_log_level_hides_and_shows_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stopped(Exception):
        pass

    def started(self: Server) -> None:
        logging.getLogger("torchweft.experts.server").warning("from the start")
        raise Stopped

    lines: dict[str, list[str]] = {}
    for level in ("debug", "info", "warning", "error"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(Server, "start", started)
            serve({"address": LOCAL, "experts": [EXPERT]}, log_level=level)
        lines[level] = [line.split(" ", 2)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == {"debug": ["WARNING", "INFO"], "info": ["WARNING", "INFO"], "warning": ["WARNING"], "error": []}
    with pytest.raises(SystemExit):
        main(["serve", "--log-level", "loud"])
    assert "invalid choice" in capsys.readouterr().err


@pytest.fixture
def notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield receiver


def test_systemd_is_notified_of_start_and_end(notified: socket.socket, watched: Watched) -> None:
    watched.serve({})
    states = [notified.recv(1000).decode() for _ in range(3)]
    assert states[0].startswith("STATUS=")
    assert re.fullmatch(r"READY=1\nSTATUS=serving 1 expert at 127\.0\.0\.1:\d+", states[1])
    assert states[2].startswith("STOPPING=1\nSTATUS=")


def test_lost_systemd_does_not_end_the_server(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "@torchweft-nobody-listens-here")
    assert "ended" in watched.serve({})[-1]


def run_serve(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and the text of both outputs."""
    code: Any = 0
    try:
        code = main(["serve", *words])
    except SystemExit as stop:
        code = stop.code
    seen = capsys.readouterr()
    return code, seen.out + seen.err


def test_check_accepts_and_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        f"""address = "{LOCAL}"
        checkpoints = "{tmp_path}/new/saved"
        [[experts]]
        name = "f.{{}}"
        count = 2
        kind = "ffn"
        arguments = {{ hidden = 8 }}
        optimizer = "SGD"
        """
    )
    code, text = run_serve(["--check", str(file)], capsys)
    assert (code, text) == (0, f"the configuration is valid: 2 experts at {LOCAL}\n")
    assert sorted(tmp_path.iterdir()) == [file]


def test_check_reports_all_faults_at_once(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"key": authority.issue("a")[0], "certificate": authority.issue("b")[1]}
    for name, pem in names.items():
        (tmp_path / name).write_bytes(pem)
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as also_taken:
        address, panel = (f"127.0.0.1:{listener.getsockname()[1]}" for listener in (taken, also_taken))
        file = tmp_path / "serve.toml"
        file.write_text(
            f"""address = "{address}"
            panel = "{panel}"
            checkpoints = "{tmp_path}/file/saved"
            [tls]
            key = "{tmp_path}/key"
            certificate = "{tmp_path}/certificate"
            [[experts]]
            name = "f"
            kind = "ffn"
            arguments = {{ hiden = 8 }}
            [[experts]]
            name = "g"
            kind = "fnn"
            """
        )
        code, text = run_serve(["--check", str(file)], capsys)
    assert code == 2 and "Traceback" not in text
    for words in (
        "it has no argument 'hiden'; did you mean 'hidden'?",
        "known are ffn, ",
        "did you mean 'ffn'?",
        "tls: the key is that of another certificate",
        f"address: the server cannot listen at {address!r}: another process listens there",
        f"panel: the server cannot listen at {panel!r}: another process listens there",
        f"but '{tmp_path}/file' is a file; wanted a folder",
    ):
        assert words in text, text


def test_check_reports_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests can run as root, which can write everywhere
    config = ServeConfig.parse({"address": LOCAL, "checkpoints": str(tmp_path / "a"), "experts": [EXPERT]})
    with pytest.raises(UsageError, match="this user cannot write to"):
        config.check()


FULL = """
address = "0.0.0.0:7070"
advertise = "10.0.0.1:7070"
directory = "etcd://10.0.0.2:2379/torchweft"
checkpoints = "saved"
panel = { address = "127.0.0.1:9090", token_file = "token" }
imports = ["json"]

[tls]
authority = "ca.crt"
key = "tls.key"
certificate = "tls.crt"

[directory_tls]
authority = "etcd-ca.crt"

[replicas]
experts = ["f*"]
tls = { authority = "ca.crt", servers = ["*"] }

[[grants]]
client = "me"
role = "admin"

[[experts]]
name = "f.{}"
count = 2
kind = "ffn"
arguments = { hidden = 8, "odd key" = "quote \\" and \\u00e9", rate = 1e-7 }
optimizer = "Adam"
optimizer_arguments = { lr = 0.001, betas = [0.9, 0.99] }
guards = { max_norm = 5.0 }
options = { max_batch_size = 64 }
"""


def test_printed_configuration_is_the_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(FULL, "utf-8")
    code, text = run_serve(["--print-config", str(file), "--expert", "g=ffn:hidden=4"], capsys)
    assert code == 0, text
    table = tomllib.loads(text)
    more = {"name": "g", "kind": "ffn", "arguments": {"hidden": 4}}
    given = tomllib.loads(FULL)
    assert ServeConfig.parse(table) == ServeConfig.parse({**given, "experts": [*given["experts"], more]})
    assert table["tls"]["key"] == "tls.key" and table["options"]["checkpoint_seconds"] == 30.0
    assert table["experts"][0]["options"]["max_batch_size"] == 64 and table["keep"] == 3
    small = ServeConfig.parse({"experts": [EXPERT]})
    assert ServeConfig.parse(tomllib.loads(to_toml(small))) == small


def test_printed_configuration_has_no_secrets(tmp_path: Path) -> None:
    table = tomllib.loads(FULL)
    table["tokens"] = {"s3cret": "me", "hunter2": "you"}
    table["replicas"]["token"] = "pa55word"
    table["tls"]["key"] = "-----BEGIN PRIVATE KEY-----\nabcdef"
    text = to_toml(ServeConfig.parse(table))
    assert not any(word in text for word in ("s3cret", "hunter2", "pa55word", "abcdef")), text
    printed = tomllib.loads(text)
    assert printed["tokens"] == {"(secret) 1": "me", "(secret) 2": "you"}
    assert printed["replicas"]["token"] == printed["tls"]["key"] == "(secret)"


def test_check_and_print_config_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_serve(["--check", "--print-config", "--expert", "f=ffn:hidden=8"], capsys)
    assert code == 2 and "not allowed with" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adress = '127.0.0.1:0'", "the configuration has 'adress'"),
        ("adress = '127.0.0.1:0'", "did you mean 'address'?"),
        ("[[experts]]\nname = 'f'\nkind = 'ffn'\noptimiser = 'SGD'", "did you mean 'optimizer'?"),
        ("[[experts]]\nname = 'f'\nkind = 'ffn'\nguards = { max_nrom = 1.0 }", "did you mean 'max_norm'?"),
        ("[option]\nconnections = 5", "did you mean 'options'?"),
        ("[[experts]]\nname = 'f'\nkind = 'ffn'\narguments = { hidden = 8 }\noptimizer = 'adamw'", "'AdamW'?"),
    ],
)
def test_misspelt_key_of_the_file_gets_a_suggestion(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    code, errors = run_serve(["--check", str(file)], capsys)
    assert code == 2 and words in errors, errors


def test_misspelt_argument_of_a_kind_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = run_serve(["--expert", "f=ffn:hiden=8", "--address", LOCAL], capsys)
    assert code == 2 and "it has no argument 'hiden'; did you mean 'hidden'?" in errors, errors


# `torchweft status --watch` and `torchweft health`.


def served(**options: Any) -> Server:
    return Server([make_expert("ffn", hidden=8).backend("f")], **options)


def test_watch_goes_on_while_a_server_is_away() -> None:
    with served() as server:
        address = server.address
        texts = watch(address, 0.01, as_json=True, timeout=5.0)
        first = json.loads(next(texts))
    assert first["address"] == address
    assert json.loads(next(texts))["error"].endswith("; asked again every 0.01 s")


def test_watch_ends_quietly_with_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    with served() as server:
        monkeypatch.setattr("torchweft.experts.client.status.time.sleep", sleep)
        assert main(["status", server.address, "--watch"]) == 0
        monkeypatch.undo()
        assert capsys.readouterr().out.count("torchweft server ") == 3 and pauses == [2.0] * 3


def test_timeout_bounds_the_wait_for_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for command in ("status", "health"):
            with pytest.raises(SystemExit) as stop:
                main([command, f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.2"])
            assert stop.value.code == 1 and "127.0.0.1" in capsys.readouterr().err


def test_health_is_that_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as server:
        assert main(["health", server.address]) == 0
        server.drain()
        with pytest.raises(SystemExit) as stop:
            main(["health", server.address])
        assert stop.value.code == 1 and "refuses new work" in capsys.readouterr().err
        address = server.address
    with pytest.raises(SystemExit) as stop:
        main(["health", address, "--timeout", "2"])
    assert stop.value.code == 1 and "UNAVAILABLE" in capsys.readouterr().err


def test_health_uses_certificate_and_server_name(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    """A probe connects to the IP address of a pod, and still verifies the name in the certificate."""
    words: list[str] = []
    for name, pem in zip(("key", "certificate"), authority.issue("me"), strict=True):
        (tmp_path / name).write_bytes(pem)
        words += [f"--{name}", str(tmp_path / name)]
    (tmp_path / "ca").write_bytes(authority.pem)
    words += ["--authority", str(tmp_path / "ca")]
    with served(tls=ServerTls(*authority.issue("server"), authority.pem)) as server:
        address = server.address.replace("localhost", "127.0.0.1")
        assert main(["health", address, *words, "--server-name", "localhost"]) == 0
        assert main(["status", address, *words, "--server-name", "localhost"]) == 0
        for fewer in (words, words[-2:]):
            with pytest.raises(SystemExit):
                main(["health", address, *fewer, "--timeout", "2"])
    with pytest.raises(SystemExit) as stop:
        main(["health", address, "--authority", str(tmp_path / "nothing")])
    assert stop.value.code == 2 and "cannot be read" in capsys.readouterr().err


def test_health_imports_no_torch() -> None:
    """Probes run it every few seconds, so it has to start fast."""
    program = """
import sys
from torchweft.cli import main
try:
    main(["health", "127.0.0.1:1", "--timeout", "1"])
except SystemExit as stop:
    print(stop.code, "grpc" in sys.modules, "torch" in sys.modules)
"""
    assert python(program).stdout.split() == ["1", "True", "False"]
