"""The page and the lines tell the numbers of the story."""

import io
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the act needs the extra `experts`")

from tests.demo.machines_cases import story_of_a_death
from weft.demo import machines_page
from weft.demo.stage import Options, Stagehand
from weft.report import page


def test_the_page_shows_when_it_died_what_it_cost_and_the_books() -> None:
    story = story_of_a_death()
    story.steps = {"x": [(1.5, 9.0), (4.0, 17.0), (4.0, 12.0), (5.0, 21.0)], "y": [(1.5, 9.0), (5.0, 41.0)]}
    html = page("test", [machines_page._learned(story), machines_page._cost(story), machines_page._books(story)])
    for words in ("90.0% · 90.0%", "21 to 41", "2.2 s", "a is killed", "its experts answer again"):
        assert words in html
    assert "<td>x</td><td>17</td><td>12</td><td>12</td><td>5</td>" in html
    assert "<td>x</td><td>a, again</td><td>10</td><td>10</td><td>10</td><td>3</td><td>9</td>" in html
    assert "after 1.00 s" in html and "5.00 ms a step" in html and "no step" in html


def test_the_upright_lines_stand_where_it_died_and_came_back_from_end_to_end() -> None:
    marks = machines_page._marks(story_of_a_death())
    assert marks == {"a is killed": pytest.approx(1.0), "its experts answer again": pytest.approx(3.25)}


def test_the_lines_say_what_was_lost_and_that_nothing_failed(tmp_path: Path) -> None:
    voice = io.StringIO()
    machines_page.say(story_of_a_death(), Stagehand(Options(tmp_path), voice))
    said = voice.getvalue()
    assert "90.0% and 90.0% right after 200 steps of both trainers" in said
    assert "steps lost, those after the last durable checkpoint: x 5; the experts were away for 2.2 s" in said
    assert "calls that failed in a trainer: 0; of 100, 2 had no answer" in said
    assert "backwards applied 52, acknowledged 52" in said and "4 answers were thrown away" in said
