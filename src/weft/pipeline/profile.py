"""What each layer of a model costs: measured time, measured bytes, or counted parameters.

    sample -> [copy of layer 0] -> y0, cut off -> [copy of layer 1] -> y1, cut off -> ...
               forward, backward                   forward, backward
               time, or bytes saved for backward   time, or bytes saved for backward

Layers run one at a time, each on a copy that is thrown away: gradients, BatchNorm statistics, random numbers
and flags of the user's model stay as they are, and the device needs room for one layer, not for the model.
The cut between layers (and in skip connections) is a detached copy, so a backward stays inside its layer.

Measuring layer by layer for balance is torchgpipe's idea.
"""

import copy
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import UsageError, listed
from weft.core.events import seeing_saved
from weft.core.microbatch import NoChunk, split
from weft.core.tree import flatten, map_leaves
from weft.core.validation import count_fault, is_number, kind_fault, seconds_fault
from weft.pipeline.skip.namespace import Key, Namespace
from weft.pipeline.skip.tracker import SkipTracker, use_skip_tracker

FEWEST_ROUNDS = 3


def profile_times(
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: int | float = 1.0,
    device: torch.device | str | None = None,
) -> list[float]:
    """Seconds of forward plus backward of each layer: the median over rounds, after one to warm up.

    ``sample``, nested or not, is an input of the first layer. Every layer gets an equal share of ``timeout``
    seconds, and at least three rounds. ``device`` is where to measure; where ``sample`` is if ``None``.
    Layers keep their training flag; weights on the meta device count as zeros. Errors of layers get a note
    that names the layer. Raises ``UsageError`` for arguments of another kind.
    """
    check_measured(module, seconds_fault("timeout", timeout, zero=True), _device_fault(device))
    where = _device(sample, device)

    def measure(trial: _Trial) -> tuple[Any, float]:
        output, _ = trial.timed(where)  # warm up
        rounds: list[float] = []
        end = time.perf_counter() + timeout / len(module)
        while len(rounds) < FEWEST_ROUNDS or time.perf_counter() < end:
            output, seconds = trial.timed(where)
            rounds.append(seconds)
        return output, sorted(rounds)[len(rounds) // 2]

    return _layer_by_layer(module, map_leaves(_whole, sample), where, measure)


def profile_sizes(
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: int | float = 2.0,
    device: torch.device | str | None = None,
) -> list[float]:
    """Bytes that each layer needs in training: parameters, buffers, what one micro-batch saves for backward.

    ``input`` is a mini-batch; the first of its ``chunks`` micro-batches is run. Parameters count
    ``param_scale`` times (with their gradient and the optimizer's state), buffers once. Of the tensors that
    autograd saves, storages are counted once each, without those of parameters and buffers; what a custom
    function keeps besides is not seen. ``device`` is where to measure; where ``input`` is if ``None``.
    Raises ``BatchError`` if ``input`` cannot be cut, ``UsageError`` for arguments of another kind. Errors of layers
    get a note that names the layer.
    """
    scales = is_number(param_scale) and 0 <= param_scale < math.inf
    wrong = [] if scales else [f"param_scale is {param_scale!r}, wanted a number from 0 up"]
    check_measured(module, count_fault("chunks", chunks), wrong, _device_fault(device))

    def measure(trial: _Trial) -> tuple[Any, float]:
        parameters, buffers = list(trial.layer.parameters()), list(trial.layer.buffers())
        owned = {tensor.untyped_storage().data_ptr() for tensor in [*parameters, *buffers]}
        saved: dict[int, int] = {}  # the graph keeps them alive, so that no other tensor gets an address of theirs

        def note(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                saved[storage.data_ptr()] = storage.nbytes()

        with seeing_saved(note):
            output, _ = trial.forward(trial.fresh_input())
        return output, sum(saved.values()) + _bytes(parameters) * param_scale + _bytes(buffers)

    return _layer_by_layer(module, split(input, chunks)[0], _device(input, device), measure)


def check_measured(module: Any, *faults: Sequence[str]) -> None:
    """Raise one UsageError with these faults, and with what is wrong with a model that is to be measured."""
    found = [*kind_fault("module", module, nn.Sequential, "an nn.Sequential"), *chain(*faults)]
    if found:
        raise UsageError(listed("layers cannot be measured so:", found))


def parameter_bytes(module: nn.Sequential) -> list[float]:
    """Bytes of parameters and buffers of each layer. One that several layers share counts in the first."""
    seen: set[Tensor] = set()
    sizes: list[float] = []
    for layer in module:
        new = {*layer.parameters(), *layer.buffers()} - seen
        seen |= new
        sizes.append(_bytes(list(new)))
    return sizes


class _CutSkips(SkipTracker):
    """Skip tensors between layers that are measured one at a time; keeps every one until the end."""

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
            return super().load(ns, name)  # says what is wrong
        return _fresh(self.values[ns, name])


@dataclass(frozen=True)
class _Trial:
    """One layer, ready to run on its own as often as wanted."""

    layer: nn.Module
    input: Any
    skips: _CutSkips

    def fresh_input(self) -> Any:
        return map_leaves(_fresh, self.input)

    def forward(self, value: Any) -> tuple[Any, list[Tensor]]:
        """The output, and every tensor (skips included) that a backward of this layer starts from."""
        self.skips.stashed.clear()
        output = self.layer(value)
        ends = [*flatten(output)[0], *self.skips.stashed]
        return output, [end for end in ends if isinstance(end, Tensor) and end.requires_grad]

    def timed(self, device: torch.device) -> tuple[Any, float]:
        """The output, and the seconds of one forward and backward."""
        self.layer.zero_grad(set_to_none=True)
        value = self.fresh_input()
        _synchronize(device)
        start = time.perf_counter()
        output, ends = self.forward(value)
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        _synchronize(device)
        return output, time.perf_counter() - start


def _whole(leaf: Any) -> Any:
    """What every micro-batch gets whole is wrapped, in a sample as in a call of the pipe, but layers see it bare."""
    return leaf.value if isinstance(leaf, NoChunk) else leaf


def _layer_by_layer(
    module: nn.Sequential,
    sample: Any,
    device: torch.device,
    measure: Callable[[_Trial], tuple[Any, float]],
) -> list[float]:
    """Hand each layer to ``measure``, copied to ``device``, with the input that the layers before made."""
    costs: list[float] = []
    skips = _CutSkips()
    with _undisturbed(device), use_skip_tracker(skips):
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


@contextmanager
def _undisturbed(device: torch.device) -> Generator[None]:
    """Gradients on, whatever the caller's mode, and the random number generators as before at the end."""
    accelerators = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"),
        torch.inference_mode(False),  # turns gradients on, too
    ):
        yield


def _copy(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy on ``device`` without gradients."""
    copied = copy.deepcopy(layer)
    tensors = [*copied.parameters(), *copied.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return copied.to(device)
    copied.to_empty(device=device)
    with torch.no_grad():
        for tensor in [*copied.parameters(), *copied.buffers()]:
            tensor.zero_()  # and not garbage, which may be no valid index, or slow to compute with
    return copied


def _cut_off(leaf: Any, device: torch.device | None = None) -> Any:
    """The same data as a leaf of autograd; anything but a tensor as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device or leaf.device).requires_grad_(leaf.requires_grad)


def _fresh(leaf: Any) -> Any:
    """A copy that a layer may write into, which autograd forbids for a leaf."""
    return _cut_off(leaf).clone() if isinstance(leaf, Tensor) else leaf


def _bytes(tensors: list[Tensor] | list[nn.Parameter]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _device_fault(device: Any) -> list[str]:
    """What is wrong with a device to measure on, in words. Whether there is one of the kind, PyTorch says."""
    try:
        if device is not None:
            torch.device(device)
    except (TypeError, RuntimeError):
        return [f"device is {device!r}, wanted a name such as 'cpu' or 'cuda:1', a torch.device, or None"]
    return []


def _device(sample: Any, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    tensors = (leaf for leaf in flatten(sample)[0] if isinstance(leaf, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
