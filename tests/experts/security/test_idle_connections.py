"""Idle TCP connections end soon and leave file descriptors for working clients."""

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.experts.certificates import Authority
from tests.experts.concurrency import wait_until
from tests.experts.security.raw_http2 import RawHttp2
from tests.experts.security.serve_process import served
from torchweft.experts.client import RemoteExpert
from torchweft.experts.server import Server, ServerTls
from torchweft.experts.wire import Limits
from torchweft.experts.wire.service import Options, server_options

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
LIMIT = 200


@pytest.mark.long
def test_silent_connections_leave_file_descriptors_free(tmp_path: Path) -> None:
    more = f'checkpoints = "{tmp_path}"\noptions = {{ checkpoint_seconds = 0.1 }}'
    with served(tmp_path, more, LIMIT) as server, ExitStack() as stack:
        host, port = server.address.split(":")
        mine = stack.enter_context(RemoteExpert("f", server.address, token="s3cret", timeout=30.0))
        mine(torch.ones(2, 8)).sum().backward()
        for _ in range(2 * LIMIT):
            stack.callback(socket.create_connection((host, int(port)), 10.0).close)
        wait_until(lambda: server.descriptors > LIMIT // 2)  # it has accepted its maximum
        assert server.descriptors <= LIMIT - 32
        for step in range(2, 5):  # connected clients keep working, and their steps are saved
            mine(torch.ones(2, 8)).sum().backward()
            assert mine.steps == step
        wait_until(lambda: mine.describe().durable == 4)
        with RemoteExpert("f", server.address, token="s3cret", timeout=30.0) as other:  # after the silent ones ended
            assert other(torch.ones(2, 8)).shape == (2, 8)


@pytest.mark.parametrize("encrypted", [False, True])
def test_connection_without_a_stream_is_closed(encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(limits: Limits, connections: int) -> Options:
        soon = {"grpc.server_handshake_timeout_ms": 200, "grpc.max_connection_idle_ms": 200}
        return [(name, soon.get(name, value)) for name, value in server_options(limits, connections)]

    monkeypatch.setattr("torchweft.experts.wire.service.server_options", hasty)
    tls = ServerTls(*Authority("authority").issue("server")) if encrypted else None
    with Server(address="localhost:0", tls=tls) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), 10.0) as silent:
            while silent.recv(1 << 16):  # the HTTP/2 preface, then the end of the stream
                pass
        if encrypted:
            return
        with RawHttp2(server.address) as idle, pytest.raises(ConnectionError):
            idle.ping()
            while True:
                idle.receive()
