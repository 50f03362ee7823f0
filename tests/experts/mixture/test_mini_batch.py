"""The sums of a mixture's mini-batch: which are whole, and what a failed backward does to them."""

import copy

import pytest

from weft.experts.mixture.mini_batch import Contribution, MixtureMiniBatch
from weft.experts.wire import DeadlineError


def test_calls_that_were_answered_are_added_and_the_others_torn() -> None:
    batch = MixtureMiniBatch(True)
    with Contribution(batch) as contribution:
        names = [contribution.begin(uid) for uid in ("a", "b", "a", "c")]
        contribution.added(0, 1)
        contribution.added(2, 1)
        contribution.added(3, 1)
        contribution.failed({1: DeadlineError("late"), 3: ValueError("its answer was of no use")})
    assert names[0] == names[2] and len(set(names)) == 3
    faults = {uid: each.fault for uid, each in batch.touched().items()}
    assert faults == {"a": None, "b": "DeadlineError: late", "c": None} and batch.broken is None


def test_an_error_breaks_it_until_it_is_discarded() -> None:
    batch = MixtureMiniBatch(True)
    error = ValueError()
    for each in (error, KeyError()):
        with pytest.raises(type(each)), Contribution(batch):
            raise each
    assert batch.broken is error  # the first
    batch.discard()
    assert batch.broken is None and batch.touched() == {}


def test_what_is_ended_is_forgotten_but_not_what_was_opened_since() -> None:
    batch = MixtureMiniBatch(True)
    first, other = batch.open("a"), batch.open("b")
    batch.end({"a": first})
    again = batch.open("a")
    batch.end({"a": first})
    assert again is not first and again.name != first.name and batch.touched() == {"a": again, "b": other}


def test_without_accumulation_nothing_is_open() -> None:
    batch = MixtureMiniBatch(False)
    with pytest.raises(ValueError), Contribution(batch) as contribution:
        assert contribution.begin("a") == ""
        contribution.added(0, 1)
        contribution.failed({0: ValueError()})
        raise ValueError
    assert batch.touched() == {} and batch.broken is None


def test_a_copy_begins_with_none() -> None:
    batch = MixtureMiniBatch(True)
    batch.open("a")
    other = copy.deepcopy(batch)
    assert other.accumulates and other.touched() == {} and list(batch.touched()) == ["a"]
