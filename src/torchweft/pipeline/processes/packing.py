"""Nested values as messages that keep the identity of tensors.

    tensors of `known`               their number, because the receiver has them, or placeholders for them
    one tensor in several places     sent once
    other tensors                    a copy, with its strides

Memory that two results share is not kept. If a write through one of them changes the program, the programs of the ranks
differ, which is an error.
"""

import json
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchweft.core.pytree import flatten, from_plain, to_plain, unflatten


def pack(value: Any, known: Sequence[Any] = ()) -> Any:
    """The message. Its tensors are copies, so that the sender may write into its own."""
    leaves, structure = flatten(value)
    # By id(): a known tensor by its first number, a tensor that is sent by -1, -2, ...
    numbers = {id(x): k for k, x in reversed([*enumerate(known)]) if isinstance(x, Tensor)}
    copies: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in numbers:
            copies.append(leaf.detach().clone().requires_grad_(leaf.requires_grad))
            numbers[id(leaf)] = -len(copies)
    places = [numbers[id(leaf)] if isinstance(leaf, Tensor) else None for leaf in leaves]
    about = json.dumps([to_plain(structure, classes=True), places])
    return [about, [leaf for leaf in leaves if not isinstance(leaf, Tensor)], copies]


def unpack(message: Any, device: torch.device, known: Sequence[Any] = ()) -> Any:
    """The inverse of `pack`. The result has the `known` tensors of this process, and its `device`."""
    about, plain, copies = cast("tuple[str, list[Any], list[Tensor]]", message)
    structure, places = json.loads(about)
    # Copied with a graph, because the result of a call is not a leaf, and code between blocks can write into it.
    tensors = [x.clone() for x in copies]
    others = iter(device if isinstance(leaf, torch.device) and leaf.type == device.type else leaf for leaf in plain)
    leaves = [
        next(others) if place is None else cast(Tensor, known[place]) if place >= 0 else tensors[-1 - place]
        for place in cast("list[int | None]", places)
    ]
    return unflatten(from_plain(structure, classes=True), leaves)
