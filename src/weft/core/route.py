"""Routes: where a value that crosses a cut comes from, and who reads it.

A value has an *address* (route, reader, micro-batch). Going forward it travels from the route's source to the
reader; its gradient has the same address and travels from the reader to the source. Nobody keeps a table of
gradients to return: the routes walked in reverse are that table.

            route "x0"        route "x1"        route "x2"
    OUTSIDE ----------> stage 0 ------> stage 1 ------> OUTSIDE
                           |     route "skip"   ^
                           +--------------------+            any number of readers

A route with `delay` d is a *carry*: micro-batch (or time chunk) i reads what micro-batch i - d produced. The
first d readings come from outside (the initial state), and the last d productions go outside (the last state).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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

    def read_address(self, route: int, stage: int, micro_batch: int) -> Address:
        """Where `stage` finds its value for `micro_batch` on this route."""
        return Address(route, stage, micro_batch - self.routes[route].delay)

    def written_addresses(self, route: int, micro_batch: int, micro_batches: int) -> list[Address]:
        """Where the value that the source made of `micro_batch` goes to; reader OUTSIDE leaves the run."""
        at = self.routes[route]
        if at.delay and micro_batch + at.delay >= micro_batches:
            return [Address(route, OUTSIDE, micro_batch)]
        return [Address(route, reader, micro_batch) for reader in at.readers]

    def comes_from_outside(self, address: Address) -> bool:
        """True when no stage of this run produced the value, so that its gradient leaves the run too."""
        return self.routes[address.route].source == OUTSIDE or address.micro_batch < 0
