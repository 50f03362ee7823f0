"""Ranks that are given other batches or call in other modes all raise. Gradients of inputs are on all ranks."""

import pytest
from torch import nn

import torchweft as weft
from tests.pipeline.processes import alike
from torchweft.errors import UsageError


@pytest.mark.parametrize("kind", ["shuffled", "sampler"])
def test_ranks_with_other_batches_all_raise(ranks, kind: str) -> None:
    for name, text in ranks(3).run(alike.batches_differ, kind):
        assert name == "BatchError", text
        for words in ("input[0]", "target", "same seed on all ranks", "DistributedSampler", "check_batches=False"):
            assert words in text


@pytest.mark.parametrize("part", ["input", "target"])
def test_one_part_that_differs_is_named(ranks, part: str) -> None:
    for name, text in ranks(3).run(alike.a_part_differs, part):
        faults = text.partition("\n  - ")[2]
        assert name == "BatchError" and part in faults and {"input": "target", "target": "input"}[part] not in faults


def test_batches_are_compared_in_some_steps(ranks) -> None:
    due = [*range(1, 11), 15, 100]
    assert ranks(3).run(alike.batches_are_compared_at, due) == [due] * 3


def test_batches_can_differ_where_they_do_not_count(ranks) -> None:
    results = ranks(3).run(alike.batches_are_not_compared)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == results[0][1]


@pytest.mark.parametrize("where", ["pipe", "layer", "loss"])
def test_a_mode_that_differs_is_raised_on_all(ranks, where: str) -> None:
    for name, text in ranks(3).run(alike.mode_differs, where):
        assert name == "UsageError" and "modules in training mode" in text


def test_an_error_without_text_reaches_all_ranks(ranks) -> None:
    results = ranks(3).run(alike.error_has_no_text)
    assert [name for name, _ in results] == ["RankFailedError", "ValueError", "RankFailedError"]
    for rank in (0, 2):
        assert "raised Wordless" in results[rank][1] and "fail" in results[rank][1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_missed_backward_is_named(ranks, schedule: str) -> None:
    for name, text in ranks(3).run(alike.backward_is_missed, schedule):
        assert name == "RankFailedError" and text.startswith("rank 1 (host") and "did not call backward()" in text


def test_a_missing_group_is_refused_in_ranks(ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for [(name, text)], alone in ranks(2).run(alike.group_is_none):
        assert name == "UsageError" and "group is None in one of 2 processes" in text and alone
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options in ({}, {"group": None}):
        with pytest.raises(UsageError, match=r"init_process_group\(\) before"):
            weft.Pipe(nn.Sequential(nn.Linear(2, 2)), chunks=1, **options)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert weft.Pipe(nn.Sequential(nn.Linear(2, 2)), chunks=1, group=None).group is None


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        *((kind, "gpipe") for kind in ("front", "tied head", "residual", "chain")),
        ("first", "1f1b"),
        ("first", "interleaved"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_modules_around_a_pipe_train_on_every_rank(ranks, size: int, kind: str, schedule: str) -> None:
    assert max(ranks(size).run(alike.shares_input_gradients, kind, schedule)) < 1e-15


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_gradients_of_input_and_target_are_on_all_ranks(ranks, schedule: str) -> None:
    assert max(max(result) for result in ranks(2).run(alike.shares_target_gradients, schedule)) < 1e-6


def test_an_input_without_gradient_on_the_first_rank(ranks) -> None:
    for name, text in ranks(3).run(alike.gradient_on_one_rank_only):
        assert name == "UsageError" and "input[0] requires a gradient on some ranks only" in text
    (total,), *others = ranks(3).run(alike.gradient_on_the_first_rank)
    assert total > 0 and others == [[], []]


def test_two_pipes_train_in_turns(ranks) -> None:
    results = ranks(3).run(alike.trains_two_pipes)
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) == 1
