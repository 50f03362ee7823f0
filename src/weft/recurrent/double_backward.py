"""Gradients of gradients, and many gradients at once: a derived sequence is run once more, now by plain autograd.

    x ----+                         +--> first gradients, which autograd can differentiate again
    s0 ---+-> gates -> eager loop --+
    w -----------------^

The derived backward is a loop that autograd does not see, and takes one gradient of each end. Under `create_graph=True`
or `is_grads_batched=True` the eager loop runs over the same tensors, with the same random numbers, and autograd makes
the gradients. It costs what the eager loop costs, and only those who ask pay for it.

A gate is where the node's own inputs begin. Closed, no gradient passes it, so the first gradients are those of this
node alone, even if an input was computed from a parameter that the cell reads as well. Then it is opened, for the
second ones.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.ambient import Ambient
from weft.core.boundary import quiet_hooks
from weft.core.errors import DoubleBackwardError
from weft.core.rng import generators
from weft.core.tree import flatten, unflatten
from weft.recurrent.capture import Cell, present
from weft.recurrent.captured import Captured

_C = cast(Any, torch._C)
AsItWas = Callable[[], AbstractContextManager[bool]]
Ends = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Flat leaves: outputs T x ..., states after every step T x ..., states after the last."""


def stepwise(captured: Captured, cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Ends:
    """The cell that was captured, step by step, in plain autograd. `inputs` are T x ..., T at least 1.

    Further inputs, which stand for random numbers, are not looked at: the cell draws.
    """
    count = captured.input_structure.num_leaves
    state = unflatten(captured.state_structure, states)
    outputs: list[list[Tensor]] = []
    after: list[list[Tensor]] = []
    for step in zip(*(each.unbind(0) for each in inputs[:count]), strict=True):
        y, state = cell(unflatten(captured.input_structure, list(step)), state)
        outputs.append(present(flatten(y)[0]))
        after.append(flatten(state)[0])
    stacked = [[torch.stack(column) for column in zip(*rows, strict=True)] for rows in (outputs, after)]
    return stacked[0], stacked[1], after[-1]


@dataclass(frozen=True)
class Again:
    """What it takes to run a sequence a second time as it was run first."""

    captured: Captured
    cell: Cell
    ambient: Ambient
    random: tuple[tuple[torch.Generator, Tensor], ...]
    """The generators that the cell draws from, as they were before."""
    as_it_was: AsItWas
    """Inside, the cell reads the tensors that it read then; tells whether it is what was captured in all else."""

    @staticmethod
    def capture(captured: Captured, cell: Cell, device: torch.device, as_it_was: AsItWas) -> "Again":
        """Before the sequence runs, and before it draws."""
        sources = generators([device]) if captured.draws else ()
        random = tuple([(each, each.get_state()) for each in sources])
        return Again(captured, cell, Ambient.capture([device.type]), random, as_it_was)

    def run(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Ends:
        """The sequence in plain autograd; the generators stay as they are. Raises DoubleBackwardError."""
        now = [(source, source.get_state()) for source, _ in self.random]
        with ExitStack() as stack:
            for each in (self.ambient.here(), self.ambient.casting(), self.ambient.process_flags(), _outside_vmap()):
                stack.enter_context(each)
            if not stack.enter_context(self.as_it_was()):
                raise DoubleBackwardError(
                    "a gradient of a gradient (create_graph=True), or a batch of gradients, runs the cell once more, "
                    "but since forward the cell was changed: a flag such as .training, a plain attribute, or a tensor "
                    "that a function closes over; change it after backward"
                )
            try:
                for source, state in self.random:
                    source.set_state(state)
                return stepwise(self.captured, self.cell, inputs, states)
            finally:
                for source, state in now:
                    source.set_state(state)


def _outside_vmap() -> AbstractContextManager[None]:
    """A batch of gradients comes under vmap, which forbids to draw; what is drawn inside belongs to no batch."""
    inside = _C.DispatchKeySet(_C._dispatch_key_parse("VmapMode"))
    return cast("AbstractContextManager[None]", _C._ExcludeDispatchKeyGuard(inside))


Given = tuple[Sequence[Tensor | None], Sequence[Tensor | None], Sequence[Tensor | None]]
"""Gradients of `Ends`; those of the states may be missing as a whole."""


def differentiable_gradients(
    again: Again, inputs: Sequence[Tensor], states: Sequence[Tensor], given: Given
) -> list[Tensor | None]:
    """The gradients of inputs, states and parameters, in this order; under grad mode autograd can differentiate them.

    `given` are those of outputs, of all states (or none), and of the last states. Raises DoubleBackwardError.
    """
    door, further = _Door(), torch.is_grad_enabled()
    parameters = again.captured.parameters
    with torch.enable_grad():
        gated = [door.gate(each) for each in (*inputs, *states)]
        ends = again.run(gated[: len(inputs)], gated[len(inputs) :])
        pairs = [
            (end, gradient)
            for values, gradients in zip(ends, given, strict=True)
            for end, gradient in zip(values, gradients, strict=False)
            if gradient is not None and end.requires_grad
        ]
        asked = [each for each in (*gated, *parameters) if each.requires_grad]
        if not pairs or not asked:
            return [None] * (len(gated) + len(parameters))
        with door.shut(), quiet_hooks(parameters):
            found = torch.autograd.grad(
                [end for end, _ in pairs],
                asked,
                [each for _, each in pairs],
                create_graph=further,
                allow_unused=True,
            )
    rest = iter(found)
    return [next(rest) if each.requires_grad else None for each in (*gated, *parameters)]


class _Door:
    """All gates of one sequence. They open and shut together."""

    def __init__(self) -> None:
        self.open = True

    def gate(self, tensor: Tensor) -> Tensor:
        """The same values, behind the door."""
        return cast(Tensor, _Gate.apply(self, tensor)) if tensor.requires_grad else tensor

    @contextmanager
    def shut(self) -> Generator[None]:
        """No gradient passes inside."""
        self.open = False
        try:
            yield
        finally:
            self.open = True


class _Gate(torch.autograd.Function):
    """Use `_Door.gate`; this is its autograd node."""

    @staticmethod
    def forward(ctx: Any, door: _Door, tensor: Tensor) -> Tensor:
        ctx.door = door
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        return None, gradients[0] if ctx.door.open else None
