"""Real etcd cluster of one or more members, started and stopped by a test."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

WHERE = shutil.which("etcd")


@dataclass
class Member:
    endpoint: str
    command: list[str]
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.endpoint)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


@contextmanager
def cluster(folder: Path, members: int = 1, client: Sequence[str] = (), scheme: str = "http") -> Iterator[list[Member]]:
    """Start a cluster. ``client``: additional command-line options. ``scheme``: URL scheme of the client ports."""
    if WHERE is None:
        pytest.skip("there is no `etcd` on the path (Debian: apt-get install etcd-server)")
    ports = free_ports(2 * members)
    peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
    all_peers = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
    running: list[Member] = []
    for i, peer in enumerate(peers):
        url = f"{scheme}://127.0.0.1:{ports[i]}"
        command = [WHERE, "--name", f"m{i}", "--data-dir", str(folder / f"m{i}")]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--initial-cluster-state", "new"]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", all_peers]
        command += ["--heartbeat-interval", "20", "--election-timeout", "200", "--log-level", "error", *client]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        running.append(Member(f"127.0.0.1:{ports[i]}", command, process))
    try:
        for member in running:
            wait_for_port(member.endpoint)
        yield running
    finally:
        for member in running:
            member.kill()


def wait_for_port(endpoint: str, seconds: float = 20.0) -> None:
    host, port = endpoint.split(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
