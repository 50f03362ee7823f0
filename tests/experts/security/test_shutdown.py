"""A server saves its experts at shutdown, whatever clients do and whichever shutdown step fails."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.concurrency import blocking_expert
from tests.experts.expert_cases import WIDTH, fussy_backend, rows
from tests.experts.security.raw_http2 import RawHttp2
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import LocalTransport, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import ClosedError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server import Server, ServerOptions
from torchweft.experts.wire import Call, Header, Kind

PATIENCE = 10.0


def take_step(backend: ExpertBackend) -> None:
    backend.backward_pool.submit_task(rows(2, 0), rows(2, 1)).result(PATIENCE)


def test_unread_health_checks_do_not_prevent_saving(store: FolderCheckpointStore) -> None:
    server = Server([fussy_backend()], checkpoints=store)
    with server, RawHttp2(server.address, window=0) as watcher, RemoteExpert("fussy", server.address) as remote:
        for _ in range(2):
            watcher.call("/grpc.health.v1.Health/Check")
        watcher.answered(1)
        remote(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
        assert server.shutdown()
    assert store.steps("fussy")[0] == 1


@pytest.mark.parametrize("broken", ["_grpc_server.announce_end", "_lease.withdraw", "experts.save"])
@pytest.mark.parametrize("replicas", [None, ReplicaOptions(first_seconds=0.1)], ids=["plain", "replicas"])
def test_failed_shutdown_step_does_not_prevent_saving(
    broken: str,
    replicas: ReplicaOptions | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    store, (first, last) = FolderCheckpointStore(tmp_path), (fussy_backend("first"), fussy_backend("last"))
    server = Server([first, last], checkpoints=store, directory=LocalDirectory(), replicas=replicas)
    server.start()
    if broken == "experts.save":  # only now: an owner already saves when it takes over
        monkeypatch.setattr(first, "state_dict", fail)
    take_step(first)
    take_step(last)
    if broken == "experts.save":
        with pytest.raises(RuntimeError, match="broken"):
            server.shutdown()
    else:
        owner, _, name = broken.rpartition(".")
        monkeypatch.setattr(getattr(server, owner) if owner else server, name, fail)
        assert server.shutdown()
        assert "RuntimeError: broken" in caplog.text
        assert store.steps("first")[0] == 1
    assert store.steps("last")[0] == 1


@pytest.mark.parametrize("replicas", [None, ReplicaOptions(first_seconds=0.1)], ids=["plain", "replicas"])
def test_hanging_module_does_not_block_shutdown(replicas: ReplicaOptions | None, tmp_path: Path) -> None:
    (gate, hung), store, directory = blocking_expert(), FolderCheckpointStore(tmp_path), LocalDirectory()
    steady, options = fussy_backend("steady"), ServerOptions(drain_seconds=0.3)
    server = Server([hung, steady], checkpoints=store, directory=directory, replicas=replicas, options=options)
    server.start()
    call = Call(Header(kind=Kind.FORWARD, call_id=0, uid="gate"), [rows(1, 0)])
    with LocalTransport(server.handler()) as transport, gate:
        take_step(steady)
        running = transport.submit(call, PATIENCE)
        assert gate.entered.wait(PATIENCE)
        waiting = transport.submit(call, PATIENCE)
        assert not server.shutdown()
        assert isinstance(waiting.exception(PATIENCE), ClosedError) and not running.done()
        assert not directory.get().owners
        assert store.steps("steady")[0] == 1
    server._runtimes._by_device["cpu"].shutdown(timeout=PATIENCE)
