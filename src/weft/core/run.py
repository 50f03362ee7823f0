"""One mini-batch's way through the stages: what every action does, and where its results go.

    F:  take the values that the stage reads  -> Segment.forward -> cut and send one leaf per reader
    B:  recompute if need be -> take the gradients of what was sent, add them up -> Tape.backward -> send back
    I:  as B, but the parameters' gradients are left for later;  W: and added up now

A run belongs to one step. Executors call `perform` from the stage's worker; nothing else here is shared between
workers but dictionaries that each of them writes at keys of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from weft.core.channel import Closed
from weft.core.errors import TWICE, BackwardTwiceError, RandomnessError, advise
from weft.core.gradient_sum import GradientSum, added
from weft.core.place import Parcel, Place
from weft.core.rng import TRIES, Dice
from weft.core.route import OUTSIDE, Address, Wiring
from weft.core.schedule import Action
from weft.core.segment import Gradients, Keep, Segment, Tape, Visit, cut
from weft.core.split_backward import SplitBackward


@runtime_checkable
class Box(Protocol):
    """Where what was sent to a worker waits for it: see `weft.core.channel`."""

    def put(self, address: Address, value: Any) -> None: ...
    def take(self, address: Address) -> Any: ...
    def close(self) -> None: ...


@dataclass
class Post:
    """The boxes of all workers in one walk, and what has left the run."""

    boxes: Sequence[Box]
    worker_of: Sequence[int]
    left: dict[Address, Parcel] = field(default_factory=dict[Address, Parcel])

    def send(self, stage: int, address: Address, parcel: Parcel) -> None:
        """Put it where `stage` will take it; OUTSIDE: keep it for the caller."""
        if stage == OUTSIDE:
            self.left[address] = parcel
        else:
            self.boxes[self.worker_of[stage]].put(address, parcel)


@runtime_checkable
class Watcher(Protocol):
    """Somebody who wants to know what runs when, and what stays alive for it; see `weft.core.events`."""

    def doing(self, kind: str, action: Action) -> AbstractContextManager[None]:
        """Surrounds the work of an action, without its waiting; kind "R" is a recomputation."""
        ...

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """A value of stage `source` is on its way to a reader, who reads it with that micro-batch."""
        ...

    def released(self, action: Action) -> None:
        """The tape of the action's stage and micro-batch is gone."""
        ...


@runtime_checkable
class WatchesSteps(Watcher, Protocol):
    """A watcher that can tell steps apart: each run gets one of its own, and drops it when it is dropped itself."""

    def one_step(self) -> Watcher:
        """The watcher of one run."""
        ...


class Run:
    """All that one step leaves between its actions: the tapes, and the sums of parameter gradients.

    `visits` holds one per micro-batch; `keeps(stage, micro_batch)` says what a forward keeps; `places[stage]` is
    None where nothing has to be moved.
    """

    def __init__(
        self,
        wiring: Wiring,
        segments: Sequence[Segment],
        visits: Sequence[Visit],
        keeps: Callable[[int, int], Keep],
        places: Sequence[Place | None],
        watcher: Watcher | None = None,
        dice: Dice | None = None,
    ) -> None:
        self.wiring = wiring
        self.segments = segments
        self.micro_batches = micro_batches = len(visits)
        self.places = places
        self.retain = False
        self._keeps = keeps
        self._visits = visits
        self._watcher = watcher.one_step() if watcher is not None and isinstance(watcher, WatchesSteps) else watcher
        self._dice = dice
        self._tapes: list[list[Tape | None]] = [[None] * micro_batches for _ in segments]
        self._pending: dict[tuple[int, int], SplitBackward | None] = {}
        self._plain = watcher is None and not any(places)
        self.sums = [GradientSum(len(segment.parameters)) for segment in segments]

    def recomputing(self) -> list[int]:
        """The segments that will run again in backward."""
        return [s for s, tapes in enumerate(self._tapes) if any(tape and tape.recomputes for tape in tapes)]

    def turn_back(self, *, retain: bool) -> None:
        """Before every walk backward. With `retain` there may be another one, which needs the tapes too.

        What an earlier walk has added up and nobody has collected, because it failed, is forgotten. So are parameters
        that were frozen since the forward: autograd may not be asked about them.
        """
        self.retain = retain
        for segment in self.segments:
            segment.parameters = [each for each in segment.parameters if each.requires_grad]
        self.sums = [GradientSum(len(segment.parameters)) for segment in self.segments]

    def perform(self, action: Action, box: Box, post: Post) -> None:
        """Do one action in the calling thread, waiting in `box` for what it needs.

        An exception of the user's code passes through with its traceback, and a note that says where it was.
        """
        try:
            if action.kind == "F":
                self._forward(action, box, post)
            elif action.kind == "W":
                self._do("W", action, self._segment_weights, action)
            else:
                self._backward(action, box, post)
        except Closed:
            raise
        except BaseException as error:
            word = "forward" if action.kind == "F" else "backward"
            advise(error)
            error.add_note(f"weft: in {word} of stage {action.stage}, micro-batch {action.micro_batch} ({action})")
            raise

    def parameter_gradients(self) -> dict[int, Tensor]:
        """The sum over stages and micro-batches for every parameter, by its id(); then the sums start anew."""
        total: dict[int, Tensor] = {}
        for segment, sums in zip(self.segments, self.sums, strict=True):
            for parameter, gradient in zip(segment.parameters, sums.totals, strict=True):
                if gradient is not None:
                    seen = total.get(id(parameter))
                    total[id(parameter)] = gradient if seen is None else added(seen, gradient.to(seen.device))
        self.sums = [GradientSum(len(segment.parameters)) for segment in self.segments]
        return total

    def _forward(self, action: Action, box: Box, post: Post) -> None:
        stage, index = action.stage, action.micro_batch
        reads = [self.wiring.read_address(route, stage, index) for route in self.wiring.inputs[stage]]
        parcels = [box.take(address) for address in reads]
        sent = self._do("F", action, self._segment_forward, action, parcels)
        del parcels  # whoever gets what is sent may look already: what only this action needed is free
        for address, parcel in sent:
            post.send(address.reader, address, parcel)

    def _segment_forward(self, action: Action, parcels: Sequence[Parcel]) -> list[tuple[Address, Parcel]]:
        """Run the segment, keep its tape, and cut one leaf for every reader of every output."""
        stage, index = action.stage, action.micro_batch
        segment, place = self.segments[stage], self.places[stage]
        values = [parcel.value if place is None else place.arrive(parcel) for parcel in parcels]
        keep = self._keeps(stage, index)
        outputs, tape = segment.forward(self._visits[index], values, keep)
        self._tapes[stage][index] = tape
        if self._watcher is not None and keep == "nothing":
            self._watcher.released(action)
        tracked = False if tape is None else tape.tracks
        sent: list[tuple[Address, Parcel]] = []
        for route, output in zip(self.wiring.outputs[stage], outputs, strict=True):
            for address in self.wiring.written_addresses(route, index, self.micro_batches):
                leaf = cut(output, tracked)
                if self._watcher is not None:
                    self._watcher.sent(stage, address, index + self.wiring.routes[route].delay, leaf)
                sent.append((address, Parcel(leaf) if place is None else place.depart(leaf)))
        return sent

    def _backward(self, action: Action, box: Box, post: Post) -> None:
        stage, index = action.stage, action.micro_batch
        tape = self._tapes[stage][index]
        if tape is None:
            raise BackwardTwiceError(TWICE)
        if tape.recomputes:
            self._recompute(action, tape)
        parcels = [
            [box.take(address) for address in self.wiring.written_addresses(route, index, self.micro_batches)]
            for route in self.wiring.outputs[stage]
        ]
        inputs = self._do(action.kind, action, self._segment_backward, action, tape, parcels)
        del tape, parcels  # as in forward
        for route, parcel in zip(self.wiring.inputs[stage], inputs, strict=True):
            address = self.wiring.read_address(route, stage, index)
            outside = self.wiring.comes_from_outside(address)
            post.send(OUTSIDE if outside else self.wiring.routes[route].source, address, parcel)

    def _recompute(self, action: Action, tape: Tape) -> None:
        """Make the graph again; and again, if others were seen to have drawn random numbers meanwhile."""
        for _ in range(TRIES - 1):
            try:
                return self._do("R", action, tape.prepare)
            except RandomnessError:
                pass
        return self._do("R", action, tape.prepare)

    def _segment_backward(self, action: Action, tape: Tape, parcels: Sequence[Sequence[Parcel]]) -> list[Parcel]:
        """Add up what the readers sent back, walk the tape, and add up the parameters' gradients."""
        stage, index = action.stage, action.micro_batch
        place = self.places[stage]
        gradients = [
            _total([parcel.value if place is None else place.arrive(parcel) for parcel in of_readers], width)
            for of_readers, width in zip(parcels, tape.widths(), strict=True)
        ]
        with self._turn(stage, tape):
            if action.kind == "I" and not self.retain:
                inputs, self._pending[stage, index] = tape.backward_inputs(gradients)
                self._tapes[stage][index] = None
                return [Parcel(each) if place is None else place.depart(each) for each in inputs]
            inputs, of_parameters = tape.backward(gradients, retain=self.retain)
        self.sums[stage].add(of_parameters)
        if not self.retain:
            self._free(action)
        return [Parcel(each) if place is None else place.depart(each) for each in inputs]

    def _segment_weights(self, action: Action) -> None:
        """Add up the parameters' gradients that I has left. (Where the graph is retained, I has left none.)"""
        split = self._pending.pop((action.stage, action.micro_batch), None)
        if split is not None:
            with self._turn(action.stage):
                found = split.parameter_gradients()
            self.sums[action.stage].add(found)
        if not self.retain:
            self._free(action)

    def _turn(self, stage: int, tape: Tape | None = None) -> AbstractContextManager[Any]:
        """For a walk back through the graph of the stage: see `Dice.backward`."""
        if self._dice is None:
            return nullcontext()
        return self._dice.backward(stage, tape.roots if tape is not None else list)

    def _free(self, action: Action) -> None:
        self._tapes[action.stage][action.micro_batch] = None
        if self._watcher is not None:
            self._watcher.released(action)

    def _do(self, kind: str, action: Action, call: Callable[..., Any], *args: Any) -> Any:
        """Call it at the stage's place, and let the watcher see it."""
        if self._plain:
            return call(*args)
        place = self.places[action.stage]
        with ExitStack() as stack:
            if place is not None:
                stack.enter_context(place.here())
            if self._watcher is not None:
                stack.enter_context(self._watcher.doing(kind, action))
            return call(*args)


def _total(of_readers: Sequence[Gradients | None], width: int) -> Gradients:
    """The gradient of one value: the sum of what its readers send back, in their order."""
    present = [gradients for gradients in of_readers if gradients is not None]
    if not present:
        return [None] * width
    if len(present) == 1:
        return present[0] + [None] * (width - len(present[0]))  # of a result, the gradients that are there come first
    return [_sum([leaf for leaf in leaves if leaf is not None]) for leaves in zip(*present, strict=True)]


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    return reduce(added, gradients) if gradients else None
