"""The mini-batch as each rank was given it: checksums of its tensors, and its tensors that require a gradient.

    first stage's rank     names and checksums, in the terms of the step --> all ranks, which compare their own
    owner of a part        gradients of its tensors, after each backward --> all ranks, which return them to autograd

The input counts on the rank of the first stage, the target on that of the last one. If these two get different batches,
inputs meet the labels of other rows, and nothing else would show it. A module in front of the pipe runs on every rank,
so every rank needs the gradient of its output. Otherwise only the first rank would train such a module.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.errors import BatchError, UsageError, join_faults
from torchweft.core.pytree import flatten, structure_paths
from torchweft.pipeline.microbatch import NoChunk
from torchweft.pipeline.processes.frames import memory_of

_FIRST_STEPS, _EVERY, _LENGTHS = 10, 100, 4096

Names = Mapping[str, Tensor]
Shapes = Mapping[str, Sequence[int]]


class CheckTurns:
    """The steps in which ranks compare the mini-batch: the first ones, every hundredth, and those of a new length. Only
    the rank of the first stage decides, so ranks need not count alike."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self._steps = enabled, 0
        self._lengths: set[int] = set()

    def is_due(self, rows: int) -> bool:
        self._steps += 1
        if len(self._lengths) >= _LENGTHS:
            self._lengths.clear()
        is_new = rows not in self._lengths
        self._lengths.add(rows)
        return self._enabled and (is_new or self._steps <= _FIRST_STEPS or not self._steps % _EVERY)


class GivenBatch:
    """The tensors of one call on this rank by part (the input, and the target if there is one) and by name."""

    def __init__(self, given: tuple[tuple[Any, ...], Mapping[str, Any]], targets: Sequence[Any]) -> None:
        args, kwargs = given
        inputs = {**_named(args, "input"), **_named(kwargs, "input")}
        self.parts: list[Names] = [inputs, *(_named(target, "target") for target in targets)]

    def checksums(self) -> dict[str, str]:
        """The checksum of each tensor, as text that shows dtype and shape too."""
        return {name: _checksum(x) for part in self.parts for name, x in part.items() if _is_plain(x)}

    def compare(self, first: Mapping[str, str], owner: str, me: str) -> None:
        """Raise BatchError if a tensor of the `first` rank is another one here. Ranks can leave parts out."""
        faults = [
            f"{name}: {first[name]} on {owner}, {value} on {me}"
            for name, value in self.checksums().items()
            if first.get(name, value) != value
        ]
        if faults:
            headline = (
                "the ranks of a Pipe must be given the same mini-batch, but these tensors differ (dtype, shape, "
                "checksum). A DataLoader that shuffles needs the same seed on all ranks, as in "
                "generator=torch.Generator().manual_seed(0). A DistributedSampler gives each rank other rows: let its "
                "num_replicas and rank count replicas of the Pipe, not processes. A rank can pass None for a part that "
                "it does not need, and check_batches=False of the Pipe switches this comparison off:"
            )
            raise BatchError(join_faults(headline, faults))

    def tracked(self) -> list[Names]:
        """By part, the tensors that require a gradient."""
        on = torch.is_grad_enabled()
        return [{name: x for name, x in part.items() if on and x.requires_grad} for part in self.parts]


class EntryGradients(NamedTuple):
    """The gradients of the mini-batch that ranks share: by part the rank that computes them, and the names of those
    that it sends. `own` names all that this rank computes. `tensors` of this rank get theirs from another one."""

    parts: Sequence[tuple[int, Sequence[str]]]
    own: Sequence[str]
    tensors: Mapping[str, Tensor]


def list_entries(batch: GivenBatch) -> list[Shapes]:
    """For the terms of a step: by part, the shape of each tensor of the first rank that requires a gradient."""
    return [{name: list(x.shape) for name, x in part.items()} for part in batch.tracked()]


def share_entries(listed: Sequence[Shapes], batch: GivenBatch, owners: Sequence[int], rank: int) -> EntryGradients:
    """The gradients to share. Raises UsageError for a tensor that requires a gradient on some ranks only, and
    BatchError for one of another shape."""
    own: list[str] = []
    tensors: dict[str, Tensor] = {}
    for names, part, tracked, owner in zip(listed, batch.parts, batch.tracked(), owners, strict=False):
        if owner == rank:
            own += tracked
            missing = [name for name in names if name not in tracked]
        else:
            missing = [name for name in tracked if name not in names]
            tensors |= {name: x for name, x in tracked.items() if name in names}
        if missing:
            raise UsageError(
                f"{', '.join(missing)} requires a gradient on some ranks only, but a module in front of the Pipe must "
                "be trained on all of them; give every rank the same mini-batch, or detach() it on every rank"
            )
        if faults := [
            f"{name}: {list(names[name])} on the rank of the first stage, {list(part[name].shape)} here"
            for name in names
            if name in tensors and list(part[name].shape) != list(names[name])
        ]:
            raise BatchError(join_faults("ranks must be given the same mini-batch, but shapes differ:", faults))
    return EntryGradients([(owner, list(names)) for owner, names in zip(owners, listed, strict=False)], own, tensors)


def describe_modes(layers: Sequence[nn.Module]) -> str:
    """The training modes of all modules: how many are in training mode, and a checksum of which."""
    modes = bytes([module.training for layer in layers for module in layer.modules()])
    return f"{sum(modes)} of {len(modes)} ({zlib.crc32(modes):08x})"


def _named(value: Any, root: str) -> dict[str, Tensor]:
    leaves, structure = flatten(value)
    named: dict[str, Tensor] = {}
    for name, leaf in zip(structure_paths(structure, root), leaves, strict=True):
        if isinstance(leaf, Tensor):
            named[name] = leaf
        elif isinstance(leaf, NoChunk):
            named |= _named(leaf.value, name)
    return named


def _is_plain(tensor: Tensor) -> bool:
    # Others have no bytes of their own to compare, or only a part of them on each rank.
    kinds = (Tensor, nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _checksum(tensor: Tensor) -> str:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    code = zlib.crc32(memory_of(plain)) if plain.numel() else 0
    return f"{str(plain.dtype).removeprefix('torch.')} {list(plain.shape)} {code:08x}"
