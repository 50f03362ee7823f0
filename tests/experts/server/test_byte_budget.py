"""Limit on the bytes of pending calls of all clients together."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from tests.experts.concurrency import blocking_expert, wait_until
from tests.experts.expert_cases import fussy_backend, rows
from tests.experts.server.raw_stream import PATIENCE, raw_stream
from tests.experts.server.server_cases import budget_of
from tests.experts.server.test_grpc_server import forward
from torchweft.experts.client import GrpcTransport, RemoteExpert
from torchweft.experts.errors import OverloadError
from torchweft.experts.server import Access, Grant, Role, Server, ServerOptions
from torchweft.experts.server.server_stream import ByteBudget
from torchweft.experts.wire import Kind
from torchweft.experts.wire.frame import MESSAGE_BYTES

BYTES = rows(2, 0).nbytes
# Two clients, because one takes at most three quarters of the bytes.
TWO = Access([Grant(role=Role.TRAIN)], {"one-token": "one", "two-token": "two"})
ONE = [("authorization", "Bearer one-token")]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_budget_is_kept_unless_one_call_alone_is_larger(sizes: list[int], most: int) -> None:
    budget, held = ByteBudget(most), list[int]()
    for size in sizes:
        try:
            budget.admit(size, f"client {len(held)}")  # one client per call, so that no client's share is full
            held.append(size)
        except OverloadError:
            assert size and budget.held + size > most
            while held:
                size = held.pop()
                budget.release(size, f"client {len(held)}")
            assert budget.held == 0
        assert budget.held == sum(held) <= max(most, *held, 0)


def test_call_beyond_the_budget_is_refused_until_others_end() -> None:
    gate, backend = blocking_expert()
    options = ServerOptions(total_bytes=2 * MESSAGE_BYTES + 3 * BYTES)
    with (
        Server([backend, fussy_backend()], options=options, access=TWO) as server,
        GrpcTransport(server.address, token="two-token") as other,
        gate,
    ):
        with raw_stream(server.address, ONE) as stream:
            stream.send(*[forward(number, rows(2, 0), "gate") for number in (1, 2, 3)])
            wait_until(lambda: budget_of(server).held == 3 * BYTES)
            error = other.submit(forward(0), PATIENCE).exception(PATIENCE)
            assert isinstance(error, OverloadError) and f"take {options.total_bytes} of" in str(error)
            assert server.statistics().errors["overload"] == 1
            gate.go.set()
            answered: list[Kind] = []
            while len(answered) < 3:
                answered += [answer.header.kind for answer in stream.receive()]
            assert answered == [Kind.RESULT] * 3
        wait_until(lambda: budget_of(server).held == 0)
        other.submit(forward(0), PATIENCE).result(PATIENCE)


def test_disconnected_client_frees_its_bytes() -> None:
    gate, backend = blocking_expert()
    with Server([backend], options=ServerOptions(total_bytes=BYTES)) as server, gate:
        with raw_stream(server.address) as stream:
            stream.send(forward(1, rows(2, 0), "gate"))
            wait_until(lambda: budget_of(server).held == BYTES)
        wait_until(lambda: budget_of(server).held == 0)


def test_client_retries_until_there_is_room() -> None:
    gate, backend = blocking_expert()
    options = ServerOptions(total_bytes=2 * MESSAGE_BYTES + BYTES)
    with (
        Server([backend, fussy_backend()], options=options, access=TWO) as server,
        raw_stream(server.address, ONE) as stream,
        RemoteExpert("fussy", server.address, token="two-token") as remote,
        gate,
    ):
        remote.describe()
        stream.send(forward(1, rows(2, 0), "gate"))
        wait_until(lambda: budget_of(server).held == BYTES)
        release = threading.Thread(
            target=lambda: wait_until(lambda: server.statistics().errors.get("overload")) or gate.go.set()
        )
        release.start()
        remote(rows(2, 0)).sum().backward()
        release.join()
        assert remote.steps == 1
