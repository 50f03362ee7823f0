"""Layers that talk to other processes: those with tensor-parallel weights, and `nn.SyncBatchNorm`.

All processes must ask for the collectives of a group in one order; else they hang, or get the numbers of another layer.
In the caller's thread the schedule says that order. With a worker per stage the clock does:

    process 0    stage 0 for micro-batch 1, then stage 1 for micro-batch 0  --+
    process 1    stage 1 for micro-batch 0, then stage 0 for micro-batch 1  --+--> each gets a sum of both

So "auto", which goes by the clock as well, runs such layers in the caller's thread.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import nn

from weft.core.errors import UsageError, listed
from weft.pipeline.strangers import shards


class Talker(NamedTuple):
    """A module of a stage that talks within a group of several processes."""

    stage: int
    layer: str
    module: nn.Module
    group: str

    @property
    def quiet(self) -> bool:
        """Whether it does not talk now: `nn.SyncBatchNorm` does in training alone."""
        return isinstance(self.module, nn.SyncBatchNorm) and not self.module.training


def talkers(stages: Iterable[Sequence[tuple[str, nn.Module]]]) -> list[Talker]:
    """The modules that talk, as far as one can see; a layer that calls `torch.distributed` itself cannot be seen."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [
        Talker(stage, name, module, group)
        for stage, layers in enumerate(stages)
        for name, layer in layers
        if not any(map(shards, layer.modules()))  # which is refused in other words
        for module in layer.modules()
        for group in dict.fromkeys(_groups(module))
    ]


def forbid_workers(found: Iterable[Talker]) -> None:
    """Raise UsageError if stages that are to run in threads of their own talk within one group."""
    by_group: dict[str, list[Talker]] = {}
    for each in found:
        if not each.quiet:
            by_group.setdefault(each.group, []).append(each)
    for group in by_group.values():
        if len({each.stage for each in group}) > 1:
            names = [f"layer {each.layer!r} of stage {each.stage} ({type(each.module).__name__})" for each in group]
            raise UsageError(
                listed(
                    "layers of several stages talk to other processes in one process group, and with a worker per "
                    "stage (executor='threads') each process would do so in another order, so that they hang or get "
                    "each other's numbers; use executor='serial' or 'auto', put such layers into one stage "
                    "(balance=), or give those of each stage a process group of their own:",
                    names,
                )
            )


def _groups(module: nn.Module) -> Iterator[str]:
    """The names of the groups of several processes in which a module talks by itself."""
    groups: list[Any] = []
    for each in chain(module._parameters.values(), module._buffers.values()):
        mesh = getattr(each, "device_mesh", None)  # of a DTensor, which is not imported for this
        groups += mesh.get_all_groups() if mesh is not None else ()
    if isinstance(module, nn.SyncBatchNorm):
        groups.append(cast(Any, module).process_group or dist.group.WORLD)
    return (each.group_name for each in groups if each.size() > 1)
