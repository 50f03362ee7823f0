"""Nested values as messages that keep the memory layout of tensors: strides, views, and shared memory.

    tensors of `known`, and views of them     their number; shape, strides and offset of a view
    other tensors                             the memory that they share, once; shape, strides and offset of each
    one tensor in several places              the first place

`Walk.send` alone makes every tensor contiguous. Code between blocks can depend on the layout: it reads strides, or
writes into one view and reads another one. All ranks would then record different programs.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.core.pytree import flatten, from_plain, to_plain, unflatten
from weft.pipeline.microbatch import storage_id

_NEW, _REPEATED = -1, -2  # in the place of the number of a known tensor
Memory = tuple[int, torch.dtype, bool]
"""A storage, a dtype, and whether the tensors in it require a gradient."""


class _View(NamedTuple):
    """A tensor as a part of its memory."""

    memory: Memory
    shape: list[int]
    strides: list[int]
    start: int

    @staticmethod
    def of(tensor: Tensor) -> "_View":
        memory = storage_id(tensor), tensor.dtype, tensor.requires_grad
        return _View(memory, list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset()))

    @property
    def end(self) -> int:
        reach = sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return self.start + reach + 1 if 0 not in self.shape else self.start


def pack(value: Any, known: Sequence[Any] = ()) -> Any:
    """The message. Its tensors are copies, so that the sender may write into its own."""
    leaves, structure = flatten(value)
    tensors = [(k, x) for k, x in reversed([*enumerate(known)]) if isinstance(x, Tensor)]
    numbers = {id(x): k for k, x in tensors}
    # Views of parameters are sent as new memory, because other ranks have placeholders without memory.
    known_memory = {_View.of(x).memory[:2]: k for k, x in tensors if not isinstance(x, nn.Parameter) and _has_memory(x)}
    first: dict[int, int] = {}
    spans: dict[Memory, tuple[int, int, Tensor]] = {}
    places: list[Any] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            places.append(None)
        elif first.setdefault(id(leaf), position) != position:
            places.append([_REPEATED, first[id(leaf)]])
        elif id(leaf) in numbers:
            places.append([numbers[id(leaf)]])
        elif not _has_memory(leaf):
            raise SpecError(f"a tensor of layout {leaf.layout} on {leaf.device} cannot be sent to other ranks")
        else:
            tensor = leaf.resolve_conj().resolve_neg()
            view = _View.of(tensor)
            if (number := known_memory.get(view.memory[:2])) is not None:
                places.append([number, *view[1:]])
                continue
            low, high, _ = spans.get(view.memory, (view.start, view.end, tensor))
            spans[view.memory] = min(low, view.start), max(high, view.end), tensor
            places.append(view)
    order = {memory: k for k, memory in enumerate(spans)}
    for position, place in enumerate(places):
        if isinstance(place, _View):
            start = place.start - spans[place.memory][0]
            places[position] = [_NEW, order[place.memory], place.shape, place.strides, start]
    copies = [
        tensor.detach().as_strided((high - low,), (1,), low).clone().requires_grad_(memory[2])
        for memory, (low, high, tensor) in spans.items()
    ]
    about = json.dumps([to_plain(structure, classes=True), places])
    return [about, [leaf for leaf in leaves if not isinstance(leaf, Tensor)], copies]


def unpack(message: Any, device: torch.device, known: Sequence[Any] = ()) -> Any:
    """The inverse of `pack`. The result has the `known` tensors of this process, and its `device`."""
    about, plain, tensors = cast("tuple[str, list[Any], list[Tensor]]", message)
    structure, places = json.loads(about)
    others = iter(device if isinstance(leaf, torch.device) and leaf.type == device.type else leaf for leaf in plain)
    new = [x.clone() for x in tensors]  # not a leaf of the graph, because the result of a call is not one
    leaves: list[Any] = []
    for place in places:
        if place is None:
            leaves.append(next(others))
        elif place[0] == _REPEATED:
            leaves.append(leaves[place[1]])
        else:
            number, *view = cast("list[Any]", place)
            tensor = new[int(view.pop(0))] if number == _NEW else cast(Tensor, known[number])
            leaves.append(tensor.as_strided(*view) if view else tensor)
    return unflatten(from_plain(structure, classes=True), leaves)


def _has_memory(tensor: Tensor) -> bool:
    """Whether shape, strides and an offset describe the tensor."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
