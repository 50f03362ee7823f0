"""A repeated backward steps once, whatever other clients do, and the table stays within its bounds."""

import random
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.concurrency import FakeClock
from tests.experts.expert_cases import answered, backward, fussy_backend, rows, spoiled_gradient, weights, work
from torchweft.core.errors import UsageError
from torchweft.experts import AccumulationOptions, ExpertBackend, IdempotencyOptions, Runtime, idempotency
from torchweft.experts.errors import GradientError, KeyReusedError, OverloadError, ResultEvictedError
from torchweft.experts.idempotency import IdempotencyTable
from torchweft.experts.serialization import deserialize, serialize
from torchweft.experts.task import Results, Task


def send(backend: ExpertBackend, key: str, client: str | None = "ann", seed: int = 0, **more: str) -> "Future[Results]":
    return backward(backend, seed, client=client, key=key, **more)


def test_retried_backward_steps_once(backend: ExpertBackend) -> None:
    first, joined = send(backend, "k"), send(backend, "k")
    work(backend)
    after = weights(backend)
    again = send(backend, "k")
    assert all(torch.equal(first.result(0)[0], future.result(0)[0]) for future in (joined, again))
    assert backend.steps == 1 and weights(backend) == after
    again.result(0)[0].zero_()  # a write into an answer does not change the stored result
    assert send(backend, "k").result(0)[0].any()
    assert backend.idempotency.step_of("backward", "ann", "k") == 1
    assert backend.backward_pool.statistics().joined == 3


def test_a_key_belongs_to_its_client(backend: ExpertBackend) -> None:
    futures = [send(backend, "k", client) for client in ("ann", "bob", None)]
    assert len(answered(backend, *futures)) == len({id(future) for future in futures}) == 3
    assert (backend.idempotency.statistics().keys, backend.backward_pool.statistics().joined) == (3, 0)


def test_joined_retries_cancel_independently(backend: ExpertBackend) -> None:
    first, joined = send(backend, "k"), send(backend, "k")
    assert first.cancel()
    work(backend)
    assert joined.result(0) and backend.steps == 1
    both = [send(backend, "l"), send(backend, "l")]
    assert all(future.cancel() for future in both)
    assert backend.backward_pool.statistics().waiting_tasks == 0
    send(backend, "l")  # a new start
    work(backend)
    assert backend.steps == 2


def test_failed_task_is_retried_under_its_key(backend: ExpertBackend) -> None:
    bad = backend.backward_pool.submit_task(*spoiled_gradient(), client="ann", key="k")
    assert isinstance(*answered(backend, bad), GradientError)
    assert isinstance(*answered(backend, send(backend, "k")), list) and backend.steps == 1


def test_key_reused_for_another_payload_is_refused(backend: ExpertBackend) -> None:
    """Both while the first request runs and afterwards."""
    send(backend, "k")
    for _ in range(2):
        after = weights(backend)
        with pytest.raises(KeyReusedError, match="shapes; use a new key for every new request"):
            backward(backend, size=3, client="ann", key="k")
        with pytest.raises(KeyReusedError, match="another payload"):
            backend.backward_pool.submit_task(rows(2, 0), rows(2, 2), client="ann", key="k")
        with pytest.raises(KeyReusedError, match="another mini-batch, mode"):
            backward(backend, client="ann", key="k", mini_batch="m")
        assert weights(backend) == after
        work(backend)
    assert backend.steps == 1 and send(backend, "k").result(0)


def test_fingerprint_ignores_the_memory_layout() -> None:
    x = rows(6, 0)
    strided = torch.stack([x, x], 1)[:, 0]
    conjugate = torch.complex(x, x).conj()
    assert not strided.is_contiguous() and conjugate.is_conj()
    pairs = [(x, strided), (conjugate, conjugate.resolve_conj()), (x[:0], x.new_empty(0, 4)), (x.bfloat16(),) * 2]
    for one, other in pairs:
        assert Task((one,), 6).fingerprint() == Task((other,), 6).fingerprint()
    others = [x.flip(0), x[:5], x.float(), x.view(12, 2)]
    fingerprints = {Task((tensor,), 6).fingerprint() for tensor in (x, *others)}
    assert len(fingerprints) == 5 and all(0 <= fingerprint < 1 << 64 for fingerprint in fingerprints)


def test_evicted_result_is_an_error_not_a_second_step() -> None:
    backend = fussy_backend(idempotency=IdempotencyOptions(max_result_bytes=0))
    send(backend, "k")
    work(backend)
    with pytest.raises(ResultEvictedError, match="was applied in step 1, but its result is no longer stored"):
        send(backend, "k")
    assert backend.steps == 1


def result(size: int) -> Results:
    return [torch.zeros(size, dtype=torch.uint8)]


def recorded(table: IdempotencyTable, principal: str, key: str, size: int = 0, step: int = 1, **more: object) -> Task:
    task = Task((), 1, client=principal, key=key, principal=principal, **more)  # type: ignore[arg-type]
    assert table.begin("backward", task) is None
    table.record("backward", task, result(size), step)
    table.abandon("backward", task)
    return task


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.floats(0, 3)), max_size=60))
def test_bytes_keys_and_ages_stay_within_their_bounds(history: list[tuple[str, int, float]]) -> None:
    clock = FakeClock()
    bounds = IdempotencyOptions(max_result_bytes=100, max_keys=8, max_age=10.0, max_result_age=0.01)
    table = IdempotencyTable(bounds, clock.monotonic)
    born: dict[tuple[str, str], float] = {}
    for number, (client, size, pause) in enumerate(history):
        clock.now += pause + 0.02
        recorded(table, client, str(number), size)
        born[client, str(number)] = clock.now
        stats = table.statistics()
        assert stats.result_bytes <= 100 and stats.keys <= 8
        for (owner, key), when in list(born.items())[-2:]:
            known = table.step_of("backward", owner, key) is not None
            assert known == (when > clock.now - 10.0)


def test_client_beyond_its_share_replaces_its_own_key() -> None:
    table = IdempotencyTable(IdempotencyOptions(max_keys=10))
    recorded(table, "ann", "mine")
    for number in range(100):
        recorded(table, "eve", str(number))
    assert table.step_of("backward", "ann", "mine") == 1
    assert table.statistics().keys == 6
    assert [table.step_of("backward", "eve", str(number)) for number in (94, 95)] == [None, 1]


def test_full_table_refuses_newcomers_while_retries_can_come() -> None:
    """After that time the table evicts keys of the largest holder."""
    clock = FakeClock()
    table = IdempotencyTable(IdempotencyOptions(max_keys=10, max_client_keys=6), clock.monotonic)
    for number in range(6):
        recorded(table, "eve", str(number))
    for number in range(4):
        recorded(table, "bob", str(number))
    with pytest.raises(OverloadError, match="holds 10 keys of 2 clients, all applied in the last 30 s"):
        recorded(table, "ann", "first")
    recorded(table, "bob", "more")  # one of its own keys is evicted
    assert [table.step_of("backward", "bob", key) for key in ("0", "1", "more")] == [None, 1, 1]
    clock.now += 31.0
    recorded(table, "ann", "first")
    assert table.step_of("backward", "eve", "0") is None
    assert all(table.step_of("backward", "bob", key) for key in ("1", "2", "3", "more"))


@pytest.mark.parametrize("max_result_bytes", [0, 100])
def test_a_key_is_protected_until_the_deadline_of_its_request(max_result_bytes: int) -> None:
    clock = FakeClock()
    bounds = IdempotencyOptions(max_result_bytes, max_keys=2, max_client_keys=2, max_result_age=1.0)
    table = IdempotencyTable(bounds, clock.monotonic)
    recorded(table, "bob", "patient", size=1, deadline=100.0)
    recorded(table, "bob", "next")
    clock.now += 50.0
    with pytest.raises(OverloadError):
        recorded(table, "ann", "k")
    clock.now += 50.0
    recorded(table, "ann", "k")
    assert table.step_of("backward", "bob", "patient") is None


def test_largest_holder_loses_results_first() -> None:
    table = IdempotencyTable(IdempotencyOptions(max_result_bytes=100))
    mine = recorded(table, "ann", "k", size=40)
    for number in range(20):
        recorded(table, "eve", str(number), size=10)
    assert table.begin("backward", mine) is not None
    assert table.statistics().result_bytes == 100


def test_foreign_keys_do_not_make_a_repeated_backward_step_twice() -> None:
    backend = fussy_backend(idempotency=IdempotencyOptions(max_keys=8))
    first = send(backend, "k")
    work(backend)
    for number in range(20):
        send(backend, str(number), client=f"made up {number}", principal="peer:1.2.3.4", seed=number)
        work(backend)
    again = send(backend, "k")
    work(backend)
    assert torch.equal(first.result(0)[0], again.result(0)[0]) and backend.steps == 21


def test_names_of_open_mini_batches_do_not_outlive_their_keys() -> None:
    table = IdempotencyTable(IdempotencyOptions(max_keys=4))
    for number in range(1000):
        recorded(table, "ann", str(number), mini_batch=f"m{number % 7}")
    assert len(table._unsaved) == 2
    table.commit_mini_batch("ann", "m5", 3)  # the key of 999, as those of 5, 12, ... 992 are evicted
    assert [table.step_of("backward", "ann", key) for key in ("992", "999", "998")] == [None, 3, 1]


def test_table_state_is_loaded_by_another_table(backend: ExpertBackend) -> None:
    sent = [send(backend, f"k{i}", seed=i) for i in range(3)]
    work(backend)
    assert isinstance(*answered(backend, send(backend, "o", mini_batch="m")), list)
    restarted = fussy_backend(mini_batches=AccumulationOptions(mini_batches=1))
    assert isinstance(*answered(restarted, send(restarted, "o", "bob", mini_batch="gone")), list)
    restarted.load_state_dict(backend.state_dict())
    restarted.idempotency.load_state_dict(backend.idempotency.state_dict())
    for i, future in enumerate(sent):
        assert torch.equal(send(restarted, f"k{i}", seed=i).result(0)[0], future.result(0)[0])
    assert restarted.idempotency.step_of("backward", "ann", "o") is None  # its sum was not committed
    assert restarted.idempotency.step_of("dropped", "bob", "gone") is not None
    assert restarted.steps == 1


def test_ages_continue_in_another_process() -> None:
    clock, later = FakeClock(), FakeClock()
    clock.now, later.now = 5000.0, 7.0
    bounds = IdempotencyOptions(max_age=100.0)
    table, other = IdempotencyTable(bounds, clock.monotonic), IdempotencyTable(bounds, later.monotonic)
    task = recorded(table, "ann", "k", size=3)
    clock.now += 60.0
    recorded(table, "ann", "l")
    other.load_state_dict(table.state_dict())
    with pytest.raises(ResultEvictedError):
        other.begin("backward", task)
    later.now += 50.0
    assert [other.step_of("backward", "ann", key) for key in "kl"] == [None, 1]


@pytest.mark.parametrize("state", ["", {}, {"now": 0.0, "keys": torch.zeros(3), "results": []}, {"now": "x"}])
def test_invalid_state_changes_nothing(state: object) -> None:
    table = IdempotencyTable()
    recorded(table, "ann", "k")
    with pytest.raises(UsageError, match="not a state of an idempotency table"):
        table.load_state_dict(state)
    saved = table.state_dict()
    with pytest.raises(UsageError, match="2 keys, of which 1 are different"):
        table.load_state_dict({**saved, "keys": saved["keys"].repeat(2, 1)})
    assert table.step_of("backward", "ann", "k") == 1


def test_a_hundred_thousand_keys_are_small_and_come_back() -> None:
    table = IdempotencyTable(IdempotencyOptions(max_client_keys=100_000))
    for number in range(1000):
        recorded(table, f"client {number % 5}", str(number), step=number)
    state = table.state_dict()
    assert state["keys"].shape == (1000, 48)
    digests = torch.arange(100_000).view(-1, 1).expand(-1, 2).contiguous().view(torch.uint8)
    many = torch.cat([digests, state["keys"][:1, 16:].expand(100_000, -1)], 1)
    table.load_state_dict({**state, "keys": many, "results": []})
    assert table.statistics().keys == 100_000 and torch.equal(table.state_dict()["keys"], many)


def test_keys_are_restored_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not unpacked one by one, but each client still has its own keys and times, oldest first."""
    clock, count = FakeClock(), 1000
    bounds = IdempotencyOptions(max_client_keys=count, max_result_age=7.0)
    table, other = IdempotencyTable(bounds, clock.monotonic), IdempotencyTable(bounds, clock.monotonic)
    for number in range(count):
        clock.now += 0.25
        recorded(table, f"client {number * number % 7}", str(number), size=0)
    unpacked: list[bytes] = []

    class Counted:
        size = idempotency._VALUE.size

        def unpack(self, value: bytes) -> tuple[object, ...]:
            unpacked.append(value)
            return plain.unpack(value)

    state, plain = table.state_dict(), idempotency._VALUE
    monkeypatch.setattr(idempotency, "_VALUE", Counted())
    other.load_state_dict({**state, "results": []})
    assert len(unpacked) < 50
    for principal, share in table._shares.items():
        assert list(share.keys.items()) == list(other._shares[principal].keys.items())
    assert other._shares.keys() == table._shares.keys()


@pytest.mark.parametrize("size", [1, 3000])
def test_of_the_results_the_newest_are_saved_up_to_a_bound(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "SAVED_RESULT_BYTES", 20_000)
    table, other = IdempotencyTable(), IdempotencyTable()
    tasks = [recorded(table, f"client {number % 3}", str(number), size=size) for number in range(60)]
    data = serialize(table.state_dict())
    assert len(data) < 48 * len(tasks) + 20_000 + 1000
    other.load_state_dict(deserialize(data))
    saved = other.statistics().results
    assert 0 < saved < len(tasks)
    for number, task in enumerate(tasks):
        if number >= len(tasks) - saved:
            assert isinstance(other.begin("backward", task), list)
        else:
            with pytest.raises(ResultEvictedError):  # the key is restored, so that it does not step again
                other.begin("backward", task)


def test_lost_replies_cause_no_second_step(backend: ExpertBackend) -> None:
    dice = random.Random(0)
    with Runtime([backend]):
        for number in range(60):
            while dice.random() < 0.5:  # sent, but the reply is lost
                future = send(backend, str(number), seed=number)
                if dice.random() < 0.5:
                    future.cancel()
                else:
                    future.result(30)
            send(backend, str(number), seed=number).result(30)
    assert backend.steps == 60
    plain = fussy_backend()
    for number in range(60):
        send(plain, str(number), seed=number)
        work(plain)
    assert weights(plain) == weights(backend)
