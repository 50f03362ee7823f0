"""The gradients of a derived sequence's backward, chunk by chunk: what autograd gave, and what was found so far.

given     of outputs and states, T x ...      cut into chunks as they are asked for
carried   of the state                        handed from chunk to chunk, the last one first
found     of inputs, T x ...; of parameters   written chunk by chunk; added up
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from weft.core.segment import differentiable
from weft.recurrent.captured import Captured
from weft.recurrent.engine import Gradients

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


class GradientsBack:
    """The gradients of one backward over a sequence of so many steps, which began with `states`."""

    def __init__(
        self,
        captured: Captured,
        states: Sequence[Tensor],
        steps: int,
        device: torch.device,
        given: Leaves[Tensor | None],
    ) -> None:
        roles = captured.roles
        self._given, self._device = given, device
        self._looks = captured.outputs
        self._carried = [
            torch.zeros_like(s) if each is None else each.resolve_neg().clone(memory_format=torch.contiguous_format)
            for s, each in zip(states, given.last, strict=True)
        ]
        self._moving = [differentiable(s) for s in states]
        self._inputs = [None if look is None else look.over(steps, device) for look in captured.input_gradients]
        self._parameters = [
            None if node is None else torch.zeros_like(p, memory_format=torch.contiguous_format)
            for node, p in zip(roles.parameter_gradients, captured.parameters, strict=True)
        ]

    def chunk(self, start: int, end: int) -> Gradients:
        """Those of a chunk; chunks are asked for from the last to the first."""
        outputs = [
            look.over(end - start, self._device).zero_() if each is None else _plain(each[start:end])
            for look, each in zip(self._looks, self._given.outputs, strict=True)
        ]
        states: list[Tensor | None] = [None] * len(self._carried)
        if self._given.states:
            states = [None if each is None else _plain(each[start:end]) for each in self._given.states]
        inputs = [None if each is None else each[start:end] for each in self._inputs]
        return Gradients(outputs, states, self._carried, inputs, self._parameters)

    def found(self) -> list[Tensor | None]:
        """The gradients of inputs, initial states and parameters."""
        states = [each if moving else None for each, moving in zip(self._carried, self._moving, strict=True)]
        return [*self._inputs, *states, *self._parameters]


def _plain(gradient: Tensor) -> Tensor:
    """As compiled code reads it: contiguous, and negated in memory where autograd only marked it as negative."""
    return gradient.resolve_neg().contiguous()
