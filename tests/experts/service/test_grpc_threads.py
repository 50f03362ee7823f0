"""No thread of gRPC outlives a closed connection, so a process can end at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest

from tests.experts.expert_cases import fussy_backend, rows
from torchweft.experts.client import Connections, RemoteExpert, transport
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.fork_guard import GrpcThreads
from torchweft.experts.server import Server
from torchweft.experts.wire import LIMITS

Way = Callable[[Server, LocalDirectory], AbstractContextManager[Any]]


def train_once(remote: RemoteExpert) -> None:
    remote(rows(2, 0).requires_grad_()).sum().backward()


@pytest.mark.parametrize("how", ["address", "connections", "describe"])
def test_a_closed_connection_leaves_no_thread(directory: LocalDirectory, how: str) -> None:
    with Server([fussy_backend()], directory=directory) as server:
        for _ in range(10):  # without a wait for them, half the turns leave one
            before = set(threading.enumerate())
            if how == "connections":
                with Connections(directory) as connections:
                    train_once(RemoteExpert("fussy", connections))
            else:
                with RemoteExpert("fussy", server.address) as remote:
                    remote.describe() if how == "describe" else train_once(remote)
            assert set(threading.enumerate()) <= before


def test_wait_includes_the_thread_of_a_short_call() -> None:
    asked, released = threading.Event(), threading.Event()

    def answer(request: bytes, context: object) -> bytes:
        asked.wait(60.0)
        return request

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_registered_method_handlers("test", {"Echo": grpc.unary_unary_rpc_method_handler(answer)})
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        before, grpc_threads = set(threading.enumerate()), GrpcThreads()
        channel = transport.open_channel(f"127.0.0.1:{port}", None, LIMITS)

        def call_and_wait() -> Any:
            call = channel.unary_unary("/test/Echo").future(b"")
            call.add_done_callback(lambda _: released.wait(60.0))  # runs in gRPC's thread, because the call is pending
            asked.set()
            call.result()
            return call

        assert grpc_threads.stream(lambda _: call_and_wait(), iter([])).done()
        assert not grpc_threads.wait(0.0)
        released.set()
        channel.close()
        assert grpc_threads.wait()
        server.stop(None).wait()
    assert set(threading.enumerate()) <= before


def test_wait_ignores_a_call_that_did_not_start() -> None:
    def fails(requests: object) -> object:
        raise ValueError("closed")

    grpc_threads = GrpcThreads()
    with pytest.raises(ValueError, match="closed"):
        grpc_threads.stream(fails, iter([b""]))
    assert grpc_threads.wait(0.0)


def test_wait_reports_a_timeout_and_ignores_other_threads() -> None:
    end, grpc_threads = threading.Event(), GrpcThreads()

    def _run() -> None:
        end.wait(60.0)

    def other() -> None:
        end.wait(60.0)

    for target, ended in ((_run, False), (other, True)):
        end.clear()
        thread = threading.Thread(target=target, daemon=True)
        grpc_threads.stream(lambda _, thread=thread: thread.start(), iter([]))
        try:
            assert grpc_threads.wait(0.0) is ended
        finally:
            end.set()
        assert grpc_threads.wait()
        thread.join()
