"""Autograd of remote experts: a call as one node of the graph, whose forward and backward both happen at a server.

    inputs, anchor ──> [ forward:  inputs ──────────────────> server ] ──> outputs ──> the user's loss
    their gradients <── [ backward: inputs, output gradients ─> server ] <── gradients of the outputs

No graph is kept here: the server runs its module again for the backward, or has kept its graph. The *anchor* is a
parameter of one zero with zero as its gradient (hivemind's DUMMY): through it the node is reached, and the expert
trained, also where no input wants a gradient.

    anchor wants a gradient                 a node of autograd, whose backward trains the experts
    frozen, nor does any input want one     no node: the experts only answer
    frozen, but an input wants one          refused: the servers would step in the backward that the input wants

It is one zero, not empty: optimizers and norms of gradients take no tensor without numbers.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from weft.core.autograd import has_tangent
from weft.core.errors import TWICE, BackwardTwiceError, InPlaceError, UsageError
from weft.core.segment import version
from weft.experts.client.stub import ExpertStub, IdempotencyKey, Signature

ONLY_ONCE = (
    "has its graph at its server, and hands on first gradients only; compute such a penalty with layers of this "
    "process, and with the expert's outputs detached"
)
"""Why there is no gradient of a gradient through an expert."""
_ANCHOR = "anchor"
_MOST = 256  # entries of a cache
Value = TypeVar("Value")


class RemoteLayer(nn.Module):
    """Base of modules whose experts are at servers. ``anchor`` is left out of what is saved and loaded."""

    anchor: nn.Parameter

    def make_anchor(self, like: Tensor | None = None) -> None:
        """Make it, of the dtype and on the device of another parameter: some wrappers want all of a module alike."""
        self.anchor = nn.Parameter(torch.zeros(1) if like is None else like.detach().new_zeros(1))

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for a commit."""
        raise NotImplementedError

    def commit(self) -> Any:
        """One optimizer step with the gradients since the last commit: whether it stepped; of several, by uid."""
        raise NotImplementedError

    def discard(self) -> None:
        """Drop the gradients since the last commit."""
        raise NotImplementedError

    @property
    def steps_in_backward(self) -> str:
        """See `weft.core.autograd.StepsInBackward`."""
        if self.accumulates or not self.anchor.requires_grad:
            return ""
        return "make it with accumulate=True and commit after backward, or freeze it if its server does not train it"

    def anchor_for(self, who: str, trained: bool, inputs: Iterable[Tensor]) -> Tensor:
        """The anchor, which wants a gradient only where the call is to train the experts (``who``, with is or are)."""
        if trained and self.anchor.requires_grad:
            return self.anchor
        if trained and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            raise UsageError(
                f"{who} frozen here (the anchor does not require a gradient), but there would be a step in the "
                "backward that the inputs want; call it under no_grad, or unfreeze it"
            )
        return self.anchor.detach()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing of the experts: what they learn is saved by their servers."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + _ANCHOR, None)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Weights for the experts are unexpected, an error if ``strict``."""
        key, missing = prefix + _ANCHOR, list[str]()
        if state_dict.pop(key, None) is not None and strict:
            unexpected_keys.append(key)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [name for name in missing if name != key]


@dataclass(eq=False)
class RemoteFunction:
    """A `weft.core.autograd.CutFunction` of one call. ``deadline``, and ``known`` outputs: of the forward."""

    stub: ExpertStub
    signature: Signature
    inputs: Sequence[Tensor]
    anchor: Tensor
    key: IdempotencyKey
    deadline: float
    known: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self._wanted = [tensor.requires_grad for tensor in self.inputs]
        self.inputs = [tensor.detach() for tensor in self.inputs]  # which share their versions, and hold no graph
        self._versions = [version(tensor) for tensor in self.inputs]
        self._outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._freed = False

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `CutFunction.forward`."""
        known, self.known = self.known, None
        outputs = self.stub.forward(self.inputs, self.key, self.deadline) if known is None else known
        self._outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs, self.signature.tracked

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """See `CutFunction.backward`. Every call of it has a key of its own: one more backward, not a repetition."""
        if self._freed:
            raise BackwardTwiceError(TWICE)
        names = zip(self.signature.inputs.names, self.inputs, self._versions, strict=True)
        if changed := [name for name, tensor, before in names if version(tensor) != before]:
            raise InPlaceError(
                f"{', '.join(changed)} of expert {self.signature.name!r} was written to after the call, but its "
                "backward needs it unchanged; give the expert a copy, or write into a copy"
            )
        key, self.key = self.key, self.key.again()
        wanted = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, self._outputs, strict=True)
        ]
        found = self.stub.backward(self.inputs, wanted, key)
        if not retain:
            self._freed = True
            self.inputs = []
        back: list[Tensor | None] = [g if flag else None for g, flag in zip(found, self._wanted, strict=True)]
        return [*back, torch.zeros_like(self.anchor)]

    @property
    def only_once(self) -> str:
        """See `weft.core.autograd.OnceDifferentiable`."""
        return f"expert {self.signature.name!r} {ONLY_ONCE}"


class RecomputeCache(Generic[Value]):
    """Results of forwards that will be recomputed, by their inputs. Thread-safe.

    Called again, remote experts might answer otherwise, if others have trained them meanwhile: the gradient would be
    that of another forward. A result that is never taken (no backward came) is evicted by newer ones.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._lock = threading.Lock()
        self._entries: deque[tuple[list[Tensor], Value]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, inputs: Sequence[Tensor], value: Value) -> None:
        """Store a result, with a copy of its inputs."""
        copies = [tensor.detach().clone() for tensor in inputs]
        with self._lock:
            self._entries.append((copies, value))

    def take(self, inputs: Sequence[Tensor]) -> Value | None:
        """Remove and return the oldest result for these inputs."""
        with self._lock:
            for place, (known, value) in enumerate(self._entries):
                pairs = zip(known, inputs, strict=True)
                if all(a.shape == b.shape and a.device == b.device and torch.equal(a, b.detach()) for a, b in pairs):
                    del self._entries[place]
                    return value
        return None


def forbid_tangents(who: str, inputs: Sequence[Tensor]) -> None:
    """Raise ``UsageError`` for forward-mode differentiation, whose tangents would be lost in silence."""
    if has_tangent(inputs):
        raise UsageError(
            f"an input of {who} has a tangent (forward-mode differentiation), which only its server could propagate; "
            "use backward, or call it with inputs that have none"
        )
