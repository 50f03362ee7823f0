"""A captured step as a compiled library: the text, the size of its workspace, and calls with memory of the caller's."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.recurrent.captured import Captured
from weft.recurrent.native import compiler
from weft.recurrent.native.build import Build, build
from weft.recurrent.native.emit import Emitter
from weft.recurrent.native.function import Function
from weft.recurrent.native.outline import outline
from weft.recurrent.native.values import Product, Total

_HERE = Path(__file__).parent
_TEAM = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_KERNELS = (
    "pack_f",
    "pack_d",
    "product_f",
    "product_d",
    "some_f",
    "some_d",
    "gather_f",
    "gather_d",
    "columns_f",
    "columns_d",
    "meet",
)


@cache
def kernels() -> ctypes.CDLL:
    """The library of matrix products, compiled once for this machine. Raises CompileError."""
    text = f"#define WEFT_BYTES {compiler.vector_bytes()}\n{_file('kernels.cpp')}"
    library = compiler.load(text, exact=False)
    library.weft_team((ctypes.c_void_p * len(_TEAM))(*_team()))
    return library


def _team() -> list[int | None]:
    """OpenMP as torch uses it: how to run a function on all threads, and to ask which one this is. None: there is none.

    GNU's, LLVM's and Intel's libraries all have these names.
    """
    found = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    try:
        library = ctypes.CDLL(str(found))  # a name is looked for in what it links to as well
        return [_address(library, name) for name in _TEAM]
    except (OSError, AttributeError):
        return [None] * len(_TEAM)


def panel_width() -> dict[torch.dtype, int]:
    """How many columns a packed panel has: two vectors of them."""
    return {dtype: 2 * compiler.vector_bytes() // dtype.itemsize for dtype in (torch.float32, torch.float64)}


class Routine:
    """One compiled function. Raises CompileError when it is made."""

    def __init__(self, emitter: Emitter, library: ctypes.CDLL) -> None:
        self.function = emitter.function
        self.emitter = emitter
        self.work = _work(self.function)
        """Roughly how many operations a step takes."""
        self.arguments = [_named(each.name) for each in self.function.arguments]
        """Where the tensor of each lies: in which table, by the letters of its name, and there at which place."""
        self._entry = ctypes.c_void_p(_address(library, self.function.name))
        self._run = kernels().weft_run

    def call(self, steps: int, threads: int, arguments: Sequence[int], workspace: Tensor) -> None:
        """Run over `steps` steps; `arguments` are addresses, in the order of the function's arguments (0: none)."""
        values = (ctypes.c_void_p * (len(arguments) + 1))(*arguments, workspace.data_ptr())
        self._run(self._entry, ctypes.c_long(threads), ctypes.c_long(steps), values)


class Program:
    """The three routines of a captured step. Raises Unsupported and CompileError."""

    def __init__(self, captured: Captured) -> None:
        self.build: Build = build(captured)
        width = panel_width()
        emitters = [Emitter(each, width) for each in self.build.functions]
        self.text = "\n".join([_file("loops.h"), *(each.text for each in emitters), ""])
        with ThreadPoolExecutor(1, "weft-compile") as beside:  # the first time, two compilers run at once
            products = beside.submit(kernels)
            library = compiler.load(self.text, exact=True)
            table = [_address(products.result(), f"weft_{name}") for name in _KERNELS]
        library.weft_bind((ctypes.c_void_p * len(table))(*table))
        self.forward, self.again, self.backward = (Routine(each, library) for each in emitters)

    def explain(self, steps: int) -> str:
        """For a person: what each function does when, and what it keeps, with chunks of so many steps."""
        saved = [each.meta["val"] for each in self.build.saved]
        kept = sum(each.numel() * each.element_size() for each in saved)
        head = f"chunks of {steps} steps; kept for backward: {len(saved)} values, {kept} bytes a step"
        parts = [outline(each.function, each.emitter.order) for each in (self.forward, self.again, self.backward)]
        return "\n\n".join([head, *parts, *self._outside()])

    def _outside(self) -> list[str]:
        """What PyTorch runs, since C does not know it."""
        halves = self.build.halves
        sums = [f"sum of {node} over all steps" for node in halves.summed]
        runs = {
            "before forward": halves.before,
            "after forward": halves.after,
            "before backward": halves.before_back,
            "after backward": [*halves.after_back, *sums],
        }
        lines = [f"  {when}: {', '.join(map(str, nodes))}" for when, nodes in runs.items() if nodes]
        return ["\n".join(["by PyTorch, all steps of a chunk at once", *lines])] if lines else []


@cache
def _file(name: str) -> str:
    return (_HERE / name).read_text()


def _named(name: str) -> tuple[str, int]:
    kind = name.rstrip("0123456789")
    return kind, int(name[len(kind) :])


def _address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _work(function: Function) -> float:
    """Operations of a step, to tell whether threads are worth it."""
    total = 0.0
    for value in function.values:
        made = value.made.of if isinstance(value.made, Total) else value.made
        total += 2.0 * value.size * made.left.shape[-1] if isinstance(made, Product) else 4.0 * value.size
    return total
