"""The Inductor backend: compiled steps; on CUDA a whole chunk is recorded and launched at once (CUDA graphs).

    CPU      bulk operators | compiled step, L times | bulk operators
    CUDA     the same, recorded once for each length L of a chunk, and replayed

    step(constants, values of this step, rows to write, carried) -> carried, values to collect

The step has the operators that the Python backend writes out as source; here they become one compiled function, for any
operator and device. Values that later parts read are written straight into a row of their buffer, and the next step
reads a state from there. Inductor fixes the strides of its arguments, so all inputs are contiguous.

A kernel of a small step runs for microseconds, about as long as the host takes to launch it; so a chunk is launched as
a whole. Recordings reuse their memory: `_Copied` holds saved values outside of it.

    forward recording    inputs, first states             ->  outputs, states, saved values
    backward recording   inputs, saved values, gradients  ->  gradients

The parts, buffers and the sums after the loop are those of `ScanPlan`.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.backends import Chunk, Gradients
from weft.recurrent.cpp.compiler import CompileError
from weft.recurrent.graph import StepGraph
from weft.recurrent.plan import BulkEvaluator
from weft.recurrent.python_backend import (
    CompiledLoop,
    Loop,
    PythonBackend,
    SavedValues,
    ScanPlan,
    first_states,
    state_gradients,
    take,
    write,
)

Recorder = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Callable[[], None]]]
"""Makes of a function its outputs, in memory that stays theirs, and a way to fill them anew."""
MOST = 16
"""So many recordings are kept for one plan: each has memory of its own."""


def cuda_recorder(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """Record on the current device. Raises RuntimeError if the function does what cannot be recorded."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # what happens once only, compiling and making handles, must happen before
        function()
        function()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay


@dataclass(frozen=True)
class RecordedFunction:
    """A function with memory of its own for what goes in and what comes out."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    replay: Callable[[], None]

    @staticmethod
    def of(
        record: Recorder, like: Sequence[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> "RecordedFunction":
        """Record a function of tensors that look like these. Raises RuntimeError if it cannot be recorded."""
        inputs = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in like]
        for place, each in zip(inputs, like, strict=True):
            place.copy_(each)  # what runs before the recording must see sound numbers
        outputs, replay = record(lambda: function(inputs))
        return RecordedFunction(inputs, outputs, replay)

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for these values, which stay so until the next run."""
        for place, each in zip(self.inputs, values, strict=True):
            place.copy_(each)
        self.replay()
        return self.outputs


class RecordingCache:
    """The recordings of a plan; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, RecordedFunction] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], RecordedFunction]) -> RecordedFunction:
        """The one of this key, made if there is none."""
        if key not in self._known:
            self._known[key] = make()
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


_aten = cast(Any, torch.ops.aten)


class BodyLoop(Loop):
    """A loop of which all that is saved is written into rows."""

    @property
    def written(self) -> list[fx.Node]:
        """Whatever the loop computes and saves: a compiled step can write any value into a given tensor."""
        made = set(self.nodes)
        return [node for node in self.saved if node in made and isinstance(node.meta.get("val"), torch.Tensor)]


@dataclass(frozen=True)
class InductorLoop(CompiledLoop):
    """A `CompiledLoop` whose function calls the compiled step; `source` is the step's graph."""

    @staticmethod
    def of(plain: Loop) -> "InductorLoop":
        """The loop with a compiled step. It is compiled when it is first called."""
        loop = BodyLoop(**{field.name: getattr(plain, field.name) for field in fields(plain)})
        step = _Step(loop)
        return InductorLoop(loop, f"a compiled step:\n{step.module.code}", step.run)


class _Step:
    """The step as a graph, and as what Inductor made of it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        written = loop.written
        self._at = [written.index(end) if end in written else None for end in loop.ends]
        self.module = self._graph()
        self._compiled: Callable[..., Sequence[Tensor]] | None = None

    def run(self, steps: int, *given: Any) -> list[Tensor]:
        """In the form that `CompiledLoop.run` calls; see the source that code.py writes."""
        loop, rest = self._loop, iter(given)
        constants = [next(rest).contiguous() for _ in loop.constants]
        carried = [next(rest).contiguous() for _ in loop.carried]
        rows = [_contiguous(next(rest)) for _ in loop.rows]
        written: list[Sequence[Tensor]] = [next(rest) for _ in loop.written]
        saves = [next(rest) for _ in range(len(loop.saved) - len(written))]
        added = [_contiguous(next(rest)) for _ in loop.carried] if loop.added else []
        for step in range(steps - 1, -1, -1) if loop.backward else range(steps):
            found = iter(self._call([*constants, *carried, *(each[step] for each in (*rows, *written, *added))]))
            carried = [next(found).contiguous() if at is None else written[at][step] for at in self._at]
            for save, value in zip(saves, found, strict=True):
                save(value)
        return carried

    def _call(self, arguments: list[Tensor]) -> Sequence[Tensor]:
        if self._compiled is None:
            self._compiled = _compiled(self.module, arguments)
        return self._compiled(*arguments)

    def _graph(self) -> fx.GraphModule:
        """The step as a function, its arguments in the order in which `run` gives them."""
        loop, graph, written = self._loop, fx.Graph(), self._loop.written
        new = {node: graph.placeholder(f"given_{node}") for node in (*loop.constants, *loop.carried, *loop.rows)}
        places = [graph.placeholder(f"row_{node}") for node in written]
        for node, added in [(node, graph.placeholder(f"added_{node}")) for node in loop.carried if loop.added]:
            new[node] = graph.call_function(_aten.add.Tensor, (new[node], added))
        for node in loop.nodes:
            new[node] = graph.node_copy(node, lambda each: new[each])
            new[node].meta = {}
        for node, place in zip(written, places, strict=True):
            graph.call_function(_aten.copy_.default, (place, new[node]))
        ends = [
            graph.call_function(_aten.zeros_like.default, (new[kept],)) if end is None else new[end]
            for kept, end, at in zip(loop.carried, loop.ends, self._at, strict=True)
            if at is None
        ]
        graph.output((*ends, *(new[node] for node in loop.saved if node not in written)))
        return fx.GraphModule({}, graph)


def _compiled(module: fx.GraphModule, arguments: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a step by Inductor for arguments of these shapes; in this process alone, so that nothing is left behind.

    Raises CompileError.
    """
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return module
    # A written row changes while it is traced: what is compiled for must be others than the caller's.
    examples = [each.clone() for each in arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's own, as it imports its parts
            from torch import _inductor  # noqa: PLC0415  (takes seconds, and most never need it)

            return cast(Any, _inductor).compile(module, examples, {"compile_threads": 1})
    except Exception as error:
        raise CompileError(f"Inductor cannot compile the step: {type(error).__name__}: {str(error)[:500]}") from error


def _contiguous(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """The rows, each contiguous; all have one layout."""
    return rows if not rows or rows[0].is_contiguous() else torch.stack(list(rows)).unbind(0)


class InductorPlan(ScanPlan):
    """A plan whose steps are compiled."""

    def compile(self, loop: Loop) -> CompiledLoop:
        """See `ScanPlan`."""
        return InductorLoop.of(loop)


@dataclass(frozen=True)
class _Copied:
    """Saved values of a recorded forward, copied out of the memory that the next one overwrites."""

    values: dict[fx.Node, Tensor]


class InductorBackend:
    """See `weft.recurrent.backends.Backend`. `record` is how a chunk is recorded; None runs it step by step."""

    def __init__(self, captured: StepGraph, record: Recorder | None = None) -> None:
        self.captured = captured
        self._plan = InductorPlan(captured)
        self._plain = PythonBackend(captured, self._plan)
        self.chunk_steps = self._plain.chunk_steps
        self._record = cuda_recorder if record is None and _on_cuda(captured) else record
        self._forwards, self._backwards = RecordingCache(), RecordingCache()
        self._invariant = captured.invariant
        self._moving = [k for k in range(len(captured.signature.states)) if k not in self._invariant]
        self._nodes: list[fx.Node] = []
        self._once: list[fx.Node] = []
        self._why_not = ""

    def begin(self) -> None:
        """Nothing: constants are cheap next to the loop."""

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> "SavedValues | _Copied":
        """See `Backend`."""
        recording = self._forward(chunk)
        if recording is None:
            return self._plain.forward(constants, chunk, keep)
        found = recording.run(self._given(chunk))
        write([*chunk.outputs, *(chunk.states[k][1:] for k in self._moving)], found[: self._made(chunk)])
        return self._copied(chunk, found) if keep else _Copied({})

    def recompute(self, constants: None, chunk: Chunk) -> "SavedValues | _Copied":
        """See `Backend`; the chunk's outputs and states are not written to."""
        recording = self._forward(chunk)
        if recording is None:
            return self._plain.recompute(constants, chunk)
        return self._copied(chunk, recording.run(self._given(chunk)))

    def backward(self, constants: None, chunk: Chunk, kept: "SavedValues | _Copied", gradients: Gradients) -> None:
        """See `Backend`."""
        recording = None if isinstance(kept, SavedValues) else self._backward(chunk, kept, gradients)
        if recording is None or isinstance(kept, SavedValues):
            store = (
                kept if isinstance(kept, SavedValues) else self._restored(chunk.steps, self._given(chunk), kept.values)
            )
            self._plain.backward(constants, chunk, store, gradients)
            return
        found = iter(recording.run(self._given_back(chunk, kept, gradients)))
        signature = self.captured.signature
        inputs = [None if node is None else next(found) for node in signature.input_gradients]
        write(gradients.carried, [next(found) for _ in gradients.carried])
        parameters = [None if node is None else next(found) for node in signature.parameter_gradients]
        take(gradients, inputs, parameters)

    def release(self, kept: "SavedValues | _Copied") -> None:
        """Its memory goes with it."""

    def kept_bytes(self, steps: int) -> int:
        """See `Backend`."""
        return self._plain.kept_bytes(steps)

    def work_bytes(self, steps: int) -> int:
        """See `Backend`; a recording has its own copy of what is kept, and of what comes in and goes out."""
        copies = 0 if self._record is None else 2 * self.kept_bytes(steps)
        return self._plain.work_bytes(steps) + copies

    def explain(self) -> str:
        """See `Backend`."""
        how = "step by step" if self._record is None else "a chunk at a time, recorded"
        return f"{self._plain.explain()}\n\nlaunched {how}{self._why_not}"

    # -- recordings -------------------------------------------------------------------------------------------------

    def _forward(self, chunk: Chunk) -> RecordedFunction | None:
        signature, count = self.captured.signature, len(chunk.inputs)
        given = {*signature.inputs, *signature.references, *(signature.states[k] for k in self._invariant)}

        def function(values: list[Tensor]) -> list[Tensor]:
            outputs, states, store = self._plan.forward(values[:count], values[count:])
            env = store.bulk.env
            for node in store.rows:
                store.stacked(node)
            self._nodes = [node for node in env if node not in given and self._plan.varies(node)]
            self._once = [node for node in env if node not in given and not self._plan.varies(node)]
            return [*outputs, *(states[k][1:] for k in self._moving), *(env[node] for node in self._nodes)]

        return self._recorded(self._forwards, self._key(chunk), self._given(chunk), function)

    def _backward(self, chunk: Chunk, kept: _Copied, gradients: Gradients) -> RecordedFunction | None:
        nodes, steps = list(kept.values), chunk.steps
        with_states = any(each is not None for each in gradients.states)
        sizes = [len(self._given(chunk)), len(nodes), len(gradients.outputs), len(gradients.carried)]

        def function(values: list[Tensor]) -> list[Tensor]:
            rest = iter(values)
            given, found, outputs, carried = ([next(rest) for _ in range(size)] for size in sizes)
            states = list(rest) if with_states else None
            store = self._restored(steps, given, dict(zip(nodes, found, strict=True)))
            inputs, last, parameters = self._plan.backward(store, outputs, states, carried)
            return [each for each in (*inputs, *last, *parameters) if each is not None]

        key = (*self._key(chunk), with_states)
        return self._recorded(self._backwards, key, self._given_back(chunk, kept, gradients), function)

    def _recorded(
        self,
        known: RecordingCache,
        key: tuple[int | bool, ...],
        like: list[Tensor],
        function: Callable[[list[Tensor]], list[Tensor]],
    ) -> RecordedFunction | None:
        """None where nothing is recorded, or cannot be."""
        record = self._record
        if record is None:
            return None
        try:
            return known.get(key, lambda: RecordedFunction.of(record, like, function))
        except RuntimeError as error:
            self._record, self._why_not = None, f", since it could not be recorded: {error}"
            return None

    def _key(self, chunk: Chunk) -> tuple[int | bool, ...]:
        """The key of a recording: its length, and the addresses of the cell's tensors."""
        captured = self.captured
        return (chunk.steps, *(captured.reference(node).data_ptr() for node in captured.signature.references))

    def _given(self, chunk: Chunk) -> list[Tensor]:
        return [*chunk.inputs, *first_states(chunk, self._invariant)]

    def _made(self, chunk: Chunk) -> int:
        """The number of outputs and states of a recorded forward, which come before the saved values."""
        return len(chunk.outputs) + len(self._moving)

    def _given_back(self, chunk: Chunk, kept: _Copied, gradients: Gradients) -> list[Tensor]:
        values = [*self._given(chunk), *kept.values.values(), *gradients.outputs, *gradients.carried]
        return [*values, *(state_gradients(chunk, gradients) or [])]

    def _copied(self, chunk: Chunk, found: list[Tensor]) -> _Copied:
        """The saved values among the results of a recorded forward."""
        values = zip(self._nodes, found[self._made(chunk) :], strict=True)
        return _Copied({node: value.clone(memory_format=torch.contiguous_format) for node, value in values})

    def _restored(self, steps: int, given: Sequence[Tensor], values: dict[fx.Node, Tensor]) -> SavedValues:
        """These values as a forward would have saved them."""
        signature = self.captured.signature
        store = SavedValues(BulkEvaluator(steps, self._plan.varies), {})
        count = len(signature.inputs)
        env = store.bulk.env
        env.update(zip(signature.inputs, given[:count], strict=True))
        env.update({node: self.captured.reference(node).detach() for node in signature.references})
        env.update(
            {signature.states[k]: given[count + k].expand(steps, *given[count + k].shape) for k in self._invariant}
        )
        env.update(values)
        store.bulk.evaluate(self._plan.parts.once, self._once)
        return store


def _on_cuda(captured: StepGraph) -> bool:
    nodes = [*captured.signature.inputs, *captured.signature.states]
    values = [node.meta.get("val") for node in nodes]
    return bool(values) and all(isinstance(each, torch.Tensor) and each.is_cuda for each in values)
