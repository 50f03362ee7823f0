"""What surrounds a call in PyTorch without being an argument of it.

Autocast, the default device and context variables belong to a *thread*. A worker thread starts without them, so a stage
that runs there would silently compute something else. They are captured once where the user calls, entered by every
worker, and entered again when a stage is recomputed in backward, which usually runs outside of the user's
``with torch.autocast(...)``. Flags that belong to the *process* (deterministic algorithms, float32 matmul precision,
choice of kernels) need no carrying into threads, but a recomputation must see those of its forward.
"""

import contextvars
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.utils._device import DeviceContext

_c = cast(Any, torch)._C

Phase = Literal["", "checkpointing", "recomputing"]


class _PhaseOfThread(threading.local):
    phase: Phase = ""


_current = _PhaseOfThread()


def is_checkpointing() -> bool:
    """True inside a forward whose graph is not kept, because it will be recomputed in backward.

    Example:
        >>> weft.is_checkpointing()  # outside of such a forward
        False
    """
    return _current.phase == "checkpointing"


def is_recomputing() -> bool:
    """True inside the second forward of a checkpointed stage, which backward starts.

    Example:
        >>> weft.is_recomputing()  # outside of a recomputation
        False
    """
    return _current.phase == "recomputing"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one. Triton kernels run there, even if their tensors are elsewhere."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@contextmanager
def phase(name: Phase) -> Generator[None]:
    """Tell `is_checkpointing` and `is_recomputing` where this thread is; also restored on error."""
    before, _current.phase = _current.phase, name
    try:
        yield
    finally:
        _current.phase = before


def has_local_modes() -> bool:
    """Whether modes or hooks of this thread alone see what runs in it, and may hold state that no other thread may
    touch: a dispatch mode such as FlopCounterMode, a function mode other than that of a default device, hooks on what
    autograd saves such as those of save_on_cpu."""
    if _c._len_torch_dispatch_stack() or _c._autograd._top_saved_tensors_default_hooks(True):
        return True
    count = _c._len_torch_function_stack()
    return any(type(_c._get_function_stack_at(i)) is not DeviceContext for i in range(count))


_PRECISIONS = [("generic", "all"), *product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]
"""Backend and operator of each ``torch.backends.*.fp32_precision``, after the setting that it inherits from."""


def float32_precision(backend: str, operator: str) -> str:
    """The precision of products in float32: "tf32", "bf16", or without rounding "ieee" or "none"."""
    return _c._get_fp32_precision_getter(backend, operator)


_CUDNN = ("enabled", "benchmark", "deterministic")
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_SWITCHES: list[tuple[Any, Any]] = [
    *((getattr(_c, f"_get_cudnn_{name}"), getattr(_c, f"_set_cudnn_{name}")) for name in _CUDNN),
    *((getattr(_c, f"_get_{name}_sdp_enabled"), getattr(_c, f"_set_sdp_use_{name}")) for name in _ATTENTION),
    (_c._get_sdp_priority_order, _c._set_sdp_priority_order),
]
"""Getter and setter of all that ``torch.backends.cudnn.flags`` and ``torch.nn.attention.sdpa_kernel`` change. Another
kernel rounds otherwise, and draws another dropout mask from the same seed."""


class ProcessFlags(NamedTuple):
    """The process-wide switches that change what an operator computes. Of PyTorch's two interfaces for precision,
    operators read the newer one. The `older` one raises where the newer one was set to something else: None then."""

    deterministic: bool
    warn_only: bool
    older: tuple[str, bool] | None
    precisions: tuple[str, ...]
    switches: list[Any]

    @staticmethod
    def capture() -> "ProcessFlags":
        try:
            older = torch.get_float32_matmul_precision(), _c._get_cudnn_allow_tf32()
        except RuntimeError:
            older = None
        return ProcessFlags(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            older,
            tuple([float32_precision(*key) for key in _PRECISIONS]),
            [get() for get, _ in _SWITCHES],
        )

    def establish(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        if self.older is not None:
            torch.set_float32_matmul_precision(self.older[0])
            _c._set_cudnn_allow_tf32(self.older[1])
        # Last, since the calls above change these too. A setting that reads right already may be inherited. If it was
        # written, a later change of the setting that it inherits from would have no effect on it.
        for key, precision in zip(_PRECISIONS, self.precisions, strict=True):
            if float32_precision(*key) != precision:
                _c._set_fp32_precision_setter(*key, precision)
        for (_, put), value in zip(_SWITCHES, self.switches, strict=True):
            put(value)


@dataclass(frozen=True)
class ExecutionContext:
    """The surroundings of one call, captured in the caller's thread. Grad mode is left to segments, which set it."""

    inference: bool
    device_types: tuple[str, ...]
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_device: torch.device
    flags: ProcessFlags
    context: contextvars.Context

    @staticmethod
    def capture(device_types: Iterable[str]) -> "ExecutionContext":
        """The surroundings of this thread, as far as they concern devices of the given types."""
        kinds = tuple(dict.fromkeys(("cpu", *device_types)))
        return ExecutionContext(
            torch.is_inference_mode_enabled(),
            kinds,
            tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)),
            torch.get_default_device(),
            ProcessFlags.capture(),
            contextvars.copy_context(),
        )

    @contextmanager
    def here(self) -> Generator[None]:
        """Enter the surroundings in this thread, but with autocast off: see `casting`. Backward may be called inside of
        an autocast that forward was not."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind in self.device_types:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            yield

    @contextmanager
    def casting(self) -> Generator[None]:
        """Autocast as it was where the user called: for forwards alone, since backward has the dtypes that forward
        chose. Without its cache, which would hand weights that were cast without a graph (in a checkpointed forward) to
        a forward that needs their gradient."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    def run(self, function: Callable[[], None]) -> None:
        """Call `function` inside the surroundings, with a copy of the caller's context variables."""

        def inside() -> None:
            with self.here():
                function()

        self.context.copy().run(inside)

    @contextmanager
    def process_flags(self) -> Generator[None]:
        """Re-establish the process-wide flags of the capture, where they have changed since."""
        now = ProcessFlags.capture()
        if now == self.flags:
            yield
            return
        self.flags.establish()
        try:
            yield
        finally:
            now.establish()
