"""Events and forecasts for pictures of them."""

from hypothesis import strategies as st

from tests.strategies import any_schedules
from weft.core.events import Event
from weft.core.forecast import Forecast, StageCost, forecast
from weft.core.schedule import Action

TIMES = st.floats(0, 1e4)
NAMES = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)


@st.composite
def events(draw: st.DrawFn) -> Event:
    """Any event."""
    action = Action(draw(st.integers(0, 5)), draw(st.sampled_from("FBIW")), draw(st.integers(0, 120)))
    start, duration = draw(TIMES), draw(TIMES)
    kind = draw(st.sampled_from([action.kind, "R"]))
    return Event(kind, action, draw(NAMES), start, start + duration)


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    """A forecast of any small schedule."""
    schedule = draw(any_schedules(3, 3))
    numbers = draw(st.lists(TIMES, min_size=3, max_size=3))
    return forecast(schedule, [StageCost(*numbers)] * schedule.stages)
