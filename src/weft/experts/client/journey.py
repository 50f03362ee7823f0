"""A call of a remote expert as one node of autograd: forward over there now, backward over there later.

    inputs, anchor ──> [ forward:  inputs ──────────────────> server ] ──> outputs ──> the user's loss
    their gradients <── [ backward: inputs, output gradients ─> server ] <── gradients of the outputs

The graph stays here empty: the server runs its module again for the backward, or has kept its graph. The *anchor* is
a parameter, a zero with zero as its gradient, so that the node is reached, and the expert trained, also where no input
wants a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import TWICE, BackwardTwiceError, InPlaceError, UsageError
from weft.core.segment import version
from weft.core.transforms import has_tangent
from weft.experts.client.key import Key
from weft.experts.client.signature import Signature

Forward = Callable[[Sequence[Tensor], Key], list[Tensor]]
"""Flat inputs, and the key that the backward will have -> flat outputs."""
Backward = Callable[[Sequence[Tensor], Sequence[Tensor], Key], list[Tensor]]
"""Flat inputs, one gradient per output, idempotency key -> one gradient per input."""

AT_ITS_SERVER = (
    "has its graph at its server, and hands on first gradients only; compute such a penalty with layers of this "
    "process, and with the expert's outputs detached"
)
"""Why there is no gradient of a gradient through an expert."""


@dataclass(eq=False)
class RemoteJourney:
    """A `weft.core.boundary.Journey`, whose forward and first backward have this ``key``."""

    signature: Signature
    inputs: list[Tensor]
    anchor: Tensor
    ask_forward: Forward
    ask_backward: Backward
    key: Key

    def __post_init__(self) -> None:
        self._wanted = [tensor.requires_grad for tensor in self.inputs]
        self.inputs = [tensor.detach() for tensor in self.inputs]  # which share their versions, and hold no graph
        self._versions = [version(tensor) for tensor in self.inputs]
        self._outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._freed = False

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `Journey.forward`."""
        outputs = self.ask_forward(self.inputs, self.key)
        self._outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs, self.signature.tracked

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """See `Journey.backward`. Every call of it has a key of its own: it is one more backward, not a repetition."""
        if self._freed:
            raise BackwardTwiceError(TWICE)
        self._check_inputs()
        key, self.key = self.key, self.key.again()
        wanted = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, self._outputs, strict=True)
        ]
        found = self.ask_backward(self.inputs, wanted, key)
        if not retain:
            self._freed = True
            self.inputs = []
        back: list[Tensor | None] = [g if flag else None for g, flag in zip(found, self._wanted, strict=True)]
        return [*back, torch.zeros_like(self.anchor)]

    @property
    def only_once(self) -> str:
        """See `weft.core.boundary.OnceDifferentiable`."""
        return f"expert {self.signature.name!r} {AT_ITS_SERVER}"

    def _check_inputs(self) -> None:
        changed = [
            name
            for name, tensor, before in zip(self.signature.inputs.names, self.inputs, self._versions, strict=True)
            if version(tensor) != before
        ]
        if changed:
            raise InPlaceError(
                f"{', '.join(changed)} of expert {self.signature.name!r} was written to after the call, but its "
                "backward needs it as it was; give the expert a copy, or write into a copy"
            )


def forbid_tangents(who: str, inputs: Sequence[Tensor]) -> None:
    """Raise ``UsageError`` for forward-mode differentiation, whose tangents would be lost without a word."""
    if has_tangent(inputs):
        raise UsageError(
            f"an input of {who} has a tangent (forward-mode differentiation), but what an expert does to "
            "tangents only its server could tell; use backward, or call it with inputs that have none"
        )
