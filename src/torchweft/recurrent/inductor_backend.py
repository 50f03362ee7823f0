"""The Inductor backend: the two loops of a plan as compiled steps. On CUDA all steps of a chunk are one CUDA graph.

    CPU      bulk operators | compiled step, L times                        | bulk operators
    CUDA     the same       | recorded once for each length L, and replayed | the same

    step(constants, carried, values of this step, rows to write) -> carried

The operators are those that the Python backend generates as source. Here they become one compiled function, for any
operator and device. Compiling the loop over T as a whole would unroll it, once for each length. Values that later parts
read are written straight into a row of their buffer, and the next step reads a state from there. Inductor fixes the
strides of its arguments, so all inputs are contiguous.

A kernel of a small step runs for microseconds, about as long as the host takes to launch it. All steps of a chunk are
therefore launched together, as one recording. It owns its memory: inputs are copied into it, and results out of it.
"""

import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.core.segment import can_have_gradient
from torchweft.recurrent.cpp.compiler import CompileError
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.python_backend import CompiledLoop, Loop, PythonBackend
from torchweft.recurrent.pytorch_internals import foreach_copy, inductor
from torchweft.recurrent.verify import difference

# Records a function. Returns its outputs, in memory that the recording owns, and a function that recomputes them.
Recorder = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Callable[[], None]]]
MAX_RECORDINGS = 16  # lengths for which a loop keeps a recording. Each has memory of its own.
_aten = cast(Any, torch.ops.aten)

# Held in the whole process while a chunk is recorded or replayed. A recording has one set of buffers, which threads
# that share a network would overwrite for each other, and PyTorch records one graph at a time.
_RECORDING = threading.RLock()
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def recording_stream(device: torch.device) -> Generator[None]:
    """Make the one stream of all recordings on this device current, in order with the caller's current stream."""
    # The buffers of recordings belong to it, so replays run one after another, whichever streams they serve.
    with ExitStack() as stack:
        if device.type == "cuda":
            # PyTorch hands out 32 streams of each priority in turn. Stages of a pipe have streams of normal priority.
            # If a stage had the recording stream too, its kernels would be recorded into the graph.
            recording = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device, priority=-1))
            current = torch.cuda.current_stream(device)
            recording.wait_stream(current)
            stack.callback(current.wait_stream, recording)
            stack.enter_context(torch.cuda.stream(recording))  # also makes the device the current one
        yield


def cuda_recorder(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """Record on the current stream. Raises RuntimeError if the function cannot be recorded."""
    # Compilation and the creation of library handles happen in the first runs. They cannot be recorded.
    function()
    function()
    graph = torch.cuda.CUDAGraph()
    # The default stream belongs to the device that recorded first. Kernels on another device would not be recorded.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay


# Buffers that are read, rows that are written, the carried values at the end, and the function that replays.
_Recording = tuple[list[Tensor], list[Tensor], list[Tensor], Callable[[], None]]


class InductorStep:
    """The step of a loop: its graph, its compiled function, and its recordings by number of steps."""

    def __init__(self, loop: Loop, plan: "InductorBackend") -> None:
        self._loop, self._plan = loop, plan
        self._at = [loop.saved.index(end) if end in loop.saved else None for end in loop.ends]
        self.module = self._build_module()
        self._compiled: Callable[..., Sequence[Tensor]] | None = None
        self._recordings: dict[int, _Recording] = {}

    def run(self, steps: int, *given: Any) -> list[Tensor]:
        """The function of a `CompiledLoop`. Its arguments are those of the source that `Loop.compile` generates."""
        loop, arguments = self._loop, iter(given)
        values = [next(arguments).contiguous() for _ in (*loop.constants, *loop.carried)]
        rows = [_contiguous_rows(next(arguments)) for _ in loop.rows]
        places = [row for _ in loop.saved for row in next(arguments)]
        rows += [_contiguous_rows(next(arguments)) for _ in loop.carried] if loop.added else []
        values += [row for node_rows in rows for row in node_rows]
        if self._plan.record:
            return self._replay(steps, values, places)
        return self._launch_steps(steps, values, places)

    def _launch_steps(self, steps: int, values: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """The carried values after the last step."""
        # `values` are constants, carried values and rows. Rows and `places` are ordered by node, then by step.
        loop, count = self._loop, len(self._loop.constants)
        constants, carried = values[:count], values[count : count + len(loop.carried)]
        rows = values[count + len(carried) :]
        for step in range(steps - 1, -1, -1) if loop.backward else range(steps):
            arguments = [*constants, *carried, *rows[step::steps], *places[step::steps]]
            if self._compiled is None:
                self._compiled = compile_module(self.module, arguments)
            ends = iter(self._compiled(*arguments))
            carried = [next(ends).contiguous() if at is None else places[at * steps + step] for at in self._at]
        return [*carried]

    def _replay(self, steps: int, values: list[Tensor], places: list[Tensor]) -> list[Tensor]:
        device = values[0].device
        with _RECORDING:
            with recording_stream(device):
                recording = self._find_recording(steps, values, places)
            if recording is not None:
                read, written, ends, replay = recording
                results = [torch.empty_like(end) for end in ends]  # allocated on the caller's stream
                with recording_stream(device):
                    foreach_copy(read, values)
                    replay()
                    foreach_copy([*places, *results], [*written, *ends])
                return results
        return self._launch_steps(steps, values, places)

    def _find_recording(self, steps: int, values: list[Tensor], places: list[Tensor]) -> _Recording | None:
        # The recording for `steps` steps. After one that fails or gives other results, no more are made.
        recording = self._recordings.get(steps)
        if recording is not None or self._plan.record is None:
            return recording
        read, written = [value.clone() for value in values], [torch.empty_like(place) for place in places]
        try:
            if any(value.device != values[0].device for value in values):
                raise RuntimeError("the loop reads tensors of several devices")
            recording = read, written, *self._plan.record(lambda: self._launch_steps(steps, read, written))
            self._check_replay(recording, steps)
        except RuntimeError as error:
            self._plan.stop_recording(error)
            return None
        if len(self._recordings) == MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        return self._recordings.setdefault(steps, recording)

    def _check_replay(self, recording: _Recording, steps: int) -> None:
        """Replay with other values. Raises RuntimeError if the results are stale or differ from `_launch_steps`."""
        read, written, ends, replay = recording
        values = [value * 0.5 + 0.25 if can_have_gradient(value) else value.clone() for value in read]
        rows, results = [torch.empty_like(row) for row in written], [*written, *ends]
        expected = [*rows, *self._launch_steps(steps, values, rows)]
        for result in results:
            result.fill_(float("nan") if can_have_gradient(result) else 1)  # an empty replay would leave these
        foreach_copy(read, values)  # after the fill, because an end can be one of the inputs
        replay()
        for reference, result in zip(expected, results, strict=True):
            if fault := difference("a value of its replay", reference, result):
                raise RuntimeError(fault)

    def _build_module(self) -> fx.GraphModule:
        # The step as a function, its arguments in the order of `_launch_steps`.
        loop, graph = self._loop, fx.Graph()
        new = {node: graph.placeholder(f"given_{node}") for node in (*loop.constants, *loop.carried, *loop.rows)}
        added = {node: graph.placeholder(f"added_{node}") for node in loop.carried if loop.added}
        places = [graph.placeholder(f"row_{node}") for node in loop.saved]
        for node, more in added.items():
            new[node] = graph.call_function(_aten.add.Tensor, (new[node], more))
        for node in loop.nodes:
            new[node] = graph.node_copy(node, lambda operand: new[operand])
            new[node].meta = {}
        for node, place in zip(loop.saved, places, strict=True):
            graph.call_function(_aten.copy_.default, (place, new[node]))
        ends = [
            graph.call_function(_aten.zeros_like.default, (new[old],)) if end is None else new[end]
            for old, end, at in zip(loop.carried, loop.ends, self._at, strict=True)
            if at is None
        ]
        graph.output((*ends,))
        return fx.GraphModule({}, graph)


def compile_module(module: fx.GraphModule, arguments: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return module
    # Copies, because tracing writes into the rows.
    examples = [argument.clone() for argument in arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by imports inside PyTorch
            # One thread: a pool of worker processes would outlive the call.
            return inductor().compile(module, examples, {"compile_threads": 1})
    except Exception as error:
        raise CompileError(f"Inductor cannot compile the step: {type(error).__name__}: {str(error)[:500]}") from error


def _contiguous_rows(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    # The rows of one node share a layout, so the first decides.
    return rows if not rows or rows[0].is_contiguous() else torch.stack(list(rows)).unbind(0)


class InductorBackend(PythonBackend):
    """See `weft.recurrent.plan_backends.Backend`. On CUDA all steps of a chunk are recorded by `record`."""

    def __init__(self, captured: StepGraph) -> None:
        self.record: Recorder | None = cuda_recorder if runs_on_cuda(captured) else None
        self._why_not = ""
        super().__init__(captured)

    def stop_recording(self, error: RuntimeError) -> None:
        """Launch the steps one by one from now on."""
        self.record, self._why_not = None, f", because it could not be recorded: {error}"

    def writes_row(self, node: fx.Node) -> bool:
        """See `PythonBackend`. A compiled step copies all values that it saves."""
        return True

    def compile_loop(self, loop: Loop) -> CompiledLoop:
        """See `PythonBackend`. A step is compiled at its first call."""
        step = InductorStep(loop, self)
        return CompiledLoop(loop, f"a compiled step:\n{step.module.code}", step.run)

    def work_bytes(self, steps: int) -> int:
        """See `Backend`. A recording has its own copy of inputs and results."""
        return super().work_bytes(steps) + (2 * self.kept_bytes(steps) if self.record else 0)

    def explain(self) -> str:
        how = "all steps of a chunk at a time, recorded" if self.record else "step by step"
        return f"{super().explain()}\n\nlaunched {how}{self._why_not}"


def runs_on_cuda(captured: StepGraph) -> bool:
    values = [node.meta.get("val") for node in (*captured.signature.inputs, *captured.signature.states)]
    return bool(values) and all(isinstance(value, Tensor) and value.is_cuda for value in values)
