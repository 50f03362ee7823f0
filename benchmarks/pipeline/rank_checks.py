"""Properties of a pipe over processes, for `pipeline.processes`: bytes on the wire, set-up time, and the time until a
failure is known. Each function runs on every rank."""

import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from torchweft import pop, skippable, stash
from torchweft.core.errors import WeftError
from torchweft.pipeline.processes.links import Links

CHUNKS, ROWS, WIDTH = 4, 8, 16
LONGEST = 20.0  # seconds until a rank without a failure aborts


class Skips(NamedTuple):
    """Skips written and read by each block of a stack with one block per stage. Skip n has 20 + n columns."""

    writes: Sequence[Sequence[int]]
    reads: Sequence[Sequence[int]]


def unet() -> Skips:
    """Four blocks; the third reads the skip of the second, the fourth that of the first."""
    return Skips([[0], [1], [], []], [[], [], [1], [0]])


def dense(blocks: int) -> Skips:
    """Stack in which every block reads a skip of each block before it."""
    writes = [[number] if number < blocks - 1 else [] for number in range(blocks)]
    return Skips(writes, [list(range(number)) for number in range(blocks)])


def columns(skip: int) -> int:
    """Width of a skip, which differs from all others and from the main path."""
    return WIDTH + 4 + skip


def expected_bytes(skips: Skips, workers: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """Bytes of each skip and of the main path in one step, by sender and destination rank, in order of size.

    A value is sent once to each other rank with a reader. Each of these ranks sends one gradient back.
    """
    expected: dict[tuple[int, int], list[int]] = {}
    values = [(WIDTH, stage, [stage + 1]) for stage in range(len(workers) - 1)]
    for source, written in enumerate(skips.writes):
        for skip in written:
            readers = [stage for stage, read in enumerate(skips.reads) if skip in read]
            values.append((columns(skip), source, readers))
    for width, source, readers in values:
        home, size = workers[source], ROWS * width * 4
        for rank in {workers[reader] for reader in readers} - {home}:
            expected.setdefault((home, rank), []).append(size)
            expected.setdefault((rank, home), []).append(size)
    return {pair: sorted(sizes) for pair, sizes in expected.items()}


def _block(writes: Sequence[int], reads: Sequence[int]) -> nn.Module:
    @skippable(stash=[f"s{skip}" for skip in writes], pop=[f"s{skip}" for skip in reads])
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Linear(WIDTH + sum(map(columns, reads)), WIDTH)
            self.sides = nn.ModuleList(nn.Linear(WIDTH, columns(skip)) for skip in writes)

        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            parts = [x]
            for skip in reads:
                parts.append((yield pop(f"s{skip}")))
            for skip, side in zip(writes, self.sides, strict=True):
                yield stash(f"s{skip}", side(x))
            return self.main(torch.cat(parts, dim=1))

    return Block()


def wire_of(skips: Skips, schedule: str) -> dict[int, list[int]]:
    """Bytes that this rank sent in one step, by destination rank: the bytes of each route, in order of size.
    The losses that the last stage's rank sends to all ranks are left out."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[_block(*block) for block in zip(*skips, strict=True)])
    pipe = _pipe(layers, CHUNKS, schedule)
    x, target = torch.randn(2, ROWS, WIDTH)
    pipe(x, target=target).backward()
    counts = pipe.statistics()["wire"].items()
    sizes = {
        int(rank): sorted(size for route, size in routes.items() if int(route) >= 0 and size not in (0, 4 * CHUNKS))
        for rank, routes in counts
    }
    return {rank: of_routes for rank, of_routes in sizes.items() if of_routes}


def _pipe(layers: nn.Sequential, chunks: int, schedule: str) -> weft.Pipe:
    settings: Any = {"chunks": chunks, "balance": [1] * len(layers), "schedule": schedule}
    return weft.Pipe(layers, loss=functional.mse_loss, group=dist.group.WORLD, **settings)


def seconds_to_link() -> float:
    """Seconds until this rank is connected to all others."""
    dist.barrier()
    begun = time.perf_counter()
    links = Links(dist.group.WORLD)
    seconds = time.perf_counter() - begun
    dist.barrier()
    links.close()
    return seconds


class _Breakable(nn.Module):
    """A layer that raises if `breaks` is set, and stores the time of the exception."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.breaks, self.raised = nn.Linear(4, 4), False, 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            self.raised = time.monotonic()
            raise ValueError("the layer failed")
        return self.linear(x)


def fail_on(rank: int | None) -> tuple[float, float]:
    """Train until a step fails. The layer of `rank` raises in the fourth step.

    Return when a layer raised on this rank (0 without an exception), and when the failure was known here. All processes
    of a host share the clock.
    """
    layers = nn.Sequential(*[_Breakable() for _ in range(dist.get_world_size())])
    pipe, (x, target) = _pipe(layers, 3, "1f1b"), torch.randn(2, 6, 4)
    own_layer: Any = layers[dist.get_rank()]
    end, steps = time.monotonic() + LONGEST, 0
    while time.monotonic() < end:
        own_layer.breaks = steps == 3 and dist.get_rank() == rank
        steps += 1
        try:
            pipe(x, target=target).backward()
        except (ValueError, WeftError):
            return own_layer.raised, time.monotonic()
    raise RuntimeError(f"no failure was known within {LONGEST} s")
