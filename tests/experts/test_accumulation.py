"""Gradients of a mini-batch accumulate until its owner commits them as one step."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.expert_cases import adam, answered, backward, fussy_backend, rows, spoiled_gradient, weights, work
from torchweft.experts import AccumulationOptions, ExpertBackend, Guards, Runtime, TensorSpec
from torchweft.experts.errors import CommitError, GradientError, OverloadError, StepError


def add(backend: ExpertBackend, mini_batch: str, seed: int, size: int = 2, client: str = "ann", key: str | None = None):
    return backward(backend, seed, size, client=client, key=key, mini_batch=mini_batch)


def is_commit_error(answer: object, words: str = "") -> bool:
    return isinstance(answer, CommitError) and words in str(answer)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 3), st.booleans()), min_size=1, max_size=8))
def test_mini_batch_is_one_step_with_all_its_gradients(tasks: list[tuple[str, int, bool]]) -> None:
    backend = fussy_backend(optimizer=lambda p: torch.optim.SGD(p, 0.1))
    plain = copy.deepcopy(backend.module)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for seed, (name, size, pause) in enumerate(tasks):
        add(backend, name, seed, size)
        if pause:
            work(backend)
    work(backend)
    assert backend.steps == 0
    first = copy.deepcopy(plain)  # all gradients were computed at the initial weights
    for steps, name in enumerate(dict.fromkeys(name for name, _, _ in tasks)):
        [[count]] = answered(backend, backend.commit(name, client="ann"))
        assert count.tolist() == [steps + 1]
        first.zero_grad()
        for seed, (other, size, _) in enumerate(tasks):
            if other == name:
                first(rows(size, seed)).backward(rows(size, seed + 50))
        for one, gradient in zip(plain.parameters(), first.parameters(), strict=True):
            one.grad = gradient.grad
        optimizer.step()
        for one, other in zip(backend.module.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-10)
    assert backend.statistics().open_mini_batches == 0


def test_commit_steps_once_and_closes_its_mini_batch(backend: ExpertBackend) -> None:
    answered(backend, added := add(backend, "m", 0, key="k"))
    assert backend.idempotency.step_of("backward", "ann", "k") == 0
    first, joined = backend.commit("m", client="ann"), backend.commit("m", client="ann")
    work(backend)
    repeated = backend.commit("m", client="ann")
    assert [commit.result(0)[0].item() for commit in (first, joined, repeated)] == [1, 1, 1]
    assert backend.steps == 1 and backend.idempotency.step_of("backward", "ann", "k") == 1
    assert is_commit_error(*answered(backend, add(backend, "m", 1)), "was committed")
    assert torch.equal(add(backend, "m", 0, key="k").result(0)[0], added.result(0)[0])


def test_mini_batch_belongs_to_its_client(backend: ExpertBackend) -> None:
    for seed, client in enumerate(("ann", "bob")):
        add(backend, "m", seed, client=client)
    assert is_commit_error(*answered(backend, backend.commit("m", client="eve")))
    assert backend.statistics().open_mini_batches == 2
    assert backend.statistics().backward_batches == 2, "gradients of two sums share no batch"


def test_commit_does_not_overtake_earlier_gradients() -> None:
    backend = fussy_backend(min_batch_size=100, timeout=60.0)
    with Runtime([backend]):
        added = add(backend, "m", 0)
        assert backend.commit("m", client="ann").result(30)[0].item() == 1 and added.done()


@pytest.mark.parametrize("fault", [GradientError, StepError])
def test_failed_commit_loses_its_sum_and_frees_the_name(monkeypatch: pytest.MonkeyPatch, fault: type) -> None:
    """The keys of its gradients are freed too, so that the mini-batch can be sent again."""

    def fail() -> None:
        raise ZeroDivisionError("mine")

    backend = fussy_backend(guards=Guards(max_norm=1e6), optimizer=adam)
    before = weights(backend)
    bad = backend.backward_pool.submit_task(*spoiled_gradient(), client="ann", key="b", mini_batch="m")
    rejected, added = answered(backend, bad, add(backend, "m", 0, key="g"))
    assert isinstance(rejected, GradientError) and isinstance(added, list)
    if fault is StepError:
        monkeypatch.setattr(backend, "apply_gradients", fail)
    else:
        for _ in range(3):  # each passes alone, but their sum is too large
            huge = rows(2, 3) * 2e5
            answered(backend, backend.backward_pool.submit_task(rows(2, 2), huge, client="ann", mini_batch="m"))
    assert isinstance(*answered(backend, backend.commit("m", client="ann")), fault)
    assert weights(backend) == before and backend.statistics().open_mini_batches == 0
    assert backend.idempotency.step_of("backward", "ann", "g") is None
    monkeypatch.undo()
    add(backend, "m", 0, key="g")
    assert answered(backend, backend.commit("m", client="ann")) and backend.steps == 1


@pytest.mark.parametrize("how", ["grows old", "is discarded"])
def test_abandoned_mini_batch_makes_room_and_accepts_no_more(how: str) -> None:
    backend = fussy_backend(mini_batches=AccumulationOptions(mini_batches=1, seconds=60.0))
    answered(backend, add(backend, "a", 0, key="k"))
    assert isinstance(*answered(backend, add(backend, "b", 0)), OverloadError)
    if how == "grows old":
        backend.executor.mini_batches["ann", "a"].touched -= 61.0
        assert backend.statistics().open_mini_batch_bytes == 0
    else:
        backend.discard("a", client="ann")
        backend.discard("a", client="bob")
    other, late = answered(backend, add(backend, "b", 0), add(backend, "a", 1))
    assert isinstance(other, list) and is_commit_error(late), "otherwise a commit would apply only its second half"
    assert answered(backend, backend.commit("b", client="ann"))[0][0].item() == 1 == backend.steps
    assert backend.idempotency.step_of("backward", "ann", "k") is None


def test_sum_ends_when_a_state_is_loaded_or_layers_frozen(backend: ExpertBackend) -> None:
    answered(backend, add(backend, "m", 0))
    backend.load_state_dict(backend.state_dict())
    assert is_commit_error(*answered(backend, add(backend, "m", 1)))
    answered(backend, add(backend, "n", 0))
    next(backend.module.parameters()).requires_grad_(False)
    assert is_commit_error(*answered(backend, add(backend, "n", 1)), "frozen")


def test_sparse_gradients_are_summed_and_counted() -> None:
    module = torch.nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
    before = module.weight.detach().clone()
    schema = (TensorSpec((None,), torch.int64),)
    backend = ExpertBackend("e", module, partial(torch.optim.SGD, lr=0.5), args_schema=schema)
    words, gradient = torch.tensor([3, 1, 3]), torch.ones(3, 4, dtype=torch.float64)
    for parts in (1, 2):
        answered(backend, backend.backward_pool.submit_task(words, gradient, client="ann", mini_batch="m"))
        held, row = backend.statistics().open_mini_batch_bytes, 4 * 8 + 8
        assert held in range(2 * row, 3 * parts * row + 1, row), "values and indices, coalesced or not"
    assert answered(backend, backend.commit("m", client="ann")) and backend.statistics().open_mini_batch_bytes == 0
    torch.testing.assert_close((before - module.weight).sum(1)[[0, 1, 3]], torch.tensor([0.0, 4.0, 8.0]).double())
