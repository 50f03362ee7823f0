"""Clients with training rights cannot act in another client's name or take more than their share."""

import contextlib
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.concurrency import BlockingProcess, FakeClock, wait_until
from tests.experts.expert_cases import answered, backward, fussy_backend, rows, work
from torchweft.core.errors import UsageError
from torchweft.experts import AccumulationOptions, ExpertBackend, GraphBudget, IdempotencyOptions, PoolOptions, TaskPool
from torchweft.experts.client import GrpcTransport, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import CommitError, ForbiddenError, OverloadError, QuotaError
from torchweft.experts.replication import ReplicaOptions, streams
from torchweft.experts.server import Access, Caller, Grant, Role, Server, ServerOptions
from torchweft.experts.server.auth import authenticate
from torchweft.experts.server.server_stream import ByteBudget
from torchweft.experts.task import CallerStream
from torchweft.experts.wire import Call, Header, Kind, Received
from torchweft.experts.wire.service import STATE

MIXED = Access(
    [Grant("*", "*", Role.TRAIN), Grant("boss", "*", Role.ADMIN)],
    {"t-token": "trainer", "o-token": "other", "b-token": "boss"},
)


@contextmanager
def mixed_server(**options: Any) -> Iterator[tuple[Server, ExpertBackend]]:
    backend = fussy_backend(**options)
    with Server([backend], access=MIXED) as server:
        yield server, backend


def ask_server(
    transport: GrpcTransport, kind: Kind, client: str, name: str = "", seed: int = 0, key: str = ""
) -> Received:
    tensors = [rows(2, seed), rows(2, seed + 1)] if kind is Kind.BACKWARD else []
    header = Header(kind=kind, call_id=0, uid="fussy", client=client, mini_batch=name, key=key or name)
    return transport.submit(Call(header, tensors), 10.0).result(10.0)


def test_unproven_client_cannot_act_as_a_proven_one() -> None:
    with (
        mixed_server() as (server, backend),
        GrpcTransport(server.address, token="t-token") as trainer,
        GrpcTransport(server.address) as stranger,
    ):
        ask_server(trainer, Kind.BACKWARD, "me", "m", key="k")
        for client, name in (("trainer", "me/m"), ("me", "m"), ("trainer", "m")):
            with pytest.raises(CommitError, match="client 'unproven:"):
                ask_server(stranger, Kind.COMMIT, client, name)
            ask_server(stranger, Kind.DISCARD, client, name)
        assert backend.steps == 0
        ask_server(trainer, Kind.COMMIT, "me", "m")
        assert backend.steps == 1


@pytest.mark.parametrize("name", ["unproven:trainer", "peer:ipv4:127.0.0.1"])
def test_proven_name_cannot_look_unproven(name: str) -> None:
    with pytest.raises(UsageError, match="which are reserved for clients without a proven name"):
        Access([Grant()], {"token": name})
    with pytest.raises(ForbiddenError, match="the name in the certificate"):
        authenticate(Access(), {"x509_common_name": [name.encode()]}, (), "ipv4:1.2.3.4:5")


@pytest.mark.parametrize(
    ("peer", "principal"),
    [
        ("ipv4:10.0.0.7:40884", "peer:ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:40884", "peer:::/64"),
        ("ipv6:[2001:db8:0:1:2::3]:40884", "peer:2001:db8:0:1::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:40884", "peer:fe80::/64"),
        ("unix:/tmp/socket", "peer:unix:/tmp/socket"),
    ],
)
def test_principal_is_the_proven_name_or_the_host(peer: str, principal: str) -> None:
    assert Caller("", peer).principal == principal
    assert Caller("trainer", peer).principal == "trainer"


def test_unproven_names_share_one_quota() -> None:
    gate = BlockingProcess(lambda tasks: [list(task.tensors[:1]) for task in tasks])
    with (
        mixed_server(max_client_tasks=4, max_batch_size=2) as (server, backend),
        GrpcTransport(server.address, token="t-token") as trainer,
        GrpcTransport(server.address) as stranger,
    ):
        backend.backward_pool.process = gate
        calls = [
            stranger.submit(Call(header, [rows(2, 0), rows(2, 1)]), 20.0)
            for header in (
                Header(kind=Kind.BACKWARD, call_id=0, uid="fussy", client=f"made up {number}") for number in range(40)
            )
        ]
        wait_until(lambda: sum(call.done() for call in calls) == 36)
        assert all(isinstance(call.exception(), QuotaError) for call in calls if call.done())
        mine = trainer.submit(Call(Header(kind=Kind.BACKWARD, call_id=0, uid="fussy"), [rows(2, 0), rows(2, 1)]), 20.0)
        gate.go.release(5)
        assert mine.result(20.0)


@given(st.lists(st.tuples(st.sampled_from(["ann", "eve"]), st.integers(1, 60)), max_size=30))
def test_one_client_leaves_memory_for_calls_to_others(calls: list[tuple[str, int]]) -> None:
    budget, held = ByteBudget(100), {"ann": list[int](), "eve": list[int]()}
    for client, nbytes in calls:
        try:
            budget.admit(nbytes, client)
            held[client].append(nbytes)
        except QuotaError:
            assert sum(held[client]) + nbytes > 75
        except OverloadError:
            assert budget.held + nbytes > 100
        assert sum(held[client]) <= max([75, *held[client][:1]])
    for client, sizes in held.items():
        for nbytes in sizes:
            budget.release(nbytes, client)
    assert budget.held == 0 and not budget._clients


def test_one_client_cannot_take_all_mini_batches() -> None:
    """The error names the holders."""
    with (
        mixed_server(mini_batches=AccumulationOptions(mini_batches=4, max_client_mini_batches=3)) as (server, _),
        GrpcTransport(server.address, token="t-token") as trainer,
        GrpcTransport(server.address, token="o-token") as greedy,
        GrpcTransport(server.address) as stranger,
    ):
        for number in range(3):
            ask_server(greedy, Kind.BACKWARD, "me", str(number))
        with pytest.raises(
            QuotaError, match="client 'other' has 3 mini-batches open, and the limit for one client is 3"
        ):
            ask_server(greedy, Kind.BACKWARD, "me too", "3")
        ask_server(trainer, Kind.BACKWARD, "me", "m")
        with pytest.raises(OverloadError, match=r"'other' has 3 \(the oldest idle for \d+ s\), client 'trainer'"):
            ask_server(stranger, Kind.BACKWARD, "me", "m")
        ask_server(trainer, Kind.COMMIT, "me", "m")


def test_one_client_cannot_take_all_connections_and_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerOptions, "client_connections", 2)
    with mixed_server() as (server, backend), contextlib.ExitStack() as stack:
        for token, accepted in [("o-token", True)] * 2 + [("o-token", False), ("t-token", True)]:
            transport = stack.enter_context(GrpcTransport(server.address, token=token))
            if accepted:
                ask_server(transport, Kind.PING, "me")
            else:
                with pytest.raises(OverloadError, match="client 'other' has 2 connections, and one client may have"):
                    ask_server(transport, Kind.PING, "me")
    gate, x = BlockingProcess(), rows(1, 0)
    pool = TaskPool("p", gate, backend.forward_pool.columns, PoolOptions(max_tasks=4))
    for _ in range(2):
        pool.submit_task(x, client="eve")
    with pytest.raises(QuotaError, match="its limit is 2 tasks"):
        pool.submit_task(x, client="eve")
    pool.submit_task(x, client="ann")


def test_graphs_that_one_client_has_kept_push_out_none_of_others() -> None:
    backend, x = fussy_backend(keep_graphs=GraphBudget(2000)), rows(2, 0)

    def forward(client: str, key: str) -> None:
        assert backend.forward_pool.submit_task(x, client=client, key=key)
        work(backend)

    forward("ann", "mine")
    for number in range(20):
        forward("eve", str(number))
    assert backend.kept_inputs("ann", "mine") is not None
    assert backend.kept_inputs("eve", "0") is None and backend.kept_inputs("eve", "19") is not None
    assert 0 < backend.statistics().kept_graph_bytes <= 2000


def test_discards_flush_nothing_of_others_and_leave_nothing() -> None:
    backend = fussy_backend(idempotency=IdempotencyOptions(max_keys=100))
    assert isinstance(*answered(backend, backward(backend, client="ann", key="a", mini_batch="m")), list)
    backend.discard("m", client="ann")
    assert backend.statistics().open_mini_batches == 0
    for number in range(10_000):
        backend.discard(f"made up {number}", client="eve")
    assert not backend.executor.mini_batches.discarded and backend.idempotency.statistics().keys == 1
    for number in range(100):
        assert answered(backend, backward(backend, client="eve", mini_batch=str(number)))
        backend.discard(str(number), client="eve")
    work(backend)
    assert backend.idempotency.statistics().keys <= 51
    (late,) = answered(backend, backward(backend, 2, client="ann", key="b", mini_batch="m"))
    assert isinstance(late, CommitError), "otherwise a commit would apply a part of the mini-batch"


def test_discard_reaches_queued_gradients(backend: ExpertBackend) -> None:
    waiting = backward(backend, client="ann", mini_batch="m")
    backend.discard("m", client="ann")
    assert isinstance(*answered(backend, waiting), CommitError) and backend.statistics().open_mini_batches == 0


def test_mini_batches_of_a_gone_client_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock().install(monkeypatch, "torchweft.experts.accumulation")
    backend = fussy_backend(mini_batches=AccumulationOptions(mini_batches=2, orphan_seconds=30.0))
    backend.executor.mini_batches._clock = clock.monotonic
    gone, back = CallerStream(), CallerStream()

    def add(client: str, stream: CallerStream, seed: int = 0) -> Any:
        (answer,) = answered(backend, backward(backend, seed, client=client, mini_batch="m", stream=stream))
        return answer if isinstance(answer, Exception) else None

    assert add("ann", gone) is None and add("bob", gone) is None
    gone.ended_at = clock.now
    clock.now += 29.0
    assert add("bob", back, 1) is None, "a client that reconnects in time can continue"
    assert isinstance(add("eve", back), OverloadError)
    clock.now += 1.0
    assert add("eve", back) is None
    lost, done = answered(backend, *[backend.commit("m", client=client) for client in ("ann", "bob")])
    assert isinstance(lost, CommitError) and "connection ended" in str(lost)
    assert isinstance(done, list) and backend.steps == 1


def test_mini_batches_notice_the_end_of_their_stream() -> None:
    with mixed_server(mini_batches=AccumulationOptions(orphan_seconds=0.0)) as (server, backend):
        with GrpcTransport(server.address) as transport:
            ask_server(transport, Kind.BACKWARD, "me", "m")
            assert backend.statistics().open_mini_batches == 1
        wait_until(lambda: backend.statistics().open_mini_batches == 0)


def test_closing_an_expert_discards_its_open_mini_batch() -> None:
    with mixed_server() as (server, backend), GrpcTransport(server.address) as shared:
        for where in (server.address, shared):
            with RemoteExpert("fussy", where, accumulate=True) as remote:
                remote(rows(2, 0)).sum().backward()
                assert backend.statistics().open_mini_batches == 1
            wait_until(lambda: backend.statistics().open_mini_batches == 0, 5.0)


@contextmanager
def states(server: Server, token: str) -> Iterator[Callable[[], Any]]:
    questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        method, metadata = channel.stream_stream(STATE), [("authorization", f"Bearer {token}")]
        call = method(iter(questions.get, None), timeout=15.0, metadata=metadata)
        try:
            yield call.code
        finally:
            questions.put(None)
            call.cancel()


def test_state_streams_need_rights_and_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "IDLE", 0.1)
    directory = LocalDirectory()
    with Server([fussy_backend()], access=MIXED, directory=directory, replicas=ReplicaOptions()) as server:
        following = server._grpc_server.handlers.leader_streams
        assert following is not None
        with states(server, "t-token") as code:
            assert code() is grpc.StatusCode.PERMISSION_DENIED and not following.open
        assert server.audit.counts()["STATE"] == 1
        with states(server, "b-token") as code:
            assert code() is grpc.StatusCode.OK and not following.open
    directory.close()
