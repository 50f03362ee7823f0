"""Routes: where a value that crosses a cut comes from, and which stages read it.

A value has an *address* (route, reader, micro-batch). Going forward it travels from the route's source to the reader;
its gradient has the same address and travels from the reader to the source. No table of gradients to return is kept:
the routes walked in reverse are that table.

            route "x0"        route "x1"        route "x2"
    OUTSIDE ----------> stage 0 ------> stage 1 ------> OUTSIDE
                           |     route "skip"   ^
                           +--------------------+            any number of readers

A route with `delay` d is a *carry*: micro-batch (or time chunk) i reads what micro-batch i - d produced. The first d
readings come from outside (the initial state), and the last d productions go outside (the last state).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.core.segment import Gradients
from weft.pipeline.device import Message, message_of

OUTSIDE = -1


@dataclass(frozen=True)
class Route:
    """One value per micro-batch: from `source` (a stage, or OUTSIDE) to each of `readers`."""

    name: str
    source: int
    readers: tuple[int, ...]
    delay: int = 0


class Address(NamedTuple):
    """Where one value waits: on which route, for whom, and what micro-batch produced it (below 0: initial)."""

    route: int
    reader: int
    micro_batch: int


@dataclass(frozen=True)
class Wiring:
    """All routes of a model, seen from its stages.

    `inputs[s]` and `outputs[s]` number the routes that stage s reads and writes, in the order in which its
    function takes and returns their values.
    """

    routes: tuple[Route, ...]
    stages: int
    inputs: tuple[tuple[int, ...], ...] = field(init=False)
    outputs: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        def numbered(belongs: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(r for r, at in enumerate(belongs) if s in at) for s in range(self.stages))

        object.__setattr__(self, "inputs", numbered([route.readers for route in self.routes]))
        object.__setattr__(self, "outputs", numbered([(route.source,) for route in self.routes]))


Given = dict[int, dict[Address, Message]]
"""What a walk starts with, by the segment that takes it."""


class EntryPoint(NamedTuple):
    """Where a part of the mini-batch (the input, or the target) enters: on which route, into which segment."""

    route: int
    segment: int


@dataclass(frozen=True)
class EntryPoints:
    """`entries` for the parts of the mini-batch, and the route `result` for what leaves the segment `source`."""

    entries: tuple[EntryPoint, ...]
    result: int
    source: int

    def enter(self, micro_batches: Sequence[Sequence[Any]], *, streams: bool) -> Given:
        """Where the walk forward finds the parts of every micro-batch. With `streams` they may be on a GPU."""
        given: Given = {}
        for part, entry in enumerate(self.entries):
            for index, parts in enumerate(micro_batches):
                address = Address(entry.route, entry.segment, index)
                value = parts[part]
                given.setdefault(entry.segment, {})[address] = message_of(value) if streams else Message(value)
        return given

    def results(self, left: Mapping[Address, Message], count: int) -> list[Any]:
        """What the last segment made of every micro-batch."""
        return [left[self._out(index)].value for index in range(count)]

    def seed(self, gradients: Sequence[Gradients], *, streams: bool) -> Given:
        """Where the walk back finds the gradients of every result."""
        messages = [message_of(each) if streams else Message(each) for each in gradients]
        return {self.source: {self._out(index): each for index, each in enumerate(messages)}}

    def gradients(self, left: Mapping[Address, Message], count: int) -> list[Gradients]:
        """What the walk back sent out for every micro-batch: the gradients of the leaves of all its parts."""
        return [
            [leaf for route, segment in self.entries for leaf in left[Address(route, segment, index)].value]
            for index in range(count)
        ]

    def _out(self, index: int) -> Address:
        return Address(self.result, OUTSIDE, index)
