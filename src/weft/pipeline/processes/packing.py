"""Nested values as messages that keep the memory layout of tensors: strides, views, and shared memory.

    tensors of `given`, and views of them     their number; shape, strides and offset of a view
    other tensors                             the memory that they share, once; shape, strides and offset of each
    one tensor in several places              the first place

A plain message, `Walk.send`, has every tensor contiguous and by itself.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.core.pytree import flatten, from_plain, to_plain, unflatten
from weft.pipeline.microbatch import storage_id

_MADE, _AGAIN = -1, -2  # in the place of the number of a given tensor
Memory = tuple[int, Any, bool]
"""A storage, a dtype, and whether the tensors in it require a gradient."""


class _View(NamedTuple):
    """A tensor in its memory."""

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


def pack(value: Any, given: Sequence[Any] = ()) -> Any:
    """The message. Its tensors are copies, so that the sender may write into its own."""
    leaves, structure = flatten(value)
    numbered = [(k, x) for k, x in enumerate(given) if isinstance(x, Tensor)]
    numbers = {id(x): k for k, x in reversed(numbered)}
    # Not of parameters: where others have them, there are placeholders without memory.
    views = [(k, _View.of(x).memory[:2]) for k, x in numbered if not isinstance(x, nn.Parameter) and _has_memory(x)]
    known = {memory: k for k, memory in reversed(views)}
    first: dict[int, int] = {}
    made: dict[Memory, tuple[int, int, Tensor]] = {}
    places: list[Any] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            places.append(None)
        elif first.setdefault(id(leaf), position) != position:
            places.append([_AGAIN, first[id(leaf)]])
        elif id(leaf) in numbers:
            places.append([numbers[id(leaf)]])
        elif not _has_memory(leaf):
            places.append(leaf)
        else:
            view = _View.of(leaf)
            if (number := known.get(view.memory[:2])) is not None:
                places.append([number, *view[1:]])
                continue
            places.append(view)
            low, high, _ = made.get(view.memory, (view.start, view.end, leaf))
            made[view.memory] = min(low, view.start), max(high, view.end), leaf
    tensors = [_flat(*span, gradient) for (_, _, gradient), span in made.items()]
    order = {memory: k for k, memory in enumerate(made)}
    for position, place in enumerate(places):
        if isinstance(place, _View):
            start = place.start - made[place.memory][0]
            places[position] = [_MADE, order[place.memory], place.shape, place.strides, start]
        elif isinstance(place, Tensor):
            places[position] = [_MADE, len(tensors)]
            tensors.append(place.clone())
    about = json.dumps([to_plain(structure, classes=True), places])
    return [about, [leaf for leaf in leaves if not isinstance(leaf, Tensor)], tensors]


def unpack(message: Any, device: torch.device, given: Sequence[Any] = ()) -> Any:
    """The inverse of `pack`, with the tensors and the `device` of this process in the places of the sender's."""
    about, plain, tensors = cast("tuple[str, list[Any], list[Tensor]]", message)
    structure, places = json.loads(about)
    rest: Iterator[Any] = iter(
        device if isinstance(leaf, torch.device) and leaf.type == device.type else leaf for leaf in plain
    )
    made = [x.clone() for x in tensors]  # with a graph, if there is one: the result of a call is not a leaf
    leaves: list[Any] = []
    for place in places:
        if place is None:
            leaves.append(next(rest))
        elif place[0] == _AGAIN:
            leaves.append(leaves[place[1]])
        else:
            number, *view = cast("list[Any]", place)
            tensor = made[int(view.pop(0))] if number == _MADE else cast(Tensor, given[number])
            leaves.append(tensor.as_strided(*view) if view else tensor)
    return unflatten(from_plain(structure, classes=True), leaves)


def _has_memory(tensor: Tensor) -> bool:
    """Whether strides and an offset describe the tensor. Others, if they can be sent at all, travel by themselves."""
    return not (tensor.is_sparse or tensor.is_quantized or tensor.is_mkldnn or tensor.is_conj() or tensor.is_neg())


def _flat(low: int, high: int, tensor: Tensor, gradient: bool) -> Tensor:
    """A copy of the memory from `low` to `high`."""
    return tensor.detach().as_strided((high - low,), (1,), low).clone().requires_grad_(gradient)
