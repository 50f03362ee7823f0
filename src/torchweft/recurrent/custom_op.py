"""A recurrent network as one custom operator, which `torch.compile` does not look into.

    Recurrent.forward       under tracing only
      traced_call           traced by Dynamo: plain values and tensors in, plain values and tensors out
        _one_operator       skipped by Dynamo, but traced by the next layer (AOTAutograd)
          weft.recurrent    the operator: runs the ordinary network, whose plans are made at run time

    compiled graph     ... -> weft.recurrent(spec, tensors, references, wanted, start) -> ends, token -> ...
                       ... <- weft.recurrent_backward(token, tensors, references, wanted, gradients) <- ...

Tracing into the network is the obvious alternative. It would unroll the loop over T, and compile each length again.

A graph holds the number of a *call spec* as a constant. It therefore works only in the process that traced it, and as
long as the network lives. The network's tensors are arguments (`references`), so a graph can be run with others. The
*token* stands for the values that autograd saved of the sequence. It is a tensor over memory that owns these values.
They are freed with that memory, i.e. when neither the token nor the graph that would call backward is referenced.

This module is imported only under tracing, because it imports Dynamo, which takes seconds.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchweft.core.autograd import is_graph_retained, silence_hooks
from torchweft.core.context import ExecutionContext
from torchweft.core.errors import BackwardTwiceError, UsageError
from torchweft.core.pytree import Structure, flatten, map_leaves, unflatten
from torchweft.core.segment import can_have_gradient
from torchweft.recurrent import eager
from torchweft.recurrent.capture import gradients_of
from torchweft.recurrent.guards import CellGuards
from torchweft.recurrent.plan_cache import PlanCache
from torchweft.recurrent.pytorch_internals import default_dispatch, nonstrict_trace, with_tensors
from torchweft.recurrent.traced_networks import GONE, TraceableNetwork, find_network

_numbers = itertools.count(1)
_specs: dict[int, "CallSpec"] = {}
# By the number in their token, the sequences that can still run backward.
live_sequences: "weakref.WeakValueDictionary[int, _TokenMemory]" = weakref.WeakValueDictionary()
_NONE = "torchweft: None"  # stands for None, which a traced call cannot take


def traced_call(
    network: TraceableNetwork, handle: int, inputs: Any, state: Any, row_options: dict[str, Any], start: int
) -> tuple[Any, Any, Any]:
    """Outputs, last and all states of a whole sequence, by one operator."""
    # `row_options` holds those of lengths, mask and reset that were given. Raises UsageError for calls that cannot be
    # traced: a PackedSequence, and a function that closes over parameters.
    if isinstance(inputs, PackedSequence):
        raise UsageError("a PackedSequence cannot be traced; pad it (pad_packed_sequence), and give its lengths")
    if "lengths" in row_options and not isinstance(row_options["lengths"], Tensor):
        row_options["lengths"] = torch.tensor(row_options["lengths"], dtype=torch.int64)
    references = (*network.parameters(), *network.buffers())
    value = _map_containers(_encode_none, (inputs, state, row_options))
    results = _one_operator(handle, references, value, start)
    outputs, last, states = _restore_named_tuples(_map_containers(_decode_none, results), _traced_named_tuples())
    return outputs, last, states


def _encode_none(leaf: Any) -> Any:
    return _NONE if leaf is None else leaf


def _decode_none(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else None


def _map_containers(fn: Callable[[Any], Any], value: Any) -> Any:
    # As `map_leaves`, but also for named tuples, which Dynamo cannot unflatten by a structure.
    kind: Any = type(cast(object, value))
    if kind is dict:
        return {key: _map_containers(fn, item) for key, item in value.items()}
    if not isinstance(value, tuple | list):
        return fn(value) if value is None or isinstance(value, Tensor) else map_leaves(fn, value)
    items = [_map_containers(fn, item) for item in cast("Sequence[Any]", value)]
    return kind._make(items) if hasattr(kind, "_make") else tuple(items) if kind is tuple else items


# Where a value has named tuples: None if nowhere, else the number of its class or None, and the places in its items.
NamedTuplePlaces = tuple[int | None, tuple["NamedTuplePlaces | None", ...]]
# The classes of named tuples by number. Dynamo can look them up here, but cannot keep a class as a constant.
_named_tuple_classes: dict[int, Any] = {}


def _strip_named_tuples(value: Any) -> tuple[Any, NamedTuplePlaces | None]:
    """The value with plain tuples instead, and the places of the named ones."""
    if type(value) is dict:
        items = cast("dict[Any, Any]", value)
        inner, places = _strip_each(items.values())
        return dict(zip(items, inner, strict=True)), (None, places) if any(places) else None
    if type(value) is list:
        inner, places = _strip_each(cast("list[Any]", value))
        return inner, (None, places) if any(places) else None
    kind: type = type(cast(object, value))
    named = hasattr(kind, "_make")
    if not named and kind is not tuple:
        return value, None
    inner, places = _strip_each(cast("tuple[Any, ...]", value))
    number = _number_of_class(kind) if named else None
    return tuple(inner), (number, places) if number is not None or any(places) else None


def _strip_each(values: Iterable[Any]) -> tuple[list[Any], tuple[NamedTuplePlaces | None, ...]]:
    pairs = [_strip_named_tuples(item) for item in values]
    return [item for item, _ in pairs], tuple([place for _, place in pairs])


def _number_of_class(kind: type) -> int:
    known = next((number for number, other in _named_tuple_classes.items() if other is kind), None)
    number = len(_named_tuple_classes) if known is None else known
    _named_tuple_classes[number] = kind
    return number


def _restore_named_tuples(value: Any, places: NamedTuplePlaces | None) -> Any:
    if places is None:
        return value
    number, inner = places
    if type(value) is dict:
        pairs = zip(cast("dict[Any, Any]", value).items(), inner, strict=True)
        return {key: _restore_named_tuples(item, place) for (key, item), place in pairs}
    items = [_restore_named_tuples(item, place) for item, place in zip(value, inner, strict=True)]
    if number is not None:
        return _named_tuple_classes[number](*items)
    return tuple(items) if type(value) is tuple else items


class _TracedCall(threading.local):
    named_tuples: NamedTuplePlaces | None = None  # in the results of the last call of `_one_operator`


_traced = _TracedCall()


@torch.compiler.assume_constant_result
def _traced_named_tuples() -> NamedTuplePlaces | None:
    # Read right after `_one_operator` was traced. Dynamo keeps it as a constant of the graph.
    return _traced.named_tuples


@nonstrict_trace
def _one_operator(handle: int, references: tuple[Tensor, ...], value: Any, start: int) -> Any:
    network = find_network(handle)
    registered = {id(parameter) for parameter in network.parameters()}
    unregistered = sum(id(parameter) not in registered for parameter in CellGuards(network.cell).parameters)
    if unregistered:  # their gradients would be lost
        raise UsageError(
            f"the cell reads {unregistered} tensors that require a gradient and are not parameters of the network, so "
            "a traced graph would not know of them; make the cell a module that registers them"
        )
    leaves, structure = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = tuple([None if isinstance(leaf, Tensor) else _concrete_value(leaf) for leaf in leaves])
    spec = _spec_of_call(handle, structure, constants)
    grad = torch.is_grad_enabled()
    wanted = [grad and tensor.requires_grad for tensor in (*tensors, *references)]
    results = spec.nest_results(recurrent(spec.number, tensors, list(references), wanted, start))
    results, _traced.named_tuples = _strip_named_tuples(results)
    return results


def _concrete_value(leaf: Any) -> Any:
    # A leaf that is not a tensor, as a constant. Symbols are replaced by their value.
    kinds: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next((convert(leaf) for kind, convert in kinds.items() if isinstance(leaf, kind)), leaf)


@dataclass(eq=False)
class CallSpec:
    """One kind of call: everything about it except the tensors."""

    network: int
    structure: Structure  # nesting of (inputs, state, row options by name)
    constants: tuple[Any, ...]  # their leaves. None stands for a tensor.
    ambient: ExecutionContext
    number: int = field(default_factory=lambda: next(_numbers))
    # Nesting of (outputs, last, states), and which of the leaves are tensors. The others are None.
    results: tuple[Structure, list[bool]] | None = None

    def run_network(
        self, tensors: Sequence[Tensor], references: Sequence[Tensor], start: int, fake: bool
    ) -> list[Tensor]:
        """The tensors that the network returns. With `fake`, all tensors are fake."""
        network = find_network(self.network)
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is None else constant for constant in self.constants]
        inputs, state, row_options = unflatten(self.structure, leaves)
        if fake and "lengths" in row_options:
            # Fake lengths have no values, so they cannot be checked. Their effect on shapes is that of a mask.
            leaf = next(leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim() > 1)
            mask = torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device)
            row_options = {"mask": mask, **{name: v for name, v in row_options.items() if name != "lengths"}}
        # The graph can be run with other weights than the network's.
        swapped = dict(zip(_named_tensors(network), references, strict=True))
        plans = OutputMeta() if fake else None
        with self.ambient.here(), self.ambient.casting(), with_tensors(network, swapped, tie_weights=True):
            outputs, last, states = network.run_plainly(
                inputs, None if state == _NONE else state, start=start, plans=plans, **row_options
            )
        ends, structure = flatten((outputs, last, states if network.memory in ("full", "states") else None))
        self.results = structure, [isinstance(end, Tensor) for end in ends]
        return [end for end in ends if isinstance(end, Tensor)]

    def nest_results(self, values: Sequence[Tensor]) -> Any:
        """(outputs, last, states) from the operator's tensors, with 0 for None, which a traced call cannot return."""
        assert self.results is not None
        (structure, tensors), remaining = self.results, iter(values)
        return unflatten(structure, [next(remaining) if is_tensor else 0 for is_tensor in tensors])


def _find_spec(number: int) -> CallSpec:
    spec = _specs.get(number)
    if spec is None:
        raise UsageError(GONE)
    return spec


def _spec_of_call(handle: int, structure: Structure, constants: tuple[Any, ...]) -> CallSpec:
    # One spec for all calls of a kind. Its number is a constant of the graph, so a new one for each trace would never
    # hit the cache of compiled graphs.
    network = find_network(handle)
    ambient = ExecutionContext.capture([parameter.device.type for parameter in network.parameters()])
    # The autocast settings of the traced call hold at run time too, so they are part of the kind.
    key = (handle, constants, ambient.autocast, structure)
    for spec in _specs.values():
        if (spec.network, spec.constants, spec.ambient.autocast, spec.structure) == key:
            return spec
    spec = CallSpec(handle, structure, constants, ambient)
    _specs[spec.number] = spec
    weakref.finalize(network, _specs.pop, spec.number, None)
    return spec


def _named_tensors(network: TraceableNetwork) -> Mapping[str, Tensor]:
    # A network's parameters and buffers by name. Their order is that of a call's references.
    return dict(itertools.chain(network.named_parameters(), network.named_buffers()))


class OutputMeta(PlanCache):
    """Shapes and dtypes of a sequence's results, in place of a network's plans."""

    # The cell runs one step on fake tensors in the eager loop, and the results are expanded to T steps. T and N can be
    # symbols. The values of the results are arbitrary.

    def run(self, job: eager.SequenceRun, reserved: int = 0) -> eager.Unrolled:
        steps = job.inputs.steps
        if not steps:
            return job.run()
        outputs, last, states = job.head(1).run()

        def over_all_steps(leaf: Any) -> Any:
            return leaf.new_empty((steps, *leaf.shape[1:])) if isinstance(leaf, Tensor) else leaf

        return map_leaves(over_all_steps, outputs), last, map_leaves(over_all_steps, states)


class _TokenMemory(bytearray):
    """The memory of a token, which owns the autograd graph of one sequence: its ends, and the leaves to derive by."""

    def __init__(self, number: int, ends: list[Tensor], leaves: list[Tensor]) -> None:
        super().__init__(number.to_bytes(8, "little"))
        self.ends, self.leaves = ends, leaves


@torch.library.custom_op("torchweft::recurrent", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def recurrent(
    spec: int, tensors: Sequence[Tensor], references: Sequence[Tensor], wanted: Sequence[bool], start: int
) -> list[Tensor]:
    """Run the network. `wanted` flags those of `tensors` and `references` that get a gradient. The token comes last."""
    # Raises UsageError if the network is gone, and any exception of the network.
    call = _find_spec(spec)
    leaves = [_new_leaf(tensor, want) for tensor, want in zip(tensors, wanted, strict=False)]
    registered = _named_tensors(find_network(call.network)).values()
    triples = zip(references, registered, wanted[len(tensors) :], strict=True)
    referred = [_choose_reference(reference, tensor, want) for reference, tensor, want in triples]
    # PyTorch disables autograd inside an operator. The network needs it for its own graph, which the token keeps.
    with default_dispatch(), torch.set_grad_enabled(any(wanted)):
        ends = call.run_network(leaves, referred, start, fake=False)
        learned = [leaf for leaf, want in zip((*leaves, *referred), wanted, strict=True) if want]
        number = next(_numbers) if learned else 0
        memory = _TokenMemory(number, ends if learned else [], learned)
        if learned:
            live_sequences[number] = memory
        token = torch.frombuffer(memory, dtype=torch.int64)
        return [*_without_overlap([end.detach() for end in ends], [*tensors, *references]), token]


@recurrent.register_fake
def _(
    spec: int, tensors: Sequence[Tensor], references: Sequence[Tensor], wanted: Sequence[bool], start: int
) -> list[Tensor]:
    with _real_tensors_allowed(tensors):
        ends = _find_spec(spec).run_network(tensors, references, start, fake=True)
    token = torch.empty(1, dtype=torch.int64, device="cpu")
    return [*(torch.empty_like(end, memory_format=torch.contiguous_format) for end in ends), token]


@torch.library.custom_op("torchweft::recurrent_backward", mutates_args=())
def recurrent_backward(
    token: Tensor,
    tensors: Sequence[Tensor],
    references: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """The gradients of the tensors flagged in `wanted`, from those of the ends."""
    # Raises BackwardTwiceError if the values of the sequence are gone.
    sequence = live_sequences.get(int(token))
    if sequence is None:
        raise BackwardTwiceError(
            "the values of a compiled recurrent network's sequence are gone: its token was copied, as offloading saved "
            "tensors does, or the graph was freed; run forward again, or keep the network out of the compiled region"
        )
    leaves = sequence.leaves
    with default_dispatch(), silence_hooks(leaf for leaf in leaves if leaf.is_leaf):
        computed = gradients_of(leaves, sequence.ends, gradients, retain_graph=is_graph_retained())
    # An operator cannot return None, so a missing gradient becomes zeros.
    results = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, computed, strict=True)]
    return _without_overlap(results, [*tensors, *references, *(grad for grad in gradients if grad is not None)])


@recurrent_backward.register_fake
def _(
    token: Tensor,
    tensors: Sequence[Tensor],
    references: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    pairs = zip((*tensors, *references), wanted, strict=True)
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor, want in pairs if want]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, tensors, references, wanted, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], *tensors, *references)
    ctx.count, ctx.wanted = len(tensors), wanted


def _run_backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    token, *saved = ctx.saved_tensors
    tensors, references = saved[: ctx.count], saved[ctx.count :]
    of_ends = [None if gradient is None else gradient.contiguous() for gradient in gradients[:-1]]
    computed = iter(recurrent_backward(token, tensors, references, ctx.wanted, of_ends))
    results = [next(computed) if want else None for want in ctx.wanted]
    return None, results[: ctx.count], results[ctx.count :], None, None


recurrent.register_autograd(_run_backward, setup_context=_save_for_backward)


def _new_leaf(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.detach().requires_grad_(wanted and can_have_gradient(tensor))


def _choose_reference(reference: Tensor, registered: Tensor, wanted: bool) -> Tensor:
    # The graph passes an alias of the parameter, a new object at each call, and plans are looked up by object. So the
    # network's own tensor is used where it is the same memory.
    same = reference is registered or (
        (reference.data_ptr(), reference.shape, reference.stride(), reference.dtype)
        == (registered.data_ptr(), registered.shape, registered.stride(), registered.dtype)
    )
    best = registered if same else reference
    # A leaf with an unrequested gradient also serves. A new leaf at each call would mean a new plan at each call.
    return best if best.is_leaf and best.requires_grad >= wanted else _new_leaf(best, wanted)


def _without_overlap(values: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    # The values, contiguous, each in its own memory: the results of an operator must not alias anything.
    taken = {other.untyped_storage()._cdata for other in others}
    results: list[Tensor] = []
    for value in values:
        value = value.contiguous()
        if value.untyped_storage()._cdata in taken:
            value = value.clone(memory_format=torch.contiguous_format)
        taken.add(value.untyped_storage()._cdata)
        results.append(value)
    return results


@contextmanager
def _real_tensors_allowed(tensors: Sequence[Tensor]) -> Generator[None]:
    # Let a cell that runs on fake tensors close over real ones, which PyTorch then converts.
    mode = next((each.fake_mode for each in cast("Sequence[Any]", tensors) if hasattr(each, "fake_mode")), None)
    before = None if mode is None else mode.allow_non_fake_inputs
    if mode is not None:
        mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        if mode is not None:
            mode.allow_non_fake_inputs = before
