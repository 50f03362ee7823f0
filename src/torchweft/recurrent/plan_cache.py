"""The plans of a network, by kind of sequence: which backend runs a call, and why.

A plan is made at the first sequence of its kind: shapes of one step, dtypes, which tensors require gradients, and
everything that the cell reads. It is verified against the eager loop and cached. If no plan is possible, the eager loop
runs, and one warning gives the reason.

    call -> unfit? ------------------------------------------------------> eager loop
              | no
            key -> cached? -- yes --> run it
                     | no
                   build by each candidate backend -> verify -> race? -> cache the choice

Planning at construction would be simpler, but shapes, dtypes and grad mode are not known then.
"""

import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from torchweft.core.errors import UsageError, WeftError
from torchweft.core.pytree import flatten, map_leaves, unflatten
from torchweft.core.timing import time_after
from torchweft.core.validation import Validator
from torchweft.recurrent import backend_registry, eager
from torchweft.recurrent.backend_registry import BackendName, serves_smaller_batches
from torchweft.recurrent.capture import CaptureError, MisfitError, capture
from torchweft.recurrent.cell import StepNetCell
from torchweft.recurrent.graph import StepGraph, draw_numbers, memory_order, same_but_rows
from torchweft.recurrent.guards import CellGuards, no_foreign_draws, without_observers
from torchweft.recurrent.masking import Conditions, MaskedStep, check_step_number, padding_values
from torchweft.recurrent.passes import is_step_constant
from torchweft.recurrent.plan_backends import MEMORY_MODES, Backend, Memory, choose_policy, size_of
from torchweft.recurrent.pytorch_internals import (
    dispatch_modes,
    forward_ad_level,
    functorch_interpreter,
    parametrizations_cached,
)
from torchweft.recurrent.sequence import SequenceInputs
from torchweft.recurrent.sequence_function import EagerReplay, append_rows, run_derived
from torchweft.recurrent.verify import PlanError, verify

VerifyMode = Literal["first", "never"]
# After this many consecutive plans that were used only once, every new kind runs by the eager loop.
MAX_UNUSED_PLANS = 32
MAX_PLANS = 64  # plans that a network keeps. The least recently used is dropped first.
RACE_STEPS = 32  # steps of a race. A shorter sequence is repeated.
COMPUTED = (
    "it reads a tensor that was computed from others, as by torch.func.functional_call, which is a new tensor at every "
    "call, so no plan could be reused; pass it as an input, a state, or one of references="
)
_Key = tuple[Hashable, Hashable]


def check_settings(check: Validator, memory: object, backend: object, verify: object) -> None:
    check.choice("backend", backend, get_args(BackendName))
    check.choice("verify", verify, get_args(VerifyMode))
    if memory not in MEMORY_MODES and not (type(memory) is int and memory > 0):
        check.add(f"memory is {memory!r}, wanted {', '.join(MEMORY_MODES)} or a number of bytes")


class NoPlanWarning(UserWarning):
    """A recurrent network does not run by the requested plan. The warning gives the replacement and the reason.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", weft.errors.NoPlanWarning)  # in your tests
        ...     weft.Recurrent(lambda x, h: (x, h if h.sum() > 0 else -h))(torch.ones(2, 1, 1), torch.ones(1, 1))
        Traceback (most recent call last):
        weft.errors.NoPlanWarning: ...
    """


@dataclass(frozen=True)
class PlanChoice:
    """The choice for one kind of sequence, with its reason. Without an engine the eager loop runs it."""

    kind: str
    engine: Backend | None
    backend: str
    why: str
    warning: str | None = None  # for the user, once
    family: Hashable = None  # equal for kinds that differ only in the number of rows
    impossible: bool = False  # whether the requested backend must not be replaced: an explicit "c" raises an error then
    held: tuple[object, ...] = ()  # objects whose addresses are part of the key. They live as long as it.

    def explain(self) -> str:
        head = f"{self.kind}: {self.backend}, because {self.why}"
        return head if self.engine is None else f"{head}\n\n{self.engine.explain()}"


class PlanCache:
    """The plans of one network, by kind of sequence."""

    def __init__(self, backend: BackendName = "auto", memory: Memory = "full", verify: VerifyMode = "first") -> None:
        self.settings = (backend, memory, verify)
        self._backend: BackendName = backend
        self._memory: Memory = memory
        self._verify = verify
        self._choices: OrderedDict[_Key, PlanChoice] = OrderedDict()
        self._dead_keys: deque[_Key] = deque()
        self._warned: set[str] = set()
        # Reentrant, because planning for filled-up rows plans for more rows first.
        self._lock = threading.RLock()
        self._unused = 0

    def run(self, job: eager.SequenceRun) -> eager.Unrolled:
        if torch.is_inference_mode_enabled():
            # A plan holds tensors. Created in inference mode, they could not be used outside of it.
            with torch.inference_mode(False), torch.no_grad():
                results, choice = self._run_by_plan(job)
        else:
            results, choice = self._run_by_plan(job)
        if choice.impossible:
            job.head(1).run()  # if the cell itself is faulty, its own error says more
            raise UsageError(
                f'backend="c" cannot run cell {job.cell.name}: {choice.why}; change the cell, or use backend="auto", '
                "which runs it by another plan, or by the eager loop"
            )
        results, warning = job.run() if results is None else results, choice.warning
        # Warn only after the run: if the cell is faulty, the error of the eager loop says more.
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            warnings.warn(warning, NoPlanWarning, stacklevel=2)
        return results

    def _run_by_plan(self, job: eager.SequenceRun) -> tuple[eager.Unrolled | None, PlanChoice]:
        call, choice = self._plan_for(job)
        return None if call is None or choice.engine is None else call.run(choice.engine, self._memory), choice

    def _plan_for(self, job: eager.SequenceRun) -> "tuple[PlannedCall | None, PlanChoice]":
        kind, why, warning, strict = "sequences of every kind", "it was asked for", None, False
        if self._backend != "eager":
            reason = unfit(job.inputs, job.initial)
            kind, why = f"calls where {reason}", "no plan can run those"
            if reason is None:
                call = PlannedCall(job)
                if not call.computed:
                    return call, self._find_choice(call)
                kind, why = "calls where the cell reads a computed tensor", COMPUTED
                warning = f"cell {job.cell.name} runs by the eager loop: {COMPUTED}"
                strict = self._backend == "c"
        choice = PlanChoice(kind, None, "eager", why, warning, strict)
        with self._lock:
            self._choices.setdefault((kind, None), choice)
        return None, choice

    def forecast(self, job: eager.SequenceRun, steps: int) -> dict[str, int]:
        """See `Recurrent.forecast`. Makes the plan if there is none yet."""
        call, choice = self._plan_for(job)
        if call is None or choice.engine is None:
            raise UsageError(
                f"no forecast for cell {job.cell.name}: {choice.kind} run by the eager loop, because {choice.why}"
            )
        size = size_of(choice.engine, steps, call.states)
        return {mode: size.peak(choose_policy(mode, size)) for mode in MEMORY_MODES}

    def choices(self) -> list[PlanChoice]:
        with self._lock:
            return list(self._choices.values())

    def _find_choice(self, call: "PlannedCall") -> PlanChoice:
        if call.guards.unready:
            return PlanChoice(call.kind, None, "eager", "a lazy module of the cell has yet to see its first input")
        key = (call.step_key(), call.cell_key)
        # Held while a plan is made, so that threads that share a network do not compile the same plan twice.
        with self._lock:
            while self._dead_keys:
                self._choices.pop(self._dead_keys.popleft(), None)
            choice = self._choices.get(key)
            if choice is None:
                return self._add_choice(call, key)
            self._unused = 0
            self._choices.move_to_end(key)
            return choice

    def _add_choice(self, call: "PlannedCall", key: _Key) -> PlanChoice:
        # New shapes of the same cell are not waste. A cell that reads something new at every call is.
        is_new = all(call.cell_key != cell_key for _, cell_key in self._choices)
        if is_new and self._unused >= MAX_UNUSED_PLANS:
            why = f"the last {MAX_UNUSED_PLANS} plans were used once each: the cell, or what it reads, is always new"
            return PlanChoice(call.kind, None, "eager", why, f"cell {call.cell.name} runs by the eager loop: {why}")
        self._unused += is_new
        # When a tensor of the cell is collected, another can get its address, so the plan must go. The callback runs in
        # any thread, at any time, even while this thread holds the lock. It only notes the key, because `append` of a
        # deque is atomic.
        dead_keys = self._dead_keys
        watchers = [weakref.ref(tensor, lambda _: dead_keys.append(key)) for tensor in call.guards.tensors]
        choice = self._choices[key] = replace(self._make_choice(call), held=(*call.guards.held, *watchers))
        if len(self._choices) > MAX_PLANS:
            self._choices.popitem(last=False)
        return choice

    def _fill_up(self, call: "PlannedCall") -> Backend | None:
        """A plan for a few more rows, if it computes the rows of this call with the same bits."""
        # Only from the third batch size on, so that a smaller last batch of an epoch is not filled up.
        family = call.step_key(1)
        same_cell = [choice for (_, cell_key), choice in self._choices.items() if cell_key == call.cell_key]
        if call.rows is not None and not isinstance(self._memory, int):
            engine = backend_registry.for_any_rows([e.engine for e in same_cell if e.family == family], call.rows)
            if engine is not None:
                return self._verified(call, engine)
        relatives = [e.engine for e in same_cell if e.family == family and serves_smaller_batches(e.engine)]
        if len(relatives) < 2 or call.rows is None or isinstance(self._memory, int):
            return None
        rows, first = 1 << (call.rows - 1).bit_length(), relatives[0]
        rows = rows * 3 // 4 if 4 * call.rows <= 3 * rows else rows  # 1, 2, 3, 4, 6, 8, 12, 16, 24 ...
        if rows == call.rows or not (first.apart and same_but_rows(first.captured, relatives[1].captured)):
            return None
        larger = self._find_choice(call.with_rows(rows)).engine
        if not (serves_smaller_batches(larger) and larger.apart and same_but_rows(first.captured, larger.captured)):
            return None
        return self._verified(call, larger.for_rows(call.rows))

    def _verified(self, call: "PlannedCall", engine: Backend) -> Backend | None:
        if self._verify == "first":
            try:
                with without_observers():
                    call.verify(engine, self._memory)
            except Exception:  # the call then gets a plan of its own
                return None
        return engine

    def _make_choice(self, call: "PlannedCall") -> PlanChoice:
        larger = self._fill_up(call)
        if larger is not None and not larger.missing:
            why = "a plan for other numbers of rows serves this one too"
            return PlanChoice(call.kind, larger, "triton", why)
        if larger is not None:
            why = f"its rows are filled up by {larger.missing}, to a number for which there is a plan"
            return PlanChoice(call.kind, larger, "c", why)
        return replace(self._make_plan(call), family=call.step_key(1))

    def _make_plan(self, call: "PlannedCall") -> PlanChoice:
        rejections, incorrect, planned = dict[str, list[str]](), False, None
        strict = self._backend == "c"
        for name in backend_registry.candidate_backends(self._backend, call.inputs.device):
            try:
                with without_observers():
                    engine = call.make(name)
                    if self._verify == "first":
                        call.verify(engine, self._memory)
            except MisfitError as error:
                return PlanChoice(call.kind, None, "eager", str(error), impossible=strict)
            except Exception as error:  # tracing runs the user's code, so it can raise anything
                text = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {str(error)[:500]}"
                rejections.setdefault(text, []).append(name)
                incorrect = incorrect or isinstance(error, PlanError)  # worth a warning even if another plan is right
            else:
                planned = name, engine
                break
        reasons = [f"not {' or '.join(names)}: {text}" for text, names in rejections.items()]
        why = "; ".join(reasons)
        without_plan = PlanChoice(call.kind, None, "eager", why, impossible=strict)
        choice = self._choose_faster(call, *planned, reasons) if planned else without_plan
        if incorrect or not planned:
            way = "the eager loop" if choice.engine is None else f"the {choice.backend} plan"
            return replace(choice, warning=f"cell {call.cell.name} runs by {way}: {why}")
        return choice

    def _choose_faster(self, call: "PlannedCall", name: str, engine: Backend, rejections: list[str]) -> PlanChoice:
        """The plan. For "auto", the faster of it and the eager loop, measured on the first steps of this sequence."""
        if self._backend != "auto":
            return PlanChoice(call.kind, engine, name, "it was asked for")
        if backend_registry.is_always_faster(name):
            return PlanChoice(call.kind, engine, name, "its loops could be compiled, and nothing here is faster")
        by_plan, by_loop = call.race(engine)
        times = f"{1e3 * by_plan:.2f} ms by the {name} plan and {1e3 * by_loop:.2f} ms by the eager loop"
        why = "; ".join([f"{RACE_STEPS} steps took {times}", *rejections])
        return (
            PlanChoice(call.kind, engine, name, why) if by_plan < by_loop else PlanChoice(call.kind, None, "eager", why)
        )


_CAPTURING = threading.RLock()  # held while a cell is traced, because tracing patches modules for the whole process


class PlannedCall:
    """One call of a network as plans see it: its key, making and verifying a plan for it, and running it."""

    def __init__(self, job: eager.SequenceRun) -> None:
        cell, inputs, rows, state = job.cell, job.inputs, job.rows, job.initial
        self.cell, self.inputs, self._job = cell, inputs, job
        self._on = Conditions(rows.valid is not None, rows.reset is not None, job.truncate is not None, cell.time_step)
        fresh = (state if job.fresh is None else job.fresh) if self._on.reset else ()
        references = cell.references if isinstance(cell, StepNetCell) and cell.references is not None else ()
        padding = [] if rows.valid is None else padding_values(inputs, rows.valid)
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
        return PlannedCall(replace(job, inputs=inputs, rows=job.rows.apply(over_time), initial=initial, fresh=fresh))

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
        with torch.random.fork_rng(devices), _CAPTURING, self.guards.restore_state(), no_foreign_draws(run_once):
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

    def run(self, engine: Backend, memory: Memory) -> eager.Unrolled:
        captured, device, inputs = engine.captured, self.inputs.device, self._input_leaves()
        restored = partial(self.guards.tensors_restored, self.cell.function)
        # Before the draws below, because the replay draws the same numbers again.
        replay = EagerReplay(captured, self._masked_step(), device, restored) if torch.is_grad_enabled() else None
        if captured.draws:
            inputs += draw_numbers(captured.draws, self.inputs.steps, device)
        leaves = run_derived(engine, inputs, self.states, memory, replay)
        outputs = iter(leaves.outputs)
        ys = [next(outputs) if is_tensor else None for is_tensor in captured.output_is_tensor]
        y = unflatten(captured.output_structure, ys)
        # A state of the graph is (the cell's, `fresh`, references, padding). Only the first is the user's.
        last = unflatten(captured.state_structure, leaves.last)[0]
        states = unflatten(captured.state_structure, leaves.states)[0] if leaves.states else None
        return y, last, states

    def race(self, engine: Backend) -> tuple[float, float]:
        """Seconds that `RACE_STEPS` of this sequence take by the engine, and by the eager loop."""
        steps = torch.arange(RACE_STEPS, device=self.inputs.device) % self.inputs.steps
        inputs = replace(self.inputs, leaves=[leaf.detach()[steps] for leaf in self.inputs.leaves], steps=RACE_STEPS)
        rows = self._job.rows.apply(lambda table: table[steps])
        # Detached, because a backward through the caller's graph would free it before the caller's own backward.
        state, fresh, *_ = unflatten(self._structure, [leaf.detach() for leaf in self.states])
        job = replace(self._job, inputs=inputs, rows=rows, initial=state, fresh=fresh if self._on.reset else None)
        ways = partial(PlannedCall(job).run, engine, "full"), job.run
        with without_observers(), torch.random.fork_rng(self._cuda_devices()), self.guards.restore_state():
            # The best of two: the first run of each way also warms up allocators.
            by_plan, by_loop = (
                min(time_with_backward(way, self.guards.parameters, self.inputs.device) for _ in range(2))
                for way in ways
            )
        return by_plan, by_loop

    def _cuda_devices(self) -> list[torch.device]:
        return [self.inputs.device] if self.inputs.device.type == "cuda" else []


def unfit(inputs: SequenceInputs, state: Any) -> str | None:
    """The reason why no plan can run this call, or None."""
    if not inputs.steps:
        return "there are no steps"
    if cast(Any, _CAPTURING)._is_owned():
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
    if cast(Any, torch.jit).is_tracing():
        return "it is being traced by torch.jit"
    if forward_ad_level() >= 0:
        return "forward-mode gradients are on"
    if parametrizations_cached():  # the cache would keep weights that a trace had computed
        return "parametrized weights are cached"
    return None


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
