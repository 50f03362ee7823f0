"""Helpers for tests of the panel: an expert, a status, and a client that sends raw bytes."""

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.experts.expert_cases import X, adam
from torchweft.experts import ExpertBackend
from torchweft.experts.client import LocalTransport, RemoteExpert
from torchweft.experts.server import Server

PATIENCE = 10.0
NASTY = "</title><script>alert(1)</script>\"'&\u202e\x00\ud800"


def layer(name: str) -> ExpertBackend:
    return ExpertBackend(name, nn.Linear(4, 4, dtype=torch.float64), adam, args_schema=(X,))


def train(server: Server, name: str, steps: int = 1) -> None:
    with LocalTransport(server.handler()) as transport:
        remote = RemoteExpert(name, transport)
        for _ in range(steps):
            remote(torch.ones(3, 4, dtype=torch.float64)).sum().backward()


def status(names: Sequence[str] = ("a",), **changes: Any) -> dict[str, Any]:
    """Status of a server that was never started, with experts of these names."""
    result = Server([layer(f"expert{i}") for i in range(len(names))]).status()
    for field in ("experts", "keeping"):
        result[field] = {name: result[field][f"expert{i}"] for i, name in enumerate(names)}
    return {**result, **changes}


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    return host, int(port)


def exchange(url: str, sent: bytes, timeout: float = PATIENCE) -> bytes:
    """Send bytes, and return all that arrives until the server closes the connection."""
    with socket.create_connection(address(url), timeout=timeout) as stream:
        stream.sendall(sent)
        received = b""
        while chunk := stream.recv(65536):
            received += chunk
    return received


def get(url: str, path: str = "/", *, method: str = "GET", **fields: str) -> tuple[int, dict[str, str], str]:
    headers = {"Host": "127.0.0.1", "Connection": "close", **fields}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    head, _, body = exchange(url, ("\r\n".join(lines) + "\r\n\r\n").encode()).partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    pairs = [line.partition(": ") for line in rest]
    return int(first.split()[1]), {key.lower(): value for key, _, value in pairs}, body.decode()
