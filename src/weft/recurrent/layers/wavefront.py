"""Layers times chunks of time as a wavefront: what a pipeline does across devices, done across time.

    worker 0   0F0 0F1 0F2 0F3                    0B3 0B2 0B1 0B0         stage: a layer,  micro-batch: a chunk of time
    worker 1       1F0 1F1 1F2 1F3        1B3 1B2 1B1 1B0

          x chunk k                  route "handed 0", from outside
              |
    -state->[ layer 0 ]-state->      route "state 0", a carry: chunk k + 1 of the same layer reads what chunk k made
              |                      route "handed 1"
    -state->[ layer 1 ]-state->      ... and every layer sends all its states outside
              |
          y chunk k

Core's executor walks this table as any other: layers are segments, cut out of autograd, and the whole stack is one
node for PyTorch. It is Appleyard et al.'s order for stacked LSTMs (arXiv 1604.01946), here forward and back and for
any cell.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.core.ambient import Ambient
from weft.core.boundary import quiet_hooks, without_gradient
from weft.core.channel import Closed
from weft.core.errors import TWICE, BackwardTwiceError
from weft.core.executor import Executor
from weft.core.place import Parcel
from weft.core.rng import Dice, RandomUse
from weft.core.route import OUTSIDE, Address, Route, Wiring
from weft.core.run import Box, Post, Run
from weft.core.schedule import Action, Schedule
from weft.core.segment import Function, Gradients, Segment, Visit, cut
from weft.core.tree import Structure, flatten, map_leaves, unflatten
from weft.recurrent.layers.borrowed import check_owned
from weft.recurrent.layers.chunks import Chunks, Tables
from weft.recurrent.unrolling import Result

RunLayer = Callable[[int, Any, Any, Tables], tuple[Any, Any, Any]]
"""``(layer, x, state, tables) -> (what goes to the next layer, last state, all states)``, over one chunk."""


@dataclass(frozen=True)
class Order:
    """What a wave is asked to do. For each layer: `parameters` are those that want a gradient; `uses` and
    `configurations` say what is known about its random numbers (see `weft.core.rng`); it is in `searched` once its
    graph was looked through."""

    run_layer: RunLayer
    chunks: Chunks
    tables: Tables
    inputs: Any
    states: Sequence[Any]
    parameters: Sequence[Sequence[Tensor]]
    uses: Sequence[RandomUse]
    configurations: Sequence[Hashable]
    executor: Executor
    tracked: bool
    searched: set[int]


@dataclass
class End:
    """A value that leaves the wave: the same of every chunk, to be joined, or of the last one alone."""

    stage: int
    addresses: list[Address]
    structure: Structure | None = None
    tensors: list[bool] = field(default_factory=list[bool])


@cache
def routes(layers: int) -> Wiring:
    """Routes 0 to L: handed on; then the carry of each layer; then all states of each layer."""
    handed = [Route("handed 0", OUTSIDE, (0,))]
    handed += [Route(f"handed {i + 1}", i, (i + 1 if i + 1 < layers else OUTSIDE,)) for i in range(layers)]
    carries = [Route(f"state {i}", i, (i,), delay=1) for i in range(layers)]
    states = [Route(f"states {i}", i, (OUTSIDE,)) for i in range(layers)]
    return Wiring((*handed, *carries, *states), layers)


@cache
def table(layers: int, chunks: int) -> Schedule:
    """One worker per layer: forward in time, then back in time. So a carry never has to wait for a later action."""
    kinds = [("F", i) for i in range(chunks)] + [("B", i) for i in reversed(range(chunks))]
    return Schedule(tuple(tuple(Action(layer, kind, i) for kind, i in kinds) for layer in range(layers)))


class Wave:
    """One call's journey through layers and chunks; see `weft.core.boundary.Journey`.

    `tensors` are all that it may have gradients for: inputs, initial states, parameters.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self.tracked = order.tracked
        self._ambient = Ambient.capture(["cpu"])
        self._layers = len(order.states)
        self._parameters = list({id(p): p for group in order.parameters for p in group}.values())
        self._inputs = _wanting(order.inputs)
        self._states = [_wanting(state) for state in order.states]
        self.tensors = [*self._inputs, *(leaf for each in self._states for leaf in each), *self._parameters]
        self._run: Run | None = None
        self._ends = self._all_ends()

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `Journey.forward`."""
        while True:
            dice = Dice(self._order.uses, self._order.configurations)
            run, left = self._walk(dice)
            if dice.settle():
                break
        self._run = run
        found = [leaf for end in self._ends for leaf in self._gathered(end, left)]
        return [leaf.detach() for leaf, _ in found], [tracked for _, tracked in found]

    def result(self, tensors: Sequence[Tensor]) -> Result:
        """What the call returns, with these tensors in place of those of `forward`."""
        rest = iter(tensors)
        values = [unflatten(_known(end), [next(rest) if has else None for has in end.tensors]) for end in self._ends]
        return Result(values[0], values[1 : 1 + self._layers], values[1 + self._layers :])

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `Journey.backward`. Raises BackwardTwiceError when the wave was freed."""
        run = self._run
        if run is None:
            raise BackwardTwiceError(TWICE)
        if not retain:
            self._run = None
        run.turn_back(retain=retain)
        half = table(self._layers, run.micro_batches).backward_only()
        with self._ambient.process_flags(), quiet_hooks(self._parameters):
            left = self._order.executor.walk(half, self._performed(run), self._seeds(gradients), self._ambient)
        found = [*self._of_inputs(left), *self._of_states(left)]
        of_parameters = run.parameter_gradients()
        found += [of_parameters.get(id(each)) for each in self._parameters]
        without_gradient(x for x, each in zip(self.tensors, found, strict=True) if each is None and x.is_leaf)
        return found

    def _walk(self, dice: Dice) -> tuple[Run, dict[Address, Parcel]]:
        order, layers, wiring = self._order, self._layers, routes(self._layers)
        tables = order.chunks.tables(order.tables)
        segments = [Segment(self._function(i, tables), order.parameters[i]) for i in range(layers)]
        visits = [Visit(k, self._ambient, dice) for k in range(len(tables))]
        keeps = "graph" if order.tracked else "nothing"
        run = Run(wiring, segments, visits, lambda s, m: keeps, [None] * layers, dice=dice)
        given = {layer: {self._carried(layer, -1): Parcel(cut(order.states[layer]))} for layer in range(layers)}
        for k, piece in enumerate(order.chunks.cut(order.inputs)):
            given[0][Address(0, 0, k)] = Parcel(map_leaves(_leaf, piece, order.inputs))
        half = table(layers, len(tables)).forward_only()
        return run, order.executor.walk(half, self._performed(run), given, self._ambient)

    def _function(self, layer: int, tables: Sequence[Tables]) -> Function:
        """The function of a layer's segment. Values come and go in the order of their routes."""

        def run_chunk(visit: Visit, x: Any, state: Any) -> tuple[Any, ...]:
            dice: Dice = visit.context
            of_chunk = tables[visit.micro_batch]
            with nullcontext() if dice.quiet else dice.scope(layer, visit.micro_batch):
                made = self._order.run_layer(layer, x, state, of_chunk)
            if torch.is_grad_enabled() and layer not in self._order.searched:
                check_owned(layer, made, (x, state), self._order.parameters[layer])
                self._order.searched.add(layer)
            return made

        return run_chunk

    def _performed(self, run: Run) -> Callable[[Action, Box, Post], None]:
        def perform(action: Action, box: Box, post: Post) -> None:
            try:
                run.perform(action, box, post)
            except Closed:
                raise
            except BaseException as error:
                begin, end = self._order.chunks.bounds[action.micro_batch]
                start = self._order.tables.start
                error.add_note(
                    f"weft: stages are layers, micro-batches are chunks of time: layer {action.stage}, "
                    f"chunk {action.micro_batch}, steps {start + begin} to {start + end - 1}"
                )
                raise

        return perform

    def _carried(self, layer: int, chunk: int) -> Address:
        """The state of a layer after a chunk; -1: the initial one. It leaves the wave after the last one."""
        last = chunk == len(self._order.chunks.bounds) - 1
        return Address(self._layers + 1 + layer, OUTSIDE if last else layer, chunk)

    def _all_ends(self) -> list[End]:
        """The outputs, the last state of every layer, all states of every layer."""
        layers, count = self._layers, len(self._order.chunks.bounds)
        outputs = End(layers - 1, [Address(layers, OUTSIDE, k) for k in range(count)])
        last = [End(i, [self._carried(i, count - 1)]) for i in range(layers)]
        states = [End(i, [Address(2 * layers + 1 + i, OUTSIDE, k) for k in range(count)]) for i in range(layers)]
        return [outputs, *last, *states]

    def _gathered(self, end: End, left: dict[Address, Parcel]) -> list[tuple[Tensor, bool]]:
        """The tensors of an end, and which of them have a gradient."""
        pieces = [flatten(left[address].value) for address in end.addresses]
        end.structure = pieces[0][1]
        columns = list(zip(*(leaves for leaves, _ in pieces), strict=True))
        end.tensors = [isinstance(column[0], Tensor) for column in columns]
        found: list[tuple[Tensor, bool]] = []
        for column, has in zip(columns, end.tensors, strict=True):
            if has:
                joined = column[0] if len(column) == 1 else self._order.chunks.join(column)
                found.append((joined, any(piece.requires_grad for piece in column)))
        return found

    def _seeds(self, gradients: Sequence[Tensor | None]) -> dict[int, dict[Address, Parcel]]:
        """The gradients of all ends, where the walk back finds them."""
        rest = iter(gradients)
        given: dict[int, dict[Address, Parcel]] = {}
        for end in self._ends:
            count = len(end.addresses)
            columns: list[Sequence[Tensor | None]] = []
            for has in end.tensors:
                gradient = next(rest) if has else None
                if gradient is None or count == 1:
                    columns.append([gradient] * count)
                else:
                    columns.append(self._order.chunks.split(gradient))
            for k, address in enumerate(end.addresses):
                given.setdefault(end.stage, {})[address] = Parcel([column[k] for column in columns])
        return given

    def _of_inputs(self, left: dict[Address, Parcel]) -> Gradients:
        pieces = [left[Address(0, 0, k)].value for k in range(len(self._order.chunks.bounds))]
        leaves = flatten(self._order.inputs)[0]
        columns = zip(leaves, zip(*pieces, strict=True), strict=True)
        return [self._order.chunks.join_gradients(column, leaf) for leaf, column in columns if _wants(leaf)]

    def _of_states(self, left: dict[Address, Parcel]) -> Gradients:
        found: Gradients = []
        for layer, state in enumerate(self._order.states):
            of_layer = left[self._carried(layer, -1)].value
            found += [each for leaf, each in zip(flatten(state)[0], of_layer, strict=True) if _wants(leaf)]
        return found


def _known(end: End) -> Structure:
    assert end.structure is not None
    return end.structure


def _wanting(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if _wants(leaf)]


def _leaf(piece: Any, whole: Any) -> Any:
    return piece.detach().requires_grad_(whole.requires_grad) if isinstance(piece, Tensor) else piece


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
