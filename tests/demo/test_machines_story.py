"""The sums over what trainers and servers say, and the claims that are refused when the sums are off."""

from dataclasses import replace

import pytest

from tests.demo.machines_cases import status, story_of_a_death
from weft.demo.machines_story import Return, Story


@pytest.fixture
def story() -> Story:
    return story_of_a_death()


def test_what_died_lost_the_steps_after_the_one_where_it_went_on(story: Story) -> None:
    assert story.returns() == [Return("x", reached=17, reported=12, restored=12)]
    assert story.returns()[0].lost == 5
    assert story.seconds_away == pytest.approx(2.25)  # to the first answer of any trainer
    assert (story.calls, story.given_up, story.thrown_away, story.accuracies()) == (100, 2, 4, [0.9, 0.9])


def test_books_count_from_when_a_server_listens(story: Story) -> None:
    other, back = story.books()
    assert (other.uid, other.applied, other.acknowledged, other.steps) == ("y", 42, 42, 41)
    assert (back.uid, back.applied, back.acknowledged, back.steps, back.repeated) == ("x", 10, 10, 9, 3)
    assert story.faults() == []


def test_a_durable_step_that_is_gone_is_a_fault(story: Story) -> None:
    story.back = replace(story.back, first=status("x", 11, 14, restored=11))
    assert story.faults()[0] == "x went on from step 11, but step 12 was reported to be durable"


@pytest.mark.parametrize(
    ("steps", "keys", "why"),
    [(22, 25, "a backward that nobody sent"), (20, 23, "one that was acknowledged is missing"), (23, 24, "twice")],
)
def test_a_backward_that_was_not_applied_exactly_once_is_a_fault(story: Story, steps: int, keys: int, why: str) -> None:
    story.back = replace(story.back, last=status("x", steps, keys))
    (fault,) = story.faults()
    assert fault.startswith("x at a, again has applied"), why


def test_what_was_sent_and_not_acknowledged_may_be_applied_or_not(story: Story) -> None:
    known = story.trainers[0].result
    assert known is not None
    known["ledger"]["accounts"]["back:1"]["x"]["sent"] += 1
    for keys in (24, 25):
        story.back = replace(story.back, last=status("x", 21, keys))
        assert story.faults() == []


def test_the_time_of_a_step_is_the_median_within_a_span(story: Story) -> None:
    assert story.step_seconds(1.0, 2.0) == pytest.approx(0.005)
    assert story.step_seconds(5.0, 6.0) is None


def test_without_an_answer_they_are_away_for_ever(story: Story) -> None:
    for each in story.trainers:
        each.answered.clear()
    assert story.seconds_away == float("inf")
