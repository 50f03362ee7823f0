"""Effects of a forward can be undone, and a gradient is that of the forward that was seen: of a mask, ``y / x``."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.client.transport_cases import WAYS, reached
from tests.experts.expert_cases import WIDTH, X, fussy_backend, good, rows, task, weights, work
from tests.experts.mixture.commit_cases import UIDS, Experts
from tests.experts.test_journal import Store
from weft import Pipe
from weft.core.rng import generators, seeded
from weft.experts import ExpertBackend, GraphBudget, Journal, TensorSpec, replay
from weft.experts.client import LocalTransport, RemoteExpert
from weft.experts.server import Server
from weft.experts.wire import Call, Kind, Received

THREE = TensorSpec((None, 3), torch.float64)


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.scale


class Renorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().sum(1).long() % 5)


def normed() -> nn.Module:
    return nn.BatchNorm1d(3, dtype=torch.float64)


def toggled() -> nn.Module:
    """Is put into training only after the dummy run."""
    return normed().eval()


def still(parameters: Any) -> torch.optim.Optimizer:
    """Steps, and leaves the weights to the module."""
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.parametrize("make", [Replaces, Renorms, normed, toggled])
def test_a_forward_changes_nothing_and_a_backward_what_the_module_changes(make: type[nn.Module]) -> None:
    backend = ExpertBackend("e", make(), still, args_schema=(THREE,))
    backend.module.train()
    before = weights(backend)
    good(backend.executor.forward([task(rows(4, 0, 3))]))
    assert weights(backend) == before
    gradient = torch.ones(4, 3, dtype=torch.float64)
    answers = backend.executor.backward([task(rows(4, 0, 3), gradient), task(rows(4, 0, 3), gradient * torch.nan)])
    assert isinstance(answers[0], list) and isinstance(answers[1], Exception)
    once = weights(backend)
    assert once[0] != before[0]
    other = ExpertBackend("e", make(), still, args_schema=(THREE,))
    other.module.train()
    if make is not Renorms:  # its first numbers are drawn
        good(other.executor.backward([task(rows(4, 0, 3), gradient)]))
        assert weights(other) == once


class LateDropout(nn.Module):
    """Draws in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_a_mode_that_is_switched_later_is_observed_anew() -> None:
    backend = ExpertBackend("late", LateDropout().eval(), args_schema=(THREE,))
    state = torch.get_rng_state()
    x = rows(20, 0, 3)
    assert torch.equal(good(backend.executor.forward([task(x)]))[0][0], x)
    backend.module.train()
    one, other = (good(backend.executor.forward([task(x)]))[0][0] for _ in range(2))
    assert not torch.equal(one, x) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


BUDGET = GraphBudget(1 << 20)


class Mask(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x) * self.weight


def masking(name: str = "mask", width: int = WIDTH, **more: Any) -> ExpertBackend:
    return ExpertBackend(name, Mask(width), still, args_schema=(TensorSpec((None, width), torch.float64),), **more)


def agree(x: Tensor, y: Tensor, gradient: Tensor | None) -> bool:
    """Whether the gradient of the sum is the mask of the outputs, which has dropped some."""
    return gradient is not None and torch.equal(gradient, (y / x).detach().round()) and not gradient.all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, BUDGET])
@pytest.mark.parametrize("options", [{}, {"keep_graph": True}, {"accumulate": True}])
def test_of_a_remote_expert(way: str, budget: GraphBudget | None, options: dict[str, Any]) -> None:
    with reached(way, masking(keep_graphs=budget)) as (_, transport):
        remote = RemoteExpert("mask", transport, **options)
        x = rows(20, 0).requires_grad_()
        one, other = remote(x), remote(x)
        assert not torch.equal(one, other)
        for y in (other, one):
            (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert agree(x, y, gradient)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], gradient)  # a step of its own, and the same mask


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_of_a_stage_of_a_pipe_that_frees_the_generator_as_it_waits(way: str, checkpoint: Any, executor: Any) -> None:
    with reached(way, masking()) as (_, transport):

        def pipe(middle: nn.Module) -> Pipe:
            layers = nn.Sequential(nn.Identity(), middle, nn.Dropout(0.5))
            return Pipe(layers, balance=[1, 2], chunks=2, checkpoint=checkpoint, executor=executor)

        far, near = pipe(RemoteExpert("mask", transport, accumulate=True)), pipe(nn.Identity())
        for seed in range(2):
            x = rows(20, seed).requires_grad_()
            torch.manual_seed(seed)
            y = far(x)
            y.sum().backward()
            assert agree(x, y, x.grad)
            torch.manual_seed(seed)
            assert not y.detach()[near(x) == 0].any(), "what is drawn here is what would be drawn without"


@pytest.mark.parametrize("options", [{}, {"keep_graph": True}])
def test_of_a_mixture(options: dict[str, Any]) -> None:
    with Experts(keep_graphs=BUDGET) as experts:
        for uid in UIDS:
            experts.servers[uid].remove(uid)
            experts.servers[uid].add(masking(uid, 5))
        mixture = experts.mixture(k_best=1, accumulate=False, **options)
        mixture.proj.requires_grad_(False)
        x = rows(40, 1, 5).requires_grad_()
        y = mixture(x)
        y.sum().backward()
        assert agree(x, y, x.grad)
        assert torch.equal(mixture.eval()(x), x)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_whoever_else_waits(sizes: list[int], draw: random.Random) -> None:
    backend = masking()
    numbers = list(range(len(sizes)))
    given = {i: rows(20 * size, i) for i, size in enumerate(sizes)}

    def asked(submit: Callable[[int], Any]) -> dict[int, Tensor]:
        order, found = draw.sample(numbers, len(numbers)), dict[int, Any]()
        for part in (order[: draw.randint(0, len(order))], order):
            found |= {i: submit(i) for i in part if i not in found}
            work(backend)
        return {i: future.result(0)[0] for i, future in found.items()}

    outputs = asked(lambda i: backend.forward_pool.submit_task(given[i], client=f"{i % 2}", key=f"{i}"))
    ones = {i: torch.ones_like(x) for i, x in given.items()}
    found = asked(lambda i: backend.backward_pool.submit_task(given[i], ones[i], client=f"{i % 2}", key=f"{i}"))
    assert all([agree(given[i], outputs[i], found[i]) for i in numbers])


def test_who_wants_larger_batches_gets_them_and_equal_ones_agree() -> None:
    backend = masking(min_batch_size=2)
    x = {key: rows(20, int(key)) for key in "123"}
    for keys in ("12", "21", "13"):
        ahead = [backend.forward_pool.submit_task(x[key], key=key) for key in "12"]
        work(backend)
        back = [backend.backward_pool.submit_task(x[key], torch.ones_like(x[key]), key=key) for key in keys]
        work(backend)
        same = {key: future.result(0)[0] for key, future in zip("12", ahead, strict=True)}
        good = [key in same and agree(x[key], same[key], f.result(0)[0]) for key, f in zip(keys, back, strict=True)]
        assert good == ([True, True] if keys != "13" else [False, False])
        backend = masking(min_batch_size=2)
    backend.forward_pool.submit_task(x["1"])
    backend.forward_pool.submit_task(x["2"])
    work(backend)
    assert backend.statistics().forward_batches == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, BUDGET])
@pytest.mark.parametrize("around", [lambda remote: remote, lambda remote: nn.Sequential(nn.Identity(), remote)])
def test_a_model_that_is_told_to_evaluate_tells_its_experts(
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
            y, wanted = model(x), twin(own)
            y.square().sum().backward()
            wanted.square().sum().backward()
            assert training or (torch.equal(y, wanted) and torch.equal(x.grad, own.grad))
            assert training != torch.equal(buffers["norm.running_mean"], backend.module.get_buffer("norm.running_mean"))
        assert backend.module.training and all(each.training for each in backend.module.modules())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_modes_share_no_batch_and_what_a_server_has_frozen_stays_so(dropout: float) -> None:
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


class Late(nn.Module):
    """Draws nothing on zeros, as in the dummy run; or in backward only; or once it is told to."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.dropout = nn.Dropout(0.0)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.dropout(x))
        if self.when == "inputs" and x.any():
            y = y + torch.randn_like(y)
        if self.when == "backward" and y.requires_grad:
            y.register_hook(lambda g: g + torch.randn_like(g))
        return y


@pytest.mark.parametrize("when", ["inputs", "backward", "told"])
def test_numbers_that_are_drawn_later_are_its_own_and_a_replay_draws_them_again(when: str, tmp_path: Path) -> None:
    store = Store()
    journal = Journal(tmp_path / "log", listener=store)
    live = ExpertBackend("late", Late(when), partial(torch.optim.SGD, lr=0.1), args_schema=(X,), journal=journal)
    again = ExpertBackend("late", Late(when), partial(torch.optim.SGD, lr=0.1), args_schema=(X,))
    again.load_state_dict(live.state_dict())
    before = torch.get_rng_state()
    for number in range(4):
        if number == 1 and when == "told":
            live.module.get_submodule("dropout").p = 0.5
        answer, gradient = live.forward_pool.submit_task(rows(6, number), key=f"{number}"), rows(6, number + 9)
        work(live)
        answer.result(0)
        live.backward_pool.submit_task(rows(6, number), gradient, key=f"{number}", evaluation=number == 3)
        work(live)
        assert torch.equal(torch.get_rng_state(), before), "the generator is the caller's"
    journal.close()
    entries = journal.entries()
    assert [entry.evaluation for entry in entries] == [False, False, False, True]
    again.module.get_submodule("dropout").p = 0.0
    replay(again, entries[:1], store.fetch)
    again.module.get_submodule("dropout").p = 0.5 if when == "told" else 0.0
    replay(again, entries[1:], store.fetch)
    assert weights(again) == weights(live)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("mean").mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x)


def test_a_buffer_that_the_dummy_run_wrote_zeros_to_is_known() -> None:
    backend = ExpertBackend("mean", Mean(), still, args_schema=(X,))
    mean = backend.module.get_buffer("mean")
    good(backend.executor.forward([task(rows(3, 0))]))
    assert not mean.any()
    spoiled = backend.executor.backward([task(rows(3, 0), torch.full_like(rows(3, 0), float("nan")))])
    assert isinstance(spoiled[0], Exception) and not mean.any()
    good(backend.executor.backward([task(rows(3, 0), rows(3, 1))]))
    assert mean.any() and mean.isfinite().all()


def test_a_server_in_the_process_of_its_client_leaves_the_clients_numbers_alone() -> None:
    def numbers(layer: nn.Module) -> Sequence[Tensor]:
        torch.manual_seed(0)
        found = list[Tensor]()
        for seed in range(3):
            x = rows(4, seed).requires_grad_()
            layer(nn.functional.dropout(x, 0.5)).sum().backward()
            found.append(torch.randn(2))
        return found

    with Server([masking()]) as server, LocalTransport(server.handler()) as transport:
        assert all(map(torch.equal, numbers(RemoteExpert("mask", transport)), numbers(nn.Identity())))


def test_two_that_draw_ask_at_once_what_an_expert_takes_and_wait_for_the_answer_alone() -> None:
    inside, answer = threading.Semaphore(0), threading.Event()

    class Slow(LocalTransport):
        def submit(self, call: Call, timeout: float) -> "Future[Received]":
            if call.header.kind is Kind.INFO:
                inside.release()
                answer.wait(10)
            return super().submit(call, timeout)

    def stage(remote: RemoteExpert) -> Tensor:
        with seeded(generators([]), 1), torch.no_grad():
            inside.release()
            return remote(rows(2, 0))

    with Server([fussy_backend()]) as server, Slow(server.handler()) as transport, ThreadPoolExecutor(2) as threads:
        remote = RemoteExpert("fussy", transport, timeout=3.0)
        outputs = [threads.submit(stage, remote) for _ in range(2)]
        for _ in range(3):  # both hold, one after the other, and one asks
            assert inside.acquire(timeout=10)
        answer.set()
        assert torch.equal(*[output.result(10) for output in outputs])
