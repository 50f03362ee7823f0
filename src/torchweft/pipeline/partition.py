"""Balanced partitioning: split the layers into stages so that the largest stage is as small as possible.

    costs     4   1   1   3   3          parts = 2
              |           |
    blocks  [ 4   1   1 ] [ 3   3 ]      largest block 6, the least possible; layers per part: 3, 2

A skip connection between two stages costs both of them (one sends or holds, the other receives). The cost of a block
depends only on where it begins and ends, which makes dynamic programming over blocks exact, with skips as without.

Costs are measured time, measured bytes, or counted parameters. Layers are measured one at a time, each on a copy, so
the user's model does not change, and the device needs memory for one layer. Profiling for balance is torchgpipe's idea.
"""

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.errors import PartitionError
from torchweft.core.pytree import flatten, map_leaves
from torchweft.core.validation import Validator, is_whole
from torchweft.pipeline.microbatch import NoChunk, split
from torchweft.pipeline.skip.tracker import Key, Namespace, SkipTracker, use_skip_tracker
from torchweft.pipeline.tracing import seeing_saved, storages

FEWEST_ROUNDS = 3
Device = torch.device | str | None


def profile_times(
    module: nn.Sequential, sample: Any, *, timeout: int | float = 1.0, device: Device = None
) -> list[float]:
    """Seconds of forward plus backward of each layer: the median over rounds, after one to warm up. ``sample`` is an
    input of the first layer. Every layer gets an equal share of ``timeout`` seconds, and at least three rounds. Errors
    of layers get a note that names the layer. Raises ``UsageError`` for invalid arguments."""
    with _checked(module) as check:
        check.seconds("timeout", timeout, zero=True)
    where = _device(sample, device)

    def measure(trial: _Trial) -> tuple[Any, float]:
        output, _ = trial.timed(where)  # warm up
        rounds: list[float] = []
        end = time.perf_counter() + timeout / len(module)
        while len(rounds) < FEWEST_ROUNDS or time.perf_counter() < end:
            output, seconds = trial.timed(where)
            rounds.append(seconds)
        return output, median(rounds)

    return _layer_by_layer(module, map_leaves(_bare, sample), where, measure)


def profile_sizes(
    module: nn.Sequential, input: Any, *, chunks: int = 1, param_scale: int | float = 2.0, device: Device = None
) -> list[float]:
    """Bytes that each layer needs in training: parameters, buffers, and the tensors saved for backward, for the first
    of ``chunks`` micro-batches of ``input``. Parameters count ``param_scale`` times (with their gradient and the
    optimizer's state). Raises ``BatchError`` if ``input`` cannot be cut, ``UsageError`` for invalid arguments."""
    with _checked(module) as check:
        check.count("chunks", chunks)
        check.number("param_scale", param_scale, most=sys.float_info.max)

    def measure(trial: _Trial) -> tuple[Any, float]:
        parameters, buffers = list(trial.layer.parameters()), list(trial.layer.buffers())
        owned = {address for address, _ in storages([*parameters, *buffers])}
        saved: dict[int, int] = {}  # the graph keeps them alive, so that no other tensor gets an address of theirs
        with seeing_saved(lambda tensor: saved.update(storages([tensor]))):
            output, _ = trial.forward(map_leaves(_fresh, trial.input))
        kept = sum(size for address, size in saved.items() if address not in owned)
        return output, kept + _bytes(parameters) * param_scale + _bytes(buffers)

    return _layer_by_layer(module, split(input, chunks)[0], _device(input, device), measure)


def _checked(module: Any) -> Validator:
    check = Validator("layers cannot be measured so")
    check.instance("module", module, nn.Sequential, "an nn.Sequential")
    return check


class _CutSkips(SkipTracker):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Key, Tensor | None] = {}
        self.stashed: list[Tensor] = []

    def save(self, ns: Namespace | None, name: str, value: Tensor | None) -> None:
        if value is not None:
            self.stashed.append(value)
        self.values[ns, name] = _cut_off(value)

    def load(self, ns: Namespace | None, name: str) -> Tensor | None:
        if (ns, name) not in self.values:
            return super().load(ns, name)  # raises an error that names the missing skip
        return _fresh(self.values[ns, name])


@dataclass(frozen=True)
class _Trial:
    layer: nn.Module
    input: Any
    skips: _CutSkips

    def forward(self, value: Any) -> tuple[Any, list[Tensor]]:
        """The output, and every tensor (skips included) that a backward of this layer starts from."""
        self.skips.stashed.clear()
        output = self.layer(value)
        ends = [*flatten(output)[0], *self.skips.stashed]
        return output, [end for end in ends if isinstance(end, Tensor) and end.requires_grad]

    def timed(self, device: torch.device) -> tuple[Any, float]:
        self.layer.zero_grad(set_to_none=True)
        value = map_leaves(_fresh, self.input)
        synchronize(device)
        start = time.perf_counter()
        output, ends = self.forward(value)
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        synchronize(device)
        return output, time.perf_counter() - start


def _layer_by_layer(
    module: nn.Sequential, sample: Any, device: torch.device, measure: Callable[[_Trial], tuple[Any, float]]
) -> list[float]:
    costs: list[float] = []
    skips = _CutSkips()
    # The generators are restored, so that a measurement does not change the random numbers of the training.
    accelerators = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"),
        torch.inference_mode(False),  # also turns gradients on, regardless of the caller's mode
        use_skip_tracker(skips),
    ):
        value = map_leaves(partial(_cut_off, device=device), sample)
        for index, layer in enumerate(module):
            try:
                output, cost = measure(_Trial(_copy(layer, device), value, skips))
            except Exception as error:
                error.add_note(f"while measuring layer {index} ({type(layer).__name__})")
                raise
            value = map_leaves(_cut_off, output)
            costs.append(cost)
    return costs


def _copy(layer: nn.Module, device: torch.device) -> nn.Module:
    # On a copy, so that gradients, statistics and flags of the model stay. One layer at a time fits on the device.
    copied = copy.deepcopy(layer)
    tensors = [*copied.parameters(), *copied.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return copied.to(device)
    copied.to_empty(device=device)
    with torch.no_grad():
        for tensor in [*copied.parameters(), *copied.buffers()]:
            # Uninitialised memory can hold invalid indices, or denormal numbers, which are slow to compute with.
            tensor.zero_()
    return copied


def _bare(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, NoChunk) else leaf


def _cut_off(leaf: Any, device: torch.device | None = None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device or leaf.device).requires_grad_(leaf.requires_grad)


def _fresh(leaf: Any) -> Any:
    """A copy that a layer can write to in place, which autograd forbids for a leaf."""
    return _cut_off(leaf).clone() if isinstance(leaf, Tensor) else leaf


def _bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))


def _device(sample: Any, device: Device) -> torch.device:
    if device is not None:
        return torch.device(device)
    tensors = (leaf for leaf in flatten(sample)[0] if isinstance(leaf, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


Skip = tuple[int, int, int | float]  # source layer, destination layer, cost


def partition(costs: Sequence[int | float], parts: int, *, skips: Sequence[Skip] = ()) -> list[int]:
    """Cut layers into ``parts`` consecutive blocks. Returns the number of layers of each block, at least one. A block
    costs the sum of its layers' costs, plus the cost of every skip (source layer, destination layer, cost) that has one
    end in the block. The cost of the largest block is the exact minimum. Among such cuts, the sum of squared block
    costs is the smallest, then the numbers of layers the most even. Raises ``PartitionError`` that lists all faults."""
    _check(costs, parts, skips)
    blocks = _block_costs(costs, skips)
    # Time and memory grow with the square of the number of layers, which is small.
    return _most_even(blocks, parts, _smallest_ceiling(blocks, parts))


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: object, *, timeout: int | float = 1.0, device: Device = None
) -> list[int]:
    """Layers per stage, balanced by the measured time of forward and backward of each layer.

    ``sample`` is an input of the model, preferably of the size of a micro-batch. ``timeout`` is the time in seconds for
    measuring. Raises ``PartitionError`` if there are fewer layers than ``partitions``, UsageError for other faults.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> sum(weft.balance_by_time(2, model, torch.randn(16, 8), timeout=0.05))
        3
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
    device: Device = None,
) -> list[int]:
    """Layers per stage, balanced by the measured bytes that each layer needs in training.

    ``input`` is a mini-batch that will be cut into ``chunks`` micro-batches. The activations of one are counted.
    ``param_scale`` is the number of copies of a parameter: with its gradient 2, with SGD's momentum 3, with Adam 4.
    Raises as `balance_by_time`.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> sum(weft.balance_by_size(2, model, torch.randn(16, 8), chunks=4))
        3
    """
    _check_parts(partitions, module)
    sizes = profile_sizes(module, input, chunks=chunks, param_scale=param_scale, device=device)
    return partition(sizes, partitions)


def balance_by_parameters(partitions: int, module: nn.Sequential) -> list[int]:
    """Layers per stage, balanced by the bytes of parameters and buffers alone, when there is no sample.

    A shared tensor counts for the first of its layers. Raises ``PartitionError`` if there are too few layers.

    Example:
        >>> weft.balance_by_parameters(2, nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        [1, 2]
    """
    return partition(own_bytes([*layer.parameters(), *layer.buffers()] for layer in module), partitions)


def own_bytes(layers: Iterable[Iterable[Tensor]]) -> list[float]:
    seen: set[Tensor] = set()
    sizes: list[float] = []
    for tensors in layers:
        new = set(tensors) - seen
        seen |= new
        sizes.append(_bytes(new))
    return sizes


def _check_parts(partitions: Any, module: nn.Sequential) -> None:
    with _checked(module):
        pass
    _check([0] * len(module), partitions, ())


def _check(costs: Sequence[int | float], parts: Any, skips: Sequence[Skip]) -> None:
    layers = len(costs)
    with Validator(f"{layers} layers cannot be cut into {parts} parts", PartitionError) as check:
        if not is_whole(parts):
            check.add(f"the number of parts is {parts!r}, wanted an int")
        else:
            check.require(parts >= 1, "at least one part is needed")
            check.require(parts <= layers, "every part needs at least one layer; ask for fewer parts or split layers")
        for at, cost in enumerate(costs):
            check.require(_valid(cost), f"layer {at} costs {cost!r}; wanted 0 or more")
        for source, destination, cost in skips:
            name = f"the skip from layer {source} to layer {destination}"
            forward = 0 <= source < destination < layers
            check.require(forward, f"{name} should lead forward between layers 0 to {layers - 1}")
            check.require(_valid(cost), f"{name} costs {cost!r}; wanted 0 or more")


def _valid(cost: Any) -> bool:
    try:
        return math.isfinite(cost) and cost >= 0
    except TypeError:
        return False


def _block_costs(costs: Sequence[int | float], skips: Sequence[Skip]) -> list[list[float]]:
    """``blocks[i][j]`` is the cost of the layers from ``i`` up to, not including, ``j`` as one part."""
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
                # A skip whose other end is inside no longer crosses the border. Any other skip starts to cross it.
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
    """Layers per part with the least sum of squared costs, then of squared lengths. No block costs over ``ceiling``."""
    # Entries are (sum of squared costs, sum of squared lengths, lengths). Tuples compare in this order.
    never: tuple[float, float, list[int]] = (math.inf, math.inf, [])
    best = [(0.0, 0.0, list[int]()), *[never] * len(blocks)]  # best[j]: of the first j layers in the parts so far
    for _ in range(parts):
        longer = [never]
        for stop in range(1, len(blocks) + 1):
            cuts = [cut for cut in range(stop) if blocks[cut][stop] <= ceiling]
            sums = [(best[cut][0] + blocks[cut][stop] ** 2, best[cut][1] + float(stop - cut) ** 2) for cut in cuts]
            least, cut = min(zip(sums, cuts, strict=True), default=(never[:2], 0))
            longer.append((*least, [*best[cut][2], stop - cut]))
        best = longer
    return best[-1][2]
