"""ModuleRunner of an expert's module: one batch as a segment, without side effects unless the batch counts.

    flat inputs ──pack──> module(*args, **kwargs) ──check──> flat outputs
         ^                                                        |
    input gradients (zeros where there is none) <── tape <── gradients of the outputs
                                                  |
                                                  +──> gradients of the parameters, never in ``.grad``

    forward:   snapshot ── forward ── restore                           leaves no trace
    backward:  snapshot ── forward ── backward ── guards ── step        everything stays
                   +────────── restore <── any of them fails            nothing stays

Besides its outputs a module may change its own tensors, its inputs and the random generator. All of that is undone, so
a batch that fails can run again in parts, and an expert's tensors depend on its backward batches alone: a log of those
is enough to replay them. Only what was seen to change is copied (running statistics of a norm layer, a weight that
``max_norm`` rescales); a tensor that the dummy run left alone and that a later batch writes to is known from then on,
but not restored that once.

PyTorch has one default generator per device. A module that draws from it (dropout) gets numbers of its own for every
batch, by a seed, and the generator is restored afterwards; see `weft.core.rng`.

    forward   of key k ── seed of k ──> mask          the gradient is that of the forward that was seen, if both
    backward  of key k ── seed of k ──> same mask     ran as the same batch: so tasks of a module that draws run alone

Whether it draws is observed in the dummy run, in the first batch and in the first backward, and again whenever a
number or a flag of a layer has changed (a dropout probability). One that drew nothing until then, and draws for some
inputs only, is not noticed: its numbers are the generator's, and a log of its batches does not lead to the same bytes.

Gradients are values. Only large ones of parameters outlive a batch on the CPU, until the next ones are there: memory
that is given back between two batches is paged in anew, which took a quarter of the backward of an expert of 34 MB.
"""

import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.core.context import ExecutionContext
from weft.core.errors import SpecError, UsageError, WeftError, listed
from weft.core.rng import RandomUse, RngStreams, drawn, generators, mix
from weft.core.segment import MicroBatchContext, Segment, Tape
from weft.core.spec import TensorSpec
from weft.experts.errors import ExpertError, WireError
from weft.experts.optimizer_step import nbytes, storages
from weft.experts.schema import NestedSchema, describe, output_schema
from weft.experts.task import REPEATED, Task

_LARGE = 1 << 20  # bytes; what is smaller, the allocator does not give back
_ROWS = 3  # more than one, since batch norm in training refuses a single row
_Sizes = tuple[int, int]
"""Of a dummy run: rows, and the size of all other free axes."""
_FIRST = ((_ROWS, _ROWS), (_ROWS + 2, _ROWS + 2))
_LARGER = (((4, 16), (8, 32)), ((2, 64), (4, 128)))  # for modules that want even batches, or windows in their images


@dataclass
class BackwardResult:
    """What a backward gives: one gradient per input, and one per parameter or None.

    The latter are autograd's own, and may look into memory that somebody ``held``, by the addresses of the storages.
    """

    inputs: list[Tensor]
    parameters: list[Tensor | None]
    held: set[int]


@dataclass
class ForwardGraph:
    """A forward whose graph is there, to be walked back once."""

    tape: Tape
    leaves: list[Tensor]
    shapes: list[torch.Size]


class ModuleRunner:
    """One module and what a call of it looks like."""

    def __init__(self, name: str, module: nn.Module, call: NestedSchema, outputs: Any, device: torch.device) -> None:
        _check_module(name, module)
        self.module = module
        self.call = call
        self.effects = SideEffects(module, device, zlib.crc32(name.encode()))
        self.device = device
        self._ambient = ExecutionContext.capture([device.type])
        self._segment = Segment(self._function)
        self._latest: list[Tensor] = []
        self.outputs = self._rehearsed(name, outputs)

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained now: layers may be frozen at any time."""
        return [parameter for parameter in self.effects.parameters() if parameter.requires_grad]

    def forward(self, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
        """The flat outputs, without a graph."""
        with _of_its_own():
            return list(self._segment.forward(self._visit(seed, inputs), inputs, "nothing")[0])

    def graph(
        self, inputs: Sequence[Tensor], seed: int, parameters: Sequence[Tensor]
    ) -> tuple[ForwardGraph, list[Tensor]]:
        """The graph that leads back to inputs and parameters, and the flat outputs without it."""
        pairs = zip(inputs, self.call.specs, strict=True)
        leaves = [tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in pairs]
        segment = Segment(self._function, parameters)
        with _of_its_own():
            outputs, tape = segment.forward(self._visit(seed, leaves), leaves, "graph")
        assert tape is not None  # keep="graph" makes one
        flat = [output.detach() for output in outputs]
        return ForwardGraph(tape, leaves, [output.shape for output in flat]), flat

    def backward(self, graph: ForwardGraph, gradients: Sequence[Tensor], seed: int) -> BackwardResult:
        """Walk a graph back, once, with the seed of its forward."""
        _same_shapes(self.outputs, graph.shapes, gradients)
        with _of_its_own():
            found, parameters = self.effects.walk(seed, graph.tape.backward, [[gradient] for gradient in gradients])
        if self.device.type == "cpu":
            self._latest = [each for each in parameters if each is not None and nbytes(each) >= _LARGE]
        pairs = zip(found, graph.leaves, strict=True)
        inputs = [torch.zeros_like(leaf) if gradient is None else gradient for (gradient,), leaf in pairs]
        held = storages([*inputs, *graph.leaves, *gradients]) | self.effects.storages() if parameters else set[int]()
        return BackwardResult(inputs, parameters, held)

    def _visit(self, seed: int, inputs: Sequence[Tensor]) -> MicroBatchContext:
        return MicroBatchContext(0, self._ambient, (seed, inputs[0].shape[0]))

    def _function(self, visit: MicroBatchContext, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Flat inputs to flat outputs: each is a value of the segment by itself, and nothing is nested but here."""
        seed, rows = visit.context
        return tuple(self.outputs.tensors(self.effects.run(seed, self._applied, inputs), rows))

    def _applied(self, inputs: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled() and self.effects.writes:
            # A module that writes into its input may not do so to a leaf that wants a gradient.
            inputs = [x.clone() if i in self.effects.writes else x for i, x in enumerate(inputs)]
        args, kwargs = self.call.pack(inputs)
        return self.module(*args, **kwargs)

    def _rehearsed(self, name: str, outputs: Any) -> NestedSchema:
        """The schema of the outputs: run on zeros, compared with what the user said if that was given.

        An axis is free if it follows the batch, or the free axes of the inputs.
        """
        rows, first, more = self._first_that_runs(name)
        pairs = zip(first.names, first.specs, strict=True)
        faults = [f"{path} has shape {spec.shape} for {rows} rows" for path, spec in pairs if spec.shape[:1] != (rows,)]
        if faults:
            raise SpecError(listed(f"axis 0 of all outputs of expert {name!r} must be the batch:", faults))
        faults = [fault for other in more for fault in first.differences(other)]
        if faults:
            raise SpecError(listed(f"expert {name!r} must return the same for all sizes but in tensors:", faults))
        specs = [_freed(spec, [other.specs[i] for other in more]) for i, spec in enumerate(first.specs)]
        found = output_schema(name, first.pack(specs))
        if outputs is None:
            return found
        given = output_schema(name, outputs)
        _agree(name, given, found)
        return given

    def _first_that_runs(self, name: str) -> tuple[int, NestedSchema, list[NestedSchema]]:
        """What comes of the first sizes that the module takes: rows, outputs, and those of a second run if it matters.

        Raises what the module raised for the very first.
        """
        sample = self.call.sample_rows
        tries: list[tuple[_Sizes, _Sizes]] = [_FIRST, *_LARGER]
        if sample is not None:
            tries.insert(1, ((sample, 16), (2 * sample, 32)))
        free = any(None in spec.shape[1:] for spec in self.call.specs)
        errors: list[Exception] = []
        for one, other in tries:
            try:
                first = self._rehearse(name, *one)
                return one[0], first, [self._rehearse(name, *other)] if first.constants or free else []
            except Exception as error:
                errors.append(error)
        tried = " or ".join(str(one[0]) for one, _ in tries[1:])
        errors[0].add_note(
            f"nor did it run with {tried} rows, and larger sizes of its other free axes. Fix in the "
            "schemas what the module wants fixed, or give it as sample tensors with as many rows as it takes"
        )
        raise errors[0]

    def _rehearse(self, name: str, rows: int, size: int) -> NestedSchema:
        shapes = [replace(spec, shape=(rows, *spec.shape[1:])) for spec in self.call.specs]
        inputs = [spec.empty(size, self.device).detach() for spec in shapes]
        visit = self._visit(0, inputs)

        def applied(visit: MicroBatchContext, *inputs: Tensor) -> tuple[Any, ...]:
            return (self._applied(inputs),)

        def forward() -> Any:
            return Segment(applied).forward(visit, inputs, "nothing")[0][0]

        try:
            value = self.effects.rehearse(inputs, forward)
        except Exception as error:
            error.add_note(f"in the dummy run of expert {name!r} on zeros with {rows} rows, as its schemas say")
            raise
        return describe(value, "output")


@contextmanager
def _of_its_own() -> Generator[None]:
    """What other experts answer to a module that calls them is no answer of this one: who called it would repeat it."""
    try:
        yield
    except WeftError as error:
        if isinstance(error, ExpertError | WireError):
            raise RuntimeError(f"{type(error).__qualname__}: {error}") from error
        raise


def _check_module(name: str, module: nn.Module) -> None:
    """Refuse what keeps its tensors where nobody can put back what a failed batch changed."""
    modules = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
    scripted = [path or "itself" for path, each in modules if isinstance(each, torch.jit.ScriptModule)]
    if scripted:
        raise UsageError(
            f"the module of expert {name!r} was made by torch.jit.script or torch.jit.trace: "
            f"{', '.join(scripted[:3])}; give the nn.Module that it was made of, or one that torch.compile made"
        )


def _freed(spec: TensorSpec, others: Sequence[TensorSpec]) -> TensorSpec:
    """The shape with axis 0 free, and every axis in which two runs of different sizes differ."""
    shapes = [other.shape for other in others]
    free = [axis == 0 or any(shape[axis] != spec.shape[axis] for shape in shapes) for axis in range(len(spec.shape))]
    return TensorSpec(tuple(None if f else size for f, size in zip(free, spec.shape, strict=True)), spec.dtype)


def _agree(name: str, given: NestedSchema, found: NestedSchema) -> None:
    """Raise if the outputs are not what the user said they are."""
    samples = [spec.empty(_ROWS) for spec in found.specs]
    try:
        given.tensors(found.pack(samples), _ROWS)
    except SpecError as error:
        raise SpecError(f"the outputs_schema of expert {name!r} is not what its module returns. {error}") from None


def _same_shapes(outputs: NestedSchema, shapes: Sequence[torch.Size], gradients: Sequence[Tensor]) -> None:
    """Only free axes can still differ: the fixed ones were checked when the task came."""
    faults = [
        f"the gradient of {name} has shape {tuple(gradient.shape)}, wanted {tuple(shape)}"
        for name, shape, gradient in zip(outputs.names, shapes, gradients, strict=True)
        if shape != gradient.shape
    ]
    if faults:
        raise SpecError(listed("the gradients do not fit the outputs:", faults))


_CONFIGURATIONS = 64


class _Slot(NamedTuple):
    """A place in a module that holds a parameter or a buffer."""

    table: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Tensor | None:
        return self.table.get(self.name)


class TensorSnapshot:
    """Copies of the tensors that a forward is known to change."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        tensors = [(slot, slot.tensor) for slot in slots]
        self._held = [(slot, tensor, tensor.detach().clone()) for slot, tensor in tensors if tensor is not None]

    def restore(self) -> None:
        """Every tensor back in its place with its bytes."""
        if not self._held:
            return
        with torch.no_grad():
            for slot, tensor, copy in self._held:
                slot.table[slot.name] = tensor
                tensor.copy_(copy)

    @property
    def copies(self) -> dict[tuple[int, str], Tensor]:
        """What is held, by its table and name there."""
        return {(id(slot.table), slot.name): copy for slot, _, copy in self._held}

    def changed(self) -> list[int]:
        """Which of them are not as they were. Versions would not tell: batch norm writes without counting."""
        pairs = enumerate(self._held)
        return [i for i, (slot, tensor, copy) in pairs if slot.tensor is not tensor or not torch.equal(tensor, copy)]


NOTHING = TensorSnapshot([])
"""Of a module that changes nothing, as most."""


class SideEffects:
    """What is known of one module. Its list of layers must not change any more."""

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self.seed = seed
        self.writes: set[int] = set()
        self._modules = list(module.modules())
        self._slots = [
            _Slot(table, name)
            for each in self._modules
            for table in (each._parameters, each._buffers)
            for name in table
        ]
        self._own = [_Slot(each._parameters, name) for each in self._modules for name in each._parameters]
        self._changing: set[int] = set()
        tables = [id(slot.table) for slot in self._slots]
        self._norms = [  # they may be put into training mode later, and do not count what they write
            (each, [i for i, table in enumerate(tables) if table == id(each._buffers)])
            for each in self._modules
            if isinstance(each, nn.modules.batchnorm._NormBase)
        ]
        self._attributes = [  # also `training`
            (table, name)
            for table in map(vars, self._modules)
            for name, value in table.items()
            if isinstance(value, bool | float) and not name.startswith("_")
        ]
        self._use, self._back = (RandomUse(generators([device])) for _ in range(2))
        self._evaluation = False
        self.draws = {False: False, True: False}
        """Whether the module draws, in training and in evaluation, as far as was seen."""

    @property
    def stateful(self) -> bool:
        """Whether a forward was seen to change the module's own tensors."""
        return bool(self._places())

    def rehearse(self, inputs: Sequence[Tensor], forward: Callable[[], Any]) -> Any:
        """Run a forward for the first time, see what it changes, and undo that.

        Before the module is known, its random numbers come from the caller's generator: one number, the seed
        of this expert, and only if the module draws.
        """
        filled = [place for place, slot in enumerate(self._slots) if slot.tensor is not None]
        every = TensorSnapshot([self._slots[place] for place in filled])
        versions, state = [tensor._version for tensor in inputs], self._state()
        dice = RngStreams([self._use], [self._configuration()])
        self.seed = dice.seed or self.seed
        try:
            with dice.scope(0, 0):
                found = forward()
        finally:
            written = [i for i, pair in enumerate(self._state()) if pair != state[i]]  # also where it wrote the same
            changed = every.changed()
            if changed:
                every.restore()
            self._changing.update(written, [filled[place] for place in changed])
        dice.settle()
        self._note()
        self._use.draws = {seen: True for seen, draws in self._use.draws.items() if draws}  # zeros are no sure sign
        self.writes |= {i for i, tensor in enumerate(inputs) if tensor._version != versions[i]}
        return found

    def parameters(self) -> list[nn.Parameter]:
        """All of the module's, each once, in its order; ten times as fast as asking the module."""
        tensors = [table.get(name) for table, name in self._own]
        return list(dict.fromkeys([tensor for tensor in tensors if tensor is not None]))

    def storages(self) -> set[int]:
        """The addresses of the module's own tensors."""
        tensors = [table.get(name) for table, name in self._slots]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}

    def snapshot(self) -> TensorSnapshot:
        """What `TensorSnapshot.restore` needs to undo a forward."""
        places = self._places()
        return TensorSnapshot([self._slots[place] for place in sorted(places)]) if places else NOTHING

    def seed_for(self, direction: int, count: int, tasks: Sequence[Task]) -> int:
        """The seed of one batch: of its keys, if it may draw and all its tasks have one; else of its number."""
        seen = self._configuration()
        if self._use.draws.get(seen) is not False or self._back.draws.get(seen) is not False:
            origin = _origin(tasks)
            if origin is not None:
                return mix(self.seed, 2, origin)
        return mix(self.seed, direction, count)

    @contextmanager
    def mode(self, evaluation: bool) -> Generator[None]:
        """Surrounds the work on a batch: in evaluation, or as the module stands. Layers are told nothing, only set."""
        training = [each for each in self._modules if each.training] if evaluation else []
        for each in training:
            each.training = False
        self._evaluation = evaluation
        try:
            yield
        finally:
            self._evaluation = False
            for each in training:
                each.training = True

    def run(self, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which is a forward: note which of the module's tensors it changes.

        Random numbers come from this seed, and the generators are as before afterwards.
        """
        before = self._state()
        try:
            return self._drawn(self._use, seed, function, *args)
        finally:
            after = self._state()
            if after != before:
                self._changing.update(i for i in range(len(after)) if after[i] != before[i])

    def walk(self, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which is a backward. Random numbers, which hooks may draw, as those of `run`."""
        return self._drawn(self._back, mix(seed, 1), function, *args)

    def _drawn(self, use: RandomUse, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        seen = self._configuration()
        if use.draws.get(seen) is False:
            return function(*args)
        if len(use.draws) > _CONFIGURATIONS:  # a number that changes all the time
            use.draws.clear()
        found, drew = drawn(use.sources, mix(seed, 0, 0), function, *args)
        use.draws[seen] = use.draws.get(seen, False) or drew
        self._note()
        return found

    def _note(self) -> None:
        seen = self._configuration()
        self.draws[self._evaluation] = bool(self._use.draws.get(seen) or self._back.draws.get(seen))

    def _places(self) -> set[int]:
        """The slots that a forward may write to, as far as is known now."""
        return self._changing.union(*(places for norm, places in self._norms if norm.training))

    def _configuration(self) -> tuple[Any, ...]:
        """What decides whether layers draw, as far as it is seen from outside."""
        return tuple([table.get(name) for table, name in self._attributes])

    def _state(self) -> list[tuple[int, int]]:
        """Which tensor is in every slot, and how often it was written to."""
        tensors = [table.get(name) for table, name in self._slots]
        return [(0, 0) if tensor is None else (id(tensor), tensor._version) for tensor in tensors]


def _origin(tasks: Sequence[Task]) -> int | None:
    """A number for these tasks in this order that is the same in forward and backward; None if one has no key."""
    if any([task.key is None for task in tasks]):
        return None
    names = [f"{task.client}\0{str(task.key).partition(REPEATED)[0]}\0{task.rows}" for task in tasks]
    return int.from_bytes(blake2b("\0".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
