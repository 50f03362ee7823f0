"""The gate of a plan: where micro-batches enter it and results leave it, and where their gradients do.

A plan takes the micro-batches one by one, at addresses of their own, or all together as one list. Behind the gate
this makes no difference: values and gradients always come and go per micro-batch.
"""

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
    """`inlets` for the parts, the route `result` for what leaves, and whether micro-batches pass `together`."""

    inlets: tuple[Inlet, ...]
    result: int
    source: int
    together: bool = False

    def enter(self, micro_batches: Sequence[Sequence[Any]]) -> Given:
        """Where the walk forward finds the parts of every micro-batch."""
        given: Given = {}
        for part, inlet in enumerate(self.inlets):
            values = [parts[part] for parts in micro_batches]
            for index, value in enumerate([values] if self.together else values):
                address = Address(inlet.route, inlet.segment, index)
                given.setdefault(inlet.segment, {})[address] = parcel(value)
        return given

    def results(self, left: Mapping[Address, Parcel], count: int) -> list[Any]:
        """What the last segment made of every micro-batch."""
        if self.together:
            return left[self._out(0)].value
        return [left[self._out(index)].value for index in range(count)]

    def seed(self, gradients: Sequence[Gradients]) -> Given:
        """Where the walk back finds the gradients of every result."""
        pieces = [[leaf for each in gradients for leaf in each]] if self.together else gradients
        return {self.source: {self._out(index): parcel(each) for index, each in enumerate(pieces)}}

    def gradients(self, left: Mapping[Address, Parcel], count: int) -> list[Gradients]:
        """What the walk back sent out for every micro-batch: the gradients of the leaves of all its parts."""
        found: list[Gradients] = [[] for _ in range(count)]
        for route, segment in self.inlets:
            if self.together:
                flat: Gradients = left[Address(route, segment, 0)].value
                width = len(flat) // count
                pieces = [flat[i * width : (i + 1) * width] for i in range(count)]
            else:
                pieces = [left[Address(route, segment, index)].value for index in range(count)]
            for each, piece in zip(found, pieces, strict=True):
                each += piece
        return found

    def _out(self, index: int) -> Address:
        return Address(self.result, OUTSIDE, index)
