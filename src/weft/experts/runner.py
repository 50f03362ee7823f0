"""Runs an expert's module over one batch, as a segment: forward without a graph, or forward and backward.

    flat inputs ──pack──> module(*args, **kwargs) ──check──> flat outputs
         ^                                                        |
    input gradients (zeros where there is none) <── tape <── gradients of the outputs
                                                  |
                                                  +──> gradients of the parameters, never in ``.grad``

Nothing that runs here outlives it: gradients are values, and what the module changes of itself is put back by
`weft.experts.effects`. Only large gradients of parameters do, on the CPU, until the next ones are there: large memory
that is given back between two batches is paged in anew, which took a quarter of the backward of an expert of 34 MB. The
module runs under the autocast in which its backend was made.
"""

import zlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.core.ambient import Ambient
from weft.core.errors import SpecError, UsageError, WeftError, listed
from weft.core.segment import Segment, Tape, Visit
from weft.core.spec import TensorSpec
from weft.experts.batch import storages
from weft.experts.effects import Effects
from weft.experts.errors import ExpertError, WireError
from weft.experts.gradients import nbytes
from weft.experts.schema import Nest, described, outputs_nest

_LARGE = 1 << 20  # bytes; what is smaller, the allocator does not give back
_ROWS = 3  # more than one, since batch norm in training refuses a single row
_Sizes = tuple[int, int]
"""Of a dummy run: rows, and the size of all other free axes."""
_FIRST = ((_ROWS, _ROWS), (_ROWS + 2, _ROWS + 2))
_LARGER = (((4, 16), (8, 32)), ((2, 64), (4, 128)))  # for modules that want even batches, or windows in their images


@dataclass
class Passed:
    """What a backward gives: one gradient per input, and one per parameter or None.

    The latter are autograd's own, and may look into memory that somebody ``held``, by the addresses of the storages.
    """

    inputs: list[Tensor]
    parameters: list[Tensor | None]
    held: set[int]


@dataclass
class Graph:
    """A forward whose graph is there, to be walked back once."""

    tape: Tape
    leaves: list[Tensor]
    shapes: list[torch.Size]


class Runner:
    """One module and what a call of it looks like."""

    def __init__(self, name: str, module: nn.Module, call: Nest, outputs: Any, device: torch.device) -> None:
        _check_module(name, module)
        self.module = module
        self.call = call
        self.effects = Effects(module, device, zlib.crc32(name.encode()))
        self.device = device
        self._ambient = Ambient.capture([device.type])
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

    def graph(self, inputs: Sequence[Tensor], seed: int, parameters: Sequence[Tensor]) -> tuple[Graph, list[Tensor]]:
        """The graph that leads back to inputs and parameters, and the flat outputs without it."""
        pairs = zip(inputs, self.call.specs, strict=True)
        leaves = [tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in pairs]
        segment = Segment(self._function, parameters)
        with _of_its_own():
            outputs, tape = segment.forward(self._visit(seed, leaves), leaves, "graph")
        assert tape is not None  # keep="graph" makes one
        flat = [output.detach() for output in outputs]
        return Graph(tape, leaves, [output.shape for output in flat]), flat

    def backward(self, graph: Graph, gradients: Sequence[Tensor], seed: int) -> Passed:
        """Walk a graph back, once, with the seed of its forward."""
        _same_shapes(self.outputs, graph.shapes, gradients)
        with _of_its_own():
            found, parameters = self.effects.walk(seed, graph.tape.backward, [[gradient] for gradient in gradients])
        if self.device.type == "cpu":
            self._latest = [each for each in parameters if each is not None and nbytes(each) >= _LARGE]
        pairs = zip(found, graph.leaves, strict=True)
        inputs = [torch.zeros_like(leaf) if gradient is None else gradient for (gradient,), leaf in pairs]
        held = storages([*inputs, *graph.leaves, *gradients]) | self.effects.storages() if parameters else set[int]()
        return Passed(inputs, parameters, held)

    def _visit(self, seed: int, inputs: Sequence[Tensor]) -> Visit:
        return Visit(0, self._ambient, (seed, inputs[0].shape[0]))

    def _function(self, visit: Visit, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Flat inputs to flat outputs: each is a value of the segment by itself, and nothing is nested but here."""
        seed, rows = visit.context
        return tuple(self.outputs.tensors(self.effects.run(seed, self._applied, inputs), rows))

    def _applied(self, inputs: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled() and self.effects.writes:
            # A module that writes into its input may not do so to a leaf that wants a gradient.
            inputs = [x.clone() if i in self.effects.writes else x for i, x in enumerate(inputs)]
        args, kwargs = self.call.pack(inputs)
        return self.module(*args, **kwargs)

    def _rehearsed(self, name: str, outputs: Any) -> Nest:
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
        found = outputs_nest(name, first.pack(specs))
        if outputs is None:
            return found
        given = outputs_nest(name, outputs)
        _agree(name, given, found)
        return given

    def _first_that_runs(self, name: str) -> tuple[int, Nest, list[Nest]]:
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

    def _rehearse(self, name: str, rows: int, size: int) -> Nest:
        shapes = [replace(spec, shape=(rows, *spec.shape[1:])) for spec in self.call.specs]
        inputs = [spec.empty(size, self.device).detach() for spec in shapes]
        visit = self._visit(0, inputs)

        def applied(visit: Visit, *inputs: Tensor) -> tuple[Any, ...]:
            return (self._applied(inputs),)

        def forward() -> Any:
            return Segment(applied).forward(visit, inputs, "nothing")[0][0]

        try:
            value = self.effects.rehearse(inputs, forward)
        except Exception as error:
            error.add_note(f"in the dummy run of expert {name!r} on zeros with {rows} rows, as its schemas say")
            raise
        return described(value, "output")


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


def _agree(name: str, given: Nest, found: Nest) -> None:
    """Raise if the outputs are not what the user said they are."""
    samples = [spec.empty(_ROWS) for spec in found.specs]
    try:
        given.tensors(found.pack(samples), _ROWS)
    except SpecError as error:
        raise SpecError(f"the outputs_schema of expert {name!r} is not what its module returns. {error}") from None


def _same_shapes(outputs: Nest, shapes: Sequence[torch.Size], gradients: Sequence[Tensor]) -> None:
    """Only free axes can still differ: the fixed ones were checked when the task came."""
    faults = [
        f"the gradient of {name} has shape {tuple(gradient.shape)}, wanted {tuple(shape)}"
        for name, shape, gradient in zip(outputs.names, shapes, gradients, strict=True)
        if shape != gradient.shape
    ]
    if faults:
        raise SpecError(listed("the gradients do not fit the outputs:", faults))
