"""From a cell, run once, to the graph of one step and its backward.

    cell(x, state) -> (y, state')                     what the user wrote

    joint(x, s, gs', gy):                             what is captured, once, whatever T
        y, s' = cell(x, s)
        gx, gs, gw = gradients of (s', y) for (x, s, parameters), given (gs', gy)
        return s', y, gx, gs, gw

The graph holds PyTorch's own operators, without mutation, duplicates or dead ends. Parameters and other tensors that
the cell reads are its *references*: constants of the graph that are looked up anew at every use, so an optimizer may
change them. What cannot be captured is refused here, loudly: a branch on data, random numbers, a write into a tensor
that outlives the step. Capturing is `make_fx` over `torch.autograd.grad`; of the ways that PyTorch offers it takes the
most cells. The idea of deriving the backward net of the step net once is that of Caffe2's ``recurrent_net``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor

from weft.core.boundary import quiet_hooks
from weft.core.errors import WeftError
from weft.core.tree import Structure, flatten, map_leaves, unflatten
from weft.recurrent.tidy import tidy

_make_fx = cast("Callable[..., Callable[..., fx.GraphModule]]", proxy_tensor.make_fx)
_functionalize = cast("Callable[..., Callable[..., Any]]", torch.func.functionalize)

Cell = Callable[[Any, Any], tuple[Any, Any]]
Value = fx.Node | None
"""A node of the graph, or None where there is no value: a gradient of what has none."""


class CaptureError(WeftError, RuntimeError):
    """A cell cannot be captured; the message says why, and what would help."""


@dataclass(frozen=True)
class Roles:
    """What the ends of the graph mean. Lists run parallel to the flat leaves of inputs, states and outputs."""

    inputs: list[fx.Node]
    states: list[fx.Node]
    new_state_gradients: list[fx.Node]
    output_gradients: list[fx.Node]
    references: list[fx.Node]
    new_states: list[Value]
    outputs: list[Value]
    input_gradients: list[Value]
    state_gradients: list[Value]
    parameter_gradients: list[Value]


@dataclass(frozen=True)
class Captured:
    """The joint graph of one step. `tensors` holds the references by the name of their node's target."""

    module: fx.GraphModule
    roles: Roles
    parameters: list[Tensor]
    input_structure: Structure
    state_structure: Structure
    output_structure: Structure

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in an order in which they can run."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]


def capture(cell: Cell, x: Any, state: Any, parameters: Sequence[Tensor] | None = None) -> Captured:
    """Run the cell once on `x` and `state` (no time axis) and derive its joint graph.

    `parameters` are the references that want a gradient; by default those of the module that the cell is.
    Raises CaptureError. An exception of the cell itself passes through.
    """
    wanted = _parameters_of(cell) if parameters is None else list(parameters)
    inputs, input_structure = flatten(x)
    states, state_structure = flatten(state)
    _check_tensors([("input", inputs), ("state", states)])
    # Tensors of our own: the tracer would take one that is given twice, as two zero states often are, for one.
    inputs, states = ([each.detach().clone() for each in part] for part in (inputs, states))
    with torch.no_grad():
        y, new_state = _result_of(cell, *(map_leaves(torch.clone, each) for each in (x, state)))
    outputs, output_structure = flatten(y)
    new_states = _matching(new_state, states, state_structure)
    _check_tensors([("output", outputs)])

    def joint(xs: list[Tensor], ss: list[Tensor], gs: list[Tensor], gy: list[Tensor]) -> list[Tensor | None]:
        leaves = [_leaf(each) for each in (*xs, *ss)]
        with torch.enable_grad():
            out, after = cell(
                unflatten(input_structure, leaves[: len(xs)]), unflatten(state_structure, leaves[len(xs) :])
            )
            ends = [*flatten(after)[0], *flatten(out)[0]]
            found = iter(_gradients(ends, [*leaves, *wanted], [*gs, *gy]))
        return [*ends, *found]

    def forward(xs: list[Tensor], ss: list[Tensor]) -> list[Tensor]:
        out, after = cell(unflatten(input_structure, xs), unflatten(state_structure, ss))
        return [*flatten(after)[0], *flatten(out)[0]]

    _check_pure(forward, (inputs, states))
    example = (inputs, states, [torch.zeros_like(each) for each in new_states], [torch.zeros_like(o) for o in outputs])
    module = _traced(joint, example, wanted)
    counts = (len(inputs), len(states), len(new_states), len(outputs))
    return Captured(module, _roles(module, counts), wanted, input_structure, state_structure, output_structure)


def _check_pure(forward: Callable[..., Any], example: tuple[list[Tensor], ...]) -> None:
    """Raise CaptureError if the cell does what a pure graph cannot express."""
    try:
        with torch.no_grad():
            seen = _make_fx(forward)(*map_leaves(torch.clone, list(example)))
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise CaptureError(
            "the cell looks at the value of a tensor (a branch on data, .item(), bool() or the like), so no graph can "
            "stand for all steps; use torch.where instead of a branch, or run the cell by the eager loop"
        ) from error
    _refuse_random(seen)
    _refuse_writes(seen)


def _traced(joint: Callable[..., Any], example: tuple[list[Tensor], ...], parameters: list[Tensor]) -> fx.GraphModule:
    """The graph, made of pure operators: traced, without mutations, and tidied."""
    with torch.no_grad(), quiet_hooks(parameters):
        seen = _make_fx(joint)(*example)
        pure = _make_fx(_functionalize(seen, remove="mutations"))(*example)
    tidy(pure)
    return pure


def _parameters_of(cell: object) -> list[Tensor]:
    return [p for p in cell.parameters() if p.requires_grad] if isinstance(cell, nn.Module) else []


def _leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _gradients(ends: list[Tensor], wanted: list[Tensor], seeds: list[Tensor]) -> list[Tensor | None]:
    """The gradients of `wanted`, None for those that have none."""
    pairs = [(end, seed) for end, seed in zip(ends, seeds, strict=True) if end.requires_grad]
    asked = [tensor for tensor in wanted if tensor.requires_grad]
    if not pairs or not asked:
        return [None] * len(wanted)
    found = iter(torch.autograd.grad([e for e, _ in pairs], asked, [s for _, s in pairs], allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in wanted]


def _result_of(cell: Cell, x: Any, state: Any) -> tuple[Any, Any]:
    result: Any = cell(x, state)
    if not isinstance(result, tuple) or len(cast("tuple[Any, ...]", result)) != 2:
        raise CaptureError(
            f"a cell returns (output, new state), but this one returned {type(cast(object, result)).__name__}; "
            "return a tuple of two, each of them nested as you like"
        )
    return cast("tuple[Any, Any]", result)


def _matching(new_state: Any, states: list[Tensor], structure: Structure) -> list[Tensor]:
    """The leaves of the new state, which must look like the old one's."""
    leaves, seen = flatten(new_state)
    faults = [] if seen == structure else [f"it is nested as {seen}, the old one as {structure}"]
    for i, (new, old) in enumerate(zip(leaves, states, strict=False)):
        if isinstance(new, Tensor) and (new.shape, new.dtype) != (old.shape, old.dtype):
            faults.append(f"leaf {i} is {_look(new)}, in the old one {_look(old)}")
    if faults:
        raise CaptureError("the new state of a cell must look like the old one, but " + "; ".join(faults))
    return leaves


def _look(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check_tensors(parts: Sequence[tuple[str, Sequence[Any]]]) -> None:
    faults = [
        f"{name} leaf {i} is {type(leaf).__name__}"
        for name, leaves in parts
        for i, leaf in enumerate(leaves)
        if not isinstance(leaf, Tensor)
    ]
    if faults:
        raise CaptureError("all leaves must be tensors, but " + ", ".join(faults))


def _refuse_random(module: fx.GraphModule) -> None:
    drawn = [n for n in module.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    if drawn:
        names = ", ".join(dict.fromkeys(str(node.target) for node in drawn))
        raise CaptureError(
            f"the cell draws random numbers ({names}), and a captured step would draw the same ones every time; "
            "run the cell by the eager loop"
        )


def _refuse_writes(module: fx.GraphModule) -> None:
    """A write into an input or a reference is seen by later steps, which a pure graph cannot express."""
    outlives: set[fx.Node] = {n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")}
    written: list[str] = []
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if value in outlives and argument.alias_info is not None:
                if argument.alias_info.is_write:
                    written.append(f"{node.target} on {value}")
                outlives.add(node)  # a view
    if written:
        raise CaptureError(
            "the cell writes into tensors that outlive the step (" + ", ".join(written) + "); carry them as a state, "
            "or run the cell by the eager loop"
        )


def _roles(module: fx.GraphModule, counts: tuple[int, int, int, int]) -> Roles:
    inputs, states, new_states, outputs = counts
    nodes = list(module.graph.nodes)
    starts = _parts([n for n in nodes if n.op == "placeholder"], [inputs, states, new_states, outputs])
    ends = list(next(n for n in nodes if n.op == "output").args[0])
    found = _parts(ends, [new_states, outputs, inputs, states, len(ends)])
    return Roles(
        inputs=starts[0],
        states=starts[1],
        new_state_gradients=starts[2],
        output_gradients=starts[3],
        references=[n for n in nodes if n.op == "get_attr"],
        new_states=found[0],
        outputs=found[1],
        input_gradients=found[2],
        state_gradients=found[3],
        parameter_gradients=found[4],
    )


def _parts(values: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for size in sizes:
        found.append(values[:size])
        values = values[size:]
    return found
