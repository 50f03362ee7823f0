"""A part of a model, cut out of autograd: it runs forward now and backward later.

    values in --> leaves --> [ function ] --> values out --> cut --> leaves for the readers
                    ^             |                             |
    gradients out --+---- Tape.backward (torch.autograd.grad) <-+-- gradients in
                                  |
                                  +--> gradients of the parameters, to a `GradientSum`

A forward leaves a `Tape` for its backward. With ``keep="graph"`` that holds the graph; with ``keep="inputs"`` only the
inputs, and `Tape.prepare` makes the graph by running the function again (checkpointing; Chen et al., arXiv 1604.06174).
That needs no gradient, so a worker may start it before one arrives. With ``keep="nothing"`` there is no tape.

At a cut every reader gets a leaf of its own. A walk asks `torch.autograd.grad` for the gradient of a leaf, which
accumulates nothing into it. What does accumulate there came from a tensor that left the stage other than as a result,
and its gradient would be lost for the stages before: leaves refuse it.

`SplitBackward` does a backward in two parts: the gradients that other stages wait for (I), those of the parameters
later (W), with which zero-bubble schedules fill idle time (Qi et al., arXiv 2401.10241). The graph is parted at its
*frontier*, the nodes on a way to the inputs with an edge into a part that leads to parameters only:

    root --- N2 --------- N1 --------- input         I: walk to the inputs; catch what arrives at N2 and N1
              |            |
              M2 = p2      M1 -- p1                  W: from each N over its edge to M, then on to the parameters

No operator runs twice: an addmm computes its input's gradient in I and its weight's in W. A Python autograd function
computes all its gradients whenever it is called, so what it has for the parameters is caught in I. Where one M hangs on
several N (a weight that is used twice), the same way would be walked twice; then I does all.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.core.context import ExecutionContext, phase
from weft.core.errors import InPlaceError, SpecError, UsageError
from weft.core.pytree import LEAF, OPEN, flatten, unflatten


def leaf_of(tensor: Tensor, wanted: bool) -> Tensor:
    """The same tensor without its graph. If a gradient is `wanted`, nothing may accumulate into it."""
    leaf = tensor.detach()
    if wanted:
        leaf.requires_grad_()
        cast(Any, leaf)._post_accumulate_grad_hooks = _GUARD  # registering it costs three times as much
    return leaf


def _refuse(leaf: Tensor) -> None:
    raise UsageError(
        "a tensor that was made inside a stage is used outside, and is none of its results (a layer kept it, or a hook "
        f"took it): its gradient ends at an input of the stage, shape {tuple(leaf.shape)}, and would be lost for what "
        "is before; return the tensor, stash it (weft.skippable), or use executor='graph'"
    )


_GUARD: "OrderedDict[int, Callable[[Tensor], None]]" = OrderedDict({0: _refuse})


def hidden_tensors(value: Any) -> list[Tensor]:
    """The tensors inside of a value that is no container for PyTorch, such as a dataclass, as far as one can see. A
    module keeps its tensors to itself."""
    kind = cast("type[Any]", type(value))
    if (may := _may_hide.get(kind)) is None:
        plain = issubclass(kind, (str, bytes, type, nn.Module)) or callable(value)
        may = not plain and any(hasattr(value, name) for name in ("__dict__", "__dataclass_fields__", "__len__"))
        _may_hide[kind] = may
    return [each for each in flatten(held_values(value))[0] if isinstance(each, Tensor)] if may else []


_COLLECTIONS = (list, tuple, set, frozenset, deque)
_may_hide: dict[type, bool] = {}
"""By type. Nearly everything that is no tensor cannot: None, numbers, strings."""


def held_values(value: Any) -> list[Any]:
    """What an object holds: fields, attributes, and the items of a collection."""
    held = [getattr(value, name, None) for name in getattr(value, "__dataclass_fields__", ())]
    held += getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        return held + list(cast("dict[Any, Any]", value).values())
    return held + list(cast("Collection[Any]", value)) if isinstance(value, _COLLECTIONS) else held


def forbid_hidden(value: Any, where: str) -> None:
    """Raise SpecError if a value that is no tensor has tensors inside that want a gradient."""
    if any(each.requires_grad for each in hidden_tensors(value)):
        raise SpecError(
            f"{where} is a {type(value).__name__} with tensors inside, whose gradients would be lost, since PyTorch "
            f"does not know it as a container; {OPEN}, or use executor='graph'"
        )


def added(one: Tensor, other: Tensor) -> Tensor:
    """A new sum of two gradients. PyTorch adds a sparse one to a dense one, but not the other way round."""
    return other + one if one.is_sparse else one + other


class GradientSum:
    """The gradients of some parameters, added up over the micro-batches in the order of their arrival. What autograd
    returned may be shared with another gradient, so the second one makes a new sum, and only that is written into."""

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count
        self._owned = [False] * count

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        totals, owned = self.totals, self._owned
        into: list[Tensor] = []
        more: list[Tensor] = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = totals[i]
            if total is None:
                totals[i] = gradient
            elif owned[i] and not gradient.is_sparse:
                into.append(total)
                more.append(gradient)
            else:
                totals[i] = added(total, gradient)
                owned[i] = not gradient.is_sparse and not total.is_sparse
        if into:
            torch._foreach_add_(into, more)  # pyright: ignore[reportPrivateImportUsage] # no public name


Node = Any
"""A node of the autograd graph; torch has no one public type for them."""


class _Frontier(NamedTuple):
    """One node of the frontier: the outputs at which gradients arrive, and its edges to parameters."""

    node: Node
    arriving: list[GradientEdge]
    leaving: list[GradientEdge]

    def caught(self) -> list[GradientEdge]:
        """What I has to catch: the gradients on the edges to parameters themselves, where the node is a Python autograd
        function, which computes all its gradients whenever it is called; else what they are computed from."""
        return self.leaving if isinstance(self.node, BackwardCFunction) else self.arriving

    def across(self, caught: Sequence[Tensor | None]) -> list[Tensor | None]:
        """From what was caught to the gradients on the edges to parameters."""
        if isinstance(self.node, BackwardCFunction):
            return list(caught)
        present = [
            (edge, gradient) for edge, gradient in zip(self.arriving, caught, strict=True) if gradient is not None
        ]
        if not present:
            return [None] * len(self.leaving)
        return _grad([edge for edge, _ in present], self.leaving, [gradient for _, gradient in present])


class SplitBackward:
    """One backward of one graph: `inputs` now, `parameters` when asked."""

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        seeds: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        self._parameters = parameters
        self._roots: Sequence[GradientEdge] = roots
        self._seeds: Sequence[Tensor] = seeds
        self._inputs: Sequence[Tensor] = inputs
        self._frontier = _frontier(roots, inputs, parameters) if inputs else None
        self._caught: list[Tensor | None] = []
        self._whole: list[Tensor | None] | None = None

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the inputs. The graph stays for `parameter_gradients`."""
        if not self._inputs:
            return []  # nobody waits: all is left for later
        if self._frontier is None:
            found = _grad(self._roots, [*self._inputs, *self._parameters], self._seeds)
            self._whole = found[len(self._inputs) :]
        else:
            edges = [edge for each in self._frontier for edge in each.caught()]
            found = _grad(self._roots, [*self._inputs, *edges], self._seeds, keep=True)
            self._caught = found[len(self._inputs) :]
        result = found[: len(self._inputs)]
        self._roots, self._seeds, self._inputs = [], [], []
        return result

    def parameter_gradients(self) -> list[Tensor | None]:
        """The gradients of the parameters, in their order; the graph is free afterwards."""
        if self._whole is not None:
            return self._whole
        if self._frontier is None:
            return _grad(self._roots, self._parameters, self._seeds)
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        caught = iter(self._caught)
        for each in self._frontier:
            found = each.across([next(caught) for _ in each.caught()])
            for edge, gradient in zip(each.leaving, found, strict=True):
                if gradient is not None:
                    edges.append(edge)
                    gradients.append(gradient)
        self._frontier, self._caught = [], []
        if not edges:
            return [None] * len(self._parameters)
        return _grad(edges, self._parameters, gradients)


def _grad(
    roots: Sequence[Tensor | GradientEdge],
    wanted: Sequence[Tensor | GradientEdge],
    seeds: Sequence[Tensor],
    *,
    keep: bool = False,
) -> list[Tensor | None]:
    grad = cast(Any, torch.autograd.grad)  # its hints know tensors or edges, not both in one list
    return list(grad(roots, wanted, seeds, retain_graph=keep, allow_unused=True))


def _frontier(
    first: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[_Frontier] | None:
    """The frontier of a graph; None where it cannot be parted."""
    order = children_first([edge.node for edge in first])
    to_inputs = _reaching(order, [get_gradient_edge(tensor).node for tensor in inputs])
    to_parameters = _reaching(order, [get_gradient_edge(tensor).node for tensor in parameters])
    if any(edge.node not in to_inputs and edge.node in to_parameters for edge in first):
        return None  # an output that depends on parameters only
    arriving: dict[Node, set[int]] = {}
    for edge in first:
        arriving.setdefault(edge.node, set()).add(edge.output_nr)
    found: list[_Frontier] = []
    owners: dict[Node, Node] = {}
    for node in reversed(order):
        for child, number in node.next_functions:
            if child is not None:
                arriving.setdefault(child, set()).add(number)
        if node not in to_inputs:
            continue
        leaving = [
            GradientEdge(child, number)
            for child, number in dict.fromkeys(node.next_functions)
            if child in to_parameters and child not in to_inputs
        ]
        if leaving:
            found.append(_Frontier(node, [GradientEdge(node, n) for n in sorted(arriving[node])], leaving))
        for edge in leaving:
            if owners.setdefault(edge.node, node) is not node:
                return None
    return found


def children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes of the graph, each after all that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def _reaching(order: Sequence[Node], goals: Sequence[Node]) -> set[Node]:
    """The nodes from which a way leads to one of the goals."""
    found = set(goals)
    for node in order:
        if any(child in found for child, _ in node.next_functions):
            found.add(node)
    return found


Keep = Literal["graph", "inputs", "nothing"]
Gradients = list[Tensor | None]
"""One entry per leaf of a value; None where the leaf has no gradient."""


@dataclass(frozen=True)
class MicroBatchContext:
    """What a function may need to know besides its inputs.

    `notes` is where a function leaves for its own recomputation what it cannot know then, each at a key of its own.
    `borrowed` are copies of parameters of other processes.
    """

    micro_batch: int
    ambient: ExecutionContext
    random: Any = None
    notes: dict[int, Any] = field(default_factory=dict[int, Any], compare=False)
    micro_batches: int = 1
    borrowed: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor], compare=False)


Function = Callable[..., tuple[Any, ...]]
"""``function(context, *values) -> values``: one value per route that it reads, and per route that it writes."""


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

    def forward(
        self, context: MicroBatchContext, values: Sequence[Any], keep: Keep
    ) -> tuple[tuple[Any, ...], "Tape | None"]:
        """Run the function over `values`, whose tensors are leaves already: the values for the readers, still to be
        `cut`, and the tape. Raises InPlaceError when it wrote into an input that its recomputation would read again."""
        if keep == "nothing":
            with torch.no_grad():
                return self.call(context, values), None
        tape = Tape(self, context, values, keep)  # before the call, which may change the lists and dicts that it gets
        if keep == "graph":
            with torch.enable_grad():
                outputs = self.call(context, values)
            tape.hold(outputs)
            return outputs, tape
        with torch.no_grad(), phase("checkpointing"):
            outputs = self.call(context, values)
        if tape.is_overwritten():
            raise InPlaceError(
                "a stage wrote into its input in place, but its recomputation in backward needs that input "
                "unchanged; use the out-of-place form of the first operation (inplace=False), "
                "or checkpoint='never' for this stage"
            )
        return outputs, tape

    def call(self, context: MicroBatchContext, values: Sequence[Any]) -> tuple[Any, ...]:
        """The function, under the autocast of the user's call."""
        if not context.ambient.autocast:
            return self.function(context, *values)
        with context.ambient.casting():
            return self.function(context, *values)


class Tape:
    """What one forward of a segment left behind for its backward."""

    __slots__ = ("_context", "_inputs", "_structures", "_versions", "edges", "recomputes", "segment", "tracks")

    def __init__(self, segment: Segment, context: MicroBatchContext, values: Sequence[Any], keep: Keep) -> None:
        self.segment = segment
        self._context = context
        flat = [([value], LEAF) if type(value) is Tensor else flatten(value) for value in values]
        self._inputs = [leaves for leaves, _ in flat]
        self._structures = [structure for _, structure in flat]
        self.recomputes = keep == "inputs"
        """Whether backward has to run the function again."""
        self._versions = versions(self._tensors()) if self.recomputes else []
        self.tracks: bool | None = None
        """What `cut` needs to know of the outputs: None asks each tensor, else all alike."""
        if self.recomputes:
            self.tracks = bool(segment.parameters) or any(x.requires_grad for x in self._tensors())
        self.edges: list[list[GradientEdge | None]] | None = None
        """Per leaf of every output value, where its gradient enters the graph; None while there is no graph."""

    def _tensors(self) -> list[Tensor]:
        return [x for leaves in self._inputs for x in leaves if isinstance(x, Tensor)]

    def is_overwritten(self) -> bool:
        """Whether an input that a recomputation will read was written to since the forward began."""
        return self._versions != versions(self._tensors())

    def hold(self, outputs: Sequence[Any]) -> None:
        """Keep the graph that leads from these outputs back to the inputs, but not the outputs themselves."""
        self.edges = [
            [_edge(leaf) for leaf in ((value,) if type(value) is Tensor else flatten(value)[0])] for value in outputs
        ]

    def roots(self) -> list[Node]:
        """The nodes that the graph begins with. Only when it is there."""
        return [edge.node for edges in self.edges or [] for edge in edges if edge is not None]

    def prepare(self) -> None:
        """Make the graph if only the inputs were kept. Raises InPlaceError when one was written to since."""
        if self.edges is None:
            if self.is_overwritten():
                raise InPlaceError(
                    "an input of a stage was written to in place between its forward and its recomputation in "
                    "backward, which would compute something else now; write after backward or into another "
                    "tensor, or use checkpoint='never' for this stage"
                )
            with torch.enable_grad(), phase("recomputing"):
                values = [unflatten(*each) for each in zip(self._structures, self._inputs, strict=True)]
                outputs = self.segment.call(self._context, values)
                self.hold(outputs)
                _wait_for(outputs)

    def backward(self, gradients: Sequence[Gradients], *, retain: bool = False) -> tuple[list[Gradients], Gradients]:
        """Walk the graph back: one list of gradients per output value in, one per input value out.

        Also returns one gradient per parameter of the segment. With `retain` the tape can be walked again.
        """
        keeps = retain and not self.recomputes
        wanted, roots, seeds = self._begin(gradients, keeps)
        parameters = self.segment.parameters
        if not roots or not (wanted or parameters):
            return self._nested([None] * len(wanted)), [None] * len(parameters)
        found = torch.autograd.grad(roots, [*wanted, *parameters], seeds, retain_graph=keeps, allow_unused=True)
        return self._nested(found[: len(wanted)]), list(found[len(wanted) :])

    def backward_inputs(self, gradients: Sequence[Gradients]) -> tuple[list[Gradients], SplitBackward | None]:
        """As `backward`, but the parameters' gradients are to be asked of the second result; None: there are none."""
        wanted, roots, seeds = self._begin(gradients, keeps=False)
        if not roots or not (wanted or self.segment.parameters):
            return self._nested([None] * len(wanted)), None
        split = SplitBackward(roots, seeds, wanted, self.segment.parameters)
        return self._nested(split.input_gradients()), split

    def _nested(self, found: Sequence[Tensor | None]) -> list[Gradients]:
        """The gradients of the inputs that want one, one list per input value, with None for the leaves in between."""
        arrived = iter(found)
        return [
            [next(arrived) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]
            for leaves in self._inputs
        ]

    def _begin(
        self, gradients: Sequence[Gradients], keeps: bool
    ) -> tuple[list[Tensor], list[GradientEdge], list[Tensor]]:
        """The inputs that a gradient is wanted for; where backward starts in the graph, and with which gradients."""
        self.prepare()
        pairs = [
            (edge, gradient)
            for edges, given in zip(self.edges or [], gradients, strict=True)
            for edge, gradient in zip(edges, given, strict=True)
            if gradient is not None and edge is not None
        ]
        if not keeps:
            self.edges = None
        wanted = [x for x in self._tensors() if x.requires_grad]
        return wanted, [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _edge(leaf: Any) -> GradientEdge | None:
    """Where the gradient of an output enters the graph: all that backward needs of it."""
    if isinstance(leaf, Tensor):
        return get_gradient_edge(leaf) if leaf.requires_grad else None
    return forbid_hidden(leaf, "a result")


def _wait_for(outputs: Sequence[Any]) -> None:
    """Wait for the messages behind outputs that nobody will read: until then PyTorch keeps them, step after step. Those
    of tensor-parallel layers are sums over processes that are still under way."""
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
