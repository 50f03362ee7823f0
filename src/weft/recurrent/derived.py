"""A plan as one node of autograd: the whole sequence forward, and back by the derived backward loop.

The node is core's `Boundary`, so what holds for a pipeline's step holds here: parameters get their gradient once,
their hooks fire once, `retain_graph=True` works, and gradients of gradients are refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from weft.core.boundary import cross, without_gradient
from weft.core.errors import TWICE, BackwardTwiceError, InPlaceError, listed
from weft.core.segment import differentiable
from weft.recurrent.plan import Plan, Trail

Value = TypeVar("Value")


@dataclass(frozen=True)
class Leaves(Generic[Value]):
    """Flat leaves of a sequence: outputs T x ..., states after every step T x ..., and the states after the last."""

    outputs: list[Value]
    states: list[Value]
    last: list[Value]

    def named(self) -> list[tuple[str, Value]]:
        """Each with a name for people."""
        parts = (("output", self.outputs), ("state", self.states), ("last state", self.last))
        return [(f"{name} {i}", value) for name, values in parts for i, value in enumerate(values)]


def run_derived(plan: Plan, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Leaves[Tensor]:
    """A whole sequence by its plan; `inputs` are T x ... with T at least 1, `states` the initial ones."""
    journey = _Journey(plan, inputs, states)
    if torch.is_grad_enabled() and any(each.requires_grad for each in journey.tensors):
        return journey.named(cross(journey, journey.tensors))
    with torch.no_grad():
        return journey.named(journey.forward()[0])


@dataclass(frozen=True)
class _Look:
    """What an output looked like, without keeping it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _Journey:
    """One sequence; see `weft.core.boundary.Journey`."""

    def __init__(self, plan: Plan, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self.tensors = [*inputs, *states, *plan.captured.parameters]
        self._plan = plan
        self._inputs = [each.detach() for each in inputs]
        self._states = [each.detach() for each in states]
        self._trail: Trail | None = None
        self._looks: list[_Look] = []
        self._read: list[tuple[str, Tensor, int]] = []

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Outputs, states after every step, and the last ones once more: often only these are used."""
        outputs, states, self._trail = self._plan.forward(self._inputs, self._states)
        rows = [each[1:] for each in states]
        self._read = [(name, each, each._version) for name, each in self._read_again(outputs, states)]
        made = [*(each.detach() for each in outputs), *rows, *(each[-1].clone() for each in rows)]
        self._looks = [_Look(each.shape, each.dtype, each.device) for each in outputs]
        return made, [differentiable(each) for each in made]

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `Journey.backward`. Raises BackwardTwiceError when the sequence was freed."""
        trail = self._trail
        if trail is None:
            raise BackwardTwiceError(TWICE)
        written = [name for name, each, version in self._read if each._version != version]
        if written:
            raise InPlaceError(
                listed("backward reads these again, but they were written to after forward; work on a copy:", written)
            )
        if not retain:
            self._trail = None
        of = self.named(gradients)
        outputs = [look.zeros() if each is None else each for look, each in zip(self._looks, of.outputs, strict=True)]
        last = [torch.zeros_like(s) if each is None else each for s, each in zip(self._states, of.last, strict=True)]
        states = None
        if any(each is not None for each in of.states):
            steps = len(self._inputs[0])
            states = [
                s.new_zeros(steps, *s.shape) if each is None else each
                for s, each in zip(self._states, of.states, strict=True)
            ]
        of_inputs, of_states, of_parameters = self._plan.backward(trail, outputs, states, last)
        found = [*of_inputs, *of_states, *of_parameters]
        without_gradient(t for t, gradient in zip(self.tensors, found, strict=True) if gradient is None and t.is_leaf)
        return found

    def _read_again(self, outputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """What backward reads and others can write to: each tensor with its name."""
        parts = {
            "input": self._inputs,
            "output": outputs,
            "state": states,
            "parameter": self._plan.captured.parameters,
        }
        return [(f"{what} {i}", each) for what, values in parts.items() for i, each in enumerate(values)]

    def named(self, values: Sequence[Value]) -> Leaves[Value]:
        """Outputs, states and last states out of one list."""
        count, width = len(self._plan.captured.roles.outputs), len(self._states)
        return Leaves(list(values[:count]), list(values[count : count + width]), list(values[count + width :]))
