"""The second law: a schedule that cannot run is rejected. The first law covers valid schedules."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.strategies import valid_schedules
from torchweft import Pipe, Schedule
from torchweft.core.errors import ScheduleError
from torchweft.pipeline.schedule import Action

Rows = list[list[Action]]


def lost(rows: Rows, worker: int, place: int) -> str:
    """Remove an action."""
    action = rows[worker].pop(place)
    if not any(left.kind != "F" for row in rows for left in row):
        return "the schedule has no backward"
    return f"missing for micro-batch {action.micro_batch}"


def repeated(rows: Rows, worker: int, place: int) -> str:
    """Repeat an action."""
    rows[worker].append(rows[worker][place])
    return f"{rows[worker][place]} occurs 2 times"


def elsewhere(rows: Rows, worker: int, place: int) -> str:
    """Give one action of a stage to a new worker."""
    action = rows[worker][place]
    assume(sum(other.stage == action.stage for other in rows[worker]) > 1)
    rows.append([rows[worker].pop(place)])
    return f"stage {action.stage} is on workers {worker} and {len(rows) - 1}"


def too_early(rows: Rows, worker: int, place: int) -> str:
    """Move a backward before its forward."""
    action = rows[worker][place]
    forward = action._replace(kind="F")
    assume(action.kind in "BI")
    rows[worker].remove(forward)
    rows[worker].insert(rows[worker].index(action) + 1, forward)
    return f"{action} stands before {forward}, which it needs"


def unknown(rows: Rows, worker: int, place: int) -> str:
    """Change the kind of an action to an invalid one."""
    rows[worker][place] = rows[worker][place]._replace(kind="X")
    return f"{rows[worker][place]} is not an action"


@pytest.mark.parametrize("spoil", [lost, repeated, elsewhere, too_early, unknown])
@given(data=st.data(), stages=st.integers(1, 3), chunks=st.integers(1, 3))
def test_invalid_table_is_rejected_with_the_reason(
    spoil: Callable[[Rows, int, int], str], data: st.DataObject, stages: int, chunks: int
) -> None:
    rows: Rows = [list(row) for row in data.draw(valid_schedules(stages, chunks)).workers]
    worker = data.draw(st.integers(0, len(rows) - 1), "worker")
    reason = spoil(rows, worker, data.draw(st.integers(0, len(rows[worker]) - 1), "place"))
    table = Schedule(tuple(map(tuple, rows)))
    model = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(stages)])
    with pytest.raises(ScheduleError) as rejected:
        Pipe(model, chunks=chunks, devices=["cpu"] * stages, schedule=table, loss=torch.nn.MSELoss())
    assert reason in str(rejected.value)
    assert spoil is not lost or "stands" not in str(rejected.value), "a missing action is not a deadlock"
