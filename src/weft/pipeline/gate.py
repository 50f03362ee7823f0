"""The gate of a plan: where micro-batches enter it and results leave it, and where their gradients do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.core.place import Parcel, parcel
from weft.core.route import OUTSIDE, Address
from weft.core.segment import Gradients

Given = dict[int, dict[Address, Parcel]]
"""What a walk starts with, by the segment that takes it."""


class Inlet(NamedTuple):
    """Where a part of the mini-batch (the input, or the target) enters: on which route, into which segment."""

    route: int
    segment: int


@dataclass(frozen=True)
class Gate:
    """`inlets` for the parts of the mini-batch, and the route `result` for what leaves the segment `source`."""

    inlets: tuple[Inlet, ...]
    result: int
    source: int

    def enter(self, micro_batches: Sequence[Sequence[Any]]) -> Given:
        """Where the walk forward finds the parts of every micro-batch."""
        given: Given = {}
        for part, inlet in enumerate(self.inlets):
            for index, parts in enumerate(micro_batches):
                address = Address(inlet.route, inlet.segment, index)
                given.setdefault(inlet.segment, {})[address] = parcel(parts[part])
        return given

    def results(self, left: Mapping[Address, Parcel], count: int) -> list[Any]:
        """What the last segment made of every micro-batch."""
        return [left[self._out(index)].value for index in range(count)]

    def seed(self, gradients: Sequence[Gradients]) -> Given:
        """Where the walk back finds the gradients of every result."""
        return {self.source: {self._out(index): parcel(each) for index, each in enumerate(gradients)}}

    def gradients(self, left: Mapping[Address, Parcel], count: int) -> list[Gradients]:
        """What the walk back sent out for every micro-batch: the gradients of the leaves of all its parts."""
        return [
            [leaf for route, segment in self.inlets for leaf in left[Address(route, segment, index)].value]
            for index in range(count)
        ]

    def _out(self, index: int) -> Address:
        return Address(self.result, OUTSIDE, index)
