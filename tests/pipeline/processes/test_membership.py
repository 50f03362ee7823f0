"""Rendezvous: members of the group are connected, other processes are not."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from torchweft.core.errors import RankLostError, UsageError
from torchweft.pipeline.processes import membership
from torchweft.pipeline.processes.membership import Rendezvous


def connect(store: Any, ranks: list[int], rank: int, seconds: float, results: dict[int, Any]) -> None:
    try:
        results[rank] = Rendezvous(store, ranks, rank, time.monotonic() + seconds).connect()
    except BaseException as error:
        results[rank] = error


def start_meetings(
    store: Any, size: int, present: list[int], seconds: float
) -> tuple[dict[int, Any], Callable[[], None]]:
    """Start ranks as threads. Return their results, and a function that waits for them."""
    results: dict[int, Any] = {}
    arguments = [(store, [10 * rank for rank in range(size)], rank, seconds, results) for rank in present]
    threads = [threading.Thread(target=connect, args=args) for args in arguments]
    for thread in threads:
        thread.start()

    def wait() -> None:
        for thread in threads:
            thread.join(seconds + 15)
        assert len(results) == len(present)

    return results, wait


def port_of(store: Any, rank: int) -> int:
    """The port of a rank, as soon as it is in the store."""
    key, end = f"torchweft/links/1/member/{rank}", time.monotonic() + 10
    while not store.check([key]):
        assert time.monotonic() < end
        time.sleep(0.01)
    return json.loads(store.get(key))[4]


def close_all(results: dict[int, Any]) -> None:
    for _, sockets, _ in results.values():
        for listener in sockets.values():
            listener.close()


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in membership._VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_every_pair_of_ranks_gets_one_connection() -> None:
    store = dist.HashStore()
    results, wait = start_meetings(store, 3, [0, 1, 2], 20)
    wait()
    for rank, (members, sockets, address) in results.items():
        assert [member.rank for member in members] == [0, 10, 20] and address == "127.0.0.1"
        assert sorted(sockets) == [other for other in range(3) if other != rank]
        for other, connection in sockets.items():
            assert connection.getsockname() == results[other][1][rank].getpeername()
    close_all(results)


def test_strangers_neither_enter_nor_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    store, strangers_are_there, call = dist.HashStore(), threading.Event(), Rendezvous._call

    def call_late(meeting: Rendezvous, *args: Any) -> None:
        assert strangers_are_there.wait(20)
        call(meeting, *args)

    monkeypatch.setattr(Rendezvous, "_call", call_late)
    results, wait = start_meetings(store, 3, [0, 1, 2], 30)
    port = port_of(store, 0)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]  # silent
    hello = membership._HELLO.pack(membership._MAGIC, 2, bytes(32))
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 9, hello + bytes(32), hello[:20]):  # garbage, a wrong proof, half a hello
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[-1].sendall(data)
    begun = time.monotonic()
    strangers_are_there.set()
    wait()
    assert time.monotonic() - begun < membership._SHAKE_SECONDS, "a silent stranger delayed the members"
    assert sorted(results[0][1]) == [1, 2] and sorted(results[2][1]) == [0, 1]
    assert results[0][1][2].getpeername() == results[2][1][0].getsockname()
    for address in strangers:
        address.close()
    close_all(results)


def test_the_port_is_closed_when_all_are_there() -> None:
    store = dist.HashStore()
    results, wait = start_meetings(store, 2, [0, 1], 20)
    wait()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(store, 0)), 1)
    close_all(results)


def test_a_listener_without_the_secret_is_refused() -> None:
    """An impostor that reflects the proof of the caller is not accepted."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        meeting = Rendezvous(dist.HashStore(), [0, 10], 1, time.monotonic() + 1)
        done: Any = membership.SimpleQueue()
        caller = threading.Thread(target=meeting._call, args=(impostor.getsockname(), 0, b"secret", done), daemon=True)
        caller.start()
        connection, _ = impostor.accept()
        membership._receive(connection, membership._HELLO.size)
        connection.sendall(bytes(32))
        connection.sendall(membership._receive(connection, 32))  # reflected
        assert connection.recv(1) == b""
        assert done.empty()
        connection.close()
    caller.join(10)


def test_missing_ranks_are_named() -> None:
    results, wait = start_meetings(dist.HashStore(), 4, [0, 2], 0.5)
    wait()
    for rank in (0, 2):
        assert isinstance(results[rank], RankLostError)
        assert "10, 30" in str(results[rank]) and "20" not in str(results[rank]).partition("no connection")[2]


def test_the_interface_of_a_variable_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert membership._own_address(dist.HashStore(), alone=False) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME=nowhere0"):
        membership._own_address(dist.HashStore(), alone=False)
