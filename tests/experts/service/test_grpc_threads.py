"""Nothing of gRPC's runs on in the background when a connection has been closed: a process may end at once."""

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
        for _ in range(10):  # without waiting for them, one is left every other time
            before = set(threading.enumerate())
            if how == "connections":
                with Connections(directory) as connections:
                    train_once(RemoteExpert("fussy", connections))
            else:
                with RemoteExpert("fussy", server.address) as remote:
                    remote.describe() if how == "describe" else train_once(remote)
            assert set(threading.enumerate()) <= before


def test_thread_of_a_short_call_is_waited_for() -> None:
    asked, through = threading.Event(), threading.Event()

    def answer(request: bytes, context: object) -> bytes:
        asked.wait(60.0)
        return request

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_registered_method_handlers("test", {"Echo": grpc.unary_unary_rpc_method_handler(answer)})
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        before, crew = set(threading.enumerate()), GrpcThreads()
        opened = transport.open_channel(f"127.0.0.1:{port}", None, LIMITS)

        def call_to_the_end() -> Any:
            call = opened.unary_unary("/test/Echo").future(b"")
            call.add_done_callback(lambda _: through.wait(60.0))  # in gRPC's thread, for the call has not ended yet
            asked.set()
            call.result()
            return call

        assert crew.stream(lambda _: call_to_the_end(), iter([])).done()
        assert not crew.wait(0.0)
        through.set()
        opened.close()
        assert crew.wait()
        server.stop(None).wait()
    assert set(threading.enumerate()) <= before


def test_a_call_that_does_not_begin_is_not_waited_for() -> None:
    def fails(requests: object) -> object:
        raise ValueError("closed")

    crew = GrpcThreads()
    with pytest.raises(ValueError, match="closed"):
        crew.stream(fails, iter([b""]))
    assert crew.wait(0.0)


def test_wait_reports_a_timeout_and_ignores_other_threads() -> None:
    end, crew = threading.Event(), GrpcThreads()

    def _run() -> None:
        end.wait(60.0)

    def other() -> None:
        end.wait(60.0)

    for target, ended in ((_run, False), (other, True)):
        end.clear()
        thread = threading.Thread(target=target, daemon=True)
        crew.stream(lambda _, thread=thread: thread.start(), iter([]))
        try:
            assert crew.wait(0.0) is ended
        finally:
            end.set()
        assert crew.wait()
        thread.join()
