"""The second law: a schedule decides when work is done, never what comes out; and one that cannot run is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.laws.models import ModelPlan, blocks, difference, floats, gradients, mini_batch, sequential, twin
from tests.strategies import checkpoints, model_plans, valid_schedules
from weft import Pipe, Schedule
from weft.core.errors import ScheduleError
from weft.pipeline.schedule import Action

Rows = list[list[Action]]


def loss_against(output: Any, target: Tensor) -> Tensor:
    """The mean over rows."""
    return ((torch.stack(floats(output)).sum(0) - target) ** 2).sum(1).mean()


@pytest.mark.parametrize("executor", ["serial", "threads"])
@given(data=st.data(), plan=model_plans())
def test_a_random_valid_table_gives_the_gradients_of_gpipe(executor: Any, data: st.DataObject, plan: ModelPlan) -> None:
    stages, chunks = len(plan.balance), data.draw(st.integers(1, 4), "chunks")
    table = data.draw(valid_schedules(stages, chunks), "table")
    checkpoint = data.draw(checkpoints(stages), "checkpoint")
    rows = data.draw(st.integers(1, 6), "rows")
    layers = blocks(plan)
    found: list[list[tuple[str, Tensor | None]]] = []
    losses: list[Tensor] = []
    for schedule in ("gpipe", table, table.text()):
        copies, value = twin(layers, mini_batch(plan, rows))
        pipe = Pipe(
            sequential(copies),
            chunks=chunks,
            devices=["cpu"] * stages,
            balance=plan.balance,
            checkpoint=checkpoint,
            schedule=schedule,
            loss=loss_against,
            executor=executor,
        )
        loss = pipe(value, target=torch.zeros_like(floats(value)[0]))
        loss.backward()
        losses.append(loss.detach())
        found.append(gradients(copies, value))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses[2], losses[1], rtol=0, atol=0)
    assert not difference(found[1], found[0])
    assert not difference(found[2], found[1])


def lost(rows: Rows, worker: int, place: int) -> str:
    """Leave an action out."""
    action = rows[worker].pop(place)
    if not any(each.kind != "F" for row in rows for each in row):
        return "the schedule has no backward"
    return f"missing for micro-batch {action.micro_batch}"


def repeated(rows: Rows, worker: int, place: int) -> str:
    """Do an action twice."""
    rows[worker].append(rows[worker][place])
    return f"{rows[worker][place]} occurs 2 times"


def elsewhere(rows: Rows, worker: int, place: int) -> str:
    """Let a new worker do one action of a stage that another one holds."""
    action = rows[worker][place]
    assume(sum(each.stage == action.stage for each in rows[worker]) > 1)
    rows.append([rows[worker].pop(place)])
    return f"stage {action.stage} is on workers {worker} and {len(rows) - 1}"


def too_early(rows: Rows, worker: int, place: int) -> str:
    """Put a backward in front of its own forward."""
    action = rows[worker][place]
    forward = action._replace(kind="F")
    assume(action.kind in "BI")
    rows[worker].remove(forward)
    rows[worker].insert(rows[worker].index(action) + 1, forward)
    return f"{action} stands before {forward}, which it needs"


def unknown(rows: Rows, worker: int, place: int) -> str:
    """Spoil the letter of an action."""
    rows[worker][place] = rows[worker][place]._replace(kind="X")
    return f"{rows[worker][place]} is no action"


@pytest.mark.parametrize("spoil", [lost, repeated, elsewhere, too_early, unknown])
@given(data=st.data(), stages=st.integers(1, 3), chunks=st.integers(1, 3))
def test_an_invalid_table_is_refused_with_the_reason(
    spoil: Callable[[Rows, int, int], str], data: st.DataObject, stages: int, chunks: int
) -> None:
    rows: Rows = [list(row) for row in data.draw(valid_schedules(stages, chunks)).workers]
    worker = data.draw(st.integers(0, len(rows) - 1), "worker")
    reason = spoil(rows, worker, data.draw(st.integers(0, len(rows[worker]) - 1), "place"))
    table = Schedule(tuple(map(tuple, rows)))
    model = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(stages)])
    with pytest.raises(ScheduleError) as refused:
        Pipe(model, chunks=chunks, devices=["cpu"] * stages, balance=[1] * stages, schedule=table, loss=loss_against)
    assert reason in str(refused.value)


def test_a_deadlock_is_refused_and_says_who_waits_for_whom() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    with pytest.raises(ScheduleError, match=r"(?s)worker 0 stands at 0B0 .*1B0.*worker 1 stands at 1F1 .*0F1"):
        Pipe(
            model,
            chunks=2,
            devices=["cpu"] * 2,
            balance=[1, 1],
            schedule="0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0",
            loss=loss_against,
        )
