"""From a cell, run once, to the graph of one step and its backward.

    cell(x, state) -> (y, state')                     what the user wrote

    joint(x, s, gs', gy):                             what is captured, once, whatever T
        y, s' = cell(x, s)
        gx, gs, gw = gradients of (s', y) for (x, s, parameters), given (gs', gy)
        return s', y, gx, gs, gw

Capturing is `make_fx` over `torch.autograd.grad`; of the ways that PyTorch offers it takes the most cells. Parameters
and other tensors that the cell reads are its *references*: constants of the graph that are looked up anew at every use,
so an optimizer may change them. What cannot be captured is refused here. The idea of deriving the backward net of the
step net once is that of Caffe2's ``recurrent_net``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core.autograd import quiet_hooks
from weft.core.errors import WeftError
from weft.core.pytree import flatten, map_leaves, unflatten
from weft.core.segment import differentiable
from weft.recurrent.graph import StepGraph, bound, graph_signature, lifted, note_strides, tell_apart
from weft.recurrent.passes import canonicalize, functionalize, fuse, make_fx, writes

Cell = Callable[[Any, Any], tuple[Any, Any]]


class CaptureError(WeftError, RuntimeError):
    """A cell cannot be captured; the message says why, and what would help."""


class MisfitError(CaptureError):
    """The cell returned something else than a step of a loop does; the eager loop's error says what, or it takes it."""


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

    `parameters` are the references that want a gradient; by default those of the module that the cell is.
    `wanted_inputs` says which leaves of `x` want one; by default all. `composed` makes larger operators out of
    smaller ones, for backends that do not know them. A cell that reads the value of a `watched` tensor, as a buffer
    is one, is refused: the plan would keep the value. Raises CaptureError. An exception of the cell itself passes
    through.
    """
    if parameters is None:
        parameters = [p for p in cell.parameters() if p.requires_grad] if isinstance(cell, nn.Module) else []
    wanted = list(parameters)
    inputs, input_structure = flatten(x)
    states, state_structure = flatten(state)
    # Tensors of our own: the tracer would take one that is given twice, as two zero states often are, for one.
    inputs, states = ([each.detach().clone() for each in part] for part in (inputs, states))
    with torch.no_grad(), _Watch(watched):
        y, new_state = result_of(cell(*(map_leaves(torch.clone, each) for each in (x, state))))
    output_leaves, output_structure = flatten(y)
    outputs, new_states = present(output_leaves), flatten(new_state)[0]
    _check_result(new_state, state, outputs)

    wants = [*(wanted_inputs or [True] * len(inputs)), *[True] * len(states)]
    grad = torch.is_grad_enabled()  # without, nothing wants a gradient, and the cell is told so

    def forward(xs: list[Tensor], ss: list[Tensor]) -> list[Tensor]:
        out, after = cell(unflatten(input_structure, xs), unflatten(state_structure, ss))
        return [*flatten(after)[0], *present(flatten(out)[0])]

    def joint(xs: list[Tensor], ss: list[Tensor], gs: list[Tensor], gy: list[Tensor]) -> list[Tensor | None]:
        leaves = [
            each.detach().requires_grad_(want and differentiable(each))
            for each, want in zip((*xs, *ss), wants, strict=True)
        ]
        with torch.set_grad_enabled(grad):
            ends = forward(leaves[: len(xs)], leaves[len(xs) :])
            return [*ends, *gradients_of([*leaves, *wanted], ends, [*gs, *gy])]

    example = (inputs, states, [torch.zeros_like(each) for each in new_states], [torch.zeros_like(o) for o in outputs])
    try:
        module = _traced(joint, example, wanted, composed)
    except Exception:  # the forward alone tells better what is wrong: gradients may stumble over it in their own way
        _check_pure(forward, (inputs, states))
        raise
    counts = (len(inputs), len(states), len(new_states), len(outputs))
    signature = graph_signature(module, counts)
    random, draws = lifted(module)
    signature.inputs.extend(random)
    signature.input_gradients.extend([None] * len(random))
    asked = tuple(wants[: len(inputs)]) + (False,) * len(random)
    given = tuple([each is not None for each in output_leaves])
    found = StepGraph(
        module, signature, wanted, input_structure, state_structure, output_structure, given, asked, draws
    )
    if composed is None:
        fuse(found)
    return found


class _Watch(TorchDispatchMode):
    """Refuse to read the value of certain tensors: tracing would take it for a constant of the program."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._held = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            seen = [each for each in args if isinstance(each, Tensor) and each.numel()]
            if any(each.untyped_storage().data_ptr() in self._held for each in seen):
                raise CaptureError(
                    f"the cell reads the value of a buffer or parameter ({func}), which a plan would keep; make it "
                    "a plain attribute, or compute with the tensor"
                )
        return func(*args, **(kwargs or {}))


def _check_pure(forward: Callable[..., Any], example: tuple[list[Tensor], ...]) -> None:
    """Raise CaptureError if the cell does what a pure graph cannot express."""
    try:
        with torch.no_grad():
            seen = make_fx(forward)(*map_leaves(torch.clone, list(example)))
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise CaptureError(
            "the cell reads the value of a tensor (a branch on data, .item(), bool() or the like), so no graph can "
            "stand for all steps; use torch.where instead of a branch, or run the cell by the eager loop"
        ) from error
    _refuse_writes(seen)


def _traced(
    joint: Callable[..., Any],
    example: tuple[list[Tensor], ...],
    parameters: list[Tensor],
    composed: Mapping[Any, Any] | None,
) -> fx.GraphModule:
    """The graph, made of pure operators: traced, without mutations, and tidied."""
    # With one fake mode for all values, the tracer does not make a mode for each: a third of its time.
    context = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
    # The gradient of a view that is written to asks for it as it was made, not by strides, which bulk work changes.
    views_as_made = cast(Any, torch.autograd.grad_mode)._force_original_view_tracking(True)
    with torch.no_grad(), quiet_hooks(parameters), tracing(context), views_as_made:
        seen = make_fx(joint)(*example)
        _refuse_writes(seen)
        tell_apart(seen)
        pure = functionalize(seen, example, composed)
    written, drawn = writes(pure), bound(pure)
    if written and composed is None:  # else some decomposition may write, which is for the backend to refuse
        raise CaptureError(
            f"no graph without writes could be made of the cell, which writes by {', '.join(written)}; compute new "
            "tensors instead, or run the cell by the eager loop"
        )
    if drawn:
        raise CaptureError(
            f"the cell draws random numbers that depend on what it computes ({', '.join(dict.fromkeys(drawn))}), so "
            "they cannot be drawn before the loop; draw from a shape and a fixed probability, or run the cell by the "
            "eager loop"
        )
    note_strides(pure)
    canonicalize(pure)
    return pure


def gradients_of(
    wanted: Sequence[Tensor], ends: Sequence[Tensor], seeds: Sequence[Tensor | None], **options: Any
) -> list[Tensor | None]:
    """The gradients of `wanted`, None for those that have none; `options` are those of `torch.autograd.grad`."""
    pairs = [(end, seed) for end, seed in zip(ends, seeds, strict=True) if end.requires_grad and seed is not None]
    asked = [tensor for tensor in wanted if tensor.requires_grad]
    if not pairs or not asked:
        return [None] * len(wanted)
    roots, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(roots, asked, given, allow_unused=True, **options))
    return [next(found) if tensor.requires_grad else None for tensor in wanted]


def result_of(result: Any) -> tuple[Any, Any]:
    """The result of a cell, checked to be a pair. Raises MisfitError."""
    if not isinstance(result, tuple) or len(cast("tuple[Any, ...]", result)) != 2:
        raise MisfitError(
            f"a cell returns (output, new state), but this one returned {type(cast(object, result)).__name__}; "
            "return a tuple of two, each of them nested as you like"
        )
    return cast("tuple[Any, Any]", result)


def present(outputs: Sequence[Any]) -> list[Any]:
    """The leaves of an output that are there: it may hold None."""
    return [each for each in outputs if each is not None]


def _check_result(new: Any, state: Any, outputs: list[Any]) -> None:
    """Raise an error unless outputs are tensors, and the new state is as the old one."""
    look = [
        [(tuple(each.shape), each.dtype) if isinstance(each, Tensor) else None for each in flatten(value)[0]]
        for value in (new, state)
    ]
    if flatten(new)[1] != flatten(state)[1] or look[0] != look[1]:
        raise MisfitError(f"the new state of a cell must match the old one, but is {look[0]}, not {look[1]}")
    kinds = {type(each).__name__ for each in outputs if not isinstance(each, Tensor)}
    if kinds:
        raise CaptureError(f"outputs must be tensors or None, but some are {', '.join(sorted(kinds))}")


def _refuse_writes(module: fx.GraphModule) -> None:
    """A write into an input or a reference is seen by later steps, which a pure graph cannot express."""
    outlives: set[fx.Node] = {n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")}
    written: list[str] = []
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        named = {argument.name: argument for argument in schema.arguments}
        given = [*zip(schema.arguments, node.args, strict=False), *((named[k], v) for k, v in node.kwargs.items())]
        for argument, value in given:
            if value in outlives and argument.alias_info is not None:
                if argument.alias_info.is_write:
                    written.append(f"{node.target} on {value}")
                outlives.add(node)  # a view
        if "batch_norm" in str(node.target) and node.args[5:6] == (True,) and node.args[3:5] != (None, None):
            written.append(f"{node.target} in training on its running statistics")
    if written:
        raise CaptureError(
            "the cell writes into tensors that outlive the step (" + ", ".join(written) + "); carry them as a state, "
            "or run the cell by the eager loop"
        )
