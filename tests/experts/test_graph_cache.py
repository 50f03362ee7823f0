"""A kept graph saves a forward and changes no number. Kept inputs serve exactly their backward, within the budget."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.concurrency import FakeClock
from tests.experts.expert_cases import (
    WIDTH,
    Formula,
    X,
    adam,
    answered,
    double_layer,
    fussy_backend,
    rows,
    seeded,
    weights,
    work,
)
from torchweft.experts import ExpertBackend, GraphBudget, TensorSpec
from torchweft.experts.graph_cache import GraphCache

BUDGET = GraphBudget(1 << 20)
INPUT_BYTES = 2 * WIDTH * 8


class CountingModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x).tanh()


def counting_expert(budget: GraphBudget | None = BUDGET) -> tuple[ExpertBackend, CountingModule]:
    module = seeded(CountingModule)
    assert isinstance(module, CountingModule)
    backend = ExpertBackend("counts", module, adam, args_schema=(X,), keep_graphs=budget)
    module.calls = 0
    return backend, module


def seed_of(key: str) -> int:
    return sum(map(ord, key))


def forward(backend: ExpertBackend, *keys: str) -> list[Tensor]:
    """Run one batch. The rows of a key are always the same."""
    sent = [backend.forward_pool.submit_task(rows(2, seed_of(key)), client="ann", key=key) for key in keys]
    return [result[0] for result in answered(backend, *sent)]


def backward(backend: ExpertBackend, *keys: str, x: int | None = None, mini_batch: str | None = None) -> list[Tensor]:
    """Run one batch with the kept inputs, or with the rows of seed ``x``."""
    sent: list[Any] = []
    for key in keys:
        inputs = [rows(2, x)] if x is not None else backend.kept_inputs("ann", key) or [rows(2, seed_of(key))]
        words = {"client": "ann", "key": key, "mini_batch": mini_batch}
        sent.append(backend.backward_pool.submit_task(*inputs, rows(2, seed_of(key) + 99), **words))
    return [result[0] for result in answered(backend, *sent)]


def kept(backend: ExpertBackend) -> GraphCache:
    return backend.executor.graphs


@pytest.mark.parametrize("batches", [["abc"], ["cab"], ["ab", "c"], ["ca", "b"], ["b", "ac"], ["c", "b", "a"], ["abd"]])
def test_kept_forwards_serve_any_batch_with_the_same_bytes(batches: Sequence[str]) -> None:
    (backend, module), (plain, _) = counting_expert(), counting_expert(None)
    gradients: list[list[Tensor]] = []
    for expert in (backend, plain):
        for result in forward(expert, *"abc"):
            result.fill_(7.0)  # a client can write into its results without changing the graph
        gradients.append([gradient for batch in batches for gradient in backward(expert, *batch)])
    assert all(map(torch.equal, *gradients)) and weights(backend) == weights(plain)
    used = set(batches[0]) == set("abc")
    assert backend.statistics().used_graphs == used and module.calls == 1 + len(batches) - used
    assert (kept(backend).nbytes == 0) == (batches != ["abd"]) and plain.kept_inputs("ann", "a") is None


def test_step_drops_all_graphs_and_sum_drops_none() -> None:
    backend, module = counting_expert()
    for key in "ab":
        forward(backend, key)
    assert backend.statistics().kept_graphs == 2
    backward(backend, "a")
    assert backend.statistics().kept_graphs == 0
    backward(backend, "b")
    assert module.calls == 3
    for key in "cd":
        forward(backend, key)
        backward(backend, key, mini_batch="m")
    assert module.calls == 5 and backend.statistics().used_graphs == 3
    forward(backend, "e")
    backward(backend, "e", x=5)  # other inputs under the same key
    assert module.calls == 7


class SpoilingProduct(torch.autograd.Function):
    """``x * y`` whose backward writes into x, which other nodes have saved too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = ctx.saved_tensors
        products = gradients[0] * y, gradients[0] * x
        x.detach().zero_()
        return products


def spoil_in_backward(layer: nn.Module, x: Tensor) -> Tensor:
    z = layer(x).exp()
    return SpoilingProduct.apply(z, z)


FORBIDDEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "into an output of exp": lambda layer, x: layer(x).exp().add_(1),
    "after its use": lambda layer, x: [y := layer(x).tanh(), y.square(), y.zero_()][1],
    "through detach": lambda layer, x: [y := layer(x) + 0, y.square(), y.detach().zero_()][1],
    "in backward": spoil_in_backward,
}
ALLOWED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "relu": lambda layer, x: layer(x).relu_().mul(2),
    "leaky relu": lambda layer, x: nn.functional.leaky_relu(layer(x), inplace=True).exp(),
    "sigmoid": lambda layer, x: layer(x).sigmoid_().add(1),
    "into a view": lambda layer, x: [y := layer(x), y[:, 0].exp_()][0],
    "copy": lambda layer, x: torch.zeros_like(x).copy_(layer(x)).cumsum_(1).tanh_(),
    "sparse": lambda layer, x: (torch.eye(4, dtype=torch.float64).to_sparse() @ layer(x).t()).t(),
}


@pytest.mark.parametrize("writes", [*FORBIDDEN, *ALLOWED])
def test_in_place_writes_are_judged_as_by_autograd(writes: str) -> None:
    answers: list[Any] = []
    formula = FORBIDDEN[writes] if writes in FORBIDDEN else ALLOWED[writes]
    for budget in (None, BUDGET):
        module = seeded(lambda: Formula(lambda self, x: formula(self.layer, x), layer=double_layer()))
        backend = ExpertBackend("e", module, adam, args_schema=(X,), keep_graphs=budget)
        forward(backend, "a")
        sent = backend.backward_pool.submit_task(rows(2, seed_of("a")), rows(2, 9), client="ann", key="a")
        answers += answered(backend, sent)
    if writes in ALLOWED:
        assert torch.equal(answers[0][0], answers[1][0]) and backend.statistics().used_graphs == 1
    else:
        assert all(isinstance(error, RuntimeError) for error in answers) and backend.steps == 0
        assert all("modified by an inplace operation" in str(error) for error in answers)


def test_dropped_graph_frees_all_tensors_that_it_saved() -> None:
    """Including a saved output, which would keep its own graph alive out of reach of the garbage collector."""
    backend, _ = counting_expert()
    forward(backend, "a")
    (entry,) = kept(backend)._all
    saved = entry.saved.packed
    assert saved and all(ref() is not None for ref in saved)
    kept(backend).void_graphs()
    assert all(ref() is None for ref in saved)


def test_graph_of_weights_stepped_by_another_expert_is_not_used() -> None:
    shared = seeded(CountingModule)
    one, other = [ExpertBackend(name, shared, adam, args_schema=(X,), keep_graphs=BUDGET) for name in "ab"]
    plain = ExpertBackend("a", copy.deepcopy(shared), adam, args_schema=(X,))
    forward(one, "a")
    for backend in (other, plain):
        backward(backend, "b")
    assert torch.equal(*backward(one, "a"), *backward(plain, "a")) and one.statistics().used_graphs == 0


@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("mini_batch", [None, "m"])
def test_graph_of_other_trained_parameters_is_not_used(freed: bool, mini_batch: str | None) -> None:
    backend, plain = (fussy_backend(keep_graphs=budget) for budget in (BUDGET, None))
    for expert in (backend, plain):
        expert.module.first.requires_grad_(not freed)
        forward(expert, "a")
        expert.module.first.requires_grad_(freed)
        for key in "ba" if mini_batch else "a":
            backward(expert, key, mini_batch=mini_batch)
        assert mini_batch is None or answered(expert, expert.commit(mini_batch, client="ann"))
    assert weights(backend) == weights(plain) and backend.statistics().used_graphs == 0


def test_inputs_are_kept_by_client_and_key_until_their_backward() -> None:
    backend = fussy_backend(keep_graphs=BUDGET)
    forward(backend, "a", "b")
    inputs = backend.kept_inputs("ann", "a")
    assert inputs is not None and torch.equal(inputs[0], rows(2, seed_of("a")))
    for client, key in (("ann", "c"), ("bob", "a"), (None, "a"), ("ann", "")):
        assert backend.kept_inputs(client, key) is None
    assert kept(backend).nbytes > 2 * INPUT_BYTES
    backward(backend, "x")
    assert (len(kept(backend)), kept(backend).nbytes) == (0, 2 * INPUT_BYTES), "a step drops only the graph"
    backward(backend, "a")
    assert backend.kept_inputs("ann", "a") is None and backend.kept_inputs("ann", "b") is not None
    assert kept(backend).nbytes == 2 * INPUT_BYTES, "both inputs share memory"
    backward(backend, "b")
    assert kept(backend).nbytes == 0


def test_repeated_forward_keeps_its_last_graph_only() -> None:
    backend, plain = fussy_backend(keep_graphs=BUDGET), fussy_backend()
    for expert in (backend, plain):
        forward(expert, "x", "x")
        backward(expert, "x")
    assert kept(backend).nbytes == 0 and weights(backend) == weights(plain), "none of two in one batch"
    forward(backend, "a", "b")
    forward(backend, "a")
    assert len(kept(backend)) == 1, "the first graph cannot be used any more"
    backward(backend, "a")
    assert backend.statistics().used_graphs == 1 and backend.kept_inputs("ann", "b") is not None


@pytest.mark.cuda
def test_gpu_expert_keeps_inputs_on_the_host() -> None:
    twins = [copy.deepcopy(fussy_backend().module).cuda() for _ in range(2)]
    backend, plain = (
        ExpertBackend("fussy", module, adam, args_schema=(X,), keep_graphs=budget)
        for module, budget in zip(twins, (BUDGET, None), strict=True)
    )
    gradients: list[list[Tensor]] = []
    for expert in (backend, plain):
        forward(expert, "a", "b")
        assert all(not x.is_cuda for x in expert.kept_inputs("ann", "a") or [])
        gradients.append(backward(expert, "a", "b"))
    assert all(map(torch.equal, *gradients)) and backend.statistics().used_graphs == 1 and kept(backend).nbytes == 0


def clamp_numbers(module: Formula, x: Tensor, numbers: Tensor) -> Tensor:
    """Write into ``numbers`` if they are large, which the dummy run on zeros does not reveal."""
    if (numbers > 2).any():
        numbers.clamp_(max=2)
    return x + module.table(numbers)


def test_module_that_writes_to_itself_or_inputs_keeps_no_graph() -> None:
    normed = fussy_backend(norm=True, keep_graphs=BUDGET)
    forward(normed, "a")
    assert normed.statistics().kept_graphs == 0
    schema = (X, TensorSpec((None,), torch.int64))
    module = Formula(clamp_numbers, table=nn.Embedding(3, WIDTH, dtype=torch.float64))
    backend = ExpertBackend("clamps", module, adam, args_schema=schema, keep_graphs=BUDGET)
    for number, is_kept in ((1, True), (7, False)):
        backend.forward_pool.submit_task(rows(1, 0), torch.tensor([number]), key=f"k{number}")
        work(backend)
        assert (backend.kept_inputs(None, f"k{number}") is not None) == is_kept


Step = tuple[str, set[str]]
STEPS = st.tuples(st.sampled_from(["forward", "backward", "void", "age"]), st.sets(st.sampled_from("abcd"), min_size=1))


@given(st.lists(STEPS, max_size=12), st.sampled_from([500, 2_000, 1 << 20]))
def test_budget_of_bytes_and_seconds_always_holds(steps: list[Step], most: int) -> None:
    backend, clock = fussy_backend(keep_graphs=GraphBudget(most, 5.0)), FakeClock()
    cache, newest = kept(backend), dict.fromkeys("abcd", 0)
    cache._clock = clock.monotonic
    for number, (step, names) in enumerate([*steps, ("backward", set("abcd"))]):
        if step == "forward":
            newest.update(dict.fromkeys(names, number))
        keys = [f"{name}{newest[name]}" for name in sorted(names)]
        if step in ("forward", "backward"):
            (forward if step == "forward" else backward)(backend, *keys)
        elif step == "void":
            cache.void_graphs()
        else:
            clock.now += 2.0
        sizes = [entry.input_bytes for entry in cache._all] + [entry.graph_bytes for entry in cache._graphs]
        assert cache.nbytes == sum(sizes) <= most
        assert all(entry in cache._all and entry.graph is not None for entry in cache._graphs)
        assert cache._by_name == {name: entry for entry in cache._all for name in entry.inputs}
    forward(backend, "last")
    clock.now += 6.0
    assert backend.statistics().kept_graph_bytes == 0 and not (cache._all or cache._by_name or cache._graphs)
