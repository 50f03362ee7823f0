"""Schedules: their text, the check that they can run, and the order in which they run."""

import csv
import pickle
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as peer

from tests.strategies import any_schedules, valid_schedules
from tests.type_checks import without_type_checks
from torchweft.core.errors import ScheduleError
from torchweft.pipeline.actions import waits
from torchweft.pipeline.schedule import (
    Action,
    Schedule,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchweft.pipeline.simulate import StageCost, forecast

BUILT_IN = (peer.ScheduleInterleaved1F1B, peer.ScheduleInterleavedZeroBubble, peer.ScheduleLoopedBFS)
IN_V = (peer.ScheduleZBVZeroBubble, peer.ScheduleDualPipeV)


def faults(table: str, **sizes: int) -> list[str]:
    """The faults that `check` lists, without its headline."""
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(table).check(**sizes)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def peers_schedule(kind: type, workers: int, micro_batches: int, per_worker: int = 2):
    """A schedule of PyTorch, with its table but without a process group."""
    stages = per_worker * workers
    stage = SimpleNamespace(num_stages=stages, group_size=workers, group_rank=0, submod=None, is_last=False)
    return kind([stage] * per_worker, micro_batches)


def chain_order_holds(order: list[Action], stages: int) -> bool:
    """Whether a serial order obeys the rules of the chain, implemented independently of `check`."""
    position = {action: index for index, action in enumerate(order)}

    def backward(stage: int, i: int) -> int:
        return position[Action(stage, "B", i)] if (stage, "B", i) in position else position[Action(stage, "I", i)]

    for stage, kind, i in order:
        at = position[Action(stage, kind, i)]
        if kind == "F" and stage and position[Action(stage - 1, "F", i)] > at:
            return False
        if kind in "BI" and position[Action(stage, "F", i)] > at:
            return False
        if kind in "BI" and stage + 1 < stages and backward(stage + 1, i) > at:
            return False
        if kind == "W" and position[Action(stage, "I", i)] > at:
            return False
    return True


@given(any_schedules())
def test_valid_table_passes_and_its_order_honours_all_lists(schedule: Schedule) -> None:
    schedule.check(stages=schedule.stages, micro_batches=schedule.micro_batches)
    order = schedule.order
    for worker, row in enumerate(schedule.workers):
        assert tuple(action for w, action in order if w == worker) == row
    assert chain_order_holds([action for _, action in order], schedule.stages)


@given(any_schedules())
def test_text_and_back_gives_the_same_schedule(schedule: Schedule) -> None:
    again = Schedule.parse(schedule.text())
    assert again == schedule
    assert hash(again) == hash(schedule) and schedule.order is schedule.order
    assert pickle.loads(pickle.dumps(again)) == schedule


@given(any_schedules(), st.data())
def test_bubbles_and_blanks_change_nothing(schedule: Schedule, data: st.DataObject) -> None:
    noise = st.sampled_from(["", ",", " , ,", "   "])
    lines = schedule.text().splitlines()
    padded = [data.draw(noise) + line.replace(",", data.draw(st.sampled_from([",", " , ", ",,"]))) for line in lines]
    assert Schedule.parse("\r\n\n".join(["", *padded, " "])) == schedule


@given(any_schedules(), st.integers(1, 5))
def test_a_valid_table_stays_valid_with_fewer_micro_batches(schedule: Schedule, fewer: int) -> None:
    rest = schedule.restricted(fewer)
    rest.check(stages=schedule.stages, micro_batches=min(fewer, schedule.micro_batches))
    assert rest.worker_of == schedule.worker_of


@given(any_schedules())
def test_forward_and_backward_are_parts_that_can_run_alone(schedule: Schedule) -> None:
    forward, backward = schedule.forward_only, schedule.backward_only
    forward.check(stages=schedule.stages, micro_batches=schedule.micro_batches)
    assert {a.kind for _, a in forward.order} == {"F"}
    assert "F" not in {a.kind for _, a in backward.order}
    assert len(forward.order) + len(backward.order) == len(schedule.order)
    cut = tuple(f + b for f, b in zip(forward.workers, backward.workers, strict=True))
    assert schedule.allows_external_loss == (cut == schedule.workers)


@given(any_schedules())
def test_launch_order_keeps_rows_and_dependencies(schedule: Schedule) -> None:
    order = schedule.launch_order
    rows = [tuple(action for worker, action in order if worker == number) for number in range(len(schedule.workers))]
    assert tuple(rows) == schedule.workers
    place = {action: at for at, (_, action) in enumerate(order)}
    assert all(place[need] < at for action, at in place.items() for need in waits(schedule.workers)[action])


def test_launch_order_feeds_all_workers_in_turn() -> None:
    order = [str(action) for _, action in gpipe(4, 4).launch_order]
    assert order.index("0F1") < order.index("2F0") and order.index("0F2") < order.index("3F0")


@given(any_schedules())
def test_live_counts_the_micro_batches_that_a_walk_holds(schedule: Schedule) -> None:
    held: dict[int, set[int]] = {stage: set() for stage in range(schedule.stages)}
    most = [0] * schedule.stages
    for _, action in schedule.order:
        if action.kind == "F":
            held[action.stage].add(action.micro_batch)
            most[action.stage] = max(most[action.stage], len(held[action.stage]))
        elif action.kind in "BW":
            held[action.stage].remove(action.micro_batch)
    assert schedule.live() == tuple(most)


@given(any_schedules(3, 3), st.data())
def test_shuffled_worker_passes_exactly_if_it_can_run(schedule: Schedule, data: st.DataObject) -> None:
    worker = data.draw(st.sampled_from(range(len(schedule.workers))))
    shuffled = tuple(data.draw(st.permutations(schedule.workers[worker])))
    table = Schedule(tuple(shuffled if w == worker else row for w, row in enumerate(schedule.workers)))
    if can_run(table):
        table.check()
        _ = table.order
    else:
        with pytest.raises(ScheduleError, match="stands"):
            table.check()
        with pytest.raises(ScheduleError, match="deadlock"):
            _ = table.order


def can_run(schedule: Schedule) -> bool:
    """Whether the dependencies of the chain and of the rows have no cycle, by removing free actions repeatedly."""
    actions = [a for row in schedule.workers for a in row]
    arrows = {(a, b) for row in schedule.workers for a, b in pairwise(row)}
    for a in actions:
        for b in actions:
            if a.micro_batch == b.micro_batch and chain_arrow(a, b):
                arrows.add((a, b))
    left = set(actions)
    while blocked := {b for a, b in arrows if a in left}:
        if blocked & left == left:
            return False
        left &= blocked
    return True


def chain_arrow(a: Action, b: Action) -> bool:
    """Whether `b` needs `a` of the same micro-batch."""
    match a.kind, b.kind, b.stage - a.stage:
        case ("F", "F", 1) | ("F", "B" | "I", 0) | ("B" | "I", "B" | "I", -1) | ("I", "W", 0):
            return True
    return False


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_forward_alone_is_a_valid_schedule(stages: int, micro_batches: int, data: st.DataObject) -> None:
    schedule = data.draw(valid_schedules(stages, micro_batches, forward_only=True))
    schedule.check(stages=stages, micro_batches=micro_batches)
    assert schedule.allows_external_loss
    assert schedule.live() == (micro_batches,) * stages


def test_circular_wait_names_both_workers() -> None:
    assert faults("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0") == [
        "deadlock: worker 0 stands at 0B0 and waits for 1B0 of worker 1",
        "deadlock: worker 1 stands at 1F1 and waits for 0F1 of worker 0",
    ]


def test_every_fault_of_a_table_is_listed_at_once() -> None:
    assert faults("0F0,0B0,0B0,2F1,2I1\n1B0,1F0,0B2,1I0,1I1\n,", stages=4, micro_batches=2) == [
        "the table has 3 stages, but 4 are needed",
        "the table has 3 micro-batches, but 2 are needed",
        "worker 2 has nothing to do; leave it out",
        "stage 0 is on workers 0 and 1; a stage lives on one worker",
        "0B0 occurs 2 times",
        "stage 0: F is missing for micro-batch 1-2",
        "stage 0: B, or I and W, is missing for micro-batch 1",
        "stage 1: F is missing for micro-batch 1-2",
        "stage 1: B, or I and W, is missing for micro-batch 2",
        "stage 1: W is missing for micro-batch 1, which has I",
        "stage 1: micro-batch 0 has both B and I; B is both in one",
        "stage 2: F is missing for micro-batch 0, 2",
        "stage 2: B, or I and W, is missing for micro-batch 0, 2",
        "stage 2: W is missing for micro-batch 1, which has I",
        "worker 1: 1B0 stands before 1F0, which it needs",
    ]


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("", "the table has no workers"),
        ("0F0,0B0\n2F0,2B0", "stage 1 has no action at all"),
        ("0F0,0W0", "stage 0: I is missing for micro-batch 0, which has W"),
        ("0F0,0W0,0I0", "worker 0: 0W0 stands before 0I0, which it needs"),
        ("0B0,0F0", "worker 0: 0B0 stands before 0F0, which it needs"),
        ("1F0,0F0", "worker 0: 1F0 stands before 0F0, which it needs"),
        ("0F0,0B0,7000000000F0,7000000000B0", "stage 1-6999999999 has no action at all"),  # and costs nothing
    ],
)
def test_a_faulty_table_is_refused_with_this_one_reason(table: str, fault: str) -> None:
    assert faults(table) == [fault]


def test_actions_that_do_not_exist_are_named() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(((Action(0, "F", 0), Action(0, "X", 0), Action(-1, "F", 0), Action(0, "F", -2)),)).check()
    assert [name for name in ("0F0", "0X0", "-1F0", "0F-2") if f"{name} is not an action" in str(caught.value)] == [
        "0X0",
        "-1F0",
        "0F-2",
    ]


def test_rows_can_be_lists_and_invalid_actions_are_named() -> None:
    table = one_f_one_b(2, 2)
    with without_type_checks():
        lists = Schedule([list(row) for row in table.workers])
        assert lists == table and hash(lists) == hash(table)
        with pytest.raises(ScheduleError, match=r"'0F0' is not an action.*\n.*0F1\.0 is not an action"):
            Schedule([["0F0", Action(0, "F", 1.0)]]).check()


def test_cells_that_cannot_be_read_are_listed_with_their_place() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse("0F0,0F\n,x, 1F0 1B0,(1F0;y)OVERLAP_F_B,1F0z")
    assert [line.strip(" -") for line in str(caught.value).splitlines()[1:]] == [
        "worker 0, cell 1: '0F' is not an action",
        "worker 1, cell 1: 'x' is not an action",
        "worker 1, cell 2: '1F0 1B0' is not an action",
        "worker 1, cell 3: 'y' is not an action",
        "worker 1, cell 4: '1F0z' is not an action",
    ]


def test_overlapped_actions_become_a_sequence_without_transfers() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,0F1,0RECV_B0,(0B0;0F2)OVERLAP_F_B,0RESHARD,0REDUCE_GRAD"
    text += ",0WAIT_SEND_F0,0WAIT_SEND_B1,0WAIT_REDUCE_GRAD"  # PyTorch 2.15 writes them, 2.14 does not
    assert Schedule.parse(text).text() == "0F0,0F1,0B0,0F2\n"


@pytest.mark.parametrize("kind", BUILT_IN + IN_V)
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 2), (2, 4), (2, 8), (4, 8)])
def test_pytorchs_tables_are_read_with_and_without_transfers(kind, workers, micro_batches, tmp_path) -> None:
    theirs = peers_schedule(kind, workers, micro_batches)
    expected = tuple(tuple(flat_actions(row)) for row in theirs.pipeline_order.values())
    for form in ("compute_only", "compute_comms"):
        theirs._dump_csv(tmp_path / form, format=form)
        schedule = Schedule.parse((tmp_path / form).read_text())
        schedule.check(stages=2 * workers, micro_batches=micro_batches)
        assert sum(map(len, schedule.workers)) <= sum(map(len, expected))  # adjacent I and W may be merged into B
        assert [a for row in schedule.forward_only.workers for a in row] == [
            a for row in expected for a in row if a.kind == "F"
        ]
        if form == "compute_only":
            assert schedule.workers == expected
            assert schedule.worker_of == tuple(theirs.stage_index_to_group_rank[s] for s in range(2 * workers))


def flat_actions(row):
    for cell in row:
        for part in (cell.sub_actions or [cell]) if cell else ():
            if part.computation_type.value in "FBIW":
                yield Action(part.stage_index, part.computation_type.value, part.microbatch_index)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (3, 3), (4, 8)])
def test_pytorchs_1f1b_is_ours(stages: int, micro_batches: int, tmp_path) -> None:
    rows = []
    for stage in range(stages):
        ahead, same = stages - 1 - stage, lambda _step, stage=stage: stage
        steady = micro_batches - ahead
        rows.append(peer._get_1f1b_rank_ops(1, stages, ahead, steady, ahead, stage, same, same))
    with (tmp_path / "table").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert Schedule.parse((tmp_path / "table").read_text()) == one_f_one_b(stages, micro_batches)


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 2), (2, 3), (2, 4), (3, 2), (3, 8), (4, 7), (4, 12)])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (peer.ScheduleLoopedBFS, looped_bfs),
        (peer.ScheduleInterleaved1F1B, interleaved),
        (peer.ScheduleInterleavedZeroBubble, zero_bubble),
        (peer.ScheduleZBVZeroBubble, None),
        (peer.ScheduleDualPipeV, None),
    ],
)
def test_ours_are_as_short_as_pytorchs_and_hold_no_more(kind, make, workers, micro_batches) -> None:
    for per_worker in (1, 2, 3) if make else (2,):
        stages = workers * per_worker
        if kind is peer.ScheduleDualPipeV and micro_batches < stages:
            continue  # PyTorch rejects these
        theirs = peers_schedule(kind, workers, micro_batches, per_worker).pipeline_order.values()
        table = Schedule(tuple(tuple(flat_actions(row)) for row in theirs))
        in_v = zbv if kind is peer.ScheduleZBVZeroBubble else dualpipev
        ours = make(stages, micro_batches, workers=workers) if make else in_v(stages, micro_batches)
        for cost in (StageCost(1.0, 2.0), StageCost(1.0, 3.0)):
            assert forecast(ours, [cost] * stages).total <= forecast(table, [cost] * stages).total
        assert ours.worker_of == table.worker_of
        assert all(mine <= other for mine, other in zip(ours.live(), table.live(), strict=True))


@given(st.data())
def test_pytorch_reads_our_tables(tmp_path_factory, data: st.DataObject) -> None:
    schedule = data.draw(valid_schedules(4, 4))
    path = tmp_path_factory.mktemp("table") / "ours.csv"
    path.write_text(schedule.text())
    theirs = peers_schedule(peer.ScheduleLoopedBFS, 2, 4)
    theirs.pp_group_size = len(schedule.workers)
    theirs.pipeline_order = {}
    peer.PipelineScheduleMulti._load_csv(theirs, path)
    assert tuple(tuple(flat_actions(row)) for row in theirs.pipeline_order.values()) == schedule.workers


def test_the_order_takes_one_micro_batch_as_far_as_it_can() -> None:
    assert " ".join(str(action) for _, action in gpipe(3, 2).order) == (
        "0F0 1F0 2F0 0F1 1F1 2F1 2B1 1B1 0B1 2B0 1B0 0B0"
    )


def test_weight_gradients_come_before_other_work() -> None:
    order = Schedule.parse("0F0,0I0,0W0\n1F0,1I0,1W0").order
    assert " ".join(str(action) for _, action in order) == "0F0 1F0 1I0 1W0 0I0 0W0"
