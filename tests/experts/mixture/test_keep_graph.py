"""With kept graphs, the backward of a mixture skips the second forward and computes the same numbers."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.mixture.commit_cases import (
    ALL,
    UIDS,
    Experts,
    LocalMixture,
    assert_commit_steps,
    assert_same_weights,
    run,
    step_here,
)
from tests.experts.mixture.keep_graph_cases import BUDGET, compared, graphs, headers, keys, turn
from tests.experts.mixture.mixture_cases import WIDTH, numbers
from torchweft import Pipe
from torchweft.core.context import set_phase
from torchweft.experts.client import NEVER, commit
from torchweft.experts.mixture import RemoteMixtureOfExperts
from torchweft.experts.wire import Kind


@pytest.mark.parametrize("switch", [False, True])
def test_kept_graphs_change_no_numbers(switch: bool) -> None:
    def work(experts: Experts, mixture: RemoteMixtureOfExperts) -> list[Tensor]:
        return [tensor for seed in range(3) for tensor in turn(mixture, seed)]

    experts, used = compared(work, {"switch": switch, "accumulate": False})
    assert used == len(experts.called(Kind.BACKWARD)) == sum(experts.steps().values()) > 2 * len(UIDS)
    forward = headers(experts, Kind.FORWARD)
    assert all(header.keep for header in forward)
    assert sorted(keys(experts, Kind.FORWARD)) == sorted(keys(experts, Kind.BACKWARD))
    assert len(set(keys(experts, Kind.FORWARD))) == len(forward)


def test_graphs_are_kept_only_on_request(experts: Experts) -> None:
    assert not experts.mixture().keep_graph
    mixture = experts.mixture(accumulate=False, keep_graph=True)
    twin, x = LocalMixture(experts, mixture), numbers(16, WIDTH)
    run(mixture, x)
    step_here(experts, twin, x)
    assert_same_weights(experts)
    assert graphs(experts) == (0, 0)


@pytest.mark.parametrize("accumulate", [False, True])
def test_every_part_of_a_large_group_has_its_key(accumulate: bool) -> None:
    def work(experts: Experts, mixture: RemoteMixtureOfExperts) -> list[Tensor]:
        results = turn(mixture, 0)
        if accumulate:
            assert mixture.commit() == ALL
        return results

    experts, used = compared(work, {"accumulate": accumulate}, max_batch_size=3)
    calls = keys(experts, Kind.BACKWARD)
    assert len(set(calls)) == len(calls) > 2 * len(UIDS)
    assert sorted(calls) == sorted(keys(experts, Kind.FORWARD))
    assert used == len(calls), "all parts are one step, so no step invalidates a kept graph"


def test_second_backward_of_a_graph_steps_again() -> None:
    def work(experts: Experts, mixture: RemoteMixtureOfExperts) -> list[Tensor]:
        x = numbers(16, WIDTH).requires_grad_()
        loss = mixture(x).square().sum()
        gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
        loss.backward()
        assert experts.steps() == dict.fromkeys(UIDS, 3) and x.grad is not None
        assert not torch.equal(*gradients), "the first backward changed the weights"
        return [*gradients, x.grad]

    experts, used = compared(work, {"accumulate": False})
    first, rest = set(keys(experts, Kind.FORWARD)), keys(experts, Kind.BACKWARD)
    assert len(set(rest)) == len(rest) == 3 * len(UIDS) and first < set(rest)
    assert used == len(UIDS)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, partial(set_phase, "checkpointing")])
def test_graphs_without_a_backward_are_not_kept(mode: Callable[[], Any]) -> None:
    with Experts(keep_graphs=BUDGET) as experts:
        mixture = experts.mixture(keep_graph=True)
        with mode():
            mixture(numbers(16, WIDTH))
        assert graphs(experts) == (0, 0)
        assert not any(header.keep for header in headers(experts, Kind.FORWARD))
        mixture.requires_grad_(False)(numbers(16, WIDTH))
        assert graphs(experts) == (0, 0)
        mixture.anchor.requires_grad_(True)
        mixture(numbers(16, WIDTH))  # the experts are trainable, so a backward can follow
        assert graphs(experts) == (len(UIDS), 0)


def test_graphs_last_until_the_commit_of_their_mini_batch() -> None:
    with Experts(keep_graphs=BUDGET) as experts:
        mixture = experts.mixture(keep_graph=True)
        twin = LocalMixture(experts, mixture)
        for seed in range(2):
            x = numbers(16, WIDTH, seed=seed)
            run(mixture, x[:4])
            losses = [mixture(part).square().sum() for part in x[4:].split(6)]
            for loss in reversed(losses):
                loss.backward()
            assert_commit_steps(experts, mixture, twin, x)
        assert graphs(experts) == (0, len(experts.called(Kind.BACKWARD))) and experts.steps() == dict.fromkeys(UIDS, 2)
        torch.testing.assert_close(mixture.proj.weight.grad, twin.proj.weight.grad, rtol=0, atol=1e-12)


def test_graph_older_than_a_step_is_recomputed() -> None:
    def work(experts: Experts, mixture: RemoteMixtureOfExperts) -> list[Tensor]:
        x = numbers(16, WIDTH).requires_grad_()
        late = mixture(x).square().sum()
        results = turn(mixture, 1)
        return [*results, torch.autograd.grad(late, x)[0]]

    experts, used = compared(work, {"accumulate": False})
    assert used == len(UIDS) and len(experts.called(Kind.BACKWARD)) == 2 * len(UIDS)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("executor", ["threads", "serial"])
def test_pipe_stage_steps_once_and_keeps_no_useless_graph(keep: bool, checkpoint: Any, executor: Any) -> None:
    with Experts(keep_graphs=BUDGET) as experts, torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        mixture = experts.mixture(keep_graph=keep)
        twin = nn.Sequential(copy.deepcopy(first), LocalMixture(experts, mixture), copy.deepcopy(last))
        model = nn.Sequential(first, mixture, last)
        pipe = Pipe(model, chunks=4, balance=[1, 1, 1], checkpoint=checkpoint, executor=executor)
        pipe(numbers(16, WIDTH)).square().sum().backward()
        calls = len(experts.called(Kind.BACKWARD))
        assert calls > len(UIDS)  # several micro-batches
        assert commit(pipe) == ALL
        step_here(experts, twin, numbers(16, WIDTH))
        assert_same_weights(experts)
        for mine, theirs in ((first, twin[0]), (last, twin[2]), (mixture.proj, twin[1].proj)):
            torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=0, atol=1e-10)
        asked = [header for header in headers(experts, Kind.FORWARD) if header.keep]
        assert graphs(experts) == (0, len(asked)) and len(experts.called(Kind.FORWARD)) == calls
        least, most = {"always": (0, 0), "except_last": (1, calls - 1), "never": (calls, calls)}[checkpoint]
        assert least * keep <= len(asked) <= most * keep and len(mixture._client.cache) == 0


def test_recomputation_without_a_cache_calls_again() -> None:
    with Experts(keep_graphs=BUDGET) as experts:
        mixture = experts.mixture(keep_graph=True)
        with set_phase("recomputing"):
            y = mixture(numbers(16, WIDTH))
        y.sum().backward()
        assert graphs(experts) == (0, len(UIDS))


@pytest.mark.parametrize("part", [False, True])
def test_reduced_groups_send_their_inputs_again(part: bool) -> None:
    """With ``part``, samples that lack one answer are also left out of the backward of their other expert."""

    def work(experts: Experts, mixture: RemoteMixtureOfExperts) -> list[Tensor]:
        experts.lose(Kind.FORWARD, "ffn.1", "request")
        return turn(mixture, 0)

    more = {"k_min": 2, "allow_zero_outputs": True} if part else {}
    experts, used = compared(work, {"accumulate": False, "retry": NEVER, **more})
    called = experts.called(Kind.BACKWARD)
    assert called == [uid for uid in UIDS if uid != "ffn.1"]
    asked = {header.uid: header.key for header in headers(experts, Kind.FORWARD)}
    assert all(asked[header.uid] == header.key for header in headers(experts, Kind.BACKWARD))
    assert used < len(called) if part else used == len(called)


@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_retried_call_has_the_same_key(kind: Kind, lost: str) -> None:
    def work(experts: Experts, mixture: RemoteMixtureOfExperts) -> list[Tensor]:
        experts.lose(kind, "ffn.1", lost, lost)
        return turn(mixture, 0)

    experts, used = compared(work, {"accumulate": False})
    mine = [header.key for header in experts.headers if header.uid == "ffn.1" and header.key]
    stepped = kind is Kind.BACKWARD and lost == "reply"  # the kept graph is used up, so the inputs are sent again
    assert len(mine) == 4 + stepped and len(set(mine)) == 1
    assert used == len(UIDS) and experts.steps() == dict.fromkeys(UIDS, 1)


def test_backward_sends_inputs_only_if_they_are_gone() -> None:
    def work(experts: Experts, mixture: RemoteMixtureOfExperts) -> list[Tensor]:
        x = numbers(16, WIDTH).requires_grad_()
        loss = mixture(x).square().sum()
        graphs_of_one = experts.backends["ffn.1"].executor.graphs
        for entry in list(graphs_of_one._all):
            graphs_of_one._drop(entry)
        return [*torch.autograd.grad(loss, x), *turn(mixture, 1)]

    experts, used = compared(work, {"accumulate": False})
    sent = [(header.uid, header.keep) for header in headers(experts, Kind.BACKWARD)]
    assert used == 2 * len(UIDS) - 1 and sum(experts.steps().values()) == 2 * len(UIDS)
    assert [(uid, keep) for uid, keep in sent if not keep] == [("ffn.1", False)] and len(sent) == 2 * len(UIDS) + 1


def test_copy_keeps_graphs_under_its_own_keys() -> None:
    with Experts(keep_graphs=BUDGET) as experts:
        mixture = experts.mixture(keep_graph=True)
        twin = copy.deepcopy(mixture)
        assert twin.keep_graph and not copy.deepcopy(experts.mixture()).keep_graph
        losses = [module(numbers(16, WIDTH)).sum() for module in (mixture, twin)]
        for loss in losses:
            loss.backward()
        assert len(set(keys(experts, Kind.FORWARD))) == 2 * len(UIDS)
        assert graphs(experts) == (0, 2 * len(UIDS))
