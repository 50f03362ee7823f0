"""Autograd of remote experts: a call is one node of the graph, with forward and backward at a server.

    inputs, anchor ──> [ forward:  inputs ──────────────────> server ] ──> outputs ──> the user's loss
    their gradients <── [ backward: inputs, output gradients ─> server ] <── gradients of the outputs

The client keeps no graph: the server re-runs its module for the backward, or has kept the graph. Autograd omits a node
if no input requires a gradient, and the expert would not be trained. The *anchor* prevents this: a parameter with a
single zero, which always gets a zero gradient (hivemind's DUMMY).

    anchor requires a gradient              a node, whose backward trains the experts
    frozen, and all inputs require none     no node: the experts only answer
    frozen, but an input requires one       rejected: the backward for the input would step the servers

The anchor is not empty, because some optimizers and gradient norms fail for tensors without elements.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from torchweft.core.autograd import has_tangent
from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, InPlaceError, UsageError
from torchweft.core.segment import version
from torchweft.experts.client.stub import ExpertStub, IdempotencyKey, Signature

ONLY_ONCE = (
    "has its graph at its server, and returns first-order gradients only; compute such a penalty with local layers, "
    "from the expert's detached outputs"
)  # The reason why a gradient of a gradient does not exist through an expert
_ANCHOR = "anchor"
_MOST = 256  # entries of a cache
Value = TypeVar("Value")


class RemoteLayer(nn.Module):
    """Base of layers with experts at servers. State dicts do not include ``anchor``."""

    anchor: nn.Parameter

    def make_anchor(self, like: Tensor | None = None) -> None:
        """Make the anchor, like another parameter: some wrappers need one dtype and device for all of a module."""
        self.anchor = nn.Parameter(torch.zeros(1) if like is None else like.detach().new_zeros(1))

    @property
    def accumulates(self) -> bool:
        raise NotImplementedError

    def commit(self) -> Any:
        raise NotImplementedError

    def discard(self) -> None:
        raise NotImplementedError

    @property
    def steps_in_backward(self) -> str:
        """See `weft.core.autograd.StepsInBackward`."""
        if self.accumulates or not self.anchor.requires_grad:
            return ""
        return "make it with accumulate=True and commit after backward, or freeze it if its server does not train it"

    def anchor_for(self, subject: str, trained: bool, inputs: Iterable[Tensor]) -> Tensor:
        """The anchor, detached if the call does not train the experts. ``subject`` begins the error."""
        if trained and self.anchor.requires_grad:
            return self.anchor
        if trained and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            raise UsageError(
                f"{subject} frozen here (the anchor does not require a gradient), but the backward for the inputs "
                "would step at the server; call it under no_grad, or unfreeze it"
            )
        return self.anchor.detach()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Without the anchor: the servers save the experts, and the anchor is always zero.
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
        # An anchor is unexpected, which is an error if ``strict``.
        key, missing = prefix + _ANCHOR, list[str]()
        if state_dict.pop(key, None) is not None and strict:
            unexpected_keys.append(key)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [name for name in missing if name != key]


@dataclass(eq=False)
class RemoteFunction:
    """A `weft.core.autograd.CutFunction` of one call. ``deadline`` and ``cached`` outputs are those of the forward."""

    stub: ExpertStub
    signature: Signature
    inputs: Sequence[Tensor]
    anchor: Tensor
    key: IdempotencyKey
    deadline: float
    cached: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self._needs_gradient = [tensor.requires_grad for tensor in self.inputs]
        # Detached tensors hold no graph, but share the version counters, by which `backward` detects modifications.
        self.inputs = [tensor.detach() for tensor in self.inputs]
        self._versions = [version(tensor) for tensor in self.inputs]
        self._outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._freed = False

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        cached, self.cached = self.cached, None
        outputs = self.stub.forward(self.inputs, self.key, self.deadline) if cached is None else cached
        self._outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs, self.signature.tracked

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        if self._freed:
            raise BackwardTwiceError(BACKWARD_TWICE)
        names = zip(self.signature.inputs.names, self.inputs, self._versions, strict=True)
        if changed := [name for name, tensor, before in names if version(tensor) != before]:
            raise InPlaceError(
                f"{', '.join(changed)} of expert {self.signature.name!r} was written to after the call, but its "
                "backward needs it unchanged; pass a copy to the expert, or write into a copy"
            )
        # A new key for the next backward of a retained graph: under the same key it would count as a retry.
        key, self.key = self.key, self.key.next_backward()
        output_gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, self._outputs, strict=True)
        ]
        input_gradients = self.stub.backward(self.inputs, output_gradients, key)
        if not retain:
            self._freed = True
            self.inputs = []
        needed = zip(input_gradients, self._needs_gradient, strict=True)
        return [*(gradient if is_needed else None for gradient, is_needed in needed), torch.zeros_like(self.anchor)]

    @property
    def only_once(self) -> str:
        return f"expert {self.signature.name!r} {ONLY_ONCE}"


class RecomputeCache(Generic[Value]):
    """Results of forwards that will be recomputed, by their inputs. Thread-safe."""

    # A second call could return other outputs, because other clients train the experts in between. The gradient would
    # then belong to another forward. Newer results evict those that no backward has fetched.
    def __init__(self, most: int = _MOST) -> None:
        self._lock = threading.Lock()
        self._entries: deque[tuple[list[Tensor], Value]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, inputs: Sequence[Tensor], value: Value) -> None:
        copies = [tensor.detach().clone() for tensor in inputs]
        with self._lock:
            self._entries.append((copies, value))

    def pop_match(self, inputs: Sequence[Tensor]) -> Value | None:
        with self._lock:
            for place, (stored, value) in enumerate(self._entries):
                pairs = zip(stored, inputs, strict=True)
                if all(a.shape == b.shape and a.device == b.device and torch.equal(a, b.detach()) for a, b in pairs):
                    del self._entries[place]
                    return value
        return None


def reject_tangents(name: str, inputs: Sequence[Tensor]) -> None:
    # Forward-mode differentiation: the tangents would be lost without notice.
    if has_tangent(inputs):
        raise UsageError(
            f"an input of {name} has a tangent (forward-mode differentiation), which only its server could propagate; "
            "use backward, or call it with inputs without tangents"
        )
