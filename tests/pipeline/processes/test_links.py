"""Connections between the ranks of a pipeline: values, walks and their ends."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.pipeline.processes.launch import Outcome, Ranks, fresh_ranks
from tests.pipeline.processes.replay import noted
from torchweft.core.errors import InPlaceError, RankFailedError, RankLostError, UsageError
from torchweft.pipeline.processes.frames import SHAPES
from torchweft.pipeline.processes.links import Links

Find = Callable[[int], Ranks]
LARGE = 200_000
"""Elements of a tensor that travels on a lane."""


@contextmanager
def open_links(timeout: float | None = None) -> Iterator[Links]:
    links = Links(dist.group.WORLD, timeout)
    try:
        yield links
    finally:
        links.close()


def exchange() -> tuple[list, list]:
    with open_links() as links:
        other = 1 - links.rank
        walk = links.open_walk("forward of step 0")
        value = {"x": torch.full((3,), float(links.rank), requires_grad=True), "n": [links.rank, None]}
        walk.send(other, (1, 2, 3), value)
        walk.send(other, (1, 2, 4), torch.full((LARGE,), links.rank, dtype=torch.bfloat16).requires_grad_())
        large = walk.receive((1, 2, 4), other)
        small = walk.receive((1, 2, 3), other)
        assert small["x"].requires_grad and small["x"].is_leaf and large.requires_grad and large.is_leaf
        seen = [small["x"].tolist(), small["n"], large.unique().tolist(), len(large)]
        return walk.agree({"rank": links.rank}), [seen, links.statistics()]


def test_values_arrive_in_any_order(ranks: Find) -> None:
    results = ranks(2).run(exchange)
    for rank, (reports, (seen, counts)) in enumerate(results):
        assert reports == [{"rank": 0}, {"rank": 1}]
        assert seen == [[1.0 - rank] * 3, [1 - rank, None], [1.0 - rank], LARGE]
        assert counts == {str(1 - rank): {"1": 12 + 2 * LARGE}}


def infer() -> list:
    with open_links() as links, torch.inference_mode():
        walk = links.open_walk("step 0")
        if links.rank == 0:
            walk.send(1, (0, 0, 0), [torch.ones(LARGE) * 2, torch.ones(2) * 3])
        seen = [tensor.unique().tolist() for tensor in walk.receive((0, 0, 0), 0)] if links.rank else []
        walk.agree(None)
        return seen


def test_tensors_of_inference_mode_arrive(ranks: Find) -> None:
    assert ranks(2).run(infer)[1] == [[2.0], [3.0]]


def use_part_of_the_ranks() -> list:
    group = dist.new_group([1, 2])
    alone = dist.new_group([0])
    links = Links(group if dist.get_rank() else alone)
    reports = links.open_walk("step 0").agree(links.name_of(links.rank).partition(" (")[0])
    links.close()
    return reports


def test_a_group_has_its_own_numbers_and_global_names(ranks: Find) -> None:
    assert ranks(3).run(use_part_of_the_ranks) == [["rank 0"], ["rank 1", "rank 2"], ["rank 1", "rank 2"]]


def run_ahead() -> list:
    with open_links() as links:
        seen = []
        for step in range(3):
            walk = links.open_walk(f"step {step}")
            if links.rank == 0:
                walk.send(1, (0, 0, step), step)
                walk.send(1, (0, 1, step), torch.full((LARGE,), step))
            else:
                seen.append([walk.receive((0, 0, step), 0), walk.receive((0, 1, step), 0).unique().tolist()])
            walk.close() if step < 2 else walk.agree(None)
        return seen


def test_a_rank_ahead_finds_its_messages_kept(ranks: Find) -> None:
    assert ranks(2).run(run_ahead)[1] == [[0, [0]], [1, [1]], [2, [2]]]


def send_both_ways() -> bool:
    with open_links() as links:
        other, walk = 1 - links.rank, links.open_walk("step 0")
        for place in range(4):
            walk.send(other, (0, 0, place), torch.full((4 << 20,), place, dtype=torch.float32))
        for place in range(3000):
            walk.send(other, (1, 0, place), torch.full((4096,), place, dtype=torch.float32))
        large = all(bool((walk.receive((0, 0, place), other) == place).all()) for place in range(4))
        small = all(bool((walk.receive((1, 0, place), other) == place).all()) for place in range(3000))
        walk.agree(None)
        return large and small


def test_large_values_both_ways_at_once_do_not_block(ranks: Find) -> None:
    assert ranks(2).run(send_both_ways) == [True, True]


def send_many_shapes() -> list:
    with open_links() as links:
        other, walk, count = 1 - links.rank, links.open_walk("step 0"), SHAPES + 20
        for place in range(count):
            walk.send(other, (0, 0, place), torch.ones(place))
        walk.send(other, (0, 1, 0), torch.ones(5))
        lengths = [len(walk.receive((0, 0, place), other)) for place in range(count)]
        walk.agree(None)
        connection = links._connections[other]
        return [lengths == list(range(count)), len(connection.sent_shapes._slots), len(connection.received_shapes)]


def test_the_cache_of_shapes_is_bounded_at_both_ends(ranks: Find) -> None:
    assert ranks(2).run(send_many_shapes) == [[True, SHAPES, SHAPES]] * 2


def fail_on_one(bad: int) -> str:
    with open_links() as links:
        seen, walk = "", links.open_walk("step 0")
        try:
            if links.rank == bad:
                error = ValueError("a poisoned row")
                error.add_note("stage 1, micro-batch 3")
                raise error
            walk.receive((0, 0, 0), bad)
        except ValueError as error:
            walk.fail(error)
        except RankFailedError as error:
            walk.fail(error)
            seen = str(error)
        walk = links.open_walk("step 1")
        assert walk.agree(links.rank) == [0, 1, 2]
        if links.rank == bad:  # a late message of the failed walk
            links.send_value(1, (bad + 1) % links.size, (0, 0, 7), torch.ones(LARGE), "step 0")
        links.open_walk("step 2").agree(None)
        assert not len(links.walks._inboxes)
        return seen


def test_an_exception_is_raised_on_all_ranks(ranks: Find) -> None:
    seen = ranks(3).run(fail_on_one, 1)
    assert seen[1] == ""
    for rank in (0, 2):
        assert "rank 1 (host" in seen[rank] and "ValueError: a poisoned row" in seen[rank]
        assert "fail_on_one" in seen[rank] and "stage 1, micro-batch 3" in seen[rank]


def fail_before_agreement() -> str:
    with open_links() as links:
        walk = links.open_walk("step 0")
        if links.rank == 2:
            walk.fail(KeyboardInterrupt("stop"))
            return ""
        with pytest.raises(RankFailedError, match="KeyboardInterrupt") as caught:
            walk.agree(None)
        with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
            walk.check()
        return str(caught.value)


def test_no_rank_agrees_when_one_has_failed(ranks: Find) -> None:
    assert all("rank 2" in text for text in ranks(3).run(fail_before_agreement)[:2])


def diverge() -> str:
    with open_links() as links:
        walk = links.open_walk(f"{'backward' if links.rank == 2 else 'forward'} of step 4")
        with pytest.raises(RankFailedError) as caught:
            walk.agree(None)
        return str(caught.value)


def diverge_in_messages() -> str:
    with open_links() as links:
        walk = links.open_walk("forward" if links.rank else "backward")
        with pytest.raises(RankFailedError) as caught:
            walk.send(1 - links.rank, (0, links.rank, 0), 1)
            walk.receive((0, links.rank, 0), 1 - links.rank)
        return str(caught.value)


def test_ranks_in_different_walks_raise_both_names(ranks: Find) -> None:
    for text in [*ranks(3).run(diverge), *ranks(2).run(diverge_in_messages)]:
        assert "forward" in text and "backward" in text and "in the same way" in text


def die(number: int, fork: bool) -> Any:
    """Kill the second of three ranks, while the others wait for each other or for it."""
    links = Links(dist.group.WORLD, 30.0)
    assert links.open_walk("step 0").agree(None) == [None] * 3
    walk, begun = links.open_walk("step 1"), time.monotonic()
    if links.rank != 1:
        walk.send(1, (0, links.rank, 1), "step 0 is complete here")
    else:
        for other in (0, 2):
            walk.receive((0, other, 1), other)  # a loss within the last agreement would fail step 0 on some ranks
        if fork and os.fork() == 0:
            time.sleep(8)  # a worker of a DataLoader, which outlives its parent
            os._exit(0)
        os.kill(os.getpid(), number)
    with pytest.raises(RankLostError) as caught:
        walk.receive((0, 0, 0), 2 - links.rank)
    walk.fail(caught.value)
    took = time.monotonic() - begun
    later = links.open_walk("step 2")
    with pytest.raises(RankLostError, match="rank 1"):  # soon, whether this rank or the other one detects the loss
        later.receive((0, 0, 0), 1)
    links.close()
    return str(caught.value), took


@pytest.mark.parametrize("fork", [False, True])
def test_a_dead_rank_is_named_at_once(fork: bool) -> None:
    with fresh_ranks(3) as three:
        pid = three.pids[1]
        outcomes = three.outcomes(die, signal.SIGKILL, fork, without=(1,))
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome and not outcome.text, outcome
        text, took = outcome.result
        assert "rank 1 (host" in text and f"process {pid})" in text and took < 5


def hang(how: str) -> Any:
    links = Links(dist.group.WORLD, 2.0)
    walk = links.open_walk("step 0")
    begun = time.monotonic()
    if links.rank == 1:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        end = time.monotonic() + 8
        while time.monotonic() < end:  # a nearly endless layer
            pass
        return None
    for place in range(300):  # more than the socket of a stopped rank can hold
        walk.send(1, (0, 1, place), torch.ones(10_000))
    with pytest.raises(RankLostError) as caught:
        walk.receive((0, 0, 0), 1 if links.rank == 2 else 2)  # rank 0 waits for rank 2, which waits for rank 1
    return str(caught.value), time.monotonic() - begun


@pytest.mark.long
@pytest.mark.parametrize(("how", "words"), [("stop", "does not answer"), ("loop", "has not taken part in step 0")])
def test_a_rank_that_hangs_is_named_by_all_others(how: str, words: str) -> None:
    with fresh_ranks(3) as three:
        outcomes = three.outcomes(hang, how, without=(1,))
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome and not outcome.text, outcome
        text, took = outcome.result
        assert text.startswith("rank 1 (host") and words in text and took < 7


def wait_in_a_circle() -> str:
    with open_links(1.0) as links:
        walk = links.open_walk("step 0")
        with pytest.raises(RankLostError) as caught:
            walk.receive((0, 0, 0), 1 - links.rank)
        return str(caught.value)


def test_circular_wait_of_ranks_is_an_error(ranks: Find) -> None:
    for text in ranks(2).run(wait_in_a_circle):
        assert "wait for each other: rank" in text


def interrupt_a_wait() -> float:
    with open_links() as links:
        walk = links.open_walk("step 0")
        if links.rank == 0:
            time.sleep(0.5)
            os.kill(links._members[1].pid, signal.SIGINT)
            with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
                walk.agree(None)
            return 0.0
        try:
            walk.receive((0, 0, 0), 0)
        except KeyboardInterrupt as error:
            walk.fail(error)
            return 1.0
        raise AssertionError


def test_an_interrupt_ends_a_wait(ranks: Find) -> None:
    assert ranks(2).run(interrupt_a_wait) == [0.0, 1.0]


def close_while_sending() -> Any:
    links = Links(dist.group.WORLD, 30.0)
    walk = links.open_walk("step 0")
    if links.rank == 0:
        walk.send(1, (0, 0, 0), torch.ones(160 * LARGE))  # still in transit when the end is announced
        links.close()
        return None
    assert len(walk.receive((0, 0, 0), 0)) == 160 * LARGE
    walk.check()
    with pytest.raises(RankLostError) as caught:
        walk.receive((0, 0, 1), 0)
    links.close()
    links.close()
    return str(caught.value)


def test_a_closed_rank_is_missed_only_when_needed(ranks: Find) -> None:
    assert "has closed its connections" in ranks(2).run(close_while_sending)[1]


def leave_nothing() -> list[str]:
    """Threads, links and descriptors that remain after links were closed, dropped, or dropped in a cycle."""
    gc.collect()
    before, gone = len(os.listdir("/proc/self/fd")), []
    for how in ("close", "drop", "cycle"):
        links = Links(dist.group.WORLD)
        walk = links.open_walk("step 0")
        walk.send(1 - links.rank, (0, 0, 0), torch.ones(LARGE))
        walk.receive((0, 0, 0), 1 - links.rank)
        walk.agree(None)
        gone.append(weakref.ref(links))
        if how == "close":
            links.close()
        box: list[Any] = [links]
        if how == "cycle":
            box.append(box)
        del links, walk, box
        gc.collect()
    end = time.monotonic() + 5
    names = ["?"]
    while names and time.monotonic() < end:
        time.sleep(0.05)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("torchweft-")]
        names += ["links"] * sum(reference() is not None for reference in gone)
        names += ["descriptors"] * (len(os.listdir("/proc/self/fd")) > before)
    return names


def test_nothing_is_left_of_closed_or_dropped_links(ranks: Find) -> None:
    assert ranks(2).run(leave_nothing) == [[], []]


def write_while_sending() -> str:
    with open_links() as links:
        walk = links.open_walk("step 0")
        if links.rank == 0:
            tensor = torch.zeros(32 << 20)  # large, so that a busy machine has not sent it all before the write
            walk.send(1, (0, 0, 0), tensor)
            tensor.add_(1)
            with pytest.raises(InPlaceError) as caught:
                walk.agree(None)
            walk.fail(caught.value)
            return str(caught.value)
        with pytest.raises(InPlaceError) as failed:  # an error of torchweft has the same class on every rank
            walk.agree(None)
        return str(failed.value)


def test_a_write_to_a_leaving_tensor_is_an_error(ranks: Find) -> None:
    assert all("written to in place while it was sent" in text for text in ranks(2).run(write_while_sending))


def use_in_child() -> int:
    with open_links() as links:
        links.open_walk("step 0").agree(None)
        child = os.fork()
        if child == 0:
            try:
                links.open_walk("step 1")
            except UsageError:
                links.close()  # must not announce the end of the parent
                os._exit(7)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        links.open_walk("step 1").agree(None)
        return code


def test_a_forked_child_cannot_use_the_links(ranks: Find) -> None:
    assert ranks(2).run(use_in_child) == [7, 7]


def test_an_outcome_tells_results_from_errors(ranks: Find) -> None:
    outcomes = ranks(2).outcomes(divide, 1)
    assert outcomes[1] == Outcome(1.0) and outcomes[0] and isinstance(outcomes[0].error, ZeroDivisionError)
    assert "divide" in outcomes[0].text


def divide(number: int) -> float:
    return number / dist.get_rank()


class Endless:
    """The work of a send that its receiver never takes."""

    def wait(self) -> None:
        time.sleep(20)


def send_without_end() -> str:
    with open_links(1.0) as links:
        walk = links.open_walk("step 0")
        if links.rank == 0:
            with patch.object(links.ways.cpu_lane, "send", lambda *_: Endless()):
                walk.send(1, (0, 0, 0), torch.ones(LARGE))
        with pytest.raises(RankLostError) as caught:
            walk.agree(None)
        return str(caught.value)


def test_a_send_without_end_names_the_receiver() -> None:
    with fresh_ranks(2) as two:
        texts = two.run(send_without_end)
    assert all(text.startswith("rank 1 (host") and "has not taken the tensors" in text for text in texts), texts


def transfer_without_end() -> str:
    with noted(), open_links(1.0) as links:
        walk = links.open_walk("step 0")
        if links.rank == 0:
            walk.send(1, (0, 0, 0), torch.ones(3))  # works of gloo count as complete only when they are waited for
        end = time.monotonic() + 20
        with pytest.raises(RankLostError) as caught:
            while time.monotonic() < end:  # a host that waits for its GPU
                time.sleep(0.02)
                walk.check()
        return str(caught.value)


def test_a_transfer_that_is_stuck_is_an_error() -> None:
    with fresh_ranks(2) as two:
        texts = two.run(transfer_without_end)
    assert [text.partition(" (host")[0] for text in texts] == ["rank 1", "rank 0"]
