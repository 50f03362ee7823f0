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

Where values and gradients wait until a worker takes them.

A mailbox belongs to one worker and one walk. Everyone may put; only its worker takes, so what has arrived lies
on a private shelf and needs no lock. Closing a mailbox wakes its worker: nobody waits for a sender that failed.

The gate of a plan: where micro-batches enter it and results leave it, and where their gradients do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

from weft.core.segment import Gradients
from weft.pipeline.device import Message, parcel

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


class Closed(Exception):
    """The walk was given up while a worker waited; the reason is kept by the walk, not by this exception."""


class LocalQueue:
    """What waits for the only worker of a serial walk: a dictionary, since nobody else can put meanwhile."""

    def __init__(self) -> None:
        self._waiting: dict[Address, Any] = {}

    def put(self, address: Address, value: Any) -> None:
        self._waiting[address] = value

    def take(self, address: Address) -> Any:
        return self._waiting.pop(address)

    def close(self) -> None:
        self._waiting.clear()


class Mailbox:
    """What waits for one worker of a threaded walk. `take` waits for the sender, `close` ends the waiting."""

    def __init__(self) -> None:
        self._arriving: SimpleQueue[tuple[Address | None, Any]] = SimpleQueue()
        self._shelf: dict[Address, Any] = {}

    def put(self, address: Address, value: Any) -> None:
        self._arriving.put((address, value))

    def take(self, address: Address) -> Any:
        """The value at `address`, as soon as it is there. Raises Closed when the walk is given up first."""
        shelf = self._shelf
        while address not in shelf:
            arrived, value = self._arriving.get()
            if arrived is None:
                self._arriving.put((None, None))  # stays closed for whoever asks again
                raise Closed
            shelf[arrived] = value
        return shelf.pop(address)

    def close(self) -> None:
        self._arriving.put((None, None))


@runtime_checkable
class Inbox(Protocol):
    """Where what was sent to a worker waits for it: see `weft.pipeline.routing`."""

    def put(self, address: Address, value: Any) -> None: ...
    def take(self, address: Address) -> Any: ...
    def close(self) -> None: ...


@dataclass
class Mailboxes:
    """The boxes of all workers in one walk, and what has left the run."""

    boxes: Sequence[Inbox]
    worker_of: Sequence[int]
    left: dict[Address, Message] = field(default_factory=dict[Address, Message])

    def send(self, stage: int, address: Address, parcel: Message) -> None:
        """Put it where `stage` will take it; OUTSIDE: keep it for the caller."""
        if stage == OUTSIDE:
            self.left[address] = parcel
        else:
            self.boxes[self.worker_of[stage]].put(address, parcel)


Given = dict[int, dict[Address, Message]]
"""What a walk starts with, by the segment that takes it."""


class EntryPoint(NamedTuple):
    """Where a part of the mini-batch (the input, or the target) enters: on which route, into which segment."""

    route: int
    segment: int


@dataclass(frozen=True)
class EntryPoints:
    """`inlets` for the parts of the mini-batch, and the route `result` for what leaves the segment `source`."""

    inlets: tuple[EntryPoint, ...]
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

    def results(self, left: Mapping[Address, Message], count: int) -> list[Any]:
        """What the last segment made of every micro-batch."""
        return [left[self._out(index)].value for index in range(count)]

    def seed(self, gradients: Sequence[Gradients]) -> Given:
        """Where the walk back finds the gradients of every result."""
        return {self.source: {self._out(index): parcel(each) for index, each in enumerate(gradients)}}

    def gradients(self, left: Mapping[Address, Message], count: int) -> list[Gradients]:
        """What the walk back sent out for every micro-batch: the gradients of the leaves of all its parts."""
        return [
            [leaf for route, segment in self.inlets for leaf in left[Address(route, segment, index)].value]
            for index in range(count)
        ]

    def _out(self, index: int) -> Address:
        return Address(self.result, OUTSIDE, index)
