"""Triton itself: whether it can run here, kernels from their text, and the functions that its interpreter lacks.

    device    TRITON_INTERPRET    kernels run
    CUDA      unset               compiled
    CPU       1                   in Triton's interpreter: one program after another, each operator by numpy
    CPU       unset               not at all

Triton is an optional package, and its import takes a second. So it is imported when the first plan asks for it. Triton
reads TRITON_INTERPRET while it is imported, so the variable must be set before.
"""

import importlib
import importlib.util
import linecache
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import torch

_numbers = count()

# Helpers of the kernels. Comparisons instead of tl.maximum: a NaN of either operand must reach the result.
_HELPERS = """
@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def maximum(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def minimum(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def remainder(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
"""


@cache
def _language() -> Any:
    """The modules of Triton that kernels use."""
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    interpreted = bool(cast(Any, triton).knobs.runtime.interpret)
    # NumPy is only needed where there is an interpreter, so its module is not imported with this one.
    own = "torchweft.recurrent.triton.interpreted_libdevice"
    libdevice = importlib.import_module(own if interpreted else "triton.language.extra.libdevice")
    return SimpleNamespace(triton=triton, tl=tl, libdevice=libdevice, interpreted=interpreted)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return importlib.util.find_spec("triton") is not None and _language().interpreted


def why_unavailable(device: torch.device) -> str | None:
    """The reason why kernels cannot run on tensors of this device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not is_interpreted():
        on_cuda = device.type == "cuda"
        return (
            None
            if on_cuda
            else f"Triton runs on CUDA, and on a CPU with TRITON_INTERPRET=1; the inputs are on {device}"
        )
    if not type(_language().tl.sum).__name__.startswith("Interpreted"):
        return "TRITON_INTERPRET was set after the import of triton; set it before"
    return None if device.type == "cpu" else f"TRITON_INTERPRET=1 is for tensors on a CPU; the inputs are on {device}"


def quiet() -> AbstractContextManager[object]:
    """Inside, the interpreter does not warn about overflow and NaN, which a GPU does not do either."""
    language = _language()
    return language.libdevice.errstate(all="ignore") if language.interpreted else nullcontext()


@cache
def _helpers() -> dict[str, Any]:
    language = _language()
    names = {"triton": language.triton, "tl": language.tl, "libdevice": language.libdevice}
    return _execute("helpers", _HELPERS, names)


@lru_cache(maxsize=1024)  # plans for other batch sizes have the same text, and need not compile it again
def load_kernel(name: str, text: str) -> Any:
    """The kernel of this name in a text. Triton compiles it at its first launch."""
    return _execute(name, text, dict(_helpers()))[name]


def _execute(name: str, text: str, names: dict[str, Any]) -> dict[str, Any]:
    # Triton reads a kernel's source by `inspect`, which looks into this cache. An entry without a time is never stale.
    path = f"<triton {name} {next(_numbers)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names["__name__"] = "torchweft.recurrent.triton.generated"
    exec(compile(text, path, "exec"), names)  # the text contains only names generated here
    return names
