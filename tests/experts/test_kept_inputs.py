"""The inputs of a forward stay for its backward: for exactly that, within the budget, and a step does not take them."""

import copy
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.expert_cases import WIDTH, X, adam, fussy_backend, rows, weights, work
from weft.experts import ExpertBackend, GraphBudget, TensorSpec
from weft.experts.graph_cache import GraphCache

BUDGET = GraphBudget(1 << 20)
BYTES = 2 * WIDTH * 8


def backends() -> tuple[ExpertBackend, ExpertBackend]:
    """One that keeps, and one that does not."""
    return fussy_backend(keep_graphs=BUDGET), fussy_backend()


def seed(key: str) -> int:
    return sum(map(ord, key))


def forward(backend: ExpertBackend, *keys: str) -> None:
    """One batch. The rows of a key are always the same."""
    for key in keys:
        backend.forward_pool.submit_task(rows(2, seed(key)), client="ann", key=key)
    work(backend)


def backward(backend: ExpertBackend, *keys: str) -> list[Tensor]:
    """One batch, with the kept inputs where they are."""
    futures = [
        backend.backward_pool.submit_task(
            *(backend.kept_inputs("ann", key) or [rows(2, seed(key))]), rows(2, seed(key) + 99), client="ann", key=key
        )
        for key in keys
    ]
    work(backend)
    return [future.result(0)[0] for future in futures]


def kept(backend: ExpertBackend) -> GraphCache:
    return backend.executor.graphs


@pytest.mark.parametrize("batches", [["abc"], ["ab", "c"], ["ca", "b"], ["b", "ac"], ["c", "b", "a"]])
def test_they_serve_any_batch_of_backwards_and_give_the_same_bytes(batches: Sequence[str]) -> None:
    (backend, plain), found = backends(), list[list[Tensor]]()
    for each in (backend, plain):
        forward(each, *"abc")
        found.append([gradient for batch in batches for gradient in backward(each, *batch)])
    assert all(map(torch.equal, *found)) and weights(backend) == weights(plain)
    assert backend.statistics().used_graphs == (batches == ["abc"])
    assert kept(backend).nbytes == 0 and plain.kept_inputs("ann", "a") is None


def test_they_are_found_under_their_client_and_key_and_until_their_backward() -> None:
    backend, _ = backends()
    forward(backend, "a", "b")
    found = backend.kept_inputs("ann", "a")
    assert found is not None and torch.equal(found[0], rows(2, seed("a")))
    for client, key in (("ann", "c"), ("bob", "a"), (None, "a"), ("ann", "")):
        assert backend.kept_inputs(client, key) is None
    backward(backend, "a")
    assert backend.kept_inputs("ann", "a") is None and backend.kept_inputs("ann", "b") is not None


def test_a_step_takes_the_graph_and_leaves_the_inputs() -> None:
    backend, _ = backends()
    forward(backend, "a")
    assert kept(backend).nbytes > BYTES
    backward(backend, "x")
    assert (len(kept(backend)), kept(backend).nbytes) == (0, BYTES)
    assert backend.kept_inputs("ann", "a") is not None


def test_the_memory_of_a_batch_counts_until_the_last_of_it_is_gone() -> None:
    backend, _ = backends()
    forward(backend, "a", "b")
    backward(backend, "a")
    assert kept(backend).nbytes == 2 * BYTES, "its rows lie in the batch"
    backward(backend, "b")
    assert kept(backend).nbytes == 0


def test_a_forward_that_is_repeated_keeps_the_last_one() -> None:
    backend, _ = backends()
    forward(backend, "a", "b")
    forward(backend, "a")
    assert len(kept(backend)) == 1, "nobody can walk the first graph any more"
    backward(backend, "a")
    assert backend.statistics().used_graphs == 1 and backend.kept_inputs("ann", "b") is not None


def test_two_forwards_with_one_key_in_one_batch_keep_nothing() -> None:
    backend, plain = backends()
    for each in (backend, plain):
        forward(each, "a", "a")
        backward(each, "a")
    assert kept(backend).nbytes == 0 and weights(backend) == weights(plain)


@pytest.mark.cuda
def test_on_a_gpu_they_are_kept_on_the_host() -> None:
    twins = [copy.deepcopy(fussy_backend().module).cuda() for _ in range(2)]
    backend, plain = (
        ExpertBackend("fussy", module, adam, args_schema=(X,), keep_graphs=budget)
        for module, budget in zip(twins, (BUDGET, None), strict=True)
    )
    found: list[list[Tensor]] = []
    for each in (backend, plain):
        forward(each, "a", "b")
        assert all(not x.is_cuda for x in each.kept_inputs("ann", "a") or [])
        found.append(backward(each, "a", "b"))
    assert all(map(torch.equal, *found)) and backend.statistics().used_graphs == 1 and kept(backend).nbytes == 0


class Clamps(nn.Module):
    """Writes into its numbers where they are large, which its dummy run on zeros does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        if (numbers > 2).any():
            numbers.clamp_(max=2)
        return x + self.table(numbers)


def test_inputs_that_the_module_has_written_to_are_not_kept() -> None:
    schema = (X, TensorSpec((None,), torch.int64))
    backend = ExpertBackend("clamps", Clamps(), adam, args_schema=schema, keep_graphs=BUDGET)
    for number, there in ((1, True), (7, False)):
        backend.forward_pool.submit_task(rows(1, 0), torch.tensor([number]), key=f"k{number}")
        work(backend)
        assert (backend.kept_inputs(None, f"k{number}") is not None) == there


Step = tuple[str, set[str]]
STEPS = st.tuples(st.sampled_from(["forward", "backward", "void", "age"]), st.sets(st.sampled_from("abcd"), min_size=1))


@given(st.lists(STEPS, max_size=12), st.sampled_from([500, 2_000, 1 << 20]))
def test_whatever_comes_the_budget_holds_and_nothing_is_left_behind(steps: list[Step], most: int) -> None:
    backend = fussy_backend(keep_graphs=GraphBudget(most, 5.0))
    held, now, newest = kept(backend), [0.0], dict.fromkeys("abcd", 0)
    held._clock = lambda: now[0]
    for number, (what, names) in enumerate([*steps, ("backward", set("abcd"))]):
        if what == "forward":
            newest.update(dict.fromkeys(names, number))
        keys = [f"{name}{newest[name]}" for name in sorted(names)]
        if what in ("forward", "backward"):
            (forward if what == "forward" else backward)(backend, *keys)
        elif what == "void":
            held.void()
        else:
            now[0] += 2.0
        sizes = [each.input_bytes for each in held._all] + [each.graph_bytes for each in held._graphs]
        assert held.nbytes == sum(sizes) <= most
        assert all(each in held._all and each.graph is not None for each in held._graphs)
        assert held._found == {name: each for each in held._all for name in each.inputs}
    now[0] += 6.0
    held.forget_old()
    assert held.nbytes == 0 and not (held._all or held._found or held._graphs)
