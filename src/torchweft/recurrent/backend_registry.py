"""The backends by name, and the order in which ``backend="auto"`` tries them.

    name        module                 devices    limits
    c           cpp/                   CPU        a C++ compiler, and operators that it can lower
    triton      triton/                CUDA       operators that it can lower; elsewhere only in Triton's interpreter
    python      python_backend.py      all        none, but a loop of small operators can lose against the eager loop
                recorded_backend.py    CUDA       the same, recorded as a CUDA graph

`plan_cache.py` decides when a plan is made and for which calls it holds. A new backend is added here, not there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch

from torchweft.recurrent.cpp.cpp_backend import CppBackend
from torchweft.recurrent.cpp.ir import Unsupported
from torchweft.recurrent.cpp.lowering import decomposition_table
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.plan_backends import Backend
from torchweft.recurrent.python_backend import PythonBackend
from torchweft.recurrent.recorded_backend import RecordedBackend, runs_on_cuda
from torchweft.recurrent.triton import toolchain
from torchweft.recurrent.triton.triton_backend import TritonBackend

BackendName = Literal["auto", "c", "triton", "python", "eager"]
_Builder = Callable[[StepGraph], Backend]


def _build_python(captured: StepGraph) -> Backend:
    return RecordedBackend(captured) if runs_on_cuda(captured) else PythonBackend(captured)


_BUILDERS: dict[str, _Builder] = {"c": CppBackend, "triton": TritonBackend, "python": _build_python}


def candidate_backends(name: BackendName, device: torch.device) -> tuple[str, ...]:
    """The backends to try, the fastest first."""
    if device.type == "cuda" and name in ("auto", "triton"):
        return "triton", "python"  # recorded steps serve the cells that the kernels cannot take
    return ("c", "python") if name == "auto" else (name,)


def is_always_faster(name: str) -> bool:
    """Whether a plan by this backend is used without a race against the eager loop."""
    return name == "c"


def composed_operators(name: str, device: torch.device) -> Mapping[Any, Any] | None:
    """Decompositions of operators that the backend does not know, for `capture`; None if it knows all."""
    # Raises Unsupported if the backend cannot run on this device.
    if name == "triton":
        if why := toolchain.why_unavailable(device):
            raise Unsupported(why)
        return decomposition_table()
    if name != "c":
        return None
    if device.type != "cpu":
        raise Unsupported(f"loops in C run on the CPU, and the inputs are on {device}")
    return decomposition_table()


def build_backend(name: str, captured: StepGraph) -> Backend:
    """A runnable plan. Raises Unsupported and CompileError."""
    return _BUILDERS[name](captured)


def serves_smaller_batches(backend: Backend | None) -> TypeGuard[CppBackend]:
    """Whether the plan can also run smaller batches that are filled up with rows, by `for_rows`."""
    return isinstance(backend, CppBackend)


def for_any_rows(backends: Sequence[Backend | None], rows: int) -> Backend | None:
    """A plan for so many rows without another capture, from two plans that differ in their number only, or None."""
    plans = [backend for backend in backends if isinstance(backend, TritonBackend)]
    return plans[0].for_rows(rows) if len(plans) > 1 and plans[0].serves_rows_like(plans[1]) else None
