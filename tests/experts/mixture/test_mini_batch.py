"""The sums of a mixture's mini-batch: which are whole, and what a failed backward does to them."""

import copy

from weft.experts.mixture.mixture_function import MixtureMiniBatch


def test_an_error_breaks_it_until_it_is_discarded() -> None:
    batch = MixtureMiniBatch(True)
    error = ValueError()
    for each in (error, KeyError()):
        batch.fail(each)
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


def test_without_accumulation_an_error_breaks_nothing() -> None:
    batch = MixtureMiniBatch(False)
    batch.fail(ValueError())
    assert batch.touched() == {} and batch.broken is None


def test_a_copy_begins_with_none() -> None:
    batch = MixtureMiniBatch(True)
    batch.open("a")
    other = copy.deepcopy(batch)
    assert other.accumulates and other.touched() == {} and list(batch.touched()) == ["a"]
