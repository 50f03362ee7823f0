"""The order of transfers between GPUs: a proof, for each table, that they cannot wait for each other in a circle.

A send over NCCL ends only when its receive runs, so a circle of waits would be a deadlock of the GPUs. Each rank puts
its actions on one stream. `DeviceLane` lets nothing else wait than this:

    an action           for the action before it on its rank, and for the transfers that it reads
    a transfer          for the action that made its value, and for the transfer before it between the same two ranks
    the end of a walk   for the last action, and for all transfers that the rank has sent in the walk

No transfer waits for an action of the rank that receives it. Why that is enough: write the actions in a serial order of
the table (`Schedule.order`), each followed by its transfers. An action reads values of earlier actions only, and a pair
of ranks exchanges values in the order of the sender's row. So everything waits for what stands before it.

The graph is computed all the same, because it is cheap and the argument is easily broken by a change. It has a transfer
between all stages. Skips and shared values are some of these transfers, so they need no graph of their own.
"""

from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from torchweft.core.errors import ScheduleError
from torchweft.pipeline.actions import Action
from torchweft.pipeline.schedule import Schedule


class Sent(NamedTuple):
    """The transfer of a result of `action` to a stage of another rank."""

    action: Action
    reader: int

    def __str__(self) -> str:
        return f"{self.action} to stage {self.reader}"


class WalkEnd(NamedTuple):
    rank: int
    walk: int

    def __str__(self) -> str:
        return f"the end of walk {self.walk} on rank {self.rank}"


Step = Action | Sent | WalkEnd
WaitGraph = dict[Step, list[Step]]  # for each step, those that it waits for


def wait_graph(schedule: Schedule) -> WaitGraph:
    """The waits on the GPUs of all ranks in one step, if every stage sends a value to every later one."""
    graph: WaitGraph = {}
    latest: dict[tuple[int, int], Sent] = {}  # by sending and receiving rank
    # With an external loss, or one that is equal to it in the table, forward and backward are walks of their own.
    split = schedule.allows_external_loss
    walks = [schedule.forward_only, schedule.backward_only] if split else [schedule]
    before: dict[int, Step] = {}
    for number, walk in enumerate(walks):
        for rank, row in enumerate(walk.workers):
            sent: list[Step] = []
            for action in row:
                graph[action] = [*([before[rank]] if rank in before else []), *_reads(schedule, action)]
                before[rank] = action
                for transfer in _sends(schedule, action):
                    pair = rank, schedule.worker_of[transfer.reader]
                    graph[transfer] = [action, *([latest[pair]] if pair in latest else [])]
                    latest[pair] = transfer
                    sent.append(transfer)
            end = WalkEnd(rank, number)
            graph[end] = [*([before[rank]] if rank in before else []), *sent]
            before[rank] = end
    return graph


def _sends(schedule: Schedule, action: Action) -> list[Sent]:
    worker_of = schedule.worker_of
    readers = {"F": range(action.stage + 1, schedule.stages), "W": range(0)}.get(action.kind, range(action.stage))
    return [Sent(action, reader) for reader in readers if worker_of[reader] != worker_of[action.stage]]


def _reads(schedule: Schedule, action: Action) -> list[Sent]:
    stage, kind, micro_batch = action
    worker_of = schedule.worker_of
    sources = {"F": range(stage), "W": range(0)}.get(kind, range(stage + 1, schedule.stages))
    kinds = ["F"] if kind == "F" else ["B", "I"]
    makers = [
        Action(source, k, micro_batch) for source in sources if worker_of[source] != worker_of[stage] for k in kinds
    ]
    present = schedule.actions
    return [Sent(maker, stage) for maker in makers if maker in present]


def find_circle(graph: WaitGraph) -> list[Step]:
    """Steps of which each waits for the next, and the last for the first. Empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[Step] = error.args[1]
        return circle
    return []


@lru_cache
def check_transfers(schedule: Schedule) -> None:
    """Raise ScheduleError if transfers of this table could wait for each other on GPUs."""
    if circle := find_circle(wait_graph(schedule)):
        steps = " waits for ".join(map(str, reversed(circle)))
        raise ScheduleError(
            f"on GPUs the transfers of this schedule would wait for each other for ever: {steps}; use a schedule with "
            "a name, or order the actions of these stages as one of them does"
        )
