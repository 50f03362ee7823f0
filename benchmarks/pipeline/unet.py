"""Small model with a long skip, for the benchmarks of memory: four stages, one skip, two readers.

    stage 0 ----> stage 1 ----> stage 2 ----> stage 3 ----> loss
       \\__________ "early" ______/ _____________/            skips one stage

Every stage also sleeps, so that the order of events does not depend on the scheduling of cores.
"""

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline.sleep import Sleep
from torchweft import pop, skippable, stash

STAGES, CHUNKS = 4, 8
SOURCE, READERS = 0, (2, 3)
"""Stage that stashes the skip, and stages that pop it."""

Change = Callable[[Tensor], Tensor]


@skippable(stash=["early"])
class Stash(nn.Module):
    """Stashes its input, or `change` of its input."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self._change = change

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("early", x if self._change is None else self._change(x))
        return x


@skippable(pop=["early"])
class Merge(nn.Module):
    """Joins the skip with the main path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        early = yield pop("early")
        return self.mix(torch.cat([x, early], dim=1))


def unet(width: int, seconds: float, change: Change | None = None) -> nn.Sequential:
    """One layer per stage. A stage sleeps for `seconds` in forward, and twice as long in backward."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for stage in range(STAGES):
        parts: list[nn.Module] = [nn.Linear(width, width), nn.GELU()]
        parts += [Stash(change)] if stage == SOURCE else [Merge(width)] if stage in READERS else []
        layers += [*parts, Sleep(seconds, 2 * seconds)]
    return nn.Sequential(*layers)


BALANCE = [4, 3, 4, 4]
"""Layers of each stage of `unet`."""
