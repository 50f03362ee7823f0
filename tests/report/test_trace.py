"""A trace has what the format asks for, and the file holds it."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.report.drawn_events import events
from weft.core.events import Event
from weft.core.schedule import Action
from weft.report.trace import trace, write_trace


@given(st.lists(events(), max_size=12))
def test_every_event_is_complete_work_on_a_named_thread(ran: list[Event]) -> None:
    made = json.loads(json.dumps(trace(ran)))["traceEvents"]
    work = [each for each in made if each["ph"] == "X"]
    named = {each["tid"] for each in made if each["name"] == "thread_name" and each["ph"] == "M"}
    assert len(work) == len(ran)
    assert len(named) == len({event.thread for event in ran})
    for each in work:
        assert each["ts"] >= 0 and each["dur"] >= 0 and each["pid"] == 0 and each["tid"] in named
        assert set(each["args"]) == {"stage", "micro-batch"}


def test_times_are_microseconds_from_the_first_event() -> None:
    ran = [Event("R", Action(2, "B", 3), "one", 5.0, 5.5), Event("B", Action(2, "B", 3), "one", 5.5, 6.0)]
    work = [each for each in trace(ran, name="step")["traceEvents"] if each["ph"] == "X"]
    assert [(each["name"], each["cat"], each["ts"], each["dur"]) for each in work] == [
        ("2R3", "recompute", 0.0, 500_000.0),
        ("2B3", "backward", 500_000.0, 500_000.0),
    ]
    assert work[0]["args"] == {"stage": 2, "micro-batch": 3}


def test_the_file_holds_the_trace(tmp_path: Path) -> None:
    ran = [Event("F", Action(0, "F", 0), "one", 0.0, 1.0)]
    where = write_trace(tmp_path / "trace.json", ran, name="step")
    assert json.loads(where.read_text("utf-8")) == trace(ran, name="step")
