"""A kept graph saves a forward and changes no number; kept inputs serve exactly their backward, within the budget."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.expert_cases import WIDTH, X, adam, answered, fussy_backend, rows, seeded, weights, work
from weft.experts import ExpertBackend, GraphBudget, TensorSpec
from weft.experts.graph_cache import GraphCache

BUDGET = GraphBudget(1 << 20)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x).tanh()


def counting(budget: GraphBudget | None = BUDGET) -> tuple[ExpertBackend, Counts]:
    module = seeded(Counts)
    assert isinstance(module, Counts)
    backend = ExpertBackend("counts", module, adam, args_schema=(X,), keep_graphs=budget)
    module.calls = 0
    return backend, module


def seed(key: str) -> int:
    return sum(map(ord, key))


def forward(backend: ExpertBackend, *keys: str) -> list[Tensor]:
    """One batch. The rows of a key are always the same."""
    sent = [backend.forward_pool.submit_task(rows(2, seed(key)), client="ann", key=key) for key in keys]
    return [result[0] for result in answered(backend, *sent)]


def backward(backend: ExpertBackend, *keys: str, x: int | None = None, mini_batch: str | None = None) -> list[Tensor]:
    """One batch, with the kept inputs where they are, or with other ones."""
    sent: list[Any] = []
    for key in keys:
        inputs = [rows(2, x)] if x is not None else backend.kept_inputs("ann", key) or [rows(2, seed(key))]
        words = {"client": "ann", "key": key, "mini_batch": mini_batch}
        sent.append(backend.backward_pool.submit_task(*inputs, rows(2, seed(key) + 99), **words))
    return [result[0] for result in answered(backend, *sent)]


def kept(backend: ExpertBackend) -> GraphCache:
    return backend.executor.graphs


@pytest.mark.parametrize("batches", [["abc"], ["cab"], ["ab", "c"], ["ca", "b"], ["b", "ac"], ["c", "b", "a"], ["abd"]])
def test_kept_graphs_and_inputs_serve_any_batch_and_give_the_same_bytes(batches: Sequence[str]) -> None:
    (backend, counts), (plain, _), found = counting(), counting(None), list[list[Tensor]]()
    for each in (backend, plain):
        for result in forward(each, *"abc"):
            result.fill_(7.0)  # what a client does with its results does not reach the graph
        found.append([gradient for batch in batches for gradient in backward(each, *batch)])
    assert all(map(torch.equal, *found)) and weights(backend) == weights(plain)
    used = set(batches[0]) == set("abc")
    assert backend.statistics().used_graphs == used and counts.calls == 1 + len(batches) - used
    assert (kept(backend).nbytes == 0) == (batches != ["abd"]) and plain.kept_inputs("ann", "a") is None


def test_a_step_voids_all_graphs_but_a_sum_does_not() -> None:
    backend, counts = counting()
    for key in "ab":
        forward(backend, key)
    assert backend.statistics().kept_graphs == 2
    backward(backend, "a")
    assert backend.statistics().kept_graphs == 0
    backward(backend, "b")
    assert counts.calls == 3
    for key in "cd":
        forward(backend, key)
        backward(backend, key, mini_batch="m")
    assert counts.calls == 5 and backend.statistics().used_graphs == 3
    forward(backend, "e")
    backward(backend, "e", x=5)  # other inputs under the same key
    assert counts.calls == 7


def test_bytes_and_seconds_are_bounded() -> None:
    backend, _ = counting(GraphBudget(1000, 5.0))
    for number in range(20):
        forward(backend, str(number))
        assert 0 < backend.statistics().kept_graph_bytes <= 1000
    assert answered(backend, backend.forward_pool.submit_task(rows(500, 0), key="large"))
    assert backend.statistics().kept_graph_bytes <= 1000
    for each in kept(backend)._all:
        each.born -= 6.0
    assert backend.statistics().kept_graphs == 0


def test_dropout_uses_the_numbers_of_its_forward() -> None:
    backend, bump = (fussy_backend(dropout=0.5, keep_graphs=BUDGET) for _ in range(2))
    step, x = 1e-6, rows(3, 0)
    [[seen]] = answered(backend, backend.forward_pool.submit_task(x, key="a"))
    [[found]] = answered(backend, backend.backward_pool.submit_task(x, seen.sign(), key="a"))
    [[moved]] = answered(bump, bump.forward_pool.submit_task(x + step, key="a"))
    slope = (moved - seen).mul(seen.sign()).sum() / step
    assert found.sum().item() == pytest.approx(slope.item(), rel=1e-4)


class Formula(nn.Module):
    def __init__(self, formula: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self.layer, x)


class Spoils(torch.autograd.Function):
    """``x * y``, whose backward writes into x, which others saved too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = ctx.saved_tensors
        found = gradients[0] * y, gradients[0] * x
        x.detach().zero_()
        return found


def spoiling(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    z = y.exp()
    return Spoils.apply(z, z)


def kept_and_not(formula: Callable[[nn.Module, Tensor], Tensor]) -> tuple[list[Any], ExpertBackend]:
    """What a backward gives with a kept graph and without, and the expert that has kept it."""
    found: list[Any] = []
    for budget in (None, BUDGET):
        backend = ExpertBackend("e", seeded(lambda: Formula(formula)), adam, args_schema=(X,), keep_graphs=budget)
        forward(backend, "a")
        words = {"client": "ann", "key": "a"}
        (answer,) = answered(backend, backend.backward_pool.submit_task(rows(2, seed("a")), rows(2, 9), **words))
        found.append(answer[0] if isinstance(answer, list) else answer)
    return found, backend


@pytest.mark.parametrize(
    "formula",
    [
        lambda layer, x: layer(x).exp().add_(1),
        lambda layer, x: [y := layer(x).tanh(), y.square(), y.zero_()][1],
        lambda layer, x: [y := layer(x) + 0, y.square(), y.detach().zero_()][1],
        spoiling,
    ],
)
def test_a_module_that_writes_into_what_backward_needs_is_told_as_autograd_tells_it(formula: Any) -> None:
    (plain, kept), backend = kept_and_not(formula)
    for error in (plain, kept):
        assert isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)
    assert backend.steps == 0


@pytest.mark.parametrize(
    "formula",
    [
        lambda layer, x: layer(x).relu_().mul(2),
        lambda layer, x: nn.functional.leaky_relu(layer(x), inplace=True).exp(),
        lambda layer, x: layer(x).sigmoid_().add(1),
        lambda layer, x: [y := layer(x), y[:, 0].exp_()][0],
        lambda layer, x: torch.zeros_like(x).copy_(layer(x)).cumsum_(1).tanh_(),
        lambda layer, x: (torch.eye(4, dtype=torch.float64).to_sparse() @ layer(x).t()).t(),
    ],
)
def test_writing_where_autograd_allows_it_leaves_the_graph_as_it_is(formula: Any) -> None:
    (plain, kept), backend = kept_and_not(formula)
    assert torch.equal(plain, kept) and backend.statistics().used_graphs == 1


def test_a_graph_that_nobody_walks_back_frees_all_that_it_saved() -> None:
    """Also what is its own output: whoever holds that, holds the graph, and no garbage collection looks into it."""
    module = Formula(lambda layer, x: layer(x).tanh())
    backend = ExpertBackend("e", module, adam, args_schema=(X,), keep_graphs=BUDGET)
    forward(backend, "a")
    (each,) = kept(backend)._all
    saved = each.saved.packed
    assert saved and all(ref() is not None for ref in saved)
    kept(backend).void_graphs()
    assert all(ref() is None for ref in saved)


def test_a_graph_whose_weights_another_expert_has_stepped_is_not_walked() -> None:
    shared = seeded(Counts)
    one, other = [ExpertBackend(name, shared, adam, args_schema=(X,), keep_graphs=BUDGET) for name in "ab"]
    plain = ExpertBackend("a", copy.deepcopy(shared), adam, args_schema=(X,))
    forward(one, "a")
    for backend in (other, plain):
        backward(backend, "b")
    assert torch.equal(*backward(one, "a"), *backward(plain, "a")) and one.statistics().used_graphs == 0


@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("mini_batch", [None, "m"])
def test_a_graph_of_other_parameters_than_those_trained_now_is_not_walked(freed: bool, mini_batch: str | None) -> None:
    found: list[ExpertBackend] = []
    for budget in (None, BUDGET):
        backend = fussy_backend(keep_graphs=budget)
        backend.module.first.requires_grad_(not freed)
        forward(backend, "a")
        backend.module.first.requires_grad_(freed)
        for key in "ba" if mini_batch else "a":
            backward(backend, key, mini_batch=mini_batch)
        assert mini_batch is None or answered(backend, backend.commit(mini_batch, client="ann"))
        found.append(backend)
    assert weights(found[0]) == weights(found[1]) and found[1].statistics().used_graphs == 0


BYTES = 2 * WIDTH * 8


def backends() -> tuple[ExpertBackend, ExpertBackend]:
    return fussy_backend(keep_graphs=BUDGET), fussy_backend()


def test_they_are_found_under_their_client_and_key_and_until_their_backward() -> None:
    backend, _ = backends()
    forward(backend, "a", "b")
    found = backend.kept_inputs("ann", "a")
    assert found is not None and torch.equal(found[0], rows(2, seed("a")))
    for client, key in (("ann", "c"), ("bob", "a"), (None, "a"), ("ann", "")):
        assert backend.kept_inputs(client, key) is None
    backward(backend, "a")
    assert backend.kept_inputs("ann", "a") is None and backend.kept_inputs("ann", "b") is not None


def test_a_step_takes_the_graph_and_leaves_the_inputs_whose_batch_counts_until_the_last_of_it_is_gone() -> None:
    backend, _ = backends()
    forward(backend, "a", "b")
    assert kept(backend).nbytes > 2 * BYTES
    backward(backend, "x")
    assert (len(kept(backend)), kept(backend).nbytes) == (0, 2 * BYTES)
    backward(backend, "a")
    assert kept(backend).nbytes == 2 * BYTES and backend.kept_inputs("ann", "b") is not None
    backward(backend, "b")
    assert kept(backend).nbytes == 0


def test_a_forward_that_is_repeated_keeps_the_last_one_and_none_of_two_in_one_batch() -> None:
    backend, plain = backends()
    for each in (backend, plain):
        forward(each, "x", "x")
        backward(each, "x")
    assert kept(backend).nbytes == 0 and weights(backend) == weights(plain)
    forward(backend, "a", "b")
    forward(backend, "a")
    assert len(kept(backend)) == 1, "nobody can walk the first graph any more"
    backward(backend, "a")
    assert backend.statistics().used_graphs == 1 and backend.kept_inputs("ann", "b") is not None


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


def test_of_a_module_that_changes_itself_or_its_inputs_nothing_is_kept() -> None:
    normed = fussy_backend(norm=True, keep_graphs=BUDGET)
    forward(normed, "a")
    assert normed.statistics().kept_graphs == 0
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
            held.void_graphs()
        else:
            now[0] += 2.0
        sizes = [each.input_bytes for each in held._all] + [each.graph_bytes for each in held._graphs]
        assert held.nbytes == sum(sizes) <= most
        assert all(each in held._all and each.graph is not None for each in held._graphs)
        assert held._by_name == {name: each for each in held._all for name in each.inputs}
    now[0] += 6.0
    held.drop_expired()
    assert held.nbytes == 0 and not (held._all or held._by_name or held._graphs)
