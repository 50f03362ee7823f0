"""Replicas in separate processes with a real etcd: owners that are killed or stopped, and an etcd that loses data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.experts.concurrency import wait_until
from tests.experts.etcd_cases import cluster, free_ports
from tests.experts.server.replica_cases import expert, make, role, same_steps, step
from tests.processes import SOURCE
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.client.status import status
from torchweft.experts.discovery.etcd import EtcdDirectory
from torchweft.experts.registry import make_expert

CONFIG = """
address = "127.0.0.1:{port}"
directory = "etcd://{etcd}"
checkpoints = "{folder}/kept"
[options]
lease_seconds = {lease}
[replicas]
experts = ["ffn.*"]
follow_seconds = 0.05
follow_steps = 1
[[experts]]
name = "ffn.0"
kind = "ffn"
arguments = {{ hidden = 8 }}
optimizer = "Adam"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[tuple[str, EtcdDirectory]]:
    with cluster(tmp_path / "etcd") as members, EtcdDirectory(members[0].endpoint) as client:
        yield members[0].endpoint, client


def serving(
    folder: Path, etcd: str, ports: list[int], stack: ExitStack, lease: float = 1.0
) -> "dict[str, subprocess.Popen[str]]":
    """Start servers, keyed by address. They start in parallel, because importing torch takes most of the time."""
    served: dict[str, subprocess.Popen[str]] = {}
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    for port in ports:
        file = folder / f"{port}.toml"
        file.write_text(CONFIG.format(port=port, etcd=etcd, folder=folder, lease=lease), "utf-8")
        words = [sys.executable, "-m", "torchweft", "serve", str(file)]
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        stack.callback(process.communicate, timeout=10)
        stack.callback(process.kill)
        served[f"127.0.0.1:{port}"] = process
    for process in served.values():
        assert process.stdout is not None and "serving" in process.stdout.readline()
    return served


@pytest.mark.long
def test_training_continues_after_owners_are_killed(tmp_path: Path, directory: tuple[str, EtcdDirectory]) -> None:
    etcd, client = directory
    with ExitStack() as stack:
        served = serving(tmp_path, etcd, free_ports(2), stack)
        connections = stack.enter_context(Connections(client))
        remote = RemoteExpert("ffn.0", connections, timeout=20.0)
        x = torch.randn(2, 8)

        def owner() -> str:
            ownership = client.get().owner("ffn.0")
            return "" if ownership is None else ownership.address

        for _ in range(3):
            remote(x).sum().backward()
        first, token = owner(), client.get().owners["ffn.0"].token
        (follower,) = set(served) - {first}
        wait_until(lambda: json.loads(status(follower, as_json=True))["experts"]["ffn.0"]["steps"] == 3)
        served[first].send_signal(signal.SIGKILL)
        remote(x).sum().backward()
        second = owner()
        assert second not in ("", first) and remote.steps == 4
        assert client.get().owners["ffn.0"].token > token

        served[first].wait(10)
        served |= serving(tmp_path, etcd, [int(first.rpartition(":")[2])], stack)
        assert owner() == second
        served[second].terminate()
        remote(x).sum().backward()
        assert remote.steps == 5
        assert served[second].wait(50) == 0
        wait_until(lambda: owner() == first)


@pytest.mark.long
def test_a_call_leaves_a_stopped_owner(tmp_path: Path, directory: tuple[str, EtcdDirectory]) -> None:
    """The next owner answers a backward that waits for an owner under SIGSTOP.

    Every acknowledged backward is one step: the weights equal those of a reference that applied each once.
    """
    etcd, client = directory
    reference = make_expert("ffn", hidden=8).backend("ffn.0", torch.optim.Adam)
    store = FolderCheckpointStore(tmp_path / "kept")
    store.save("ffn.0", reference.state_dict(), 0, {"records": reference.idempotency.state_dict(), "token": 0})
    inputs = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        served = serving(tmp_path, etcd, free_ports(2), stack)
        connections = stack.enter_context(Connections(client))
        remote = RemoteExpert("ffn.0", connections)
        for x in inputs[:3]:
            remote(x).sum().backward()
        first = client.get().owners["ffn.0"].address
        (second,) = set(served) - {first}
        wait_until(lambda: json.loads(status(second, as_json=True))["experts"]["ffn.0"]["steps"] == 3)
        y, start = remote(inputs[3]), time.monotonic()
        served[first].send_signal(signal.SIGSTOP)
        stack.callback(served[first].send_signal, signal.SIGCONT)
        y.sum().backward()
        assert time.monotonic() - start < 9.0  # gRPC itself closes a silent connection after 10 to 20 s
        assert client.get().owners["ffn.0"].address == second and remote.steps == 4
        remote(inputs[4]).sum().backward()
        served[first].send_signal(signal.SIGCONT)
        for x in inputs[5:]:
            remote(x).sum().backward()
        wait_until(lambda: json.loads(status(first, as_json=True))["experts"]["ffn.0"]["steps"] == 8)
        assert remote.steps == 8 and remote.steps_lost == 0
        for process in served.values():
            process.terminate()
            assert process.wait(50) == 0
    module, optimizer = reference.module, torch.optim.Adam(reference.module.parameters())
    for x in inputs:
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()
    saved = store.load_newest("ffn.0")
    assert saved is not None and saved.step == 8
    torch.testing.assert_close(saved.state["module"], dict(module.state_dict()))


@pytest.mark.long
def test_training_continues_after_etcd_lost_its_data(tmp_path: Path) -> None:
    with cluster(tmp_path) as (member,), ExitStack() as stack:
        clients = [stack.enter_context(EtcdDirectory(member.endpoint)) for _ in range(3)]
        for _ in range(50):  # so that the first tokens are larger than the new ones
            clients[0].withdraw(clients[0].declare("else", "elsewhere:1", 60.0))
        one, other = (stack.enter_context(make(directory, expert())) for directory in clients[:2])
        connections = stack.enter_context(Connections(clients[2]))
        remote = RemoteExpert("fussy", connections, timeout=20.0)
        for seed in range(3):
            step(remote, seed)
        before = clients[2].get().owners["fussy"]
        member.kill()
        shutil.rmtree(tmp_path / "m0")
        member.start()
        step(remote, 3)
        wait_until(lambda: connections.snapshot().owner("fussy") not in (None, before))
        assert connections.snapshot().revision < 50
        step(remote, 4)
        wait_until(lambda: sorted((role(one), role(other))) == ["follower", "owner"] and same_steps(one, other))
        assert remote.steps == 5
