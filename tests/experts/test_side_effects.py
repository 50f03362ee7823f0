"""Side effects of a forward are undone, and a backward uses the dropout mask of the forward that the client saw."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.client.transport_cases import WAYS, reached
from tests.experts.expert_cases import WIDTH, Formula, X, double_layer, fussy_backend, good, rows, task, weights, work
from tests.experts.expert_cases import seeded as seeded_module
from tests.experts.mixture.commit_cases import UIDS, Experts
from torchweft import Pipe
from torchweft.core.rng import generators_of, seed_generators
from torchweft.experts import ExpertBackend, GraphBudget, TensorSpec
from torchweft.experts.client import LocalTransport, RemoteExpert
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Kind, Received

THREE = TensorSpec((None, 3), torch.float64)


def replace_buffer(module: Formula, x: Tensor) -> Tensor:
    module.count = module.count + 1
    return x * module.scale


def write_buffer(module: Formula, x: Tensor) -> Tensor:
    """Write a running mean. The dummy run on zeros does not change its values."""
    module.get_buffer("mean").mul_(0.9).add_(0.1 * x.detach().mean(0))
    return module.layer(x)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "replaces a buffer": lambda: Formula(
        replace_buffer, count=torch.zeros(1), scale=nn.Parameter(torch.ones(1, dtype=torch.float64))
    ),
    "writes a buffer": lambda: Formula(
        write_buffer, mean=torch.zeros(3, dtype=torch.float64), layer=double_layer(3, 3)
    ),
    "writes a parameter": lambda: Formula(
        lambda self, x: self.table(x.abs().sum(1).long() % 5), table=nn.Embedding(5, 3, max_norm=0.1)
    ),
    "batch norm": lambda: nn.BatchNorm1d(3, dtype=torch.float64),
    "batch norm, at first in evaluation": lambda: nn.BatchNorm1d(3, dtype=torch.float64).eval(),
}


def still(parameters: Any) -> torch.optim.Optimizer:
    """Optimizer whose steps leave the weights unchanged."""
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.parametrize("kind", CHANGING)
def test_only_applied_backwards_change_the_modules_own_tensors(kind: str) -> None:
    one, other = [ExpertBackend("e", seeded_module(CHANGING[kind]), still, args_schema=(THREE,)) for _ in range(2)]
    for backend in (one, other):
        backend.module.train()  # only now, after the dummy run
    before = weights(one)
    x, gradient = rows(4, 0, 3), torch.ones(4, 3, dtype=torch.float64)
    good(one.executor.forward([task(x)]))
    assert isinstance(one.executor.backward([task(x, gradient * torch.nan)])[0], Exception)
    assert weights(one) == before
    answers = one.executor.backward([task(x, gradient), task(x, gradient * torch.nan)])
    assert isinstance(answers[0], list) and isinstance(answers[1], Exception)
    good(other.executor.backward([task(x, gradient)]))
    assert weights(other) == weights(one) != before


BUDGET = GraphBudget(1 << 20)


def masking_expert(name: str = "mask", width: int = WIDTH, **more: Any) -> ExpertBackend:
    weight = nn.Parameter(torch.ones(width, dtype=torch.float64))
    module = Formula(lambda self, x: self.dropout(x) * self.weight, dropout=nn.Dropout(0.5), weight=weight)
    return ExpertBackend(name, module, still, args_schema=(TensorSpec((None, width), torch.float64),), **more)


def is_masked_like(x: Tensor, y: Tensor, gradient: Tensor | None) -> bool:
    """Whether the gradient of ``y.sum()`` is the dropout mask ``y / x``, with at least one zero."""
    return gradient is not None and torch.equal(gradient, (y / x).detach().round()) and not gradient.all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, BUDGET])
@pytest.mark.parametrize("options", [{}, {"keep_graph": True}, {"accumulate": True}])
def test_remote_gradient_uses_the_mask_of_its_forward(
    way: str, budget: GraphBudget | None, options: dict[str, Any]
) -> None:
    with reached(way, masking_expert(keep_graphs=budget)) as (_, transport):
        remote = RemoteExpert("mask", transport, **options)
        x = rows(20, 0).requires_grad_()
        one, other = remote(x), remote(x)
        assert not torch.equal(one, other)
        for y in (other, one):
            (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert is_masked_like(x, y, gradient)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], gradient)  # another step, but the same mask


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_remote_stage_of_a_pipe_frees_the_generator(way: str, checkpoint: Any, executor: Any) -> None:
    with reached(way, masking_expert()) as (_, transport):

        def pipe(middle: nn.Module) -> Pipe:
            layers = nn.Sequential(nn.Identity(), middle, nn.Dropout(0.5))
            return Pipe(layers, balance=[1, 2], chunks=2, checkpoint=checkpoint, executor=executor)

        remote_pipe, local_pipe = pipe(RemoteExpert("mask", transport, accumulate=True)), pipe(nn.Identity())
        for seed in range(2):
            x = rows(20, seed).requires_grad_()
            torch.manual_seed(seed)
            y = remote_pipe(x)
            y.sum().backward()
            assert is_masked_like(x, y, x.grad)
            torch.manual_seed(seed)
            assert not y.detach()[local_pipe(x) == 0].any(), "the local generator draws as without a remote stage"


@pytest.mark.parametrize("options", [{}, {"keep_graph": True}])
def test_mixture_gradient_uses_the_mask_of_its_forward(options: dict[str, Any]) -> None:
    with Experts(keep_graphs=BUDGET) as experts:
        for uid in UIDS:
            experts.servers[uid].remove(uid)
            experts.servers[uid].add(masking_expert(uid, 5))
        mixture = experts.mixture(k_best=1, accumulate=False, **options)
        mixture.proj.requires_grad_(False)
        x = rows(40, 1, 5).requires_grad_()
        y = mixture(x)
        y.sum().backward()
        assert is_masked_like(x, y, x.grad)
        assert torch.equal(mixture.eval()(x), x)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_masks_agree_whatever_other_tasks_wait(sizes: list[int], draw: random.Random) -> None:
    backend = masking_expert()
    inputs = [rows(20 * size, i) for i, size in enumerate(sizes)]

    def run_in_two_parts(submit: Callable[[int], Any]) -> list[Tensor]:
        order, futures = draw.sample(range(len(sizes)), len(sizes)), dict[int, Any]()
        for part in (order[: draw.randint(0, len(order))], order):
            futures |= {i: submit(i) for i in part if i not in futures}
            work(backend)
        return [futures[i].result(0)[0] for i in range(len(sizes))]

    forward, backward = backend.forward_pool.submit_task, backend.backward_pool.submit_task
    outputs = run_in_two_parts(lambda i: forward(inputs[i], client=f"{i % 2}", key=f"{i}"))
    ones = [torch.ones_like(x) for x in inputs]
    gradients = run_in_two_parts(lambda i: backward(inputs[i], ones[i], client=f"{i % 2}", key=f"{i}"))
    assert all(map(is_masked_like, inputs, outputs, gradients))


@pytest.mark.parametrize(("keys", "agree"), [("12", True), ("21", True), ("13", False)])
def test_masks_of_equal_shared_batches_agree(keys: str, agree: bool) -> None:
    backend = masking_expert(min_batch_size=2)
    inputs = {key: rows(20, int(key)) for key in "123"}
    ahead = {key: backend.forward_pool.submit_task(inputs[key], key=key) for key in "12"}
    work(backend)
    assert backend.statistics().forward_batches == 1
    back = {key: backend.backward_pool.submit_task(x := inputs[key], torch.ones_like(x), key=key) for key in keys}
    work(backend)
    for key in set(keys) & set("12"):
        assert is_masked_like(inputs[key], ahead[key].result(0)[0], back[key].result(0)[0]) == agree


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, BUDGET])
@pytest.mark.parametrize("around", [lambda remote: remote, lambda remote: nn.Sequential(nn.Identity(), remote)])
def test_eval_of_a_model_reaches_its_experts(
    way: str, budget: GraphBudget | None, around: Callable[[nn.Module], nn.Module]
) -> None:
    backend = fussy_backend(optimizer=still, keep_graphs=budget, dropout=0.5, norm=True)
    twin = fussy_backend(dropout=0.5, norm=True).module
    with reached(way, backend) as (_, transport):
        model = around(RemoteExpert("fussy", transport, keep_graph=True))
        for training in (True, False, True, False):
            model.train(training)
            twin.load_state_dict(backend.module.state_dict())
            twin.train(training)
            buffers = {name: buffer.clone() for name, buffer in backend.module.named_buffers()}
            x, own = rows(6, 0).requires_grad_(), rows(6, 0).requires_grad_()
            y, expected = model(x), twin(own)
            y.square().sum().backward()
            expected.square().sum().backward()
            assert training or (torch.equal(y, expected) and torch.equal(x.grad, own.grad))
            assert training != torch.equal(buffers["norm.running_mean"], backend.module.get_buffer("norm.running_mean"))
        assert backend.module.training and all(module.training for module in backend.module.modules())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_modes_share_no_batch_and_frozen_layers_stay_frozen(dropout: float) -> None:
    backend = fussy_backend(dropout=dropout, norm=True)
    norm = backend.module.get_submodule("norm").eval()
    modes = [True, False, True]
    futures = [
        backend.forward_pool.submit_task(rows(2, 0), key=f"{i}", evaluation=mode) for i, mode in enumerate(modes)
    ]
    work(backend)
    (one, _, other) = [future.result(0)[0] for future in futures]
    assert backend.statistics().forward_batches == 2 and torch.equal(one, other)
    assert not norm.training and backend.module.get_submodule("dropout").training


def draw_late(when: str) -> nn.Module:
    """Module that draws nothing in the dummy run, but on other inputs, in backward, or with dropout switched on."""

    def forward(module: Formula, x: Tensor) -> Tensor:
        y = module.layer(module.dropout(x))
        if when == "inputs" and x.any():
            y = y + torch.randn_like(y)
        if when == "backward" and y.requires_grad:
            y.register_hook(lambda g: g + torch.randn_like(g))
        return y

    return switch_dropout(Formula(forward, layer=double_layer(), dropout=nn.Dropout(0.0)), when, on=False)


def switch_dropout(module: nn.Module, when: str, *, on: bool) -> nn.Module:
    """Switch dropout by its probability (``number``) or by its mode."""
    dropout = module.get_submodule("dropout")
    dropout.p = 0.5 if when == "mode" or (on and when == "number") else 0.0
    return dropout.train(on) and module


@pytest.mark.parametrize("when", ["inputs", "backward", "number", "mode"])
def test_late_draws_are_private_and_repeatable(when: str) -> None:
    """The same requests lead to the same weights, and the caller's generator is unchanged."""
    experts: list[ExpertBackend] = []
    for _ in range(2):
        module, sgd = seeded_module(partial(draw_late, when)), partial(torch.optim.SGD, lr=0.1)
        experts.append(ExpertBackend("late", module, sgd, args_schema=(X,)))
    experts[1].load_state_dict(experts[0].state_dict())
    before = torch.get_rng_state()
    for expert in experts:
        for number in range(4):
            if number == 1:
                switch_dropout(expert.module, when, on=True)
            answer, gradient = expert.forward_pool.submit_task(rows(6, number), key=f"{number}"), rows(6, number + 9)
            work(expert)
            answer.result(0)
            expert.backward_pool.submit_task(rows(6, number), gradient, key=f"{number}", evaluation=number == 3)
            work(expert)
            assert torch.equal(torch.get_rng_state(), before)
    assert weights(experts[0]) == weights(experts[1])


def test_two_drawing_stages_request_a_description_at_once() -> None:
    inside, answer = threading.Semaphore(0), threading.Event()

    class Slow(LocalTransport):
        def submit(self, call: Call, timeout: float) -> "Future[Received]":
            if call.header.kind is Kind.INFO:
                inside.release()
                answer.wait(10)
            return super().submit(call, timeout)

    def stage(remote: RemoteExpert) -> Tensor:
        with seed_generators(generators_of([]), 1), torch.no_grad():
            inside.release()
            return remote(rows(2, 0))

    with Server([fussy_backend()]) as server, Slow(server.handler()) as transport, ThreadPoolExecutor(2) as threads:
        remote = RemoteExpert("fussy", transport, timeout=3.0)
        outputs = [threads.submit(stage, remote) for _ in range(2)]
        for _ in range(3):  # both stages are inside, and one requests the description
            assert inside.acquire(timeout=10)
        answer.set()
        assert torch.equal(*[output.result(10) for output in outputs])
