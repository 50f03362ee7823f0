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
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from torchweft.core.autograd import has_tangent
from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, InPlaceError, UsageError
from torchweft.core.segment import version
from torchweft.experts.client.calls import Steps, run_all
from torchweft.experts.client.stub import ExpertStub, IdempotencyKey, Signature

ONLY_ONCE = (
    "has its graph at its server, and returns first-order gradients only; compute such a penalty with local layers, "
    "from the expert's detached outputs"
)  # The reason why a gradient of a gradient does not exist through an expert
_ANCHOR = "anchor"
_MOST = 256  # entries of a cache
T = TypeVar("T")
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

    # The two phases of `commit`, for a commit of several layers, see `weft.experts.client.commit`.

    def prepare_commit(self) -> None:
        """Raise if no step can be taken now."""

    def apply_commit(self) -> Any:
        return self.commit()

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
        anchor = self.anchor
        if trained and anchor.requires_grad:
            return anchor
        if trained and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            raise UsageError(
                f"{subject} frozen here (the anchor does not require a gradient), but the backward for the inputs "
                "would step at the server; call it under no_grad, or unfreeze it"
            )
        return anchor.detach()

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
class ExpertCall:
    """One call of one expert: its forward, and the backward that belongs to it. ``cached``: outputs of the forward."""

    stub: ExpertStub
    signature: Signature
    inputs: Sequence[Tensor]
    anchor: Tensor
    key: IdempotencyKey
    deadline: float
    cached: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self._outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._needs_gradient = [tensor.requires_grad for tensor in self.inputs]
        self.is_tracked = torch.is_grad_enabled() and (self.anchor.requires_grad or any(self._needs_gradient))
        if self.is_tracked:
            # Detached tensors hold no graph, but share the version counters, by which `backward` detects modifications.
            self.inputs = [tensor.detach() for tensor in self.inputs]
            self._versions = [version(tensor) for tensor in self.inputs]

    def forward(self) -> Steps[list[Tensor]]:
        outputs, self.cached = self.cached, None
        if outputs is None:
            outputs = yield from self.stub.forward(self.inputs, self.key, self.deadline)
        if self.is_tracked:
            self._outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs

    def check_unchanged(self) -> None:
        names = zip(self.signature.inputs.names, self.inputs, self._versions, strict=True)
        if changed := [name for name, tensor, before in names if version(tensor) != before]:
            raise InPlaceError(
                f"{', '.join(changed)} of expert {self.signature.name!r} was written to after the call, but its "
                "backward needs it unchanged; pass a copy to the expert, or write into a copy"
            )

    def backward(self, gradients: Sequence[Tensor | None]) -> Steps[list[Tensor | None]]:
        """One gradient for each input, None for those that need none."""
        # A new key for the next backward of a retained graph: under the same key it would count as a retry.
        key, self.key = self.key, self.key.next_backward()
        output_gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, self._outputs, strict=True)
        ]
        input_gradients = yield from self.stub.backward(self.inputs, output_gradients, key)
        needed = zip(input_gradients, self._needs_gradient, strict=True)
        return [gradient if is_needed else None for gradient, is_needed in needed]


class RemoteFunction:
    """A `weft.core.autograd.CutFunction` of calls that are under way at once. Their anchors come last."""

    # ``counts``: after `forward`, the number of flat outputs of each call, or its error if ``settle``. The outputs
    # themselves refer to the node of this function, and keeping them here would be a cycle.
    def __init__(self, calls: Sequence[ExpertCall], anchors: Sequence[Tensor], settle: bool = False) -> None:
        self.calls, self.settle = calls, settle
        self.counts: list[int | BaseException] = []
        self._anchors = anchors
        self._freed = False

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        results = run_calls([call.forward() for call in self.calls], self.calls, self.settle)
        self.counts = [result if isinstance(result, BaseException) else len(result) for result in results]
        answered = [call for call, count in zip(self.calls, self.counts, strict=True) if isinstance(count, int)]
        tracked = [is_tracked and call.is_tracked for call in answered for is_tracked in call.signature.tracked]
        return [output for outputs in results if not isinstance(outputs, BaseException) for output in outputs], tracked

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        if self._freed:
            raise BackwardTwiceError(BACKWARD_TWICE)
        steps: dict[ExpertCall, Steps[list[Tensor | None]]] = {}
        rest = list(gradients)
        for call, count in zip(self.calls, self.counts, strict=True):
            if isinstance(count, int):
                own, rest = rest[:count], rest[count:]
                # As in plain autograd, a call whose outputs got no gradient has no backward, and its expert no step.
                if any(gradient is not None for gradient in own):
                    steps[call] = call.backward(own)
        for call in steps:  # before the first expert steps
            call.check_unchanged()
        results = cast("list[list[Tensor | None]]", run_calls([*steps.values()], [*steps], None))
        found = dict(zip(steps, results, strict=True))
        input_gradients = [found[call] if call in found else [None] * len(call.inputs) for call in self.calls]
        if not retain:
            self._freed = True
            for call in self.calls:
                call.inputs = []
        flat = [gradient for call_gradients in input_gradients for gradient in call_gradients]
        return [*flat, *map(torch.zeros_like, self._anchors)]

    @property
    def only_once(self) -> str:
        return f"expert {', '.join(dict.fromkeys(repr(call.signature.name) for call in self.calls))} {ONLY_ONCE}"


def run_calls(
    operations: Sequence[Steps[T]], calls: Sequence[ExpertCall], settle: bool | None
) -> list[T | BaseException]:
    """Run the operations of these calls at once. Errors name their call if there are several.

    ``settle``: return errors in place of results. None: wait for all as well, and raise the first error then.
    """
    runs = run_all(operations, settle=settle is not False)
    failed = [(number, run) for number, run in enumerate(runs) if run.error is not None]
    for number, run in failed:
        if run.error is not None and len(calls) > 1:
            run.error.add_note(f"in call {number} of {len(calls)}: expert {calls[number].stub.uid!r}")
    if failed and not settle:
        runs.clear()  # the error's traceback holds this frame, and must not hold the results of other calls
        failed[0][1].take()
    return [run.take() if run.error is None else run.error for run in runs]


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
