"""A mixture's mini-batch is one step of each called expert, also after splits, lost calls and restarts."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.experts.mixture.commit_cases import (
    ALL,
    UIDS,
    Experts,
    LocalMixture,
    assert_commit_steps,
    assert_same_weights,
    only,
    run,
    step_here,
)
from tests.experts.mixture.mixture_cases import WIDTH, numbers
from torchweft.core.errors import UsageError
from torchweft.experts.client import RemoteExpert, commit, discard
from torchweft.experts.errors import MixtureCommitError, StepError, TooFewAnswersError
from torchweft.experts.mixture.mixture_function import MixtureCommit
from torchweft.experts.wire import Kind


@pytest.mark.parametrize("switch", [False, True])
def test_micro_batches_are_one_step_of_each_expert(experts: Experts, switch: bool) -> None:
    mixture = experts.mixture(switch)
    twin = LocalMixture(experts, mixture)
    for turn in range(2):
        x = numbers(16, WIDTH, seed=turn)
        for part in x.split(5):
            run(mixture, part)
        assert experts.steps() == (dict.fromkeys(UIDS, turn) if turn else {})
        assert_commit_steps(experts, mixture, twin, x)
        assert experts.steps() == dict.fromkeys(UIDS, turn + 1) == mixture.steps
    assert mixture.statistics().commits == 2 and not mixture.statistics().failed
    torch.testing.assert_close(mixture.proj.weight.grad, twin.proj.weight.grad, rtol=0, atol=1e-10)


def test_micro_batches_of_several_threads_are_one_step() -> None:
    with Experts() as experts, ThreadPoolExecutor(4) as pool:
        mixture = experts.mixture()
        batches = [numbers(4, WIDTH, seed=seed) for seed in range(8)]
        list(pool.map(lambda x: run(mixture, x), batches))
        assert_commit_steps(experts, mixture, LocalMixture(experts, mixture), *batches)


def test_commit_calls_only_experts_with_gradients(experts: Experts) -> None:
    mixture = only(experts.mixture(), 1, 3)
    assert mixture.commit() == {} and experts.called(Kind.COMMIT) == []
    run(mixture, numbers(4, WIDTH))
    assert mixture.commit() == {"ffn.1": True, "ffn.3": True}
    assert mixture.commit() == {}
    assert experts.called(Kind.COMMIT) == ["ffn.1", "ffn.3"] and experts.steps() == {"ffn.1": 1, "ffn.3": 1}


def test_commits_are_sent_concurrently(experts: Experts) -> None:
    mixture = experts.mixture()
    run(mixture, numbers(16, WIDTH))
    held: list[Any] = []
    handle = experts._handle

    def hold(address: str, call: Any, reply: Any) -> None:
        held.append((address, call, reply))
        if len(held) == len(UIDS):  # answer only after all commits have arrived
            for call_and_reply in held:
                handle(*call_and_reply)

    for uid in UIDS:
        transport: Any = experts.connections.transport_to(uid)
        transport._handler = lambda call, reply, uid=uid: hold(uid, call, reply)
    assert mixture.commit() == ALL


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_lost_message_still_gives_exactly_one_step(experts: Experts, lost: str) -> None:
    mixture = experts.mixture()
    twin, x = LocalMixture(experts, mixture), numbers(16, WIDTH)
    experts.lose(Kind.BACKWARD, "ffn.1", lost, "", lost)
    experts.lose(Kind.COMMIT, "ffn.2", lost, lost)
    for part in x.split(8):
        run(mixture, part)
    assert_commit_steps(experts, mixture, twin, x)
    keys = [header.key for header in experts.headers if header.kind is Kind.COMMIT and header.uid == "ffn.2"]
    assert len(keys) == 3 and len(set(keys)) == 1 and experts.steps() == dict.fromkeys(UIDS, 1)


def test_discarded_gradients_are_not_applied(experts: Experts) -> None:
    mixture = experts.mixture()
    twin, x = LocalMixture(experts, mixture), numbers(16, WIDTH)
    run(mixture, numbers(16, WIDTH, seed=7))
    mixture.discard()
    assert mixture.commit() == {} and experts.steps() == {}
    run(mixture, x)
    assert_commit_steps(experts, mixture, twin, x)


@pytest.mark.parametrize("how", ["two", "of one name", "copy"])
def test_two_mixtures_do_not_mix_their_sums(experts: Experts, how: str) -> None:
    client = "trainer" if how == "of one name" else ""
    one = experts.mixture(client=client)
    other = copy.deepcopy(one) if how == "copy" else experts.mixture(client=client)
    twin, x = LocalMixture(experts, one), numbers(16, WIDTH)
    run(one, x[:8])
    run(other, numbers(16, WIDTH, seed=7))
    run(one, x[8:])
    assert_commit_steps(experts, one, twin, x)
    other.discard()
    assert other.commit() == one.commit() == {}


def test_commit_without_accumulation_is_refused(experts: Experts) -> None:
    mixture = experts.mixture(accumulate=False)
    with pytest.raises(UsageError, match="accumulate"):
        mixture.commit()
    assert commit(nn.Sequential(mixture)) == {} and not mixture.accumulates
    run(mixture, numbers(16, WIDTH))
    assert experts.steps() == dict.fromkeys(UIDS, 1)


def test_a_group_commits_mixtures_and_single_experts(experts: Experts) -> None:
    single = RemoteExpert("ffn.0", experts.connections, accumulate=True)
    mixture = only(experts.mixture(), 0, 1)
    model = nn.Sequential(single, mixture)
    run(mixture, numbers(4, WIDTH))
    assert commit(model) == {"ffn.0": True, "ffn.1": True}  # `single` itself has no gradients
    model(numbers(4, WIDTH)).sum().backward()
    assert commit(model) == {"ffn.0": True, "ffn.1": True} and experts.steps() == {"ffn.0": 3, "ffn.1": 2}
    model(numbers(4, WIDTH)).sum().backward()
    discard(model)
    assert commit(model) == {"ffn.0": False} and experts.steps() == {"ffn.0": 3, "ffn.1": 2}


def test_the_client_is_named_in_all_calls() -> None:
    with Experts() as experts:
        for client in ("trainer", ""):
            experts.headers.clear()
            mixture = experts.mixture(client=client)
            run(mixture, numbers(16, WIDTH))
            mixture.commit()
            (seen,) = {header.client for header in experts.headers}
            assert seen == client if client else len(seen) > 8
            assert {header.kind for header in experts.headers} == {Kind.INFO, Kind.FORWARD, Kind.BACKWARD, Kind.COMMIT}
    assert not [thread for thread in threading.enumerate() if "mixture" in thread.name]


def test_interrupted_commit_names_discard(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(batch: MixtureCommit, sums: object) -> None:
        raise KeyboardInterrupt

    with Experts() as experts:
        mixture, x = experts.mixture(k_min=1), numbers(16, WIDTH)
        run(mixture, x)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(MixtureCommit, "close", interrupted)
            mixture.commit()
        assert experts.steps() == dict.fromkeys(UIDS, 1)
        with pytest.raises(TooFewAnswersError, match=r"an interrupted commit, discard\(\) begins"):
            run(mixture, x)
        mixture.discard()
        run(mixture, x)
        assert mixture.commit() == ALL and experts.steps() == dict.fromkeys(UIDS, 2)


def test_expert_called_in_parts_steps_once() -> None:
    with Experts(max_batch_size=3) as experts:
        mixture = experts.mixture(accumulate=False)
        twin, x = LocalMixture(experts, mixture), numbers(16, WIDTH)
        run(mixture, x)
        assert len(experts.called(Kind.BACKWARD)) > len(UIDS)
        assert experts.steps() == dict.fromkeys(UIDS, 1)
        step_here(experts, twin, x)
        assert_same_weights(experts)


def test_failed_commit_of_parts_raises() -> None:
    with Experts(max_batch_size=3) as experts:
        mixture = experts.mixture(accumulate=False)
        experts.lose(Kind.COMMIT, UIDS[1], StepError("the optimizer raised"))
        with pytest.raises(MixtureCommitError, match=r"(?s)sent in parts: 1 experts are not known to have.*StepError"):
            run(mixture, numbers(16, WIDTH))
