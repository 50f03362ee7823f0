"""The C++ backend: a captured step as a compiled library, and PyTorch for the operators that C does not know.

    forward     PyTorch: before         C: forward     PyTorch: after
    backward    PyTorch: before_back    C: backward    PyTorch: after_back, and sums over time

C gets addresses: inputs, states and outputs of the caller, and one workspace. PyTorch works on all steps of a chunk at
once; partitioner.py decides on what.
"""

import copy
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.cpp import compiler
from weft.recurrent.cpp.codegen import Emitter
from weft.recurrent.cpp.gemm import ALIGN, aligned
from weft.recurrent.cpp.ir import REDUCED_PRECISION, LoopValue, Product, TimeReduction, meta_value
from weft.recurrent.cpp.lowering import Lowered, lower
from weft.recurrent.cpp.partitioner import ForwardBackwardSplit, inputs_of
from weft.recurrent.cpp.scheduling import explain_function, rows_apart
from weft.recurrent.graph import StepGraph, is_check
from weft.recurrent.plan_backends import Chunk, Gradients, chunk_length
from weft.recurrent.step_plan import BulkEvaluator, explain, leading_to, summed_at_once

_HERE = Path(__file__).parent
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_KERNELS = [*(f"{name}_{kind}" for name in ("pack", "product", "some", "gather", "columns") for kind in "fd"), "meet"]


@cache
def kernels() -> ctypes.CDLL:
    """The library of matrix products, compiled once for this machine. Raises CompileError."""
    text = f"#define WEFT_BYTES {compiler.vector_bytes()}\n{_file('kernels.cpp')}"
    library = compiler.load(text, exact=False)
    library.weft_bind_openmp((ctypes.c_void_p * len(_OPENMP))(*_openmp()))
    return library


def _openmp() -> list[int | None]:
    """OpenMP as torch uses it: how to run a function on all threads, and to ask which one this is. None: there is none.

    GNU's, LLVM's and Intel's libraries all have these names.
    """
    found = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    try:
        library = ctypes.CDLL(str(found))  # a name is looked for in what it links to as well
        return [_address(library, name) for name in _OPENMP]
    except (OSError, AttributeError):
        return [None] * len(_OPENMP)


def panel_width() -> dict[torch.dtype, int]:
    """Columns of a packed panel: two vector registers."""
    return {dtype: 2 * compiler.vector_bytes() // dtype.itemsize for dtype in (torch.float32, torch.float64)}


class CompiledFunction:
    """One compiled function. Raises CompileError when it is made."""

    def __init__(self, emitter: Emitter, library: ctypes.CDLL) -> None:
        self.function, self.emitter = emitter.function, emitter
        self.work = sum(map(_operations, self.function.values))
        """Roughly how many operations a step takes."""
        names = [each.name for each in self.function.arguments]
        kinds = [name.rstrip("0123456789") for name in names]
        self.arguments = [(kind, int(name.removeprefix(kind))) for kind, name in zip(kinds, names, strict=True)]
        """The table of each, by the letters of its name, and its index there."""
        self._entry = ctypes.c_void_p(_address(library, self.function.name))
        self._run = kernels().weft_run

    def call(self, steps: int, threads: int, arguments: Sequence[int], workspace: Tensor, rows: int) -> None:
        """Run over `steps` steps; `arguments` are addresses, in the order of the function's arguments (0: none). Sums
        over time are those of the first `rows` rows."""
        values = (ctypes.c_void_p * (len(arguments) + 2))(*arguments, workspace.data_ptr(), rows)
        self._run(self._entry, ctypes.c_long(threads), ctypes.c_long(steps), values)


class CompiledStep:
    """The three functions of a captured step. Raises Unsupported and CompileError."""

    def __init__(self, captured: StepGraph) -> None:
        self.lowered: Lowered = lower(captured)
        width = panel_width()
        emitters = [Emitter(each, width) for each in self.lowered.functions]
        self.text = "\n".join([_file("loops.h"), *(each.text for each in emitters), ""])
        with ThreadPoolExecutor(1, "weft-compile") as beside:  # the first time, two compilers run at once
            products = beside.submit(kernels)
            library = compiler.load(self.text, exact=True)
            table = [_address(products.result(), f"weft_{name}") for name in _KERNELS]
        library.weft_bind((ctypes.c_void_p * len(table))(*table))
        self.functions = [CompiledFunction(each, library) for each in emitters]
        self.forward, self.recompute, self.backward = self.functions

    def explain(self, steps: int) -> str:
        """For a person: what each function does when, and what it keeps, with chunks of so many steps."""
        split, saved = self.lowered.split, self.lowered.split.saved
        head = f"chunks of {steps} steps; kept for backward: {len(saved)} values, {sum(map(_size, saved))} bytes a step"
        parts = [explain_function(each.function) for each in self.functions]
        sums = [f"sum of {node} over all steps" for node in split.summed]
        runs = {
            "before forward": split.before,
            "after forward": split.after,
            "before backward": split.before_back,
            "after backward": [*split.after_back, *sums],
        }
        lines = [f"  {when}: {', '.join(map(str, nodes))}" for when, nodes in runs.items() if nodes]
        outside = ["\n".join(["by PyTorch, all steps of a chunk at once", *lines])] if lines else []
        return "\n\n".join([head, *parts, *outside])


@cache
def _file(name: str) -> str:
    return (_HERE / name).read_text()


def _address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _operations(value: LoopValue) -> float:
    """Operations to make a value, to tell whether threads are worth it."""
    made = value.made.of if isinstance(value.made, TimeReduction) else value.made
    return 2.0 * value.size * made.left.shape[-1] if isinstance(made, Product) else 4.0 * value.size


MIN_PARALLEL_OPERATIONS = 4e6
"""Operations of a chunk from which more than one thread pays: to be woken, and to meet, costs them microseconds."""


@dataclass(frozen=True)
class Constants:
    """Values that depend on the references only: contiguous for C, and by node for PyTorch."""

    tensors: list[Tensor]
    values: dict[fx.Node, Tensor]


@dataclass(frozen=True)
class SavedChunk:
    """Values of a chunk that backward reads: a buffer that C wrote, and tensors of PyTorch's."""

    buffer: Tensor
    values: dict[fx.Node, Tensor]


class TorchStage:
    """Operators that PyTorch runs for all steps of a chunk at once, and those of them that somebody else reads."""

    def __init__(self, nodes: Sequence[fx.Node], views: Sequence[fx.Node], readers: set[fx.Node]) -> None:
        made = [node for node in nodes if node in readers and isinstance(node.meta.get("val"), Tensor)]
        self.wanted = [*made, *(node for node in nodes if is_check(node))]
        self._nodes = [*views, *nodes]

    def run(self, bulk: BulkEvaluator) -> None:
        """Make them."""
        if not self.wanted:
            return
        # Operators as the graph has them: it contains the casts of autocast already.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            bulk.evaluate([node for node in self._nodes if node not in bulk.env], self.wanted)


class TorchStages:
    """The operators of a step that C does not know, and PyTorch runs."""

    def __init__(self, split: ForwardBackwardSplit, lowered: Lowered) -> None:
        self._split = split
        signature = split.captured.signature
        self.works = bool(split.torch or split.sums)
        aliases = split.captured.aliases
        self.outputs = [(i, n) for i, n in enumerate(signature.outputs) if n and i not in aliases and split.outside(n)]
        """Outputs that PyTorch writes, with their numbers."""
        self._gradients = [(i, n) for i, n in enumerate(signature.input_gradients) if n and split.outside(n)]
        views = [node for node in split.captured.nodes if node in split.torch_views]
        summed = split.summed
        given, ends = {*lowered.outside, *split.kept}, {node for _, node in self.outputs}
        back = {node for _, node in self._gradients}
        self.before = TorchStage(split.before, views, given | ends | inputs_of([*views, *split.after]))
        self.after = TorchStage(split.after, views, given | ends)
        self.after_recompute = TorchStage(split.after, views, given)
        self.before_back = TorchStage(split.before_back, views, given | back | inputs_of([*split.after_back, *summed]))
        self.after_back = TorchStage(split.after_back, views, back)
        self._inside = [*views, *split.before_back, *split.after_back, *summed]
        read = dict.fromkeys(each for node in (*split.torch, *summed) for each in (node, *node.all_input_nodes))
        self.constants = [node for node in read if not split.varies(node)]
        """Values it reads that depend on references only."""
        stacked = {*split.torch, *split.made, *summed}
        self.step_bytes = sum(_size(node) for node in stacked if not summed_at_once(node))
        self._fixed = sum(_size(node) for node in summed)

    def bytes(self, steps: int) -> int:
        """Bytes for so many steps, besides saved values."""
        return steps * self.step_bytes + self._fixed

    def finish(self, bulk: BulkEvaluator, gradients: Gradients) -> None:
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
                    into.add_(bulk.summed(piece.node, self._inside))


class CppBackend:
    """See `weft.recurrent.plan_backends.Backend`. Raises Unsupported and CompileError when it is made."""

    missing = 0

    def __init__(self, captured: StepGraph) -> None:
        self.captured = captured
        self.compiled = CompiledStep(captured)
        self._lowered, self._split = self.compiled.lowered, self.compiled.lowered.split
        self._workspaces: dict[tuple[int, int], int] = {}
        """By steps and threads."""
        self._saved = [_size(each) for each in self._split.saved]
        self._outside = TorchStages(self._split, self._lowered)
        stacks = max(sum(each.bytes for each in routine.function.stacks) for routine in self.compiled.functions)
        self.rows = next((size for state in captured.signature.states[:1] for size in meta_value(state).shape), 1)
        self._step_bytes = sum(self._saved) + stacks + self._outside.step_bytes
        self.chunk_steps = chunk_length(self._step_bytes, self.rows)
        self._constants = list(dict.fromkeys([*self._lowered.constants, *self._outside.constants]))
        checks = [each for each in captured.checks if not self._split.varies(each)]
        self._made_once = [*(each for each in self._constants if each.op == "call_function"), *checks]
        once = leading_to(self._made_once)
        self._once = [node for node in captured.nodes if node in once]
        wanted = {*self._constants, *(each for node in self._once for each in node.all_input_nodes)}
        self._references = [node for node in captured.signature.references if node in wanted]

    @cached_property
    def apart(self) -> bool:
        """Whether no row depends on another, anywhere in the plan: then it serves for fewer rows, bit for bit."""
        signature, rows = self.captured.signature, self.rows
        ends = [node for node in (*signature.outputs, *signature.new_states) if node is not None]
        by_rows = all(meta_value(node).shape[:1] == (rows,) for node in ends)
        alone = by_rows and not self.captured.draws and not self._outside.works
        return alone and all(rows_apart(function, rows) for function in self._lowered.functions)

    def for_rows(self, rows: int) -> "CppBackend":
        """This plan for fewer rows, which `run_derived` fills up, with chunks as long as by a plan for just these rows:
        their bounds order the sums over time."""
        found = copy.copy(self)
        found.missing = self.rows - rows
        found.chunk_steps = chunk_length(self._step_bytes // self.rows * rows, rows)
        return found

    def begin(self) -> Constants:
        values: dict[fx.Node, Any] = {**self.captured.referred(self._references)}
        if self._once:
            bulk = BulkEvaluator(1, lambda node: False, values)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                bulk.evaluate(self._once, self._made_once)
        constants = [values[node] for node in self._lowered.constants]
        tensors = [_plain(each.float() if each.dtype in REDUCED_PRECISION else each) for each in constants]
        return Constants(tensors, {node: values[node] for node in self._outside.constants})

    def forward(self, constants: Constants, chunk: Chunk, keep: bool) -> SavedChunk | None:
        kept, made = self._forward(self.compiled.forward, constants, chunk, self._outside.after)
        for i, node in self._outside.outputs:
            chunk.outputs[i].copy_(made.env[node])
        if not keep:
            self.release(kept)
        return kept if keep else None

    def recompute(self, constants: Constants, chunk: Chunk) -> SavedChunk:
        return self._forward(self.compiled.recompute, constants, chunk, self._outside.after_recompute)[0]

    def _forward(
        self, routine: CompiledFunction, constants: Constants, chunk: Chunk, after: TorchStage
    ) -> tuple[SavedChunk, BulkEvaluator]:
        outside = self._given(constants, chunk)
        self._outside.before.run(outside)
        kept = SavedChunk(pool.take(self._kept_bytes(chunk.steps)), {})
        self._call(routine, constants, chunk, kept.buffer, outside)
        if after.wanted:
            self._take_made(outside, chunk, kept)
            after.run(outside)
        kept.values.update({node: outside.env[node] for node in self._split.kept})
        return kept, outside

    def backward(self, constants: Constants, chunk: Chunk, kept: SavedChunk, gradients: Gradients) -> None:
        """See `Backend`. A carried gradient has two rows, of which a step reads one and writes the other."""
        carried = [each.new_empty(2, *each.shape) if each.is_floating_point() else each for each in gradients.carried]
        pairs = [each for each in zip(carried, gradients.carried, strict=True) if each[1].is_floating_point()]
        for pair, given in pairs:
            pair[chunk.steps & 1].copy_(given)
        outside = self._given(constants, chunk)
        if self._outside.works:
            outside.env.update(zip(self.captured.signature.output_gradients, gradients.outputs, strict=True))
            outside.env.update(kept.values)
            self._take_made(outside, chunk, kept)
        self._outside.before_back.run(outside)
        metas = [each.meta["val"] for each in self._split.made]
        made = [torch.empty((chunk.steps, *each.shape), dtype=each.dtype) for each in metas]
        held = Gradients(gradients.outputs, gradients.states, carried, gradients.inputs, gradients.parameters)
        self._call(self.compiled.backward, constants, chunk, kept.buffer, outside, held, made)
        outside.env.update(zip(self._split.made, made, strict=True))
        self._outside.finish(outside, gradients)
        for pair, given in pairs:
            given.copy_(pair[0])

    def release(self, kept: SavedChunk) -> None:
        pool.give(kept.buffer)

    def kept_bytes(self, steps: int) -> int:
        return self._kept_bytes(steps) + steps * sum(map(_size, self._split.kept))

    def _kept_bytes(self, steps: int) -> int:
        return rounded(sum(aligned(each * steps) for each in self._saved) + ALIGN)

    def work_bytes(self, steps: int) -> int:
        return self._workspace(steps) + self._outside.bytes(steps)

    def _workspace(self, steps: int) -> int:
        """Bytes of the workspace, of one size for all functions so that they share it. Cached: every call needs it."""
        key = steps, torch.get_num_threads()
        if key not in self._workspaces:
            self._workspaces[key] = rounded(max(each.emitter.workspace(*key) for each in self.compiled.functions))
        return self._workspaces[key]

    def _given(self, constants: Constants, chunk: Chunk) -> BulkEvaluator:
        """Values that PyTorch may read before the loops: constants, inputs, and states before each step."""
        bulk, signature = BulkEvaluator(chunk.steps, self._split.varies), self.captured.signature
        if self._outside.works:
            bulk.env.update(constants.values)
            bulk.env.update(zip(signature.inputs, chunk.inputs, strict=True))
            for k, (node, state) in enumerate(zip(signature.states, chunk.states, strict=True)):
                invariant = k in self.captured.invariant
                bulk.env[node] = state.expand(chunk.steps, *state.shape) if invariant else state[:-1]
        return bulk

    def _take_made(self, bulk: BulkEvaluator, chunk: Chunk, kept: SavedChunk) -> None:
        """Values that C computed forward: saved ones, new states and outputs."""
        front, steps = self._split.front, chunk.steps
        for node, start in zip(self._split.saved, self._starts(kept.buffer, steps), strict=True):
            value = node.meta["val"]
            rows = kept.buffer[start : start + _size(node) * steps].view(value.dtype)
            bulk.env[node] = rows.view(steps, *value.shape)
        states = [each[1:] for k, each in enumerate(chunk.states) if k not in self.captured.invariant]
        moving = [each for k, each in enumerate(self.captured.signature.new_states) if k not in self.captured.invariant]
        results = zip([*self.captured.signature.outputs, *moving], [*chunk.outputs, *states], strict=True)
        bulk.env.update({node: each for node, each in results if node in front})

    def _starts(self, buffer: Tensor, steps: int) -> list[int]:
        """Offsets of the saved values in a buffer."""
        sizes = (aligned(each * steps) for each in self._saved)
        return list(accumulate(sizes, initial=-buffer.data_ptr() % ALIGN))[:-1]

    def explain(self) -> str:
        return explain(self.captured) + "\n\n" + self.compiled.explain(self.chunk_steps)

    def _call(
        self,
        routine: CompiledFunction,
        constants: Constants,
        chunk: Chunk,
        kept: Tensor,
        outside: BulkEvaluator,
        gradients: Gradients | None = None,
        made: Sequence[Tensor] = (),
    ) -> None:
        steps = chunk.steps
        offsets = [kept.data_ptr() + start for start in self._starts(kept, steps)]
        read = {i for kind, i in routine.arguments if kind == "u"}
        given = [_plain(outside.env[node]) if i in read else None for i, node in enumerate(self._lowered.outside)]
        tables: dict[str, Sequence[Tensor | None]] = {"x": chunk.inputs, "h": chunk.states, "y": chunk.outputs}
        tables |= {"c": constants.tensors, "u": given, "g": made}
        if gradients is not None:
            tables |= {"dy": gradients.outputs, "dh": gradients.carried, "a": gradients.states}
            tables |= {"dx": gradients.inputs, "dp": gradients.parameters}
        addresses = [
            offsets[i] if kind == "v" else 0 if (tensor := tables[kind][i]) is None else tensor.data_ptr()
            for kind, i in routine.arguments
        ]
        threads = torch.get_num_threads() if routine.work * steps > MIN_PARALLEL_OPERATIONS else 1
        work = pool.take(self._workspace(steps), "work")
        routine.call(steps, threads, addresses, work, self.rows - self.missing)
        pool.give(work, "work")


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, with a lazy negation resolved, as C reads memory."""
    return tensor.resolve_neg().contiguous()


def _size(node: fx.Node) -> int:
    """Bytes of a step."""
    value: Any = node.meta.get("val")
    values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
    return sum(each.numel() * each.element_size() for each in values if isinstance(each, Tensor))


_OWN_PAGES = 1 << 18  # bytes from which a buffer is mapped by itself
_SHARE = 8  # the pool holds at most this fraction of the free memory
_WASTE = 2  # a buffer may be so many times larger than requested: a last, shorter chunk takes those of the others
_ASK_AGAIN = 0.5  # seconds for which a reading of free memory is valid


class WorkspacePool:
    """Byte buffers on the CPU, reused from call to call by all networks and threads of a process.

    Reused because fresh memory costs a page fault for every 4 KiB. The pool holds at most an eighth of the memory that
    the machine has free, read anew from time to time; anything more goes back to the system at once. A buffer that
    its owner does not give back is simply collected.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[str, int], list[Tensor]] = {}
        self._held = 0
        self._limit = 0
        self._asked = float("-inf")
        self._reused = 0
        self._made = 0

    def take(self, size: int, kind: str = "") -> Tensor:
        """A buffer of at least `size` bytes, its content arbitrary; of those that were given back as of this kind."""
        size = rounded(size)
        with self._lock:
            fitting = min((n for like, n in self._free if like == kind and size <= n <= _WASTE * size), default=None)
            if fitting is not None:
                buffers = self._free[kind, fitting]
                buffer = buffers.pop()
                if not buffers:  # an empty list would only make the search longer
                    del self._free[kind, fitting]
                self._held -= fitting
                self._reused += 1
                return buffer
            self._made += 1
        try:
            return _fresh(size)
        except (RuntimeError, OSError):  # out of memory: give up what is idle, and try once more
            self.release()
            return _fresh(size)

    def give(self, buffer: Tensor, kind: str = "") -> None:
        """Return a buffer. Kinds are separate, so that long-lived buffers do not take those of short-lived use."""
        size = buffer.numel()
        with self._lock:
            now = time.monotonic()
            if now - self._asked > _ASK_AGAIN:
                self._asked, self._limit = now, _free_memory() // _SHARE
                if self._held > self._limit:
                    self._drop()
            if self._held + size <= self._limit:
                self._free.setdefault((kind, size), []).append(buffer)
                self._held += size

    def release(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._drop()

    def forked(self) -> None:
        """In a child: another thread may have held the lock, and the parent's buffers are not needed."""
        self._lock = threading.Lock()
        self._drop()

    def statistics(self) -> dict[str, int]:
        """Bytes held idle, and how many buffers were made and used again."""
        with self._lock:
            return {"held_bytes": self._held, "limit_bytes": self._limit, "made": self._made, "reused": self._reused}

    def _drop(self) -> None:
        self._free.clear()
        self._held = 0


def rounded(size: int) -> int:
    """Size class of a buffer: rounded up to 1/8 of a power of two, so that similar sizes share buffers."""
    size = max(size, 1)
    grain = max(64, 1 << max(size.bit_length() - 4, 0))
    return -(-size // grain) * grain


def _fresh(size: int) -> Tensor:
    """Uninitialised memory; a large buffer has pages of its own, which return to the system when it is freed.

    An allocator would keep them, and idle memory would exceed a byte budget.
    """
    if size < _OWN_PAGES:
        return torch.empty(size, dtype=torch.uint8)
    # Private: a forked child would write into shared pages. The final operator makes the memory visible to modes that
    # count the bytes of PyTorch's tensors.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).detach()


def _free_memory() -> int:
    """Bytes that new allocations could get without swapping."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


pool = WorkspacePool()
"""The pool of this process."""
os.register_at_fork(after_in_child=pool.forked)


def release() -> None:
    """Give the idle workspaces of recurrent networks back to the system.

    Example:
        >>> weft.recurrent.release()
    """
    pool.release()
