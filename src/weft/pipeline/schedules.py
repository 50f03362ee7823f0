"""The schedules that come with weft, and the door through which a user's own one enters.

Both have one stage per worker. They take the same time and differ in what is alive; here three stages and
four micro-batches:

    gpipe   F0 F1 F2 F3             B3 B2 B1 B0
               F0 F1 F2 F3       B3 B2 B1 B0           every stage holds all four
                  F0 F1 F2 F3 B3 B2 B1 B0

    1f1b    F0 F1 F2       B0 F3 B1    B2    B3        at most 3
               F0 F1    B0 F2 B1 F3 B2    B3           at most 2
                  F0 B0 F1 B1 F2 B2 F3 B3              at most 1

gpipe can be cut between forward and backward, so the loss may be computed outside. 1f1b cannot: its last
stage computes the loss of each micro-batch.
"""

from collections.abc import Callable
from functools import lru_cache

from ..core.errors import ScheduleError
from ..core.schedule import Action, Schedule
from ..core.schedule_text import looks_like_table


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Fill and drain (Huang et al., GPipe, 2019): all forward, then all backward in reverse order.

    Every stage holds all micro-batches at once. Raises ScheduleError when a size is below 1.
    """
    _check_sizes(stages, micro_batches)
    kinds = [("F", i) for i in range(micro_batches)] + [("B", i) for i in reversed(range(micro_batches))]
    return Schedule(tuple(tuple(Action(stage, kind, i) for kind, i in kinds) for stage in range(stages)))


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush; Narayanan et al., 2021).

    Stage s holds at most ``min(stages - s, micro_batches)`` micro-batches, as many as it takes until its
    first gradient comes back. Takes as long as `gpipe`. Raises ScheduleError when a size is below 1.
    """
    _check_sizes(stages, micro_batches)
    return Schedule(tuple(_one_f_one_b_row(s, stages - 1 - s, micro_batches) for s in range(stages)))


def _one_f_one_b_row(stage: int, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    row = [Action(stage, "F", i) for i in range(min(ahead, micro_batches))]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            row.append(Action(stage, "F", i + ahead))
        row.append(Action(stage, "B", i))
    return tuple(row)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules that go by a name."""


@lru_cache
def build(schedule: str | Schedule, stages: int, micro_batches: int) -> Schedule:
    """The schedule for so many stages and micro-batches, checked.

    `schedule` is a name from `SCHEDULES`, a table as text, or a `Schedule`. A table must have just the wanted
    stages and at least the wanted micro-batches; what it holds beyond them is dropped.
    Raises ScheduleError for an unknown name, and with all its faults for a table that cannot be used.
    """
    if isinstance(schedule, str):
        if schedule in SCHEDULES:
            return SCHEDULES[schedule](stages, micro_batches)
        if not looks_like_table(schedule):
            raise ScheduleError(
                f"no schedule is named {schedule!r}; there are {', '.join(SCHEDULES)}. "
                "Or pass a table as text: a line per worker of comma separated actions: 0F0,0F1,0B1,0B0"
            )
        schedule = Schedule.parse(schedule)
    _check_sizes(stages, micro_batches)
    schedule.check(stages=stages, micro_batches=max(micro_batches, schedule.micro_batches))
    return schedule.restricted(micro_batches)


def _check_sizes(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ScheduleError(
            f"a schedule needs at least one stage and one micro-batch, but got {stages} stages "
            f"and {micro_batches} micro-batches"
        )
