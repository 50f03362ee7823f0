"""Incomplete or uncommitted sums are left out of a mini-batch and reported, and no part of a sum is applied."""

import copy
from typing import Any

import pytest

from tests.experts.mixture.commit_cases import ALL, UIDS, Experts, LocalMixture, assert_commit_steps, only, run
from tests.experts.mixture.mixture_cases import WIDTH, numbers
from torchweft.experts.client import NEVER
from torchweft.experts.client.stub import ExpertProgress
from torchweft.experts.errors import CommitError, GradientError, MalformedError, MixtureCommitError, TooFewAnswersError
from torchweft.experts.mixture.fanout import MixtureSignature
from torchweft.experts.mixture.mixture_function import MixtureCommit
from torchweft.experts.wire import Kind


def test_failed_backward_leaves_its_expert_out_once(experts: Experts) -> None:
    mixture = experts.mixture()
    experts.lose(Kind.BACKWARD, "ffn.1", "", GradientError("too large"))
    run(mixture, numbers(16, WIDTH))
    run(mixture, numbers(16, WIDTH, seed=1))
    assert mixture.commit() == {**ALL, "ffn.1": False}
    assert "ffn.1" not in experts.called(Kind.COMMIT) and "ffn.1" not in experts.steps()
    assert experts.called(Kind.DISCARD) == ["ffn.1"], "the discard frees the sum on the server"
    run(mixture, numbers(16, WIDTH))
    assert mixture.commit() == ALL and experts.steps() == {**dict.fromkeys(UIDS, 2), "ffn.1": 1}
    assert mixture.statistics().left_out == 1


def test_expert_with_an_invalid_answer_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Experts() as experts:
        mixture = experts.mixture()
        read, pending_errors = MixtureSignature.read_input_gradients, [MalformedError("x", reason="shape")]

        def failing(*args: Any) -> Any:
            if pending_errors:
                raise pending_errors.pop()
            return read(*args)

        monkeypatch.setattr(MixtureSignature, "read_input_gradients", failing)
        run(mixture, numbers(16, WIDTH))
        assert mixture.statistics().failed and mixture.commit() == ALL


def test_expert_that_was_not_awaited_is_left_out(experts: Experts) -> None:
    mixture = experts.mixture(k_min=2, timeout_after_k_min=0.0)  # forward waits for both, backward for one
    y = mixture(numbers(16, WIDTH))
    experts.lose(Kind.BACKWARD, "ffn.1", "silence")
    y.sum().backward()
    assert mixture.commit()["ffn.1"] is False


@pytest.mark.parametrize("switch", [False, True])
def test_expert_that_restarted_is_left_out(experts: Experts, switch: bool) -> None:
    mixture = experts.mixture(switch, k_best=2)
    run(mixture, numbers(16, WIDTH))
    experts.restart("ffn.1")
    run(mixture, numbers(16, WIDTH, seed=1))
    experts.restart("ffn.2")  # the mixture notices only at the commit
    assert mixture.commit() == {**ALL, "ffn.1": False, "ffn.2": False}
    assert experts.steps() == {"ffn.0": 1, "ffn.3": 1}
    run(mixture, numbers(16, WIDTH))
    assert mixture.commit() == ALL


def test_incomplete_sums_are_listed_before_any_step(experts: Experts) -> None:
    mixture = experts.strict()
    run(mixture, numbers(16, WIDTH))
    experts.restart("ffn.1", "ffn.2")
    run(mixture, numbers(16, WIDTH, seed=1))
    for _ in range(2):
        with pytest.raises(MixtureCommitError, match=r"(?s)2 lack .*discard.*ffn\.1: .*ffn\.2: ") as caught:
            mixture.commit()
        assert sorted(caught.value.faults) == ["ffn.1", "ffn.2"]
    assert experts.called(Kind.COMMIT) == [] and experts.steps() == {}
    mixture.discard()
    run(mixture, numbers(16, WIDTH))
    assert mixture.commit() == ALL


def test_failed_backward_blocks_commits_until_discard(experts: Experts) -> None:
    mixture = only(experts.mixture(), 0, 1)
    run(mixture, numbers(4, WIDTH))
    for uid in UIDS:
        experts.lose(Kind.BACKWARD, uid, GradientError("too large"))
    with pytest.raises(TooFewAnswersError):
        run(mixture, numbers(4, WIDTH))
    run(mixture, numbers(4, WIDTH))
    with pytest.raises(MixtureCommitError, match="TooFewAnswersError") as caught:
        mixture.commit()
    assert sorted(caught.value.faults) == ["ffn.0", "ffn.1"] and experts.called(Kind.COMMIT) == []
    mixture.discard()
    run(mixture, numbers(4, WIDTH))
    assert mixture.commit() == {"ffn.0": True, "ffn.1": True} and experts.steps() == {"ffn.0": 1, "ffn.1": 1}


def test_unsent_gradients_block_the_commit(experts: Experts) -> None:
    mixture = experts.mixture(detect_anomalies=True)
    run(mixture, numbers(16, WIDTH))
    with pytest.raises(ArithmeticError):
        (mixture(numbers(16, WIDTH)) * float("nan")).sum().backward()
    with pytest.raises(CommitError, match="AnomalyError"):
        mixture.commit()


def test_commit_needs_a_step_unless_zeros_are_allowed(experts: Experts) -> None:
    for mixture in (experts.mixture(), experts.mixture(allow_zero_outputs=True)):
        run(only(mixture, 0, 1), numbers(4, WIDTH))
        experts.restart("ffn.0", "ffn.1")
        run(mixture, numbers(4, WIDTH))
        if mixture.options.allow_zero_outputs:
            assert mixture.commit() == {"ffn.0": False, "ffn.1": False}
        else:
            with pytest.raises(MixtureCommitError, match="2 lack"):
                mixture.commit()
            mixture.discard()
        assert experts.steps() == {}


def test_late_committer_is_left_out_and_discarded(experts: Experts) -> None:
    mixture = experts.mixture(backward_timeout=1.0)
    twin, x = LocalMixture(experts, mixture), numbers(16, WIDTH)
    run(mixture, numbers(16, WIDTH, seed=7))
    experts.lose(Kind.COMMIT, "ffn.1", "silence")
    assert mixture.commit() == {**ALL, "ffn.1": False}
    for uid in UIDS:
        module = experts.backends[uid].module
        experts.module_here(uid).load_state_dict(module.state_dict())
    run(mixture, x)
    assert_commit_steps(experts, mixture, twin, x)


def test_second_commit_calls_only_the_failed(experts: Experts) -> None:
    mixture = experts.strict(retry=NEVER)
    run(mixture, numbers(16, WIDTH))
    experts.lose(Kind.COMMIT, "ffn.1", "reply")
    experts.lose(Kind.COMMIT, "ffn.2", "request")
    with pytest.raises(MixtureCommitError, match=r"2 of 4 .*commit\(\) again") as caught:
        mixture.commit()
    assert sorted(caught.value.faults) == ["ffn.1", "ffn.2"]
    experts.headers.clear()
    assert mixture.commit() == {"ffn.1": True, "ffn.2": True}
    assert experts.called(Kind.COMMIT) == ["ffn.1", "ffn.2"] and experts.steps() == dict.fromkeys(UIDS, 1)


def test_second_commit_skips_lost_sums(experts: Experts) -> None:
    mixture = experts.strict()
    run(mixture, numbers(16, WIDTH))
    experts.restart("ffn.1")
    with pytest.raises(MixtureCommitError, match=r"(?s)1 of 4 .*Call discard.*started again"):
        mixture.commit()
    experts.headers.clear()
    with pytest.raises(MixtureCommitError, match="1 lack"):
        mixture.commit()
    assert experts.called(Kind.COMMIT) == []
    mixture.discard()
    run(mixture, numbers(16, WIDTH))
    assert mixture.commit() == ALL


def test_interrupted_commit_can_be_called_again(experts: Experts) -> None:
    mixture = experts.mixture()
    run(mixture, numbers(16, WIDTH))
    accept = ExpertProgress.accept
    seen: list[Any] = []

    def interrupted(self: ExpertProgress, answer: Any) -> None:
        seen.append(answer)
        if len(seen) == 2:
            raise KeyboardInterrupt
        accept(self, answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertProgress, "accept", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mixture.commit()
    assert mixture.commit() == ALL and experts.steps() == dict.fromkeys(UIDS, 1)


def test_close_keeps_newer_mini_batches() -> None:
    batch = MixtureCommit(True)
    first, other = batch.open_for("a"), batch.open_for("b")
    batch.close({"a": first})
    again = batch.open_for("a")
    batch.close({"a": first})
    assert again is not first and again.name != first.name and batch.open_mini_batches() == {"a": again, "b": other}
    copied = copy.deepcopy(batch)
    assert copied.accumulates and copied.open_mini_batches() == {} and sorted(batch.open_mini_batches()) == ["a", "b"]
