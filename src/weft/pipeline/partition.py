"""Which layers go to which stage: the cut that makes the slowest (or fullest) stage as small as it can be.

    costs     4   1   1   3   3          parts = 2
              |           |
    blocks  [ 4   1   1 ] [ 3   3 ]      largest block 6, the least possible; layers per part: 3, 2

A pipeline runs at the pace of its largest stage, so the largest block is what counts. A skip connection
between two stages costs both of them (one sends or holds, the other receives):

    layers    0   1 | 2 | 3   4          skip from layer 1 to layer 3 of cost 2, parts = 3
                  \\_____/                 adds 2 to the first and 2 to the third block, none to the second

What a block costs so depends on where the block begins and ends, and on nothing else. That makes dynamic
programming over blocks exact, with skips as without.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.core.errors import PartitionError, listed
from weft.core.validation import is_whole
from weft.pipeline.profile import check_measured, parameter_bytes, profile_sizes, profile_times

Skip = tuple[int, int, int | float]
"""A skip connection: source layer, destination layer, cost."""


def partition(costs: Sequence[int | float], parts: int, *, skips: Sequence[Skip] = ()) -> list[int]:
    """Cut layers into ``parts`` consecutive blocks; returns the number of layers of each, at least one.

    A block costs the sum of its layers' costs, plus the cost of every skip that has exactly one of its ends
    in the block. Each skip is (source layer, destination layer, cost), in the unit of ``costs``.

    The largest block is as small as possible, exactly. Among such cuts, the one with the smallest sum of
    squared block costs is taken; among those, the one whose numbers of layers are most even. Time and memory
    grow with the square of the number of layers.

    Raises ``PartitionError`` that lists all faults: more parts than layers, no part, a cost or a skip that is
    negative, infinite or no number, a skip that does not lead forward from one layer to a later one, or is none.
    """
    _check(costs, parts, skips)
    blocks = _block_costs(costs, skips)
    ceiling = _smallest_ceiling(blocks, parts)
    return _most_even(blocks, parts, ceiling)


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: object,
    *,
    timeout: int | float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Layers per stage, balanced by the measured time of forward and backward of each layer.

    ``sample`` is an input of the model, best of the size of a micro-batch; ``timeout`` the seconds that
    measuring may take beyond one run of every layer. See :func:`weft.pipeline.profile.profile_times`.
    Raises ``PartitionError`` if there are fewer layers than ``partitions``, UsageError for arguments of another kind.
    """
    _check_parts(partitions, module)
    return partition(profile_times(module, sample, timeout=timeout, device=device), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: object,
    *,
    chunks: int = 1,
    param_scale: int | float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Layers per stage, balanced by the measured bytes that each layer needs in training.

    ``input`` is a mini-batch, which ``chunks`` micro-batches will share; the activations of one are counted.
    ``param_scale`` is how many times a parameter is held: itself and its gradient make 2, SGD with momentum
    3, Adam 4. See :func:`weft.pipeline.profile.profile_sizes`.
    Raises ``PartitionError`` if there are fewer layers than ``partitions``, UsageError for arguments of another kind.
    """
    _check_parts(partitions, module)
    sizes = profile_sizes(module, input, chunks=chunks, param_scale=param_scale, device=device)
    return partition(sizes, partitions)


def balance_by_parameters(partitions: int, module: nn.Sequential) -> list[int]:
    """Layers per stage, balanced by the bytes of parameters and buffers alone, when there is no sample.

    Raises ``PartitionError`` if there are fewer layers than ``partitions``.
    """
    return partition(parameter_bytes(module), partitions)


def _check_parts(partitions: Any, module: nn.Sequential) -> None:
    """Before anything is measured: whether there can be so many parts. Raises UsageError, PartitionError."""
    check_measured(module)
    _check([0] * len(module), partitions, ())


def _check(costs: Sequence[int | float], parts: Any, skips: Sequence[Skip]) -> None:
    layers = len(costs)
    faults: list[str] = []
    if not is_whole(parts):
        faults.append(f"the number of parts is {parts!r}, wanted an int")
    elif parts < 1:
        faults.append("at least one part is needed")
    elif parts > layers:
        faults.append("every part needs at least one layer; ask for fewer parts or split layers")
    faults += [f"layer {at} costs {cost!r}; wanted 0 or more" for at, cost in enumerate(costs) if not _valid(cost)]
    faults += [fault for skip in skips for fault in _skip_faults(skip, layers)]
    if faults:
        raise PartitionError(listed(f"{layers} layers cannot be cut into {parts} parts:", faults))


def _skip_faults(skip: Any, layers: int) -> list[str]:
    try:
        source, destination, cost = skip
    except (TypeError, ValueError):
        source = destination = cost = None
    if not (is_whole(source) and is_whole(destination)):
        return [f"{skip!r} is no skip, wanted (source layer, destination layer, cost)"]
    name, faults = f"the skip from layer {source} to layer {destination}", list[str]()
    if not 0 <= source < destination < layers:
        faults.append(f"{name} should lead forward between layers 0 to {layers - 1}")
    if not _valid(cost):
        faults.append(f"{name} costs {cost!r}; wanted 0 or more")
    return faults


def _valid(cost: Any) -> bool:
    try:
        return math.isfinite(cost) and cost >= 0
    except TypeError:
        return False


def _block_costs(costs: Sequence[int | float], skips: Sequence[Skip]) -> list[list[float]]:
    """``blocks[i][j]`` is what the layers from ``i`` up to, not including, ``j`` cost as one part."""
    layers = len(costs)
    ends: list[list[tuple[int, int | float]]] = [[] for _ in costs]  # per layer: the other end, and the cost
    for source, destination, cost in skips:
        ends[source].append((destination, cost))
        ends[destination].append((source, cost))
    blocks: list[list[float]] = []
    for start in range(layers):
        row = [math.inf] * (layers + 1)
        total = 0.0
        for layer in range(start, layers):
            total += costs[layer]
            for other, cost in ends[layer]:
                # A skip whose other end is already inside stops crossing the border; any other starts to.
                total += -cost if start <= other < layer else cost
            row[layer + 1] = total
        blocks.append(row)
    return blocks


def _smallest_ceiling(blocks: list[list[float]], parts: int) -> float:
    """The least cost that the largest of ``parts`` blocks can have."""
    layers = len(blocks)
    best = [blocks[0][stop] for stop in range(layers + 1)]  # best[j]: the first j layers in the parts so far
    for _ in range(parts - 1):
        best = [
            min((max(best[cut], blocks[cut][stop]) for cut in range(1, stop)), default=math.inf)
            for stop in range(layers + 1)
        ]
    return best[layers]


def _most_even(blocks: list[list[float]], parts: int, ceiling: float) -> list[int]:
    """Layers per part, no block above ``ceiling``; least sum of squared costs, then of squared lengths."""
    layers = len(blocks)
    never = (math.inf, math.inf)
    best = [(0.0, 0.0), *[never] * layers]
    cuts: list[list[int]] = []  # per part, for each end of it: where it begins at best
    for _ in range(parts):
        scores, begins = [never] * (layers + 1), [0] * (layers + 1)
        for stop in range(1, layers + 1):
            for cut in range(stop):
                block = blocks[cut][stop]
                if block > ceiling or best[cut] == never:
                    continue
                score = (best[cut][0] + block * block, best[cut][1] + float(stop - cut) ** 2)
                if score < scores[stop]:
                    scores[stop], begins[stop] = score, cut
        best = scores
        cuts.append(begins)
    lengths: list[int] = []
    stop = layers
    for begins in reversed(cuts):
        lengths.insert(0, stop - begins[stop])
        stop = begins[stop]
    return lengths
