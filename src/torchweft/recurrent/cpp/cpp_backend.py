"""The C++ backend: a captured step as a compiled library, and PyTorch for the operators that C does not know.

    forward     PyTorch: before         C: forward     PyTorch: after
    backward    PyTorch: before_back    C: backward    PyTorch: after_back, and sums over time

C gets addresses: inputs, states and outputs of the caller, and one workspace. PyTorch works on all steps of a chunk at
once. Partitioner.py decides which operators it runs.
"""

import copy
import ctypes
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.recurrent.cpp import compiler
from torchweft.recurrent.cpp.codegen import Emitter
from torchweft.recurrent.cpp.gemm import ALIGN, aligned
from torchweft.recurrent.cpp.ir import REDUCED_PRECISION, ArgumentKind, LoopValue, Product, TimeReduction, meta_value
from torchweft.recurrent.cpp.lowering import Lowered, lower
from torchweft.recurrent.cpp.partitioner import ForwardBackwardSplit, operands_of
from torchweft.recurrent.cpp.scheduling import explain_function, rows_apart
from torchweft.recurrent.cpp.workspace import pool, rounded
from torchweft.recurrent.graph import StepGraph, is_check, strong_reference
from torchweft.recurrent.plan_backends import Chunk, Gradients, chunk_length, copy_bytes
from torchweft.recurrent.step_plan import BulkEvaluator, explain, leading_to, summed_at_once

_HERE = Path(__file__).parent
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@cache
def kernels() -> ctypes.CDLL:
    """The library of matrix products, compiled once for this machine. Raises CompileError."""
    text = f"#define TORCHWEFT_BYTES {compiler.vector_bytes()}\n{_read_source('kernels.cpp')}"
    library = compiler.load(text, exact=False)
    library.torchweft_bind_openmp((ctypes.c_void_p * len(_OPENMP))(*openmp_addresses()))
    library.torchweft_kernels.restype = ctypes.c_void_p
    library.torchweft_run.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
    return library


def openmp_addresses() -> list[int | None]:
    """The functions of torch's OpenMP that run a function on all threads and number them, or None without OpenMP."""
    # GNU's, LLVM's and Intel's libraries all have these names. A second OpenMP in the process would start threads of
    # its own, so the one that torch links to is looked up through libtorch itself.
    path = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    try:
        library = ctypes.CDLL(str(path))
        return [_address_of(library, name) for name in _OPENMP]
    except (OSError, AttributeError):
        return [None] * len(_OPENMP)


def panel_width() -> dict[torch.dtype, int]:
    """The columns of a packed panel: two vector registers."""
    return {dtype: 2 * compiler.vector_bytes() // dtype.itemsize for dtype in (torch.float32, torch.float64)}


class CompiledFunction:
    """One compiled function. Raises CompileError."""

    def __init__(self, emitter: Emitter, library: ctypes.CDLL) -> None:
        self.function, self.emitter = emitter.function, emitter
        self.work = sum(map(_operation_count, self.function.values))  # roughly the operations of a step
        # In the order in which the function takes their addresses. PyTorch computes those of `from_torch`.
        self.arguments = [(argument.kind, argument.index) for argument in emitter.arguments]
        self.from_torch = frozenset(index for kind, index in self.arguments if kind == "from torch")
        self._entry = ctypes.c_void_p(_address_of(library, self.function.signature.name))
        self._run = kernels().torchweft_run
        # The arguments of each kind: their places, and their indices among the tensors of the kind.
        kinds = cast("list[ArgumentKind]", [*dict.fromkeys(kind for kind, _ in self.arguments)])
        self.by_kind: list[tuple[ArgumentKind, list[tuple[int, int]]]] = [
            (kind, [(at, i) for at, (other, i) in enumerate(self.arguments) if other == kind]) for kind in kinds
        ]

    def call(self, steps: int, threads: int, addresses: Sequence[int], workspace: Tensor, rows: int) -> None:
        """Run over `steps` steps. Address 0 stands for no tensor. Sums over time are those of the first `rows` rows."""
        # One array, so that all generated functions have the same C signature. An array of ctypes takes ten times as
        # long to fill.
        values = array("Q", addresses)
        values.extend((workspace.data_ptr(), rows))
        self._run(self._entry, threads, steps, values.buffer_info()[0])


class CompiledStep:
    """The three functions of a captured step. Raises Unsupported and CompileError."""

    def __init__(self, captured: StepGraph) -> None:
        self.lowered: Lowered = lower(captured)
        width = panel_width()
        emitters = [Emitter(function, width) for function in self.lowered.functions]
        self.text = "\n".join([_read_source("loops.h"), *(emitter.text for emitter in emitters), ""])
        # The first step of a process compiles two libraries, which takes seconds. So both compilers run at once.
        with ThreadPoolExecutor(1, "torchweft-compile") as executor:
            products = executor.submit(kernels)
            library = compiler.load(self.text, exact=True)
            library.torchweft_bind(ctypes.c_void_p(products.result().torchweft_kernels()))
        self.functions = [CompiledFunction(emitter, library) for emitter in emitters]
        self.forward, self.recompute, self.backward = self.functions

    def explain(self, steps: int) -> str:
        """The work of each function, its order and its memory, with chunks of so many steps, as text."""
        split, saved = self.lowered.split, self.lowered.split.saved
        size = sum(map(_step_bytes, saved))
        head = f"chunks of {steps} steps; kept for backward: {len(saved)} values, {size} bytes a step"
        parts = [explain_function(function.function) for function in self.functions]
        sums = [f"sum of {node} over all steps" for node in split.summed]
        runs = {
            "before forward": split.by_torch.before,
            "after forward": split.by_torch.after,
            "before backward": split.by_torch.before_back,
            "after backward": [*split.by_torch.after_back, *sums],
        }
        lines = [f"  {when}: {', '.join(map(str, nodes))}" for when, nodes in runs.items() if nodes]
        outside = ["\n".join(["by PyTorch, all steps of a chunk at once", *lines])] if lines else []
        return "\n\n".join([head, *parts, *outside])


@cache
def _read_source(name: str) -> str:
    return (_HERE / name).read_text()


def _address_of(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _operation_count(value: LoopValue) -> float:
    """Roughly the operations that compute a value, to decide whether several threads are worth it."""
    operation = value.operation.of if isinstance(value.operation, TimeReduction) else value.operation
    if isinstance(operation, Product):
        return 2.0 * value.size * operation.left.shape[-1]
    return 4.0 * value.size


# Operations of a chunk from which several threads pay: waking them, and each meeting, costs microseconds.
MIN_PARALLEL_OPERATIONS = 4e6


@dataclass(slots=True)
class Constants:
    """Values that depend on the references only: contiguous for C, and by node for PyTorch."""

    tensors: list[Tensor]
    values: dict[fx.Node, Tensor]


class ConstantEvaluator:
    """Computes, once per call, the values of a step that depend on its references only, and its checks of them."""

    def __init__(self, captured: StepGraph, lowered: Lowered, for_torch: Sequence[fx.Node]) -> None:
        self._captured = captured
        self._for_c, self._for_torch = lowered.constants, for_torch
        constants = list(dict.fromkeys([*lowered.constants, *for_torch]))
        checks = [node for node in captured.checks if not lowered.split.varies(node)]
        self._computed = [*(node for node in constants if node.op == "call_function"), *checks]
        ancestors = leading_to(self._computed)
        self._operators = [node for node in captured.nodes if node in ancestors]
        read = {*constants, *(operand for node in self._operators for operand in node.all_input_nodes)}
        self._references = [node for node in captured.signature.references if node in read]
        # All constants are references, which C reads where they are.
        self._is_direct = not self._operators and not for_torch
        self._held = [captured.held_reference(node) for node in lowered.constants] if self._is_direct else []

    def evaluate(self) -> Constants:
        if self._is_direct:
            references = [strong_reference(held) for held in self._held]
            if all([tensor.dtype not in REDUCED_PRECISION for tensor in references]):
                return Constants([_plain(tensor) for tensor in references], {})
        values: dict[fx.Node, Any] = {**self._captured.referred(self._references)}
        if self._operators:
            bulk = BulkEvaluator(1, lambda node: False, values)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                bulk.evaluate(self._operators, self._computed)
        constants = [values[node] for node in self._for_c]
        tensors = [_plain(value.float() if value.dtype in REDUCED_PRECISION else value) for value in constants]
        return Constants(tensors, {node: values[node] for node in self._for_torch})


@dataclass(slots=True)
class SavedChunk:
    """Values of a chunk that backward reads: a buffer that C wrote, and tensors that PyTorch computed."""

    buffer: Tensor
    values: dict[fx.Node, Tensor]


class SavedLayout:
    """The places of the saved values of a chunk in one buffer."""

    def __init__(self, saved: Sequence[fx.Node]) -> None:
        self._nodes = saved
        self._sizes = [_step_bytes(node) for node in saved]
        self.step_bytes = sum(self._sizes)
        self._of_steps: tuple[int, int, list[int]] = (-1, 0, [])  # a number of steps, their bytes, and the offsets

    def bytes(self, steps: int) -> int:
        return self._layout(steps)[1]

    def _layout(self, steps: int) -> tuple[int, int, list[int]]:
        layout = self._of_steps  # read once: another thread can replace it
        if layout[0] != steps:
            *offsets, size = accumulate((aligned(size * steps) for size in self._sizes), initial=0)
            layout = self._of_steps = (steps, rounded(size + ALIGN), offsets)
        return layout

    def addresses(self, buffer: Tensor, steps: int) -> list[int]:
        start = buffer.data_ptr()
        start += -start % ALIGN  # the buffer itself can begin anywhere
        return [start + offset for offset in self._layout(steps)[2]]

    def tensors(self, buffer: Tensor, steps: int) -> dict[fx.Node, Tensor]:
        views: dict[fx.Node, Tensor] = {}
        for node, address, size in zip(self._nodes, self.addresses(buffer, steps), self._sizes, strict=True):
            value, start = node.meta["val"], address - buffer.data_ptr()
            views[node] = buffer[start : start + size * steps].view(value.dtype).view(steps, *value.shape)
        return views


class TorchStage:
    """Operators that PyTorch runs for all steps of a chunk at once. `results` are those that something else reads."""

    def __init__(self, nodes: Sequence[fx.Node], views: Sequence[fx.Node], readers: set[fx.Node]) -> None:
        read = [node for node in nodes if node in readers and isinstance(node.meta.get("val"), Tensor)]
        self.results = [*read, *(node for node in nodes if is_check(node))]
        self._nodes = [*views, *nodes]

    def run(self, bulk: BulkEvaluator) -> None:
        if not self.results:
            return
        # The graph contains the casts of autocast already, so autocast must not add more.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            bulk.evaluate([node for node in self._nodes if node not in bulk.env], self.results)


class TorchStages:
    """The operators of a step that C does not know, and PyTorch runs."""

    def __init__(self, split: ForwardBackwardSplit, lowered: Lowered) -> None:
        self._split = split
        signature, parts = split.captured.signature, split.by_torch
        self.is_needed = bool(split.torch or split.sums)
        aliases, outputs = split.captured.aliases, enumerate(signature.outputs)
        # Those that PyTorch writes, with their indices.
        self.outputs = [(i, n) for i, n in outputs if n and i not in aliases and split.is_outside(n)]
        self._gradients = [(i, n) for i, n in enumerate(signature.input_gradients) if n and split.is_outside(n)]
        views = [node for node in split.captured.nodes if node in split.forward_values.torch_views]
        summed = split.summed
        read = {*lowered.outside, *split.forward_values.from_torch}
        ends = {node for _, node in self.outputs}
        ends_back = {node for _, node in self._gradients}
        self.before = TorchStage(parts.before, views, read | ends | operands_of([*views, *parts.after]))
        self.after = TorchStage(parts.after, views, read | ends)
        self.after_recompute = TorchStage(parts.after, views, read)
        read_back = read | ends_back | operands_of([*parts.after_back, *summed])
        self.before_back = TorchStage(parts.before_back, views, read_back)
        self.after_back = TorchStage(parts.after_back, views, ends_back)
        self._all = [*views, *parts.before_back, *parts.after_back, *summed]
        operands = dict.fromkeys(x for node in (*split.torch, *summed) for x in (node, *node.all_input_nodes))
        self.constants = [node for node in operands if not split.varies(node)]  # of references only
        stacked = {*split.torch, *split.for_torch, *summed}
        self.step_bytes = sum(_step_bytes(node) for node in stacked if not summed_at_once(node))
        self._fixed_bytes = sum(_step_bytes(node) for node in summed)

    def bytes(self, steps: int) -> int:
        return steps * self.step_bytes + self._fixed_bytes

    def finish_backward(self, bulk: BulkEvaluator, gradients: Gradients) -> None:
        """After the loop backward: gradients of inputs, and those of parameters that PyTorch sums."""
        self.after_back.run(bulk)
        for i, node in self._gradients:
            into = gradients.inputs[i]
            if into is not None:
                into.copy_(bulk.env[node])
        for j, piece in self._split.sums:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                whole, at = gradients.parameters[j], piece.at
                if whole is not None:
                    into = whole.as_strided(at.size(), at.stride(), whole.storage_offset() + at.storage_offset())
                    into.add_(bulk.summed(piece.node, self._all))


class CppBackend:
    """See `weft.recurrent.plan_backends.Backend`. Raises Unsupported and CompileError."""

    missing = 0

    def __init__(self, captured: StepGraph) -> None:
        self.captured = captured
        self.compiled = CompiledStep(captured)
        self._split = self.compiled.lowered.split
        self._workspaces: dict[tuple[int, int], int] = {}
        self._saved = SavedLayout(self._split.saved)
        self._outside = TorchStages(self._split, self.compiled.lowered)
        self._constants = ConstantEvaluator(captured, self.compiled.lowered, self._outside.constants)
        stacks = max(sum(value.bytes for value in routine.function.stacks) for routine in self.compiled.functions)
        self.rows = next((size for state in captured.signature.states[:1] for size in meta_value(state).shape), 1)
        self._step_bytes = self._saved.step_bytes + stacks + self._outside.step_bytes
        self.chunk_steps = chunk_length(self._step_bytes, self.rows)

    @cached_property
    def apart(self) -> bool:
        """Whether no row depends on another, anywhere in the plan: then it also runs fewer rows, bit for bit."""
        signature, rows = self.captured.signature, self.rows
        ends = [node for node in (*signature.outputs, *signature.new_states) if node is not None]
        by_rows = all(meta_value(node).shape[:1] == (rows,) for node in ends)
        independent = by_rows and not self.captured.draws and not self._outside.is_needed
        return independent and all(rows_apart(function, rows) for function in self.compiled.lowered.functions)

    def for_rows(self, rows: int) -> "CppBackend":
        """This plan for fewer rows, which `run_derived` fills up."""
        plan = copy.copy(self)
        plan.missing = self.rows - rows
        # The bounds of chunks order the sums over time. So chunks must be as long as in a plan for exactly these rows.
        plan.chunk_steps = chunk_length(self._step_bytes // self.rows * rows, rows)
        return plan

    def begin(self) -> Constants:
        return self._constants.evaluate()

    def forward(self, constants: Constants, chunk: Chunk, keep: bool) -> SavedChunk | None:
        saved, outside = self._forward(self.compiled.forward, constants, chunk, self._outside.after)
        for i, node in self._outside.outputs:
            chunk.outputs[i].copy_(outside.env[node])
        if not keep:
            self.release(saved)
        return saved if keep else None

    def recompute(self, constants: Constants, chunk: Chunk) -> SavedChunk:
        return self._forward(self.compiled.recompute, constants, chunk, self._outside.after_recompute)[0]

    def _forward(
        self, routine: CompiledFunction, constants: Constants, chunk: Chunk, after: TorchStage
    ) -> tuple[SavedChunk, BulkEvaluator]:
        outside = self._torch_values(constants, chunk)
        if self._outside.is_needed:
            self._outside.before.run(outside)
        saved = SavedChunk(_acquire(self._saved.bytes(chunk.steps)), {})
        memory: dict[ArgumentKind, Sequence[Tensor | None]] = {
            "input": chunk.inputs, "state": chunk.states, "output": chunk.outputs,
        }  # fmt: skip
        self._call(routine, constants, chunk.steps, saved.buffer, outside, memory)
        if after.results:
            self._add_c_values(outside, chunk, saved)
            after.run(outside)
        for node in self._split.forward_values.from_torch:
            saved.values[node] = outside.env[node]
        return saved, outside

    def backward(self, constants: Constants, chunk: Chunk, kept: SavedChunk, gradients: Gradients) -> None:
        # A carried gradient has two rows: a step reads one and writes the other. The loop runs from the last step of
        # the chunk to its first one. Its first row to read is `steps & 1`, and the last one that it writes is 0.
        carried = [x.new_empty(2, *x.shape) if x.is_floating_point() else x for x in gradients.carried]
        pairs = [(rows, x) for rows, x in zip(carried, gradients.carried, strict=True) if x.is_floating_point()]
        for rows, gradient in pairs:
            copy_bytes(rows, gradient, chunk.steps & 1)
        outside = self._torch_values(constants, chunk)
        if self._outside.is_needed:
            outside.env.update(zip(self.captured.signature.output_gradients, gradients.outputs, strict=True))
            outside.env.update(kept.values)
            self._add_c_values(outside, chunk, kept)
            self._outside.before_back.run(outside)
        for_torch: list[Tensor] = []
        if self._split.for_torch:
            metas = [node.meta["val"] for node in self._split.for_torch]
            for_torch = [torch.empty((chunk.steps, *meta.shape), dtype=meta.dtype) for meta in metas]
        memory: dict[ArgumentKind, Sequence[Tensor | None]] = {
            "input": chunk.inputs, "state": chunk.states, "output": chunk.outputs, "for torch": for_torch,
            "output gradient": gradients.outputs, "carried gradient": carried, "added gradient": gradients.states,
            "input gradient": gradients.inputs, "parameter gradient": gradients.parameters,
        }  # fmt: skip
        self._call(self.compiled.backward, constants, chunk.steps, kept.buffer, outside, memory)
        if self._outside.is_needed:
            outside.env.update(zip(self._split.for_torch, for_torch, strict=True))
            self._outside.finish_backward(outside, gradients)
        for rows, gradient in pairs:
            copy_bytes(gradient, rows)

    def release(self, kept: SavedChunk) -> None:
        _give(kept.buffer)

    def kept_bytes(self, steps: int) -> int:
        return self._saved.bytes(steps) + steps * sum(map(_step_bytes, self._split.forward_values.from_torch))

    def work_bytes(self, steps: int) -> int:
        return self._workspace_bytes(steps) + self._outside.bytes(steps)

    def _workspace_bytes(self, steps: int) -> int:
        """The size of the workspace, the same for all functions so that they share it. Every call needs it."""
        key = steps, torch.get_num_threads()
        if key not in self._workspaces:
            sizes = (routine.emitter.workspace_bytes(*key) for routine in self.compiled.functions)
            self._workspaces[key] = rounded(max(sizes))
        return self._workspaces[key]

    def _torch_values(self, constants: Constants, chunk: Chunk) -> BulkEvaluator:
        """Values that PyTorch can read before the loops: constants, inputs, and states before each step."""
        bulk = BulkEvaluator(chunk.steps, self._split.varies)
        if self._outside.is_needed:
            signature = self.captured.signature
            bulk.env.update(constants.values)
            bulk.env.update(zip(signature.inputs, chunk.inputs, strict=True))
            for k, (node, state) in enumerate(zip(signature.states, chunk.states, strict=True)):
                invariant = k in self.captured.invariant
                bulk.env[node] = state.expand(chunk.steps, *state.shape) if invariant else state[:-1]
        return bulk

    def _add_c_values(self, bulk: BulkEvaluator, chunk: Chunk, saved: SavedChunk) -> None:
        """Add the values that C computed forward: saved ones, new states and outputs."""
        bulk.env.update(self._saved.tensors(saved.buffer, chunk.steps))
        signature, invariant = self.captured.signature, self.captured.invariant
        states = [state[1:] for k, state in enumerate(chunk.states) if k not in invariant]
        new_states = [node for k, node in enumerate(signature.new_states) if k not in invariant]
        results = zip([*signature.outputs, *new_states], [*chunk.outputs, *states], strict=True)
        bulk.env.update({node: tensor for node, tensor in results if node in self._split.front})

    def explain(self) -> str:
        return explain(self.captured) + "\n\n" + self.compiled.explain(self.chunk_steps)

    def _call(
        self,
        routine: CompiledFunction,
        constants: Constants,
        steps: int,
        saved: Tensor,
        outside: BulkEvaluator,
        memory: Mapping[ArgumentKind, Sequence[Tensor | None]],
    ) -> None:
        """Call a compiled function: resolve each argument's kind and index to an address, and lend it a workspace."""
        # C reads addresses, so this list must keep the contiguous copies alive until the call returns.
        from_torch: list[Tensor | None] = []
        if self._outside.is_needed:
            from_torch = [
                _plain(outside.env[node]) if i in routine.from_torch else None
                for i, node in enumerate(self.compiled.lowered.outside)
            ]
        tables = {**memory, "constant": constants.tensors, "from torch": from_torch}
        addresses = [0] * len(routine.arguments)
        for kind, places in routine.by_kind:
            if kind == "saved":
                saved_addresses = self._saved.addresses(saved, steps)
                for at, i in places:
                    addresses[at] = saved_addresses[i]
                continue
            tensors = tables[kind]
            for at, i in places:
                tensor = tensors[i]
                if tensor is not None:
                    addresses[at] = tensor.data_ptr()
        # The number of threads changes no bit, see codegen.py, so a short last chunk can use fewer.
        threads = torch.get_num_threads() if routine.work * steps > MIN_PARALLEL_OPERATIONS else 1
        work = _acquire(self._workspace_bytes(steps), "work")
        routine.call(steps, threads, addresses, work, self.rows - self.missing)
        _give(work, "work")


# Below this size PyTorch's allocator keeps the memory, and is faster than the pool.
_SMALL = 1 << 17


def _acquire(size: int, kind: str = "") -> Tensor:
    return torch.empty(size, dtype=torch.uint8) if size < _SMALL else pool.acquire(size, kind)


def _give(buffer: Tensor, kind: str = "") -> None:
    if buffer.numel() >= _SMALL:
        pool.give(buffer, kind)


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, with a lazy negation resolved, because C reads the memory itself."""
    return tensor.resolve_neg().contiguous()


def _step_bytes(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
    return sum(tensor.numel() * tensor.element_size() for tensor in values if isinstance(tensor, Tensor))
