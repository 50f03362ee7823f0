"""A part of a model that is cut out of autograd: it runs forward now and backward later.

    values in --> leaves --> [ function ] --> values out --> cut --> leaves for the readers
                    ^             |                             |
    gradients out --+---- Tape.backward (torch.autograd.grad) <-+-- gradients in
                                  |
                                  +--> gradients of the parameters, to a `GradientSum`

A forward leaves a `Tape` for its backward. With ``keep="graph"`` the tape holds the graph. With ``keep="inputs"`` it
holds only the inputs, and `Tape.prepare` builds the graph by running the function again (checkpointing; Chen et al.,
arXiv 1604.06174). That needs no gradient, so a worker can start it before one arrives. `torch.utils.checkpoint` cannot
do that, because it recomputes inside the walk back. With ``keep="nothing"`` a forward leaves no tape.

At a cut, every reader gets its own leaf. A walk asks `torch.autograd.grad` for the gradient of a leaf, which
accumulates nothing into it. If a gradient does accumulate there, it came from a tensor that left the stage other than
as a result, and the stages before would never get it. Leaves therefore reject accumulation.

`SplitBackward` runs a backward in two parts: the gradients that other stages wait for (I), and those of the parameters
later (W), with which zero-bubble schedules fill idle time (Qi et al., arXiv 2401.10241). The graph is divided at its
*frontier*: nodes on a path to the inputs, with an edge into a part that leads to parameters only.

    root --- N2 --------- N1 --------- input         I: walk to the inputs; capture the gradients at N2 and N1
              |            |
              M2 = p2      M1 -- p1                  W: from each N over its edge to M, then on to the parameters

No operator runs twice: an addmm computes its input's gradient in I and its weight's in W. A Python autograd function
computes all its gradients whenever it is called, so I captures its gradients for the parameters. If one M follows
several N (a weight that is used twice), the walk from one N can pass another. Then I does all the work.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchweft.core import torch_internals as internals
from torchweft.core.context import ExecutionContext, call_in_phase
from torchweft.core.errors import InPlaceError, SpecError, UsageError
from torchweft.core.pytree import CONTAINER_ADVICE, LEAF, Structure, flatten, unflatten


def detached_leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The same tensor without its graph. With `requires_grad`, the leaf rejects accumulation into it."""
    leaf = tensor.detach()
    if requires_grad:
        leaf.requires_grad_()
        # One table of hooks for all leaves. To register the hook on every leaf takes three times as long.
        cast(Any, leaf)._post_accumulate_grad_hooks = _REJECT_ACCUMULATION
    return leaf


def _reject_accumulation(leaf: Tensor) -> None:
    raise UsageError(
        "a tensor that was made inside a stage is used outside, but is not one of its results (a layer kept it, or a "
        f"hook took it): its gradient ends at an input of the stage, shape {tuple(leaf.shape)}, and would be lost for "
        "the layers before; return the tensor, stash it (weft.skippable), or use executor='graph'"
    )


_REJECT_ACCUMULATION: "OrderedDict[int, Callable[[Tensor], None]]" = OrderedDict({0: _reject_accumulation})


def hidden_tensors(value: Any) -> list[Tensor]:
    """The tensors inside a value that is not a container for PyTorch, e.g. a dataclass, as far as they can be found."""
    kind = cast("type[Any]", type(value))
    if (can_hide := _can_hide.get(kind)) is None:
        # The tensors of a module are its own parameters and buffers, not values in transit.
        plain = issubclass(kind, (str, bytes, type, nn.Module)) or callable(value)
        can_hide = not plain and any(hasattr(value, name) for name in ("__dict__", "__dataclass_fields__", "__len__"))
        _can_hide[kind] = can_hide
    return [leaf for leaf in flatten(held_values(value))[0] if isinstance(leaf, Tensor)] if can_hide else []


_COLLECTIONS = (list, tuple, set, frozenset, deque)
# Whether values of a type can hide tensors. Most leaves cannot: None, numbers, strings.
_can_hide: dict[type, bool] = {}


def held_values(value: Any) -> list[Any]:
    held = [getattr(value, name, None) for name in getattr(value, "__dataclass_fields__", ())]
    held += getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        return held + list(cast("dict[Any, Any]", value).values())
    return held + list(cast("Collection[Any]", value)) if isinstance(value, _COLLECTIONS) else held


def reject_hidden(value: Any, where: str) -> None:
    """Raise SpecError if a value that is not a tensor hides tensors that require a gradient."""
    if any(tensor.requires_grad for tensor in hidden_tensors(value)):
        raise SpecError(
            f"{where} is a {type(value).__name__} with tensors inside, whose gradients would be lost, because PyTorch "
            f"does not know it as a container; {CONTAINER_ADVICE}, or use executor='graph'"
        )


def add_gradients(one: Tensor, other: Tensor) -> Tensor:
    # PyTorch adds a sparse tensor to a dense one, but not the other way round.
    return other + one if one.is_sparse else one + other


class GradientSum:
    """The gradients of some parameters, added up over the micro-batches in the order of their arrival."""

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count
        # Autograd can return one tensor as the gradient of several. Therefore the second gradient makes a new sum, and
        # only sums made here are written to.
        self._owned = [False] * count

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        totals, owned = self.totals, self._owned
        for i, gradient in enumerate(gradients):
            if gradient is None or gradient.is_sparse or not owned[i]:
                return self._add_some(gradients)
        # The usual case, without lists: all sums were made here.
        torch._foreach_add_(totals, gradients)  # type: ignore[arg-type] # pyright: ignore[reportPrivateImportUsage] # no public name
        return None

    def _add_some(self, gradients: Sequence[Tensor | None]) -> None:
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
                totals[i] = add_gradients(total, gradient)
                owned[i] = not gradient.is_sparse and not total.is_sparse
        if into:
            torch._foreach_add_(into, more)  # pyright: ignore[reportPrivateImportUsage] # no public name


Node = Any  # A node of the autograd graph. PyTorch has several types for them, without a public base.


class _FrontierNode(NamedTuple):
    """One node of the frontier: the outputs at which gradients arrive, and its edges to parameters."""

    node: Node
    arriving: list[GradientEdge]
    leaving: list[GradientEdge]

    def captured_edges(self) -> list[GradientEdge]:
        """The edges at which I captures gradients, to compute those of the parameters from."""
        # A Python autograd function has computed the latter already, and must not be called again.
        return self.leaving if isinstance(self.node, BackwardCFunction) else self.arriving

    def leaving_gradients(self, captured: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients on the edges to parameters, from those on the captured edges."""
        if isinstance(self.node, BackwardCFunction):
            return list(captured)
        present = [
            (edge, gradient) for edge, gradient in zip(self.arriving, captured, strict=True) if gradient is not None
        ]
        if not present:
            return [None] * len(self.leaving)
        return _grad([edge for edge, _ in present], self.leaving, [gradient for _, gradient in present])


class SplitBackward:
    """A backward in two parts: first `input_gradients`, later `parameter_gradients`."""

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
        self._frontier = _find_frontier(roots, inputs, parameters) if inputs else None
        self._captured: list[Tensor | None] = []
        self._complete: list[Tensor | None] | None = None

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the inputs. The graph stays for `parameter_gradients`."""
        if not self._inputs:
            return []  # no stage waits, so all the work is left to the second part
        if self._frontier is None:
            gradients = _grad(self._roots, [*self._inputs, *self._parameters], self._seeds)
            self._complete = gradients[len(self._inputs) :]
        else:
            edges = [edge for node in self._frontier for edge in node.captured_edges()]
            gradients = _grad(self._roots, [*self._inputs, *edges], self._seeds, keep=True)
            self._captured = gradients[len(self._inputs) :]
        result = gradients[: len(self._inputs)]
        # The second part starts at the frontier. Let go of the rest of the graph, so that its memory is free before.
        self._roots, self._seeds, self._inputs = [], [], []
        return result

    def parameter_gradients(self) -> list[Tensor | None]:
        """The gradients of the parameters, in their order. Afterwards the graph is free."""
        if self._complete is not None:
            return self._complete
        if self._frontier is None:
            return _grad(self._roots, self._parameters, self._seeds)
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        captured = iter(self._captured)
        for node in self._frontier:
            leaving = node.leaving_gradients([next(captured) for _ in node.captured_edges()])
            for edge, gradient in zip(node.leaving, leaving, strict=True):
                if gradient is not None:
                    edges.append(edge)
                    gradients.append(gradient)
        self._frontier, self._captured = [], []
        if not edges:
            return [None] * len(self._parameters)
        return _grad(edges, self._parameters, gradients)


def _grad(
    roots: Sequence[Tensor | GradientEdge],
    targets: Sequence[Tensor | GradientEdge],
    seeds: Sequence[Tensor],
    *,
    keep: bool = False,
) -> list[Tensor | None]:
    if internals.function_mode_count() or not _PLAIN.issuperset(map(type, targets)):
        grad = cast(Any, torch.autograd.grad)  # its hints allow tensors or edges, not both in one list
        return list(grad(roots, targets, seeds, retain_graph=keep, allow_unused=True))
    return list(
        internals.run_backward(tuple(roots), tuple(seeds), keep, False, tuple(targets), True, accumulate_grad=False)
    )


# Types that no mode or subclass of `torch.autograd.grad` is asked about.
_PLAIN = frozenset((Tensor, nn.Parameter, GradientEdge))


def _find_frontier(
    roots: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[_FrontierNode] | None:
    """The frontier of a graph, or None if the graph cannot be divided."""
    order = children_first([edge.node for edge in roots])
    to_inputs = _leading_to(order, [get_gradient_edge(tensor).node for tensor in inputs])
    to_parameters = _leading_to(order, [get_gradient_edge(tensor).node for tensor in parameters])
    if any(edge.node not in to_inputs and edge.node in to_parameters for edge in roots):
        return None  # an output that depends on parameters only
    arriving: dict[Node, set[int]] = {}
    for edge in roots:
        arriving.setdefault(edge.node, set()).add(edge.output_nr)
    frontier: list[_FrontierNode] = []
    predecessors: dict[Node, Node] = {}
    for node in reversed(order):  # parents first, so that `arriving` of a node is complete when it is visited
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
            frontier.append(_FrontierNode(node, [GradientEdge(node, n) for n in sorted(arriving[node])], leaving))
        for edge in leaving:
            # Two nodes lead to one M: the walk from one can reach M through the other, and count that gradient twice.
            if predecessors.setdefault(edge.node, node) is not node:
                return None
    return frontier


def children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes of the graph, each after all nodes that it leads to."""
    # With an own stack, because the graph of a long chain of layers is deeper than Python's recursion limit.
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def _leading_to(order: Sequence[Node], goals: Sequence[Node]) -> set[Node]:
    reached = set(goals)
    for node in order:
        if any(child in reached for child, _ in node.next_functions):
            reached.add(node)
    return reached


Keep = Literal["graph", "inputs", "nothing"]
Gradients = list[Tensor | None]  # one entry per leaf of a value, which is None if the leaf has no gradient


@dataclass(frozen=True)
class MicroBatchContext:
    """Information for the function of a segment besides its inputs."""

    micro_batch: int
    ambient: ExecutionContext
    random: Any = None
    # Data that a forward stores for its own recomputation, at a key of its stage.
    notes: dict[int, Any] = field(default_factory=dict[int, Any], compare=False)
    micro_batches: int = 1
    # Copies of parameters of other processes.
    borrowed: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor], compare=False)


# ``function(context, *values) -> values``: one value per route that it reads, then per route that it writes.
SegmentFunction = Callable[..., tuple[Any, ...]]


def detach_leaves(value: Any, tracked: bool | None = None) -> Any:
    """The same tensors without their graph, as leaves for one reader.

    With `tracked` None a leaf requires a gradient if the tensor did. Otherwise `tracked` decides for all tensors that
    can carry one.
    """
    if type(value) is Tensor:
        return _leaf(value, tracked)
    leaves, structure = flatten(value)
    return unflatten(structure, [_leaf(leaf, tracked) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _leaf(tensor: Tensor, tracked: bool | None) -> Tensor:
    if tracked is None:
        return detached_leaf(tensor, tensor.requires_grad)
    return detached_leaf(tensor, tracked and (tensor.is_floating_point() or tensor.is_complex()))


def can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Segment:
    """A function of values, and the parameters that it reads."""

    def __init__(self, function: SegmentFunction, parameters: Sequence[Tensor] = ()) -> None:
        self.function = function
        self.parameters = list(parameters)

    def drop_frozen(self) -> None:
        self.parameters = [parameter for parameter in self.parameters if parameter.requires_grad]

    def forward(
        self, context: MicroBatchContext, values: Sequence[Any], keep: Keep
    ) -> tuple[tuple[Any, ...], "Tape | None"]:
        """Run the function over `values`, where tensors are leaves. Return its outputs, before `detach_leaves`, and the
        tape. Raises InPlaceError if the function wrote into an input that its recomputation would read."""
        if keep == "nothing":
            with torch.no_grad():
                return self.call(context, values), None
        # The tape is made before the call, because a function can change the lists and dicts that it receives.
        tape = Tape(self, context, values, keep)
        if keep == "graph":
            before = torch.is_grad_enabled()
            internals.set_grad_mode(True)  # without the objects of a context manager
            try:
                outputs = self.call(context, values)
            finally:
                internals.set_grad_mode(before)
            tape.hold(outputs)
            return outputs, tape
        outputs = call_in_phase("checkpointing", self.call, context, values, tracked=False)
        if tape.is_overwritten():
            raise InPlaceError(
                "a stage wrote into its input in place, but its recomputation in backward needs that input "
                "unchanged; use the out-of-place form of the first operation (inplace=False), "
                "or checkpoint='never' for this stage"
            )
        return outputs, tape

    def call(self, context: MicroBatchContext, values: Sequence[Any]) -> tuple[Any, ...]:
        if not context.ambient.autocast:
            return self.function(context, *values)
        with context.ambient.casting():
            return self.function(context, *values)


class Tape:
    """State that one forward of a segment leaves for its backward."""

    __slots__ = (
        "_context",
        "_inputs",
        "_structures",
        "_tensors",
        "_versions",
        "edges",
        "recomputes",
        "segment",
        "tracks",
    )

    def __init__(self, segment: Segment, context: MicroBatchContext, values: Sequence[Any], keep: Keep) -> None:
        self.segment = segment
        self._context = context
        self._inputs: list[list[Any]] = []
        self._structures: list[Structure] = []
        self._tensors: list[Tensor] = []
        for value in values:
            if type(value) is Tensor:
                self._inputs += ([value],)
                self._structures += (LEAF,)
                self._tensors += (value,)
            else:
                leaves, structure = flatten(value)
                self._inputs += (leaves,)
                self._structures += (structure,)
                self._tensors += [x for x in leaves if isinstance(x, Tensor)]
        self.recomputes = keep == "inputs"  # whether backward must run the function again
        # Tensor versions reveal writes in place. A recomputation from changed inputs would be silently wrong.
        self._versions = versions(self._tensors) if self.recomputes else []
        self.tracks: bool | None = None  # the argument `tracked` of `detach_leaves` for the outputs
        if self.recomputes:
            # The first forward runs without a graph, so its outputs cannot tell whether they will require a gradient.
            self.tracks = bool(segment.parameters) or any(x.requires_grad for x in self._tensors)
        # For each leaf of each output, the edge at which its gradient enters the graph. None without a graph.
        self.edges: list[list[GradientEdge | None]] | None = None

    def is_overwritten(self) -> bool:
        """Whether an input of a recomputation was written to since the forward began."""
        return self._versions != versions(self._tensors)

    def hold(self, outputs: Sequence[Any]) -> None:
        """Keep the graph from these outputs back to the inputs, but not the outputs themselves."""
        edges: list[list[GradientEdge | None]] = []
        for value in outputs:
            edges += ([_edge_of(value)] if type(value) is Tensor else [_edge(leaf) for leaf in flatten(value)[0]],)
        self.edges = edges

    def roots(self) -> list[Node]:
        """The nodes at which the graph begins, if it exists."""
        return [edge.node for edges in self.edges or [] for edge in edges if edge is not None]

    def prepare(self) -> None:
        """Build the graph if only the inputs were kept. Raises InPlaceError if one was written to since."""
        if self.edges is None:
            if self.is_overwritten():
                raise InPlaceError(
                    "an input of a stage was written to in place between its forward and its recomputation in "
                    "backward, which would compute something else now; write after backward or into another "
                    "tensor, or use checkpoint='never' for this stage"
                )
            call_in_phase("recomputing", self._run_again, tracked=True)

    def _run_again(self) -> None:
        # Each call gets its own lists and dicts, because a layer can change them.
        values: list[Any] = []
        for structure, leaves in zip(self._structures, self._inputs, strict=True):
            values += (leaves[0] if structure is LEAF else unflatten(structure, leaves),)
        outputs = self.segment.call(self._context, values)
        self.hold(outputs)
        for value in outputs:
            if type(value) is not Tensor:
                _wait_for_collectives(value)

    def backward(self, gradients: Sequence[Gradients], *, retain: bool = False) -> tuple[list[Gradients], Gradients]:
        """Walk the graph back: from gradients per output value to those per input value, and of the parameters."""
        # With `retain` the tape can be walked again. A recomputed graph is freed even then: a second walk recomputes
        # it again, so that memory stays bounded.
        keeps = retain and not self.recomputes
        inputs, roots, seeds = self._begin(gradients, keeps)
        parameters = self.segment.parameters
        if not roots or not (inputs or parameters):
            return self._nest([None] * len(inputs)), [None] * len(parameters)
        results = _grad(roots, [*inputs, *parameters], seeds, keep=keeps)
        count = len(inputs)
        return self._nest(results[:count]), results[count:]

    def backward_inputs(self, gradients: Sequence[Gradients]) -> tuple[list[Gradients], SplitBackward | None]:
        """The first part of `backward`. The second result computes the gradients of the parameters, if any."""
        inputs, roots, seeds = self._begin(gradients, keeps=False)
        if not roots or not (inputs or self.segment.parameters):
            return self._nest([None] * len(inputs)), None
        split = SplitBackward(roots, seeds, inputs, self.segment.parameters)
        return self._nest(split.input_gradients()), split

    def _nest(self, flat: Sequence[Tensor | None]) -> list[Gradients]:
        """One list per input value, from the gradients of the inputs that require one. Other leaves get None."""
        nested: list[Gradients] = []
        at = 0
        for leaves in self._inputs:
            of_value: Gradients = []
            for x in leaves:
                present = isinstance(x, Tensor) and x.requires_grad
                of_value += (flat[at] if present else None,)
                at += present
            nested += (of_value,)
        return nested

    def _begin(
        self, gradients: Sequence[Gradients], keeps: bool
    ) -> tuple[list[Tensor], list[GradientEdge], list[Tensor]]:
        """The inputs that require a gradient; the edges at which backward starts, and their gradients."""
        if self.edges is None:
            self.prepare()
        roots: list[GradientEdge] = []
        seeds: list[Tensor] = []
        for edges, of_output in zip(self.edges or [], gradients, strict=True):
            for edge, gradient in zip(edges, of_output, strict=True):
                if gradient is not None and edge is not None:
                    roots += (edge,)
                    seeds += (gradient,)
        if not keeps:
            self.edges = None
        inputs: list[Tensor] = []
        for x in self._tensors:
            if x.requires_grad:
                inputs += (x,)
        return inputs, roots, seeds


def _edge(leaf: Any) -> GradientEdge | None:
    return _edge_of(leaf) if isinstance(leaf, Tensor) else reject_hidden(leaf, "a result")


def _edge_of(tensor: Tensor) -> GradientEdge | None:
    """The edge at which the gradient of an output enters the graph. Backward needs nothing else of the output."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    # A node that is written in Python needs a token that keeps its graph alive, and a leaf has no node yet.
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def _wait_for_collectives(value: Any) -> None:
    """Wait for the sums over processes that tensor-parallel layers have started."""
    # Nothing reads the outputs of a recomputation, and PyTorch keeps the messages of an unread one, step after step.
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor) and type(leaf) is not Tensor:
            local = getattr(leaf, "_local_tensor", leaf)  # of a DTensor
            if wait := getattr(local, "trigger_wait", None):  # of an AsyncCollectiveTensor
                wait()


def versions(tensors: Iterable[Tensor]) -> list[int]:
    numbers: list[int] = []
    for tensor in tensors:  # as `version`, without a call for each
        try:
            numbers += (tensor._version,)
        except RuntimeError:  # an inference tensor
            numbers += (0,)
    return numbers


def version(tensor: Tensor) -> int:
    """The number of writes to a tensor so far."""
    # Inference tensors have no version, but outside of inference mode they cannot be written to.
    return 0 if tensor.is_inference() else tensor._version
