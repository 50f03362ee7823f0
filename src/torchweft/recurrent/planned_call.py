"""One call of a network as its plans see it: its key, and making, verifying and running a plan for it.

Everything about a call that a plan depends on is here; `plan_cache.py` decides which plan runs it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchweft.core.pytree import flatten, map_leaves, unflatten
from torchweft.core.timing import time_after
from torchweft.recurrent import backend_registry, eager
from torchweft.recurrent.capture import CaptureError, capture
from torchweft.recurrent.cell import StepNetCell
from torchweft.recurrent.graph import StepGraph, memory_order
from torchweft.recurrent.guards import CellGuards, no_foreign_draws, tensors_restored, without_observers
from torchweft.recurrent.masking import Conditions, MaskedStep, check_step_number
from torchweft.recurrent.passes import is_step_constant
from torchweft.recurrent.plan_backends import Backend, Memory
from torchweft.recurrent.prepared_call import CAPTURING, is_capturing
from torchweft.recurrent.pytorch_internals import (
    dispatch_modes,
    forward_ad_level,
    functorch_interpreter,
    is_jit_tracing,
    parametrizations_cached,
)
from torchweft.recurrent.sequence import SequenceInputs
from torchweft.recurrent.sequence_function import append_rows, run_plan
from torchweft.recurrent.verify import verify

RACE_STEPS = 32  # steps of a race. A shorter sequence runs several times.


class PlannedCall:
    """One call of a network as plans see it: its key, making and verifying a plan for it, and running it."""

    def __init__(self, job: eager.SequenceRun) -> None:
        cell, inputs, rows, state = job.cell, job.inputs, job.rows, job.initial
        self.cell, self.inputs, self._job = cell, inputs, job
        self._on = Conditions(rows.valid is not None, rows.reset is not None, job.truncate is not None, cell.time_step)
        fresh = (state if job.fresh is None else job.fresh) if self._on.reset else ()
        references = cell.references if isinstance(cell, StepNetCell) and cell.references is not None else ()
        padding = [] if job.padding is None else [*job.padding]
        # The initial states of the captured step, flat.
        self.states, self._structure = flatten((state, fresh, references, padding))
        self.guards = CellGuards(cell.function)
        self.cell_key = tuple(self.guards.key)  # what the cell reads, as of now. A plan holds for exactly that.
        # Whether the cell reads a tensor computed from others, which is a new one at every call.
        self.computed = not all([tensor.is_leaf for tensor in self.guards.tensors])
        grad = torch.is_grad_enabled()
        # Flags the inputs that require a gradient.
        self._wants = tuple([grad and leaf.requires_grad for leaf in inputs.leaves])

    @property
    def kind(self) -> str:
        shapes = ", ".join(
            f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape[1:])}" for leaf in self.inputs.leaves
        )
        flags = [name for name, on in self._on._asdict().items() if on]
        return f"steps of {shapes}" + (f" with {', '.join(flags)}" if flags else "")

    @property
    def rows(self) -> int | None:
        """N, if all states have rows, and the cell reads nothing else that could have some."""
        by_rows = all(isinstance(state, Tensor) and state.shape[:1] == (self.inputs.rows,) for state in self.states)
        return self.inputs.rows if by_rows and getattr(self.cell, "references", None) is None else None

    def with_rows(self, rows: int) -> "PlannedCall":
        job, more = self._job, rows - (self.rows or 0)
        over_time, first = (partial(append_rows, axis=axis, more=more) for axis in (1, 0))
        inputs = replace(self.inputs, leaves=[*map(over_time, self.inputs.leaves)], rows=rows)
        initial, fresh = (None if state is None else map_leaves(first, state) for state in (job.initial, job.fresh))
        padding = None if job.padding is None else [*map(first, job.padding)]
        changes = {"inputs": inputs, "initial": initial, "fresh": fresh, "padding": padding}
        return PlannedCall(replace(job, rows=job.rows.apply(over_time), **changes))

    def step_key(self, begin: int = 0) -> Hashable:
        """Everything that a plan depends on besides the cell: tensors and structure of one step, and PyTorch's modes.

        Shapes count from axis `begin` on.
        """
        casting = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        return (
            self.cell.form,
            self._on,
            self.inputs.structure,
            self._structure,
            tuple([_meta_key(leaf[0], begin) for leaf in self.inputs.leaves]),
            tuple([_meta_key(leaf, begin) for leaf in self.states]),
            self._wants,
            *casting,
            torch.is_grad_enabled(),  # a cell can ask for it, and a plan without backward is smaller
            torch.get_default_dtype(),
        )

    def _input_leaves(self) -> list[Tensor]:
        if not any(self._on):
            return [*self.inputs.leaves]
        start, truncate, rows = self._job.start, self._job.truncate, self._job.rows
        numbers = torch.arange(start, start + self.inputs.steps, device=self.inputs.device)
        cut = None if truncate is None else (numbers % truncate == 0) & (numbers > 0)
        added = (rows.valid, rows.reset, cut, numbers if self._on.time else None)
        return [*self.inputs.leaves, *(leaf for leaf in added if leaf is not None)]

    def _masked_step(self) -> MaskedStep:
        return MaskedStep(self.cell, self._on)

    def make(self, name: str) -> Backend:
        """A new plan by this backend. Raises CaptureError, Unsupported and CompileError."""
        if not all(isinstance(state, Tensor) for state in self.states):
            raise CaptureError("not all references are tensors; let the step net close over the others")
        if self.guards.rejection is not None:
            raise CaptureError(self.guards.rejection)
        other = next((leaf.device for leaf in self.inputs.leaves if leaf.device.type != "cpu"), self.inputs.device)
        captured = self._capture(backend_registry.composed_operators(name, other))
        known = {id(tensor) for tensor in self.guards.tensors}
        references = [(node, captured.reference(node)) for node in captured.signature.references]
        # A constant that the step itself creates from plain numbers is not a tensor of the cell.
        unregistered = sum(
            id(tensor) not in known and (tensor.requires_grad or not (is_step_constant(node) or not tensor.dim()))
            for node, tensor in references
        )
        if unregistered:
            raise CaptureError(
                f"it reads {unregistered} tensors that are neither parameters nor buffers of it; register them"
            )
        return backend_registry.build_backend(name, captured.hold_weakly(self.guards.tensors))

    def _capture(self, operators: Mapping[Any, Any] | None) -> StepGraph:
        # Capture the step. Side effects of the cell are undone, and the caller's generators do not advance.
        leaves = self._input_leaves()
        count = len(self.inputs.leaves)
        first = [leaf[0] for leaf in leaves]
        nest = unflatten(self.inputs.structure, first[:count]), first[count:]
        wants = [*self._wants, *[False] * (len(leaves) - count)]
        step, state = self._masked_step(), unflatten(self._structure, self.states)

        def run_once() -> Any:
            with torch.no_grad():
                return step(*(map_leaves(torch.clone, value) for value in (nest, state)))

        devices = self._cuda_devices()
        with torch.random.fork_rng(devices), CAPTURING, self.guards.restore_state(), no_foreign_draws(run_once):
            parameters, tensors = self.guards.parameters, self.guards.tensors
            captured = capture(step, nest, state, parameters, wanted_inputs=wants, composed=operators, watched=tensors)
            if self._on.time:
                check_step_number(captured.signature.inputs[len(leaves) - 1], [*first, *self.states])
            # Compared before `restore_state` undoes the cell's writes.
            changed = CellGuards(self.cell.function).key != self.guards.key
            if captured.draws and not changed:
                after = flatten(run_once()[1])[0]
                if any(memory_order(old) != memory_order(new) for old, new in zip(self.states, after, strict=True)):
                    raise CaptureError(
                        "the cell draws, possibly in the memory order of a state, and the first state has another "
                        "memory layout than later ones, as a transposed tensor has; make both contiguous, as by "
                        ".contiguous()"
                    )
        if changed:
            raise CaptureError(
                "the cell changes what it reads in a step (an attribute of its own, a variable that it closes over or "
                "a global one); carry what changes as a state"
            )
        return captured

    def verify(self, engine: Backend, memory: Memory) -> None:
        with self.guards.restore_state():
            verify(engine, self._masked_step(), self._input_leaves(), self.states, memory, self.guards.as_float64)

    def run(self, engine: Backend, memory: Memory, reserved: int = 0) -> eager.Unrolled:
        captured = engine.captured
        restored = partial(tensors_restored, self.cell.function, self.guards.key, self.guards.tensors)
        step, inputs = self._masked_step(), self._input_leaves()
        leaves = run_plan(engine, step, inputs, self.states, restored, self.inputs.device, memory, reserved)
        outputs = iter(leaves.outputs)
        ys = [next(outputs) if is_tensor else None for is_tensor in captured.output_is_tensor]
        y = unflatten(captured.output_structure, ys)
        # A state of the graph is (the cell's, `fresh`, references, padding). Only the first is the user's.
        last = unflatten(captured.state_structure, leaves.last)[0]
        states = unflatten(captured.state_structure, leaves.states)[0] if leaves.states else None
        return y, last, states

    def race(self, engine: Backend) -> tuple[float, float]:
        """Seconds that about `RACE_STEPS` of this sequence take by the engine, and by the eager loop."""
        # A shorter sequence runs several times, always from its own first state. The cell can accept no other states:
        # it can count its steps, and read a table by that number.
        runs, steps = race_length(self.inputs.steps)
        head = self._job.head(steps)
        inputs = replace(head.inputs, leaves=[leaf.detach() for leaf in head.inputs.leaves])
        # Detached, because a backward through the caller's graph would free it before the caller's own backward.
        state, fresh, *_ = unflatten(self._structure, [leaf.detach() for leaf in self.states])
        job = replace(head, inputs=inputs, initial=state, fresh=fresh if self._on.reset else None)
        ways = partial(PlannedCall(job).run, engine, "full"), job.run
        with without_observers(), torch.random.fork_rng(self._cuda_devices()), self.guards.restore_state():
            # The best of two: the first run of each way also warms up allocators.
            by_plan, by_loop = (
                min(
                    sum(time_with_backward(way, self.guards.parameters, self.inputs.device) for _ in range(runs))
                    for _ in range(2)
                )
                for way in ways
            )
        return by_plan, by_loop

    def _cuda_devices(self) -> list[torch.device]:
        return [self.inputs.device] if self.inputs.device.type == "cuda" else []


def unfit(inputs: SequenceInputs, state: Any) -> str | None:
    """The reason why no plan can run this call, or None."""
    if not inputs.steps:
        return "there are no steps"
    if is_capturing():
        return "a cell contains a network, and the plan of the outer one is being made"
    leaves = [*inputs.leaves, *flatten(state)[0]]
    if not all([isinstance(leaf, Tensor) for leaf in inputs.leaves]):
        return "an input is not a tensor"
    if any([type(leaf) not in (Tensor, nn.Parameter) for leaf in leaves]):
        return "a tensor is of a subclass"
    if not all([leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]):
        return "a tensor is empty"
    # Tracers and counters of operators would miss a loop in C. A mode that can do without its operators, such as a
    # counter of bytes, declares so.
    if not all([getattr(mode, "lets_plans_run", False) for mode in dispatch_modes()]):
        return "a mode that watches operators is on, as a tracer or FlopCounterMode is"
    if functorch_interpreter() is not None:
        return "it is being transformed by torch.func"
    if is_jit_tracing():
        return "it is being traced by torch.jit"
    if forward_ad_level() >= 0:
        return "forward-mode gradients are on"
    if parametrizations_cached():  # the cache would keep weights that a trace had computed
        return "parametrized weights are cached"
    return None


def race_length(steps: int) -> tuple[int, int]:
    """The runs of a race over a sequence of so many steps, and the steps of each run."""
    steps = min(steps, RACE_STEPS)
    return -(-RACE_STEPS // steps), steps


def _meta_key(value: Any, begin: int) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(type(cast(object, value)))
    plain = value.layout is torch.strided and value.is_contiguous()
    return value.shape[begin:], value.dtype, value.device, None if plain else memory_order(value)


def time_with_backward(run: Callable[[], eager.Unrolled], parameters: Sequence[Tensor], device: torch.device) -> float:
    """The seconds of a run with its backward, on this device and those of the parameters."""
    devices = {device, *(parameter.device for parameter in parameters)}
    begin = time_after(devices)
    leaves = flatten(run()[:2])[0]
    ends = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if ends and parameters:
        torch.autograd.grad(ends, parameters, [torch.ones_like(end) for end in ends], allow_unused=True)
    return time_after(devices) - begin
