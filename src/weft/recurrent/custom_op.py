"""A recurrent network as one custom operator, which `torch.compile` and `torch.export` do not look into.

    Recurrent.forward       under tracing only
      traced_call           traced by Dynamo: plain values and tensors in, plain values and tensors out
        _one_operator       skipped by Dynamo; traced by what comes behind it (AOTAutograd, export)
          weft.recurrent    the operator: runs the ordinary network, whose plans are made at run time

    compiled graph     ... -> weft.recurrent(spec, tensors, references, wanted, start) -> ends, token -> ...
                       ... <- weft.recurrent_backward(token, tensors, references, wanted, gradients) <- ...

A graph has the number of a *call spec* as a constant, so it works in the process that traced it, as long as the network
lives. A network's tensors are arguments (`references`): a graph may be run with others. The *token* stands for what
autograd saved of the sequence. It is a tensor over memory that owns these values: when nothing refers to that memory
any more, nor the graph that was to call backward, they go with it.

The module is imported when something is being traced, not before: it brings Dynamo, whose import takes seconds.
"""

import itertools
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.nn.utils.rnn import PackedSequence

from weft.core.autograd import keeps_graph, quiet_hooks
from weft.core.context import ExecutionContext
from weft.core.errors import BackwardTwiceError, UsageError
from weft.core.pytree import Structure, flatten, map_leaves, unflatten
from weft.core.segment import differentiable
from weft.recurrent import eager
from weft.recurrent.capture import gradients_of
from weft.recurrent.guards import CellGuards
from weft.recurrent.plan_cache import PlanCache
from weft.recurrent.recurrent import NETWORKS, Recurrent, Result

_C = cast(Any, torch._C)
_numbers = itertools.count(1)
_specs: dict[int, "CallSpec"] = {}
_sequences: "weakref.WeakValueDictionary[int, _TokenMemory]" = weakref.WeakValueDictionary()
_NONE = "weft: None"
"""Stands for None, which a traced call cannot take."""
_with_tensors = cast("Callable[..., AbstractContextManager[None]]", cast(Any, stateless)._reparametrize_module)
"""Puts other tensors in the place of a module's own, as `torch.func.functional_call` does."""
_GONE = (
    "a compiled or exported graph runs a recurrent network that is not there: it was deleted, or the graph was loaded "
    "in another process; keep the module, or compile and export it anew where it runs"
)


# -- a call as it is traced -----------------------------------------------------------------------------------------


def traced_call(network: Recurrent, handle: int, inputs: Any, state: Any, more: dict[str, Any], start: int) -> Result:
    """A whole sequence as one operator. `more` holds lengths, mask and reset, as far as they were given.

    Raises UsageError for what cannot be traced: a PackedSequence, and a function that closes over parameters.
    """
    if isinstance(inputs, PackedSequence):
        raise UsageError("a PackedSequence cannot be traced; pad it (pad_packed_sequence), and give its lengths")
    if "lengths" in more and not isinstance(more["lengths"], Tensor):
        more["lengths"] = torch.tensor(more["lengths"], dtype=torch.int64)
    references = (*network.parameters(), *network.buffers())
    value = map_leaves(_without_none, (inputs, state, more))
    outputs, last, states = map_leaves(_with_none, _one_operator(handle, references, value, start))
    return Result(outputs, last, states)


def _without_none(leaf: Any) -> Any:
    return _NONE if leaf is None else leaf


def _with_none(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else None


@torch._dynamo.nonstrict_trace
def _one_operator(handle: int, references: tuple[Tensor, ...], value: Any, start: int) -> Any:
    network: Recurrent = _found(NETWORKS, handle)
    own = {id(each) for each in network.parameters()}
    strange = sum(id(each) not in own for each in CellGuards(network.cell).parameters)
    if strange:  # their gradients would be lost
        raise UsageError(
            f"the cell reads {strange} tensors that want a gradient and are not parameters of the network, so a traced "
            "graph would not know of them; make the cell a module that has them"
        )
    leaves, structure = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = tuple([None if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves])
    spec = _spec_of(handle, structure, constants)
    graph = torch.is_grad_enabled()
    wanted = [graph and each.requires_grad for each in (*tensors, *references)]
    return spec.nested(recurrent(spec.number, tensors, list(references), wanted, start))


def _plain(leaf: Any) -> Any:
    """A leaf that is no tensor, as a constant; symbols get their value."""
    kinds: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next((make(leaf) for kind, make in kinds.items() if isinstance(leaf, kind)), leaf)


# -- call specs -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CallSpec:
    """One kind of call: everything about it but the tensors."""

    network: int
    structure: Structure
    """How (inputs, state, further arguments by name) are nested."""
    constants: tuple[Any, ...]
    """Their leaves that are no tensors; None stands for a tensor."""
    ambient: ExecutionContext
    number: int = field(default_factory=lambda: next(_numbers))
    results: tuple[Structure, list[bool]] | None = None
    """How (outputs, last, states) are nested, and which of the leaves are tensors; the others are None."""

    def run(self, tensors: Sequence[Tensor], references: Sequence[Tensor], start: int, fake: bool) -> list[Tensor]:
        """The tensors that the network returns; with `fake`, fake ones for fake ones."""
        network = _found(NETWORKS, self.network)
        rest = iter(tensors)
        leaves = [next(rest) if each is None else each for each in self.constants]
        inputs, state, more = unflatten(self.structure, leaves)
        if fake and "lengths" in more:  # their content is not known; they act as a mask does
            leaf = next(each for each in flatten(inputs)[0] if isinstance(each, Tensor) and each.dim() > 1)
            mask = torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device)
            more = {"mask": mask, **{name: each for name, each in more.items() if name != "lengths"}}
        own = dict(zip(_tensors_of(network), references, strict=True))
        plans = OutputMeta() if fake else None
        with self.ambient.here(), self.ambient.casting(), _with_tensors(network, own, tie_weights=True):
            result = network.run_plainly(inputs, None if state == _NONE else state, start=start, plans=plans, **more)
        parts = (result.outputs, result.last, result.states if network.memory in ("full", "states") else None)
        ends, structure = flatten(parts)
        self.results = structure, [isinstance(each, Tensor) for each in ends]
        return [each for each in ends if isinstance(each, Tensor)]

    def nested(self, values: Sequence[Tensor]) -> Any:
        """(outputs, last, states) out of the operator's tensors, with 0 for None, which a traced call cannot return."""
        assert self.results is not None
        (structure, tensors), rest = self.results, iter(values)
        return unflatten(structure, [next(rest) if there else 0 for there in tensors])


def _found(table: Any, key: int) -> Any:
    """The network of a handle, or the call spec of a number. Raises UsageError if it is gone."""
    found = table.get(key)
    if found is None:
        raise UsageError(_GONE)
    return found


def _spec_of(handle: int, structure: Structure, constants: tuple[Any, ...]) -> CallSpec:
    """The spec of a call, always the same one for the same kind."""
    network = _found(NETWORKS, handle)
    ambient = ExecutionContext.capture([each.device.type for each in network.parameters()])
    key = (handle, constants, ambient.autocast, structure)
    for spec in _specs.values():
        if (spec.network, spec.constants, spec.ambient.autocast, spec.structure) == key:
            return spec
    spec = CallSpec(handle, structure, constants, ambient)
    _specs[spec.number] = spec
    weakref.finalize(network, _specs.pop, spec.number, None)
    return spec


def _tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """A network's parameters and buffers by name: the references of its calls, in their order."""
    return dict(itertools.chain(network.named_parameters(), network.named_buffers()))


# -- shapes of the results, before any number is known --------------------------------------------------------------


class OutputMeta(PlanCache):
    """Shapes and dtypes of a sequence's results, in place of a network's plans.

    The cell runs one step, on fake tensors, in the eager loop; what comes out is stretched to T steps. T and N may be
    symbols. The values that it returns are arbitrary.
    """

    def run(self, job: eager.SequenceRun) -> eager.Unrolled:
        """See `PlanCache.run`."""
        steps = job.inputs.steps
        if not steps:
            return job.run()
        outputs, last, states = job.head(1).run()

        def stretched(leaf: Any) -> Any:
            return leaf.new_empty((steps, *leaf.shape[1:])) if isinstance(leaf, Tensor) else leaf

        return map_leaves(stretched, outputs), last, map_leaves(stretched, states)


# -- the operator and its backward ----------------------------------------------------------------------------------


class _TokenMemory(bytearray):
    """The memory of a token, and what lives as long as it: the ends of a sequence, and what wants a gradient."""

    ends: list[Tensor]
    asked: list[Tensor]


@torch.library.custom_op("weft::recurrent", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def recurrent(
    spec: int, tensors: Sequence[Tensor], references: Sequence[Tensor], wanted: Sequence[bool], start: int
) -> list[Tensor]:
    """Run the network. `wanted` says which of `tensors` and `references` want a gradient. The last result is the token.

    Raises UsageError if the network is gone, and whatever the network raises.
    """
    which = _found(_specs, spec)
    leaves = [_leaf(each, want) for each, want in zip(tensors, wanted, strict=False)]
    own = _tensors_of(_found(NETWORKS, which.network)).values()
    given = [
        _reference(each, mine, want) for each, mine, want in zip(references, own, wanted[len(tensors) :], strict=True)
    ]
    with _outside_operator(), torch.set_grad_enabled(any(wanted)):
        ends = which.run(leaves, given, start, fake=False)
        asked = [each for each, want in zip((*leaves, *given), wanted, strict=True) if want]
        number = next(_numbers) if asked else 0
        memory = _TokenMemory(number.to_bytes(8, "little"))
        if asked:
            memory.ends, memory.asked = ends, asked
            _sequences[number] = memory
        token = torch.frombuffer(memory, dtype=torch.int64)
        return [*_separate([each.detach() for each in ends], [*tensors, *references]), token]


@recurrent.register_fake
def _(
    spec: int, tensors: Sequence[Tensor], references: Sequence[Tensor], wanted: Sequence[bool], start: int
) -> list[Tensor]:
    with _real_tensors_allowed(tensors):
        ends = _found(_specs, spec).run(tensors, references, start, fake=True)
    token = torch.empty(1, dtype=torch.int64, device="cpu")
    return [*(torch.empty_like(each, memory_format=torch.contiguous_format) for each in ends), token]


@torch.library.custom_op("weft::recurrent_backward", mutates_args=())
def recurrent_backward(
    token: Tensor,
    tensors: Sequence[Tensor],
    references: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """The gradients of what is wanted, out of those of the ends.

    Raises BackwardTwiceError if the values of the sequence are gone.
    """
    sequence = _sequences.get(int(token))
    if sequence is None:
        raise BackwardTwiceError(
            "the values of a compiled recurrent network's sequence are gone: its token was copied, as offloading saved "
            "tensors does, or the graph was freed; run forward again, or keep the network out of the compiled region"
        )
    asked = sequence.asked
    with _outside_operator(), quiet_hooks(each for each in asked if each.is_leaf):
        made = gradients_of(asked, sequence.ends, gradients, retain_graph=keeps_graph())
    found = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(asked, made, strict=True)]
    return _separate(found, [*tensors, *references, *(each for each in gradients if each is not None)])


@recurrent_backward.register_fake
def _(
    token: Tensor,
    tensors: Sequence[Tensor],
    references: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    return [
        torch.empty_like(each, memory_format=torch.contiguous_format)
        for each, want in zip((*tensors, *references), wanted, strict=True)
        if want
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, tensors, references, wanted, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], *tensors, *references)
    ctx.count, ctx.wanted = len(tensors), wanted


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    token, *saved = ctx.saved_tensors
    tensors, references = saved[: ctx.count], saved[ctx.count :]
    given = [None if each is None else each.contiguous() for each in gradients[:-1]]
    found = iter(recurrent_backward(token, tensors, references, ctx.wanted, given))
    every = [next(found) if want else None for want in ctx.wanted]
    return None, every[: ctx.count], every[ctx.count :], None, None


recurrent.register_autograd(_backward, setup_context=_save)


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.detach().requires_grad_(wanted and differentiable(tensor))


def _reference(given: Tensor, own: Tensor, wanted: bool) -> Tensor:
    """The network's own tensor where the given one is it, so that the network's plans serve; else the given one."""
    same = given is own or (
        (given.data_ptr(), given.shape, given.stride(), given.dtype)
        == (own.data_ptr(), own.shape, own.stride(), own.dtype)
    )
    best = own if same else given
    # One that wants more is as good: a new tensor at every call would be a new plan at every call.
    return best if best.is_leaf and best.requires_grad >= wanted else _leaf(best, wanted)


def _separate(values: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The values, contiguous, and none in memory of another or of `others`: so an operator's results must be."""
    taken = {each.untyped_storage()._cdata for each in others}
    found: list[Tensor] = []
    for value in values:
        value = value.contiguous()
        if value.untyped_storage()._cdata in taken:
            value = value.clone(memory_format=torch.contiguous_format)
        taken.add(value.untyped_storage()._cdata)
        found.append(value)
    return found


with ThreadPoolExecutor(1, "weft-dispatch-keys") as _fresh:
    _DEFAULT_KEYS = [
        _fresh.submit(each).result()
        for each in (_C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set)
    ]
"""The dispatch keys included and excluded by default, as a new thread has them."""


@contextmanager
def _outside_operator() -> Generator[None]:
    """Restore the default dispatch keys: inside an operator autograd is off, and under tracing `torch.func` too."""
    include, exclude = _DEFAULT_KEYS
    if torch.is_inference_mode_enabled():
        include = include.remove(_C.DispatchKey.ADInplaceOrView)
    with _C._ForceDispatchKeyGuard(include, exclude):
        yield


@contextmanager
def _real_tensors_allowed(tensors: Sequence[Tensor]) -> Generator[None]:
    """A cell may close over real tensors; fake ones are made of them."""
    mode = next((each.fake_mode for each in cast("Sequence[Any]", tensors) if hasattr(each, "fake_mode")), None)
    before = None if mode is None else mode.allow_non_fake_inputs
    if mode is not None:
        mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        if mode is not None:
            mode.allow_non_fake_inputs = before
