"""Connections between the ranks of a pipeline: values, walks and their ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.pipeline.processes.launch import Ranks
from weft.core.errors import RankFailedError
from weft.pipeline.processes.links import Links

Find = Callable[[int], Ranks]


@contextmanager
def linked(timeout: float | None = None) -> Iterator[Links]:
    links = Links(dist.group.WORLD, timeout)
    try:
        yield links
    finally:
        links.close()


def exchange() -> tuple[list, list]:
    with linked() as links:
        other = 1 - links.rank
        walk = links.open_walk("forward of step 0")
        value = {"x": torch.full((3,), float(links.rank), requires_grad=True), "n": [links.rank, None]}
        walk.send(other, (1, 2, 3), value)
        walk.send(other, (1, 2, 4), torch.full((1 << 20,), float(links.rank)))
        big = walk.receive((1, 2, 4), other)
        small = walk.receive((1, 2, 3), other)
        assert small["x"].requires_grad and small["x"].is_leaf and not big.requires_grad
        seen = [small["x"].tolist(), small["n"], big.unique().tolist(), big.numel()]
        return walk.agree({"rank": links.rank}), [seen, links.statistics()]


def test_values_arrive_in_any_order(ranks: Find) -> None:
    results = ranks(2).run(exchange)
    for rank, (reports, (seen, counts)) in enumerate(results):
        assert reports == [{"rank": 0}, {"rank": 1}]
        assert seen == [[1.0 - rank] * 3, [1 - rank, None], [1.0 - rank], 1 << 20]
        assert counts == {str(1 - rank): {"1": 12 + (4 << 20)}}


def ahead() -> list:
    with linked() as links:
        if links.rank == 0:
            for step in range(3):
                walk = links.open_walk(f"step {step}")
                walk.send(1, (0, 0, step), step)
                walk.send(1, (0, 1, step), torch.full((100_000,), step))
                if step < 2:
                    walk.close()
            return walk.agree(None)
        seen = []
        for step in range(3):
            walk = links.open_walk(f"step {step}")
            seen.append([walk.receive((0, 0, step), 0), walk.receive((0, 1, step), 0).unique().tolist()])
            if step < 2:
                walk.close()
        walk.agree(seen)
        return seen


def test_a_rank_ahead_finds_its_messages_kept(ranks: Find) -> None:
    assert ranks(2).run(ahead)[1] == [[0, [0]], [1, [1]], [2, [2]]]


def fails_on_one(bad: int) -> str:
    with linked() as links:
        walk = links.open_walk("step 0")
        try:
            if links.rank == bad:
                raise ValueError("a poisoned row")
            walk.receive((0, 0, 0), bad)
        except ValueError as error:
            walk.fail(error)
            seen = ""
        except RankFailedError as error:
            walk.fail(error)
            seen = str(error)
        walk = links.open_walk("step 1")
        assert walk.agree(links.rank) == [0, 1, 2]
        return seen


def test_an_exception_is_raised_on_all_ranks(ranks: Find) -> None:
    seen = ranks(3).run(fails_on_one, 1)
    for rank in (0, 2):
        assert "rank 1 (host" in seen[rank] and "ValueError: a poisoned row" in seen[rank]
        assert "fails_on_one" in seen[rank]
