"""From a cell, run once, to the graph of one step and its backward.

    cell(x, state) -> (y, state')                     the user's code

    joint(x, s, gs', gy):                             the captured graph: once, for any T
        y, s' = cell(x, s)
        gx, gs, gw = gradients of (s', y) for (x, s, parameters), given (gs', gy)
        return s', y, gx, gs, gw

The idea of deriving the backward net once is that of Caffe2's ``recurrent_net``. Capturing is `make_fx` over
`torch.autograd.grad`. Dynamo and `torch.export` read the cell's Python code and reject code that they do not know,
whereas `make_fx` runs it, so it accepts the most cells. Parameters and other tensors that the cell reads are its
*references*: constants of the graph that are looked up at every use, so an optimizer can change them. A cell that
cannot be captured is rejected here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from torchweft.core.autograd import silence_hooks
from torchweft.core.errors import WeftError
from torchweft.core.pytree import flatten, map_leaves, unflatten
from torchweft.core.segment import can_have_gradient
from torchweft.recurrent import graph as step_graph
from torchweft.recurrent import pytorch_internals as internals
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.passes import canonicalize, functionalize, fuse, writes

Cell = Callable[[Any, Any], tuple[Any, Any]]


class CaptureError(WeftError, RuntimeError):
    """A cell cannot be captured. The message gives the reason and a remedy."""


class MisfitError(CaptureError):
    """The result of the cell does not have the form of a step. The eager loop either accepts it or reports why not."""


def capture(
    cell: Cell,
    x: Any,
    state: Any,
    parameters: Sequence[Tensor] | None = None,
    *,
    wanted_inputs: Sequence[bool] | None = None,
    composed: Mapping[Any, Any] | None = None,
    watched: Sequence[Tensor] = (),
) -> StepGraph:
    """Run the cell once on `x` and `state` (no time axis) and derive its joint graph.

    `parameters` are the references that require a gradient, by default those of a cell that is a module.
    `wanted_inputs` flags the leaves of `x` that require one, by default all. `composed` decomposes large operators, for
    backends that do not know them. A cell that reads the value of a `watched` tensor, e.g. a buffer, is rejected,
    because the plan would freeze it. Raises CaptureError. An exception of the cell itself passes through.
    """
    if parameters is None:
        parameters = [p for p in cell.parameters() if p.requires_grad] if isinstance(cell, nn.Module) else []
    learned = list(parameters)
    inputs, input_structure = flatten(x)
    states, state_structure = flatten(state)
    # Copies, because the tracer identifies values by object: two zero states that are one tensor would become one.
    inputs, states = ([leaf.detach().clone() for leaf in leaves] for leaves in (inputs, states))
    with torch.no_grad(), _ValueReadGuard(watched):
        y, new_state = check_pair(cell(*(map_leaves(torch.clone, value) for value in (x, state))))
    output_leaves, output_structure = flatten(y)
    outputs, new_states = tensor_outputs(output_leaves), flatten(new_state)[0]
    _check_result(new_state, state, outputs)

    wants = [*(wanted_inputs or [True] * len(inputs)), *[True] * len(states)]
    grad = torch.is_grad_enabled()  # the cell can ask for it

    def run_forward(xs: list[Tensor], ss: list[Tensor]) -> list[Tensor]:
        out, after = cell(unflatten(input_structure, xs), unflatten(state_structure, ss))
        return [*flatten(after)[0], *tensor_outputs(flatten(out)[0])]

    def run_joint(xs: list[Tensor], ss: list[Tensor], gs: list[Tensor], gy: list[Tensor]) -> list[Tensor | None]:
        leaves = [
            value.detach().requires_grad_(want and can_have_gradient(value))
            for value, want in zip((*xs, *ss), wants, strict=True)
        ]
        with torch.set_grad_enabled(grad):
            ends = run_forward(leaves[: len(xs)], leaves[len(xs) :])
            return [*ends, *gradients_of([*leaves, *learned], ends, [*gs, *gy])]

    example = (inputs, states, [torch.zeros_like(s) for s in new_states], [torch.zeros_like(o) for o in outputs])
    try:
        module = _trace_joint(run_joint, example, learned, composed)
    except Exception:
        # The derivation of gradients can fail on an impure cell with an obscure error. Forward alone names the cause.
        _check_pure(run_forward, (inputs, states))
        raise
    counts = (len(inputs), len(states), len(new_states), len(outputs))
    signature = step_graph.graph_signature(module, counts)
    random, draws = step_graph.lift_draws(module)
    signature.inputs.extend(random)
    signature.input_gradients.extend([None] * len(random))
    graph = StepGraph(
        module,
        signature,
        learned,
        input_structure,
        state_structure,
        output_structure,
        output_is_tensor=tuple([leaf is not None for leaf in output_leaves]),
        wanted_inputs=tuple(wants[: len(inputs)]) + (False,) * len(random),
        draws=draws,
    )
    if composed is None:
        fuse(graph)
    return graph


class _ValueReadGuard(internals.TorchDispatchMode):
    """Reject reads of the value of certain tensors, because tracing would freeze it as a constant of the program."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            operands = [value for value in args if isinstance(value, Tensor) and value.numel()]
            if any(operand.untyped_storage().data_ptr() in self._addresses for operand in operands):
                raise CaptureError(
                    f"the cell reads the value of a buffer or parameter ({func}), which a plan would freeze; make it "
                    "a plain attribute, or compute with the tensor"
                )
        return func(*args, **(kwargs or {}))


def _check_pure(forward: Callable[..., Any], example: tuple[list[Tensor], ...]) -> None:
    try:
        with torch.no_grad():
            traced = internals.make_fx(forward)(*map_leaves(torch.clone, list(example)))
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise CaptureError(
            "the cell reads the value of a tensor (a branch on data, .item(), bool() or the like), so no graph can "
            "stand for all steps; use torch.where instead of a branch, or run the cell by the eager loop"
        ) from error
    _reject_writes(traced)


def _trace_joint(
    joint: Callable[..., Any],
    example: tuple[list[Tensor], ...],
    parameters: list[Tensor],
    composed: Mapping[Any, Any] | None,
) -> fx.GraphModule:
    # One fake mode for all values. Without it the tracer creates one per value, which takes a third of its time.
    context = internals.TracingContext(internals.FakeTensorMode(allow_fallback_kernels=True))
    # The gradient of a view that is written to then repeats the view. By default it reads by strides, which a value
    # stacked over time does not have.
    with torch.no_grad(), silence_hooks(parameters), internals.tracing(context), internals.replay_views(True):
        traced = internals.make_fx(joint)(*example)
        _reject_writes(traced)
        step_graph.separate_bernoulli(traced)
        pure = functionalize(traced, example, composed)
    written, dependent = writes(pure), step_graph.value_dependent_draws(pure)
    # With `composed`, a decomposition of PyTorch can write. The backend then rejects it.
    if written and composed is None:
        raise CaptureError(
            f"no graph without writes could be derived from the cell, which writes by {', '.join(written)}; compute "
            "new tensors instead, or run the cell by the eager loop"
        )
    if dependent:
        raise CaptureError(
            f"the cell draws random numbers that depend on computed values ({', '.join(dict.fromkeys(dependent))}), so "
            "they cannot be drawn before the loop; draw from a shape and a fixed probability, or run the cell by the "
            "eager loop"
        )
    # Before canonicalization, which changes the layouts that random numbers are drawn in.
    step_graph.note_strides(pure)
    canonicalize(pure)
    return pure


def gradients_of(
    tensors: Sequence[Tensor], ends: Sequence[Tensor], seeds: Sequence[Tensor | None], **options: Any
) -> list[Tensor | None]:
    """The gradients of `tensors`, None for those without; `options` are those of `torch.autograd.grad`."""
    pairs = [(end, seed) for end, seed in zip(ends, seeds, strict=True) if end.requires_grad and seed is not None]
    learned = [tensor for tensor in tensors if tensor.requires_grad]
    if not pairs or not learned:
        return [None] * len(tensors)
    roots, grad_outputs = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(roots, learned, grad_outputs, allow_unused=True, **options))
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors]


def check_pair(result: Any) -> tuple[Any, Any]:
    """The result of a cell. Raises MisfitError if it is not a pair."""
    if not isinstance(result, tuple) or len(cast("tuple[Any, ...]", result)) != 2:
        raise MisfitError(
            f"a cell returns (output, new state), but this one returned {type(cast(object, result)).__name__}; "
            "return a tuple of two, each of them nested as you like"
        )
    return cast("tuple[Any, Any]", result)


def tensor_outputs(leaves: Sequence[Any]) -> list[Any]:
    return [leaf for leaf in leaves if leaf is not None]


def _check_result(new: Any, state: Any, outputs: list[Any]) -> None:
    # Raise an error unless outputs are tensors, and the new state has the form of the old one.
    new_form, old_form = (
        [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in flatten(value)[0]]
        for value in (new, state)
    )
    if flatten(new)[1] != flatten(state)[1] or new_form != old_form:
        raise MisfitError(f"the new state of a cell must match the old one, but is {new_form}, not {old_form}")
    kinds = {type(leaf).__name__ for leaf in outputs if not isinstance(leaf, Tensor)}
    if kinds:
        raise CaptureError(f"outputs must be tensors or None, but some are {', '.join(sorted(kinds))}")


def _reject_writes(module: fx.GraphModule) -> None:
    """Raise CaptureError for a write into an input or a reference. Later steps see it, which a pure graph cannot do."""
    outlives: set[fx.Node] = {n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")}
    written: list[str] = []
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        named = {argument.name: argument for argument in schema.arguments}
        pairs = [*zip(schema.arguments, node.args, strict=False), *((named[k], v) for k, v in node.kwargs.items())]
        for argument, value in pairs:
            if value in outlives and argument.alias_info is not None:
                if argument.alias_info.is_write:
                    written.append(f"{node.target} on {value}")
                outlives.add(node)  # a view
        # Batch norm in training updates its statistics without saying so in its schema.
        if "batch_norm" in str(node.target) and node.args[5:6] == (True,) and node.args[3:5] != (None, None):
            written.append(f"{node.target} in training on its running statistics")
    if written:
        raise CaptureError(
            "the cell writes into tensors that outlive the step (" + ", ".join(written) + "); carry them as a state, "
            "or run the cell by the eager loop"
        )
