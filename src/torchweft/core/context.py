"""State of PyTorch that surrounds a call without being an argument of it.

Autocast, the default device and context variables belong to a *thread*. A worker thread starts without them, so a stage
that runs there would silently compute something else. They are captured once in the caller's thread and entered by
every worker. They are entered again when backward recomputes a stage, because backward usually runs outside the user's
``with torch.autocast(...)``. Flags that belong to the *process* (deterministic algorithms, float32 matmul precision,
choice of kernels) apply to all threads anyway, but a recomputation must see those of its forward.
"""

import contextvars
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from torchweft.core import torch_internals as internals

Phase = Literal["", "checkpointing", "recomputing"]
Result = TypeVar("Result")


class _PhaseOfThread(threading.local):
    phase: Phase = ""


_current = _PhaseOfThread()


def is_checkpointing() -> bool:
    """True inside a forward that keeps no graph, because it will be recomputed in backward.

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
def set_phase(name: Phase) -> Generator[None]:
    """Set the phase of this thread for `is_checkpointing` and `is_recomputing`."""
    before, _current.phase = _current.phase, name
    try:
        yield
    finally:
        _current.phase = before


def call_in_phase(name: Phase, function: Callable[..., Result], *args: Any, tracked: bool) -> Result:
    """Call a function in this phase of the thread, and with grad mode as `tracked` says."""
    # As `set_phase` and `torch.set_grad_enabled`, without the objects of two context managers: this runs per
    # micro-batch and stage.
    before, _current.phase = _current.phase, name
    changes = torch.is_grad_enabled() is not tracked
    if changes:
        internals.set_grad_mode(tracked)
    try:
        return function(*args)
    finally:
        if changes:
            internals.set_grad_mode(not tracked)
        _current.phase = before


def has_local_modes() -> bool:
    """Whether modes or hooks of this thread observe the operators that run in it."""
    # Examples: a dispatch mode such as FlopCounterMode, or hooks on saved tensors such as those of save_on_cpu. Their
    # state belongs to this thread, so a worker must not enter them.
    if internals.dispatch_mode_count() or internals.saved_tensor_hooks(True):
        return True
    # A default device is a function mode too, but a harmless one: `ExecutionContext` carries it to the workers.
    modes = map(internals.function_mode_at, range(internals.function_mode_count()))
    return any(type(mode) is not internals.DeviceContext for mode in modes)


# The precision of float32 products of a backend and operator: "tf32", "bf16", or without rounding "ieee" or "none".
float32_precision = internals.get_precision


class ProcessFlags(NamedTuple):
    """The process-wide flags that change the result of an operator."""

    # PyTorch has two interfaces for precision, and operators read the newer one. The `older` one raises if the newer
    # one was set to a different value, and is then None.

    deterministic: bool
    warn_only: bool
    older: tuple[str, bool] | None
    precisions: tuple[str, ...]
    switches: list[Any]

    @staticmethod
    def capture() -> "ProcessFlags":
        try:
            older = torch.get_float32_matmul_precision(), internals.get_cudnn_tf32()
        except RuntimeError:
            older = None
        return ProcessFlags(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            older,
            tuple([internals.get_precision(*key) for key in internals.PRECISIONS]),
            [get() for get, _ in internals.KERNEL_SWITCHES],
        )

    def establish(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        if self.older is not None:
            torch.set_float32_matmul_precision(self.older[0])
            internals.set_cudnn_tf32(self.older[1])
        # After the calls above, which change these too. A setting that already has the right value is left alone: it
        # may be inherited, and once written it would ignore later changes of the setting that it inherits from.
        for key, precision in zip(internals.PRECISIONS, self.precisions, strict=True):
            if internals.get_precision(*key) != precision:
                internals.set_precision(*key, precision)
        for (_, put), value in zip(internals.KERNEL_SWITCHES, self.switches, strict=True):
            put(value)


@dataclass(frozen=True)
class ExecutionContext:
    """The surroundings of one call, captured in the caller's thread. Grad mode is not included: segments set it."""

    inference: bool
    device_types: tuple[str, ...]
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_device: torch.device
    flags: ProcessFlags
    context: contextvars.Context

    @staticmethod
    def capture(device_types: Iterable[str]) -> "ExecutionContext":
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
        """Enter the surroundings in this thread, with autocast off; a forward then enters `casting`."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            # Off also if the thread has it on: backward can be called inside an autocast that forward was not in.
            for kind in self.device_types:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            yield

    @contextmanager
    def casting(self) -> Generator[None]:
        """Enter the autocast of the caller. Only forwards need it, because backward uses the dtypes of its forward."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast:
                # Without the cache of cast weights. A checkpointed forward casts them without a graph, and the cache
                # would hand those to a forward that needs the gradient.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    def run(self, function: Callable[[], None]) -> None:
        """Call `function` inside the surroundings, with a copy of the caller's context variables."""

        def inside() -> None:
            with self.here():
                function()

        # A copy, because a context can be entered by only one thread at a time.
        self.context.copy().run(inside)

    @contextmanager
    def process_flags(self) -> Generator[None]:
        """Re-establish the process-wide flags of the capture, if they have changed since."""
        now = ProcessFlags.capture()
        if now == self.flags:
            yield
            return
        self.flags.establish()
        try:
            yield
        finally:
            now.establish()
