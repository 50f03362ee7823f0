"""The Inductor backend: the two loops of a plan as compiled steps; on CUDA all steps of a chunk are one CUDA graph.

    CPU      bulk operators | compiled step, L times                        | bulk operators
    CUDA     the same       | recorded once for each length L, and replayed | the same

    step(constants, carried, values of this step, rows to write) -> carried

The step has the operators that the Python backend writes out as source; here they become one compiled function, for any
operator and device. Values that later parts read are written straight into a row of their buffer, and the next step
reads a state from there. Inductor fixes the strides of its arguments, so all inputs are contiguous.

A kernel of a small step runs for microseconds, about as long as the host takes to launch it; so all steps of a chunk
are launched as a whole. What they read is copied into memory of the recording, and what they computed out of it.
"""

import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.core.segment import differentiable
from weft.recurrent.cpp.compiler import CompileError
from weft.recurrent.graph import StepGraph
from weft.recurrent.python_backend import CompiledLoop, Loop, PythonBackend
from weft.recurrent.verify import difference

Recorder = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Callable[[], None]]]
"""Makes of a function its outputs, in memory that stays theirs, and a way to fill them anew."""
MAX_RECORDINGS = 16
"""Lengths for which a loop keeps a recording; each has memory of its own."""
_aten, _foreach_copy = cast(Any, torch.ops.aten), cast(Any, torch)._foreach_copy_


_RECORDING = threading.RLock()
"""Held in the whole process while a chunk is recorded or replayed: a recording has one set of buffers, which threads
that share a network would overwrite for each other, and PyTorch records one graph at a time."""
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def recording_stream(device: torch.device) -> Generator[None]:
    """Make the one stream of all recordings on this device current, in order with the caller's current stream. Their
    buffers belong to it, so replays run one after another, whichever streams they serve."""
    with ExitStack() as stack:
        if device.type == "cuda":
            # PyTorch hands out 32 streams of each priority in turn. Stages have normal ones; if a stage had this one
            # too, its kernels would be recorded into our graph.
            aside = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device, priority=-1))
            here = torch.cuda.current_stream(device)
            aside.wait_stream(here)
            stack.callback(here.wait_stream, aside)
            stack.enter_context(torch.cuda.stream(aside))  # also makes the device the current one
        yield


def cuda_recorder(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """Record on the current stream. Raises RuntimeError if the function does what cannot be recorded."""
    function()  # what happens once only, compiling and making handles, must happen before
    function()
    graph = torch.cuda.CUDAGraph()
    # By default PyTorch records on a stream of the device that recorded first, where kernels of another are not seen.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay


_Recording = tuple[list[Tensor], list[Tensor], list[Tensor], Callable[[], None]]
"""Buffers that are read, rows that are written, the carried values at the end, and how to compute them again."""


class InductorStep:
    """The step of a loop: as a graph, as what Inductor made of it, and recorded by the number of steps."""

    def __init__(self, loop: Loop, plan: "InductorBackend") -> None:
        self._loop, self._plan = loop, plan
        self._at = [loop.saved.index(end) if end in loop.saved else None for end in loop.ends]
        self.module = self._graph()
        self._compiled: Callable[..., Sequence[Tensor]] | None = None
        self._recordings: dict[int, _Recording] = {}

    def run(self, steps: int, *given: Any) -> list[Tensor]:
        """As the function of a `CompiledLoop`; see the source that `Loop.compile` writes."""
        loop, rest = self._loop, iter(given)
        values = [next(rest).contiguous() for _ in (*loop.constants, *loop.carried)]
        rows = [_contiguous(next(rest)) for _ in loop.rows]
        places = [row for _ in loop.saved for row in next(rest)]
        rows += [_contiguous(next(rest)) for _ in loop.carried] if loop.added else []
        values += [row for each in rows for row in each]
        return self._replayed(steps, values, places) if self._plan.record else self._steps(steps, values, places)

    def _steps(self, steps: int, values: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """The carried values after the last step.

        `values` are constants, carried values and rows; of rows, as of `places`, all steps of one node in a row.
        """
        loop, count = self._loop, len(self._loop.constants)
        constants, carried = values[:count], values[count : count + len(loop.carried)]
        rows = values[count + len(carried) :]
        for step in range(steps - 1, -1, -1) if loop.backward else range(steps):
            arguments = [*constants, *carried, *rows[step::steps], *places[step::steps]]
            if self._compiled is None:
                self._compiled = _compiled(self.module, arguments)
            found = iter(self._compiled(*arguments))
            carried = [next(found).contiguous() if at is None else places[at * steps + step] for at in self._at]
        return [*carried]

    def _replayed(self, steps: int, values: list[Tensor], places: list[Tensor]) -> list[Tensor]:
        """As `_steps`, by a recording; by `_steps` if it cannot be recorded."""
        device = values[0].device
        with _RECORDING:
            with recording_stream(device):
                recording = self._recording(steps, values, places)
            if recording is not None:
                read, written, ends, replay = recording
                results = [torch.empty_like(each) for each in ends]  # memory of the current stream
                with recording_stream(device):
                    _foreach_copy(read, values)
                    replay()
                    _foreach_copy([*places, *results], [*written, *ends])
                return results
        return self._steps(steps, values, places)

    def _recording(self, steps: int, values: list[Tensor], places: list[Tensor]) -> _Recording | None:
        """The recording for so many steps. After one that fails, or computes something else, no more are made."""
        found = self._recordings.get(steps)
        if found is not None or self._plan.record is None:
            return found
        read, written = [each.clone() for each in values], [torch.empty_like(each) for each in places]
        try:
            if any(each.device != values[0].device for each in values):
                raise RuntimeError("the loop reads tensors of several devices")
            found = read, written, *self._plan.record(lambda: self._steps(steps, read, written))
            self._compare(found, steps)
        except RuntimeError as error:
            self._plan.record, self._plan.why_not = None, f", since it could not be recorded: {error}"
            return None
        if len(self._recordings) == MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        return self._recordings.setdefault(steps, found)

    def _compare(self, recording: _Recording, steps: int) -> None:
        """Replay with other values. Raises RuntimeError if the results are stale or otherwise not those of `_steps`."""
        read, written, ends, replay = recording
        other = [each * 0.5 + 0.25 if differentiable(each) else each.clone() for each in read]
        rows, results = [torch.empty_like(each) for each in written], [*written, *ends]
        expected = [*rows, *self._steps(steps, other, rows)]
        for each in results:
            each.fill_(float("nan") if differentiable(each) else 1)  # what an empty replay would leave
        _foreach_copy(read, other)  # after that, because an end can be one of these
        replay()
        for wanted, seen in zip(expected, results, strict=True):
            if fault := difference("a value of its replay", wanted, seen):
                raise RuntimeError(fault)

    def _graph(self) -> fx.GraphModule:
        """The step as a function, its arguments in the order in which `_steps` gives them."""
        loop, graph = self._loop, fx.Graph()
        new = {node: graph.placeholder(f"given_{node}") for node in (*loop.constants, *loop.carried, *loop.rows)}
        added = {node: graph.placeholder(f"added_{node}") for node in loop.carried if loop.added}
        places = [graph.placeholder(f"row_{node}") for node in loop.saved]
        for node, more in added.items():
            new[node] = graph.call_function(_aten.add.Tensor, (new[node], more))
        for node in loop.nodes:
            new[node] = graph.node_copy(node, lambda each: new[each])
            new[node].meta = {}
        for node, place in zip(loop.saved, places, strict=True):
            graph.call_function(_aten.copy_.default, (place, new[node]))
        ends = [
            graph.call_function(_aten.zeros_like.default, (new[kept],)) if end is None else new[end]
            for kept, end, at in zip(loop.carried, loop.ends, self._at, strict=True)
            if at is None
        ]
        graph.output((*ends,))
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


class InductorBackend(PythonBackend):
    """See `weft.recurrent.plan_backends.Backend`; on CUDA all steps of a chunk are recorded by `record`."""

    def __init__(self, captured: StepGraph) -> None:
        self.record, self.why_not = cuda_recorder if _on_cuda(captured) else None, ""
        super().__init__(captured)

    def writes(self, node: fx.Node) -> bool:
        """See `PythonBackend`; a compiled step copies whatever it saves."""
        return True

    def compile(self, loop: Loop) -> CompiledLoop:
        """See `PythonBackend`; a step is compiled when it is first called."""
        step = InductorStep(loop, self)
        return CompiledLoop(loop, f"a compiled step:\n{step.module.code}", step.run)

    def work_bytes(self, steps: int) -> int:
        """See `Backend`; a recording has its own copy of what comes in and goes out."""
        return super().work_bytes(steps) + (2 * self.kept_bytes(steps) if self.record else 0)

    def explain(self) -> str:
        """See `Backend`."""
        how = "all steps of a chunk at a time, recorded" if self.record else "step by step"
        return f"{super().explain()}\n\nlaunched {how}{self.why_not}"


def _on_cuda(captured: StepGraph) -> bool:
    values = [node.meta.get("val") for node in (*captured.signature.inputs, *captured.signature.states)]
    return bool(values) and all(isinstance(each, Tensor) and each.is_cuda for each in values)
