"""A segment: a part of the model, cut out of autograd. It runs forward now and backward later.

    values in --> leaves --> [ function ] --> values out --> cut --> leaves for the readers
                    ^             |                             |
    gradients out --+---- Tape.backward (torch.autograd.grad) <-+-- gradients in
                                  |
                                  +--> gradients of the parameters, to a `GradientSum`

What a forward leaves behind for its backward is a `Tape`. With ``keep="graph"`` that is the graph. With
``keep="inputs"`` only the inputs, and `Tape.prepare` makes the graph by running the function again
(checkpointing; Chen et al., arXiv 1604.06174); it needs no gradient, so a worker may start it before one
arrives. With ``keep="nothing"`` there is no tape: the segment runs without gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from weft.core.ambient import Ambient, phase
from weft.core.errors import InPlaceError
from weft.core.leaves import forbid_hidden, leaf_of
from weft.core.split_backward import SplitBackward
from weft.core.tree import flatten, unflatten

Keep = Literal["graph", "inputs", "nothing"]
Gradients = list[Tensor | None]
"""One entry per leaf of a value; None where the leaf has no gradient."""


@dataclass(frozen=True)
class Visit:
    """One passage of one micro-batch, of so many: what a function may need to know besides its inputs.

    `notes` is where a function leaves for its own recomputation what it cannot know then, each at a key of its own.
    """

    micro_batch: int
    ambient: Ambient
    context: Any = None
    notes: dict[int, Any] = field(default_factory=dict[int, Any], compare=False)
    micro_batches: int = 1


Function = Callable[..., tuple[Any, ...]]
"""``function(visit, *values) -> values``: one value per route that it reads, and per route that it writes."""


def cut(value: Any, tracked: bool | None = None) -> Any:
    """The same tensors without their graph, as leaves for one reader.

    A leaf wants a gradient if the tensor did (`tracked` None), or as `tracked` says for tensors that can.
    """
    if type(value) is Tensor:
        return _leaf(value, tracked)
    leaves, structure = flatten(value)
    return unflatten(structure, [_leaf(leaf, tracked) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _leaf(tensor: Tensor, tracked: bool | None) -> Tensor:
    wanted = tensor.requires_grad if tracked is None else tracked and differentiable(tensor)
    return leaf_of(tensor, wanted)


def differentiable(tensor: Tensor) -> bool:
    """Whether its dtype can carry a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


class Segment:
    """A function of values and the parameters that it reads, to be run forward now and backward later."""

    def __init__(self, function: Function, parameters: Sequence[Tensor] = ()) -> None:
        self.function = function
        self.parameters = list(parameters)

    def forward(self, visit: Visit, values: Sequence[Any], keep: Keep) -> tuple[tuple[Any, ...], "Tape | None"]:
        """Run the function over `values`, whose tensors are leaves already.

        Returns the values for the readers, still to be `cut`, and the tape. Raises InPlaceError when the
        function wrote into an input that its recomputation would read again.
        """
        if keep == "nothing":
            with torch.no_grad():
                return self.call(visit, values), None
        tape = Tape(self, visit, values, keep)  # before the call, which may change the lists and dicts that it gets
        if keep == "graph":
            with torch.enable_grad():
                outputs = self.call(visit, values)
            tape.hold(outputs)
            return outputs, tape
        with torch.no_grad(), phase("checkpointing"):
            outputs = self.call(visit, values)
        if tape.is_overwritten():
            raise InPlaceError(
                "a stage wrote into its input in place, but its recomputation in backward needs that input "
                "unchanged; use the out-of-place form of the first operation (inplace=False), "
                "or checkpoint='never' for this stage"
            )
        return outputs, tape

    def call(self, visit: Visit, values: Sequence[Any]) -> tuple[Any, ...]:
        """The function, under the autocast of the user's call."""
        if not visit.ambient.autocast:
            return self.function(visit, *values)
        with visit.ambient.casting():
            return self.function(visit, *values)


class Tape:
    """What one forward of a segment left behind for its backward."""

    __slots__ = ("_inputs", "_keep", "_outputs", "_structures", "_versions", "_visit", "segment")

    def __init__(self, segment: Segment, visit: Visit, values: Sequence[Any], keep: Keep) -> None:
        self.segment = segment
        self._visit = visit
        self._keep = keep
        flat = [flatten(value) for value in values]
        self._inputs = [leaves for leaves, _ in flat]
        self._structures = [structure for _, structure in flat]
        self._versions = versions(self._tensors()) if keep == "inputs" else []
        self._outputs: list[list[GradientEdge | None]] | None = None

    def _tensors(self) -> list[Tensor]:
        return [x for leaves in self._inputs for x in leaves if isinstance(x, Tensor)]

    def is_overwritten(self) -> bool:
        """Whether an input that a recomputation will read was written to since the forward began."""
        return self._versions != versions(self._tensors())

    @property
    def tracks(self) -> bool | None:
        """What `cut` needs to know of the outputs: None asks each tensor, else all alike."""
        if self._keep == "graph":
            return None
        return bool(self.segment.parameters) or any(x.requires_grad for x in self._tensors())

    def hold(self, outputs: Sequence[Any]) -> None:
        """Keep the graph that leads from these outputs back to the inputs, but not the outputs themselves: they
        are freed with their last reader."""
        self._outputs = [[_edge(leaf) for leaf in flatten(value)[0]] for value in outputs]

    def widths(self) -> list[int]:
        """How many leaves each output value has. Only when the graph is there."""
        return [len(edges) for edges in self._outputs or []]

    def roots(self) -> list[Node]:
        """The nodes that the graph begins with. Only when it is there."""
        return [edge.node for edges in self._outputs or [] for edge in edges if edge is not None]

    @property
    def recomputes(self) -> bool:
        """Whether backward has to run the function again."""
        return self._keep == "inputs"

    def prepare(self) -> None:
        """Make the graph if only the inputs were kept. Needs no gradient, so it may run early.

        Raises InPlaceError when an input was written to since the forward, such as a buffer for the next mini-batch.
        """
        if self._outputs is None:
            if self.is_overwritten():
                raise InPlaceError(
                    "an input of a stage was written to in place between its forward and its recomputation in "
                    "backward, which would compute something else now; write after backward or into another "
                    "tensor, or use checkpoint='never' for this stage"
                )
            with torch.enable_grad(), phase("recomputing"):
                values = [unflatten(*each) for each in zip(self._structures, self._inputs, strict=True)]
                outputs = self.segment.call(self._visit, values)
                self.hold(outputs)
                _wait_for(outputs)

    def backward(self, gradients: Sequence[Gradients], *, retain: bool = False) -> tuple[list[Gradients], Gradients]:
        """Walk the graph back: one list of gradients per output value in, one per input value out.

        Also returns one gradient per parameter of the segment. With `retain` the tape can be walked again.
        """
        wanted = self._wanted()
        roots, seeds = self._roots(gradients)
        keeps = retain and not self.recomputes
        if not keeps:
            self._outputs = None
        parameters = self.segment.parameters
        if not roots or not (wanted or parameters):
            return self._nested([None] * len(wanted)), [None] * len(parameters)
        found = torch.autograd.grad(roots, [*wanted, *parameters], seeds, retain_graph=keeps, allow_unused=True)
        return self._nested(found[: len(wanted)]), list(found[len(wanted) :])

    def backward_inputs(self, gradients: Sequence[Gradients]) -> tuple[list[Gradients], SplitBackward | None]:
        """As `backward`, but the gradients of the parameters are left for later, to be asked of the second result.

        None instead means that there are no gradients at all.
        """
        wanted = self._wanted()
        roots, seeds = self._roots(gradients)
        self._outputs = None
        if not roots or not (wanted or self.segment.parameters):
            return self._nested([None] * len(wanted)), None
        split = SplitBackward(roots, seeds, wanted, self.segment.parameters)
        return self._nested(split.input_gradients()), split

    def _wanted(self) -> list[Tensor]:
        """The leaves that a gradient is wanted for."""
        self.prepare()
        return [x for x in self._tensors() if x.requires_grad]

    def _nested(self, found: Sequence[Tensor | None]) -> list[Gradients]:
        """The gradients of `_wanted`, one list per input value, with None for the leaves in between."""
        arrived = iter(found)
        return [
            [next(arrived) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]
            for leaves in self._inputs
        ]

    def _roots(self, gradients: Sequence[Gradients]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where backward starts in the graph, and with which gradients."""
        pairs = [
            (edge, gradient)
            for edges, given in zip(self._outputs or [], gradients, strict=True)
            for edge, gradient in zip(edges, given, strict=True)
            if gradient is not None and edge is not None
        ]
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _edge(leaf: Any) -> GradientEdge | None:
    """Where the gradient of an output enters the graph: all that backward needs of it."""
    if isinstance(leaf, Tensor):
        return get_gradient_edge(leaf) if leaf.requires_grad else None
    return forbid_hidden(leaf, "a result")


def _wait_for(outputs: Sequence[Any]) -> None:
    """Wait for the messages behind outputs that nobody will read: until then PyTorch keeps them, step after step.

    Those of tensor-parallel layers are sums over processes that are still under way.
    """
    for leaf in chain.from_iterable(flatten(value)[0] for value in outputs):
        if isinstance(leaf, Tensor) and type(leaf) is not Tensor:
            local = getattr(leaf, "_local_tensor", leaf)  # of a DTensor
            if wait := getattr(local, "trigger_wait", None):  # of an AsyncCollectiveTensor
                wait()


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written to."""
    return [version(tensor) for tensor in tensors]


def version(tensor: Tensor) -> int:
    """How often it was written to. Inference tensors do not count that, and cannot be written to outside."""
    return 0 if tensor.is_inference() else tensor._version
