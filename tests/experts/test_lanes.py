"""The queue of a pool against a list that is searched from the start."""

from hypothesis import given
from hypothesis import strategies as st

from weft.experts.batching import Lanes
from weft.experts.task import Task

MIN, MAX, PATIENCE = 4, 6, 10.0
events = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("ab"), st.integers(1, MAX), st.none() | st.integers(0, 30)),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("flush"), st.sampled_from("ab")),
    st.tuples(st.just("wait"), st.integers(0, 12)),
    st.tuples(st.just("take")),
    st.tuples(st.just("sweep")),
)


class Model:
    """All waiting tasks in order of arrival, and the lanes that were flushed."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.flushed: set[str] = set()

    def lane(self, name: str) -> list[Task]:
        return [task for task in self.tasks if task.lane == (name,)]

    def ready(self, name: str, now: float) -> bool:
        lane = self.lane(name)
        if not lane:
            return False
        waited = now >= lane[0].arrival + PATIENCE
        return waited or name in self.flushed or sum(task.rows for task in lane) >= MIN

    def drop_expired_heads(self, now: float) -> list[Task]:
        dropped: list[Task] = []
        for name in "ab":
            while (lane := self.lane(name)) and lane[0].expired(now):
                dropped.append(lane[0])
                self.forget(lane[0])
        return dropped

    def forget(self, task: Task) -> None:
        self.tasks.remove(task)
        self.flushed = {name for name in self.flushed if self.lane(name)}

    def take(self, now: float) -> tuple[list[Task], list[Task]]:
        expired = self.drop_expired_heads(now)
        ready = [self.lane(name) for name in "ab" if self.ready(name, now)]
        batch: list[Task] = []
        for task in min(ready, key=lambda lane: lane[0].number) if ready else []:
            if task.expired(now):
                expired.append(task)
            elif sum(each.rows for each in batch) + task.rows <= MAX:
                batch.append(task)
            else:
                break
            self.forget(task)
        return batch, expired


@given(st.lists(events, max_size=40))
def test_lanes_do_what_a_plain_list_would(history: list[tuple]) -> None:  # type: ignore[type-arg]
    lanes, model, now = Lanes(MIN, MAX, PATIENCE), Model(), 0.0
    seen: list[Task] = []
    for event, *details in history:
        if event == "add":
            name, size, ends = details
            task = Task((), size, (name,), None if ends is None else now + ends, arrival=now)
            lanes.add(task)
            model.tasks.append(task)
            seen.append(task)
        elif event == "remove" and details[0] < len(seen):
            task = seen[details[0]]
            assert lanes.remove(task) == (task in model.tasks)
            if task in model.tasks:
                model.forget(task)
        elif event == "flush":
            lanes.flush_where(lambda lane, name=details[0]: lane == (name,))
            model.flushed |= {details[0]} if model.lane(details[0]) else set()
        elif event == "wait":
            now += details[0]
        elif event == "sweep":
            expired = [task for task in model.tasks if task.expired(now)]
            assert set(lanes.sweep(now)) == set(expired)
            for task in expired:
                model.forget(task)
        elif event == "take":
            # With an expired head a lane is looked at: that is how it gets dropped.
            heads = [lane[0] for name in "ab" if (lane := model.lane(name))]
            ready = [
                name
                for name in "ab"
                if model.ready(name, now) or any(h.lane == (name,) and h.expired(now) for h in heads)
            ]
            number, later = lanes.urgency(now)
            assert number == min((model.lane(name)[0].number for name in ready), default=None)
            assert (later is None) == (number is not None or not model.tasks) and (later is None or later > now)
            batch, expired = lanes.take(now)
            wanted, dropped = model.take(now)
            assert batch == wanted and set(expired) == set(dropped)
        assert len(lanes) == len(model.tasks) and lanes.rows == sum(task.rows for task in model.tasks)
        assert set(lanes) == set(model.tasks)
        assert lanes.oldest() == (model.tasks[0].arrival if model.tasks else None)
