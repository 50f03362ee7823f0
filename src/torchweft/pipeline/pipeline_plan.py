"""A plan: stages, their wiring and an executor, made once and used for every step.

A pipe can have several plans over the same layers: with a thread per stage, or in the caller's thread. Without
recomputation and on one device, it can also merge all stages into a single segment, so that small layers do not pay for
cuts that are not needed. `weft.pipeline.autotune` chooses between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.rng import DrawnSeed
from torchweft.core.segment import MicroBatchContext, SegmentFunction
from torchweft.pipeline.checks import ForeignParameterCheck
from torchweft.pipeline.executor import SerialExecutor
from torchweft.pipeline.loss import LossStage
from torchweft.pipeline.routing import OUTSIDE, CudaStageDevice, EntryPoint, EntryPoints, Route, StageDevice, Wiring
from torchweft.pipeline.skip import inspect_skip_layout
from torchweft.pipeline.stage import Skip, Stage


@dataclass(frozen=True)
class PipelinePlan:
    """The functions, wiring and executor of one way to run a pipe. `functions[s]` is stage s, in the last segment
    followed by the loss. `searched[s]` is the same with a search for foreign parameters, if segments are cut out of
    autograd."""

    functions: tuple[SegmentFunction, ...]
    searched: tuple[ForeignParameterCheck, ...]
    wiring: Wiring
    places: tuple[StageDevice | None, ...]
    executor: SerialExecutor
    entry_points: EntryPoints
    stages: tuple[Stage, ...]


class Agreement(NamedTuple):
    """Terms that all processes of a step agree on before it starts. The defaults are those of a single process. `name`
    is for messages. `anchors` are inputs of the node without a gradient, so that a process without parameters has a
    node too. `loss_seed` is the loss gradient of an early backward. `borrowed` are copies of parameters of other
    processes, by the number of the loan. `entries` say which gradients of the mini-batch processes share, and
    `entry_tensors` are the tensors of this process that get one from another process."""

    name: str = ""
    anchors: Sequence[Tensor] = ()
    rng: DrawnSeed | None = None
    loss_seed: float | None = None
    borrowed: Mapping[int, Tensor] = MappingProxyType({})
    entries: Any = None
    entry_tensors: Sequence[Tensor] = ()


ALONE = Agreement()


Crossing = Sequence[tuple[Skip, int, tuple[int, ...]]]  # every skip between stages, with its source and its readers


def build_stages(
    layers: Sequence[tuple[str, nn.Module]],
    balance: Sequence[int],
    devices: Sequence[torch.device],
    kind: type[Stage] = Stage,
    partitions: Sequence[nn.Module] | None = None,
) -> tuple[list[Stage], Crossing]:
    """The stages, each of this `kind` and with its partition, and every skip that crosses between two of them."""
    ends = list(accumulate(balance))
    blocks = [list(layers[end - count : end]) for end, count in zip(ends, balance, strict=True)]
    layout = inspect_skip_layout([[layer for _, layer in block] for block in blocks])
    crossing = [
        (skip, source, tuple(reader for reader in readers if reader != source))
        for skip, (source, readers) in layout.routes.items()
        if any(reader != source for reader in readers)
    ]
    stages = [
        kind(
            index,
            block,
            device,
            popped=[skip for skip, _, readers in crossing if index in readers],
            stashed=[skip for skip, source, _ in crossing if index == source],
            first=end - len(block),
            partition=None if partitions is None else partitions[index],
        )
        for index, (block, device, end) in enumerate(zip(blocks, devices, ends, strict=True))
    ]
    return stages, crossing


def staged_plan(
    stages: Sequence[Stage],
    crossing: Crossing,
    executor: SerialExecutor,
    loss: LossStage | None,
    *,
    streams: bool,
    cut: bool,
) -> PipelinePlan:
    """A plan with one segment per stage. With `streams`, CUDA stages get streams. With `cut`, graphs are searched."""
    last = len(stages) - 1
    routes = [Route("input", OUTSIDE, (0,))]
    routes += [Route(f"main of stage {j}", j, (j + 1,)) for j in range(last)]
    routes.append(Route("loss" if loss else "output", last, (OUTSIDE,)))
    routes += [Route(f"skip {name!r}", source, readers) for (_, name), source, readers in crossing]
    functions: list[SegmentFunction] = list(stages)
    entries = [EntryPoint(0, 0)]
    if loss is not None:
        entries.append(EntryPoint(len(routes), last))
        routes = [*routes, Route("target", OUTSIDE, (last,))]
        # The target's route comes last, so it is the last value that the function of the last stage gets.
        inner = functions[-1]

        def with_loss(context: MicroBatchContext, *values: Any) -> tuple[Any, ...]:
            main, *stashed = inner(context, *values[:-1])
            return (loss.of(context, main, values[-1]), *stashed)

        functions = [*functions[:-1], with_loss]
    layers = [stage.layers for stage in stages]
    searched = [
        ForeignParameterCheck(function, layers, number, loss.function if loss and number == last else None)
        for number, function in enumerate(functions if cut else ())
    ]
    places: list[StageDevice | None] = [
        CudaStageDevice(stage.device) if streams and stage.device.type == "cuda" else StageDevice(stage.device)
        for stage in stages
    ]
    if all(stage.device.type == "cpu" for stage in stages):  # nothing has to be moved
        places = [None] * len(stages)
    wiring = Wiring(tuple(routes), len(functions))
    entry_points = EntryPoints(tuple(entries), last + 1, last)
    return PipelinePlan(tuple(functions), tuple(searched), wiring, tuple(places), executor, entry_points, tuple(stages))
