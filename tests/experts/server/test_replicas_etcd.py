"""Replicas in processes of their own, with a real etcd: SIGKILL of the owner, and SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.experts.etcd_cases import WHERE, cluster, free_ports, wait_for_port
from tests.experts.waiting import until
from weft.experts.client import Connections, RemoteExpert
from weft.experts.directory.etcd import EtcdDirectory

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[3]
CONFIG = """
address = "127.0.0.1:{port}"
directory = "etcd://{etcd}"
[options]
lease_seconds = 1.0
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


@pytest.fixture(autouse=True)
def needs_etcd(request: pytest.FixtureRequest) -> None:
    """Skip by name, since -rs folds equal reasons."""
    if WHERE is None:
        pytest.skip(f"{request.node.name}: there is no `etcd` on the path (Debian: apt-get install etcd-server)")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[tuple[str, EtcdDirectory]]:
    with cluster(tmp_path / "etcd") as members:
        wait_for_port(members[0].endpoint)
        with EtcdDirectory(members[0].endpoint) as made:
            yield members[0].endpoint, made


def serve(folder: Path, etcd: str, port: int, stack: ExitStack) -> "subprocess.Popen[str]":
    file = folder / f"{port}.toml"
    file.write_text(CONFIG.format(port=port, etcd=etcd), "utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", "serve", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    assert "serving" in process.stdout.readline()
    return process


def test_training_goes_on_after_sigkill_and_after_sigterm_of_owners(
    tmp_path: Path, directory: tuple[str, EtcdDirectory]
) -> None:
    etcd, there = directory
    ports = free_ports(2)
    with ExitStack() as stack:
        served = {f"127.0.0.1:{port}": serve(tmp_path, etcd, port, stack) for port in ports}
        connections = stack.enter_context(Connections(there))
        remote = RemoteExpert("ffn.0", connections, timeout=20.0)
        x = torch.randn(2, 8)

        def owner() -> str:
            found = there.get().owner("ffn.0")
            return "" if found is None else found.address

        for _ in range(3):
            remote(x).sum().backward()
        first, token = owner(), there.get().owners["ffn.0"].token
        time.sleep(0.3)  # for the follower to follow
        served[first].send_signal(signal.SIGKILL)
        remote(x).sum().backward()
        second = owner()
        assert second not in ("", first) and remote.steps == 4
        assert there.get().owners["ffn.0"].token > token

        served[first].wait(10)
        served[first] = serve(tmp_path, etcd, int(first.rpartition(":")[2]), stack)
        assert owner() == second
        start = time.monotonic()
        served[second].terminate()
        remote(x).sum().backward()
        assert remote.steps == 5
        assert served[second].wait(10) == 0 and time.monotonic() - start < 6.0
        until(lambda: owner() == first)
