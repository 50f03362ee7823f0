"""A plan run by Python, as an engine: bulk operators of PyTorch around two minimal loops; it needs no compiler."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from weft.recurrent.captured import Captured
from weft.recurrent.engine import Chunk, Gradients, chunk_length
from weft.recurrent.plan import Plan, Trail


class PythonEngine:
    """See `weft.recurrent.engine.Engine`."""

    def __init__(self, captured: Captured, plan: Plan | None = None) -> None:
        self.captured = captured
        self.plan = Plan(captured) if plan is None else plan
        self._still = captured.passing
        self._step_bytes = _bytes(self.plan.kept())
        states = captured.roles.states
        shape = states[0].meta["val"].shape if states else ()
        self._chunk = chunk_length(self._step_bytes, shape[0] if shape else 1)

    def chunk_steps(self) -> int:
        """See `Engine`."""
        return self._chunk

    def begin(self) -> None:
        """Nothing: constants are cheap next to a loop in Python."""

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> Trail:
        """See `Engine`."""
        outputs, states, trail = self.plan.forward(chunk.inputs, first_states(chunk, self._still))
        write(chunk.outputs, outputs)
        moving = [k for k in range(len(states)) if k not in self._still]
        write([chunk.states[k][1:] for k in moving], [states[k][1:] for k in moving])
        return trail

    def again(self, constants: None, chunk: Chunk) -> Trail:
        """See `Engine`; by Python, step by step as before."""
        return self.plan.forward(chunk.inputs, first_states(chunk, self._still))[2]

    def backward(self, constants: None, chunk: Chunk, kept: Trail, gradients: Gradients) -> None:
        """See `Engine`."""
        states = state_gradients(chunk, gradients)
        inputs, carried, parameters = self.plan.backward(kept, gradients.outputs, states, gradients.carried)
        write(gradients.carried, carried)
        take(gradients, inputs, parameters)

    def release(self, kept: Trail) -> None:
        """Its memory goes with it."""

    def kept_bytes(self, steps: int) -> int:
        """See `Engine`."""
        return steps * self._step_bytes

    def work_bytes(self, steps: int) -> int:
        """See `Engine`: values of the backward loop and of what follows it, all steps at once."""
        back = [*self.plan.parts.before_back, *self.plan.parts.loop_back, *self.plan.parts.after_back]
        return steps * _bytes([node for node in back if self.plan.varies(node)])

    def explain(self) -> str:
        """See `Engine`."""
        return self.plan.explain()


def first_states(chunk: Chunk, still: set[int]) -> list[Tensor]:
    """The states that a chunk begins with."""
    return [each if k in still else each[0] for k, each in enumerate(chunk.states)]


def state_gradients(chunk: Chunk, gradients: Gradients) -> list[Tensor] | None:
    """The gradients of all states after each step, or None if none was given."""
    if all(each is None for each in gradients.states):
        return None
    return [
        g.new_zeros(chunk.steps, *g.shape) if each is None else each
        for g, each in zip(gradients.carried, gradients.states, strict=True)
    ]


def write(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into places; where states change places, a value may lie in the place of another."""
    taken = {place.untyped_storage().data_ptr() for place in places}
    values = [each.clone() if each.untyped_storage().data_ptr() in taken else each for each in values]
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def take(gradients: Gradients, inputs: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> None:
    """Write the gradients of inputs, and add those of parameters, where they are wanted."""
    for to, found in zip(gradients.inputs, inputs, strict=True):
        if to is not None and found is not None:
            to.copy_(found)
    for to, found in zip(gradients.parameters, parameters, strict=True):
        if to is not None and found is not None:
            to.add_(found)


def _bytes(nodes: Sequence[fx.Node]) -> int:
    values = [node.meta.get("val") for node in nodes]
    found = [each for each in values if isinstance(each, torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in found)
