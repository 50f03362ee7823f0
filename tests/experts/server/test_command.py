"""``torchweft serve`` and ``torchweft status``: configuration, output, and the end of a served process."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.concurrency import FakeClock, wait_until
from tests.experts.server.server_cases import access_of, backend_of
from tests.processes import SOURCE, python
from torchweft.cli import main
from torchweft.core.errors import UsageError
from torchweft.experts.accumulation import AccumulationOptions
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import RemoteExpert, Retry
from torchweft.experts.client.status import status
from torchweft.experts.errors import RemoteError
from torchweft.experts.graph_cache import GraphBudget
from torchweft.experts.idempotency import IdempotencyOptions
from torchweft.experts.server import Role, command
from torchweft.experts.server.command import serve
from torchweft.experts.server.config import build, parse_expert, read_config

CONFIG = """
address = "127.0.0.1:0"
checkpoints = "{folder}"
[options]
drain_seconds = 2.0
[limits]
frame_bytes = 1000000
[tokens]
secret = "me"
[[grants]]
client = "me"
role = "admin"
[[experts]]
name = "ffn.{{}}"
count = 2
kind = "ffn"
arguments = {{ hidden = 8 }}
optimizer = "SGD"
optimizer_arguments = {{ lr = 0.1 }}
clip_grad_norm = 1
keep_graphs = {{ nbytes = 1000, seconds = 2 }}
options = {{ max_batch_size = 64 }}
"""


def test_a_file_describes_a_server(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(CONFIG.format(folder=tmp_path / "saved"), "utf-8")
    server = build(read_config(file))
    assert server.experts == ["ffn.0", "ffn.1"]
    assert server.options.drain_seconds == 2.0 and server.options.limits.frame_bytes == 1_000_000
    backend = backend_of(server, "ffn.1")
    assert isinstance(backend.optimizer, torch.optim.SGD) and backend.clip_grad_norm == 1.0
    assert backend.forward_pool.options.max_batch_size == 64
    assert backend.executor.graphs._budget == GraphBudget(1000, 2.0)
    assert access_of(server).role("me", "x") is Role.ADMIN and not access_of(server).admits("")


def test_file_configures_idempotency_and_sums() -> None:
    table = {
        **parse_expert("F=ffn:hidden=8"),
        "optimizer": "SGD",
        "idempotency": {"max_keys": 7, "max_age": 60},
        "mini_batches": {"mini_batches": 3, "max_client_mini_batches": 2, "orphan_seconds": 1},
    }
    backend = backend_of(build({"address": "127.0.0.1:0", "experts": [table]}), "F")
    assert backend.idempotency.options == IdempotencyOptions(max_keys=7, max_age=60.0)
    assert backend.executor.mini_batches._options == AccumulationOptions(3, 2, orphan_seconds=1.0)
    wrong = {"idempotency": {"keys": 1}, "mini_batches": {"seconds": "x"}, "guards": {"finite": 2}}
    with pytest.raises(UsageError) as caught:
        build({"experts": [{**table, **wrong}]})
    messages = ("idempotency has 'keys'", "mini_batches.seconds is 'x'", "guards.finite is 2")
    assert all(f"experts[0].{word}" in str(caught.value) for word in messages), caught.value


def test_parse_expert_reads_name_kind_and_arguments() -> None:
    expected = {"name": "a.0", "kind": "ffn", "arguments": {"hidden": 8, "rate": 0.5, "mode": "x"}}
    assert parse_expert("a.0=ffn:hidden=8,rate=0.5,mode=x") == expected
    for word in ("a", "a=", "=ffn", "a=ffn:hidden", "a=ffn:=3"):
        with pytest.raises(UsageError, match="NAME=KIND"):
            parse_expert(word)
    with pytest.raises(UsageError, match=r"which repeats hidden"):
        parse_expert("f=ffn:hidden=8,inner=4,hidden=16")


def test_status_is_printed_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    server = build({"address": "127.0.0.1:0", "experts": [{**parse_expert("f=ffn:hidden=8"), "optimizer": "SGD"}]})
    with server, RemoteExpert("f", server.address) as remote:
        remote(torch.ones(2, 8)).sum().backward()
        assert main(["status", server.address]) == 0
        text = capsys.readouterr().out
        assert text.splitlines()[2].split() == ["f", "1", "-", "2", "0", "0"] and "1 connections" in text
        assert json.loads(status(server.address, as_json=True))["experts"]["f"]["steps"] == 1
        with pytest.raises(SystemExit) as stop:  # the port is taken
            main(["serve", "--expert", "f=ffn:hidden=8", "--address", server.address])
        assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["status", "127.0.0.1:1"])
    assert stop.value.code == 1 and "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--expert", "f=ffn:hidden=8", "--import", "json"]])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[experts]\nname = 'f'", "experts is {'name': 'f'}, wanted a valid list; start each with [[experts]]"),
        ("experts = 5", "experts is 5, wanted a valid list"),
        ("imports = 'json'", "imports is 'json', wanted a valid list"),
        ("imports = 5", "imports is 5, wanted a valid list"),
    ],
)
def test_non_list_in_a_file_is_reported_despite_flags(
    text: str, told: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["serve", *words, str(file)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and told in said and "[0]" not in said, said


@pytest.fixture
def process(tmp_path: Path) -> Any:
    words = ["--address", "127.0.0.1:0", "--checkpoints", str(tmp_path), "--optimizer", "SGD", "--lr", "1e-6"]
    words = [sys.executable, "-m", "torchweft", "serve", "--expert", "f=ffn:hidden=8", *words]
    env, pipe = {**os.environ, "PYTHONPATH": str(SOURCE)}, subprocess.PIPE
    child = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=env)
    yield child
    child.kill()
    child.communicate(timeout=20)


@pytest.mark.long
def test_terminated_server_answers_accepted_calls_and_saves(process: Any, tmp_path: Path) -> None:
    line = process.stdout.readline()
    assert " INFO torchweft: serving 1 expert at " in line
    with RemoteExpert("f", line.split()[-1], retry=Retry(attempts=1)) as remote:
        steps = 0
        remote(torch.ones(2, 8)).sum().backward()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(RemoteError):
            while True:
                remote(torch.ones(2, 8)).sum().backward()
                steps = remote.steps or 0
        said, errors = process.communicate(timeout=50)
        assert process.returncode == 0 and "draining" in said and errors == ""
    assert FolderCheckpointStore(tmp_path).steps("f")[0] >= max(1, steps)


def test_ctrl_c_ends_a_server_and_leaves_the_signal_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        try:
            wait_until(lambda: gc.get_freeze_count() > frozen)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(True)

    before, frozen, seen = signal.getsignal(signal.SIGINT), gc.get_freeze_count(), list[bool]()
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["serve", "--expert", "f=ffn:hidden=8", "--address", "127.0.0.1:0"]) == 0
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before and "draining" in capsys.readouterr().out
    assert seen, "imported objects must be frozen, or a full collection pauses the server"
    assert gc.get_freeze_count() <= frozen


@pytest.mark.parametrize("wrong", ["f=nothing-like-it", "f"])
def test_failed_serve_restores_the_signal_handlers(wrong: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit):
        main(["serve", "--expert", wrong, "--address", "127.0.0.1:0"])
    with pytest.raises(Exception):  # noqa: B017  (of any type: only the signal handlers matter)
        serve({"experts": [{"name": "f", "kind": "nothing-like-it"}]})
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


_IMPORTS = """
import gc, sys
from torchweft.experts.server import command

def build(config):
    print(full.count(2), gc.isenabled(), gc.get_freeze_count() > 10_000, "torch._dynamo" in sys.modules)
    raise SystemExit

gc.collect()
full, command.ServeConfig.server = [], build
gc.callbacks.append(lambda phase, seen: full.append(seen["generation"]) if phase == "start" else None)
try:
    command.serve({"experts": [{"name": "f", "kind": "ffn", "arguments": {"hidden": 8}, OPTIMIZER}]})
finally:
    print(gc.get_freeze_count())
"""


@pytest.mark.long
def test_imports_of_the_optimizer_are_frozen() -> None:
    """Garbage collections skip frozen objects. Without an optimizer, torch._dynamo is not imported."""
    trained = python(_IMPORTS.replace("OPTIMIZER", "'optimizer': 'Adam'"))
    assert trained.stdout.split() == ["0", "True", "True", "True", "0"], trained.stderr
    served = python(_IMPORTS.replace("OPTIMIZER", ""))
    assert served.stdout.split() == ["0", "True", "False", "False", "0"], served.stderr


@pytest.mark.parametrize(("lease", "warned"), [(5.0, False), (0.5, True)])
def test_pause_longer_than_a_lease_allows_is_logged(
    lease: float, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock().install(monkeypatch, "torchweft.experts.server.command")
    monkeypatch.setattr(gc, "collect", lambda: setattr(clock, "now", clock.now + 0.3))
    command._check_lease(lease)
    assert ("set it to 0.6 or more" in caplog.text) == warned
