"""A failure of one rank is raised on all ranks with its place, and leaves the pipe usable."""

import signal

import pytest

from tests.pipeline.processes import failing
from tests.pipeline.processes.launch import fresh_ranks


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_is_raised_on_every_rank(ranks, rank: int, where: str, schedule: str) -> None:
    results = ranks(3).run(failing.layer_fails, rank, where, schedule)
    for other, (kind, message) in enumerate(results):
        assert kind == ("ValueError" if other == rank else "RankFailedError"), message
        assert f"stage {rank}" in message
        assert "micro-batch" in message
    assert all(f"rank {rank}" in results[other][1] for other in range(3) if other != rank)


def test_an_exception_of_the_loss_is_raised_on_every_rank(ranks) -> None:
    results = ranks(3).run(failing.loss_fails)
    assert [kind for kind, _ in results] == ["RankFailedError", "RankFailedError", "ValueError"]
    assert all("in the loss function" in message for _, message in results)


@pytest.mark.parametrize(
    ("work", "kinds", "words"),
    [
        (failing.batch_is_refused, ["BatchError"] * 3, "same length"),
        (failing.batch_differs, ["BatchError"] * 3, "the same mini-batch"),
        (failing.tag_differs, ["UsageError"] * 3, "batch_tag"),
        (failing.target_is_missing, ["UsageError"] * 3, "there is a target"),
        (failing.settings_differ, ["UsageError"] * 3, "chunks"),
        (failing.gradient_differs, ["UsageError"] * 3, "the gradient of the loss differs between ranks"),
        (failing.layer_changes, ["ModuleChangedError"] * 3, "training to evaluation"),
        (failing.buffer_is_shared, ["SpecError"] * 3, "0, on the ranks [0, 2]"),
        (failing.pipe_is_nested, ["SpecError"] * 3, "a stage runs on one rank"),
        (failing.backward_twice, ["BackwardTwiceError"] * 3, "retain_graph"),
        (failing.rank_is_interrupted, ["RankFailedError", "KeyboardInterrupt", "RankFailedError"], ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_refusal_is_raised_on_every_rank(ranks, work, kinds: list[str], words: str) -> None:
    """This includes errors outside a walk, such as a mini-batch that cannot be cut. The next step runs."""
    results = ranks(3).run(work)
    assert [kind for kind, _ in results] == kinds, results
    assert all(words in message for _, message in results), results


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "sent", "limit"),
    [(0, signal.SIGKILL, {}), (2, signal.SIGKILL, {}), (1, signal.SIGSTOP, {"timeout": 8.0})],
    ids=["first killed", "last killed", "stopped"],
)
def test_a_killed_or_stopped_rank_is_named(rank: int, sent: signal.Signals, limit: dict[str, float]) -> None:
    with fresh_ranks(3, **limit) as three:
        outcomes = three.outcomes(failing.trains_until_failure, rank, sent, without=(rank,))
    for outcome in (outcomes[other] for other in range(3) if other != rank):
        assert outcome is not None
        kind, message, _ = outcome.result
        assert kind == "RankLostError"
        assert f"rank {rank}" in message


@pytest.mark.long
def test_a_rank_that_skips_a_step_is_named() -> None:
    with fresh_ranks(3, timeout=4.0) as three:
        results = three.run(failing.calls_less_often)
    for kind, message in results[:2]:
        assert kind == "RankLostError"
        assert "rank 2" in message
        assert "different number of times" in message


def test_data_loader_workers_do_not_disturb_the_links(ranks) -> None:
    losses = ranks(3).run(failing.trains_with_a_data_loader)
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 3


def test_links_are_closed_with_their_pipe(ranks) -> None:
    assert ranks(3).run(failing.threads_after_close) == [[], [], []]
