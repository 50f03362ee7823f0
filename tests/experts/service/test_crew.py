"""Nothing of gRPC's runs on in the background when a connection has been closed: a process may end at once."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.experts.expert_cases import fussy_backend, rows
from weft.experts.client import Connections, RemoteExpert, channel
from weft.experts.directory import LocalDirectory
from weft.experts.server import Server
from weft.experts.service.crew import Crew

Way = Callable[[Server, LocalDirectory], AbstractContextManager[Any]]


def trained(remote: RemoteExpert) -> None:
    remote(rows(2, 0).requires_grad_()).sum().backward()


@pytest.mark.parametrize("how", ["address", "connections", "describe"])
def test_a_closed_connection_leaves_no_thread(how: str) -> None:
    directory = LocalDirectory()
    with Server([fussy_backend()], directory=directory) as server:
        for _ in range(10):  # without waiting for them, one is left every other time
            before = set(threading.enumerate())
            if how == "connections":
                with Connections(directory) as connections:
                    trained(RemoteExpert("fussy", connections))
            else:
                with RemoteExpert("fussy", server.address) as remote:
                    remote.describe() if how == "describe" else trained(remote)
            assert set(threading.enumerate()) <= before


def test_a_thread_that_tells_of_an_expert_ends_before_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    told = channel._told

    def slowly(*arguments: Any) -> None:
        told(*arguments)
        time.sleep(0.1)  # in gRPC's thread, which need not be through when the caller has heard

    monkeypatch.setattr(channel, "_told", slowly)
    with Server([fussy_backend()]) as server:
        before = set(threading.enumerate())
        with RemoteExpert("fussy", server.address) as remote:
            assert remote.describe().steps == 0
        assert set(threading.enumerate()) <= before


def test_calls_that_do_not_begin_or_have_ended_already_are_not_waited_for() -> None:
    class Over:
        def add_callback(self, callback: object) -> bool:
            return False

    def fails(requests: object) -> object:
        raise ValueError("closed")

    crew = Crew()
    with pytest.raises(ValueError, match="closed"):
        crew.stream(fails, iter([b""]))
    crew.stream(lambda requests: Over(), iter([b""]))
    assert crew.wait(0.0)
    crew.begin()
    assert not crew.wait(0.0)
