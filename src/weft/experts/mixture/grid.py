"""Experts on a grid, and which of them live.

    prefix "ffn", grid 4 x 32      "ffn.3.17" is the expert in row 3 and column 17

    snapshot of the directory ──> Crowd: uids   ["ffn.0.0", "ffn.0.1", "ffn.3.17"]
                                         places [[0, 0],    [0, 1],    [3, 17]]      living experts x axes, int64

A crowd is made once for each snapshot, not for each call. What stands in the directory under the prefix and is no
place of the grid is passed over: it belongs to somebody else. Grids whose scores are sums along the axes are the
product keys of Lample et al., "Large Memory Layers with Product Keys" (2019), in the form of hivemind's mixture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault
from weft.experts.directory import Snapshot


@dataclass(frozen=True)
class Crowd:
    """The living experts of a grid, sorted by their place: ``places`` is int64, experts x axes, on the CPU."""

    uids: tuple[str, ...]
    places: Tensor

    def __len__(self) -> int:
        return len(self.uids)


def grid_faults(prefix: Any, sizes: Any) -> list[str]:
    """What is wrong with the ``uid_prefix`` and the ``grid_size`` of a grid."""
    named = isinstance(prefix, str) and prefix.strip(".")
    faults = [] if named else [f"uid_prefix is {prefix!r}, wanted a name such as 'ffn'"]
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence):
        return [*faults, f"grid_size is {sizes!r}, wanted a list with one size for each axis, such as [4, 32]"]
    faults += [] if sizes else ["grid_size is empty, wanted one size for each axis"]
    each = enumerate(cast("Sequence[Any]", sizes))
    return faults + [fault for i, size in each for fault in count_fault(f"grid_size[{i}]", size)]


class Grid:
    """Names of experts, and what they mean. ``sizes`` says how many places there are along each axis.

    Raises ``UsageError`` that lists an empty prefix, and sizes that are missing or not positive.
    """

    def __init__(self, prefix: str, sizes: Sequence[int]) -> None:
        faults = grid_faults(prefix, sizes)
        if faults:
            raise UsageError(listed("there is no such grid of experts:", faults))
        self.prefix = prefix.rstrip(".") + "."
        self.sizes = tuple(sizes)

    def __len__(self) -> int:
        """The number of places."""
        return math.prod(self.sizes)

    def uid(self, place: Sequence[int]) -> str:
        """The name of the expert at a place."""
        return self.prefix + ".".join(map(str, place))

    def place(self, uid: str) -> tuple[int, ...] | None:
        """Where the expert of this name stands; ``None`` if it is not in the grid."""
        if not uid.startswith(self.prefix):
            return None
        words = uid[len(self.prefix) :].split(".")
        if len(words) != len(self.sizes) or not all(word.isascii() and word.isdecimal() for word in words):
            return None
        if any(len(word) > len(str(size)) for word, size in zip(words, self.sizes, strict=True)):
            return None  # also spares int() a number of thousands of digits
        place = tuple(int(word) for word in words)
        inside = all(i < size for i, size in zip(place, self.sizes, strict=True))
        return place if inside and self.uid(place) == uid else None  # "03" would be a second name of 3

    def crowd(self, snapshot: Snapshot) -> Crowd:
        """The experts of the snapshot that stand in the grid."""
        found = sorted((place, uid) for uid in snapshot.search(self.prefix) if (place := self.place(uid)) is not None)
        places = torch.tensor([place for place, _ in found], dtype=torch.int64, device="cpu")
        return Crowd(tuple(uid for _, uid in found), places.reshape(-1, len(self.sizes)))
