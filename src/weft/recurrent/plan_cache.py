"""The plans of a network, by kind of sequence: which backend runs a call, and why.

A plan is made at the first sequence of its kind (shapes of one step, dtypes, which tensors want gradients, what the
cell reads), verified against the eager loop, and cached. Where there can be none, the eager loop runs, and a warning
says why, once.
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
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from weft.core.errors import UsageError, WeftError
from weft.core.pytree import flatten, map_leaves, unflatten
from weft.core.timing import time_after
from weft.core.validation import Validator
from weft.recurrent import eager
from weft.recurrent.capture import CaptureError, MisfitError, capture
from weft.recurrent.cell import StepNetCell
from weft.recurrent.cpp.cpp_backend import CppBackend
from weft.recurrent.cpp.ir import Unsupported
from weft.recurrent.cpp.lowering import decomposition_table
from weft.recurrent.graph import StepGraph, drawn, memory_order, same_but_rows
from weft.recurrent.guards import CellGuards, no_foreign_draws, unobserved
from weft.recurrent.inductor_backend import InductorBackend
from weft.recurrent.masking import Conditions, MaskedStep, RowMasks, check_number, padding_values
from weft.recurrent.passes import made_in_the_step
from weft.recurrent.plan_backends import NAMES as MEMORY
from weft.recurrent.plan_backends import Backend, Memory, choose_policy, size_of
from weft.recurrent.python_backend import PythonBackend
from weft.recurrent.sequence import SequenceInputs
from weft.recurrent.sequence_function import EagerReplay, filled_up, run_derived
from weft.recurrent.verify import PlanError, verify

BackendName = Literal["auto", "c", "inductor", "python", "eager"]
VerifyMode = Literal["first", "never"]
MAX_UNUSED_PLANS = 32
"""After this many plans in a row that were used once each, whatever is new runs by the eager loop."""
MAX_PLANS = 64
"""Plans that a network keeps; the least recently used goes first."""
RACE_STEPS = 32
"""Steps that a race takes; of a shorter sequence the same ones again."""
COMPUTED = (
    "it reads a tensor that was computed from others, as by torch.func.functional_call, which is another one at every "
    "call, so that no plan could be kept; hand it over as an input, a state, or one of references="
)
_Key = tuple[Hashable, Hashable]


def check_settings(check: Validator, memory: object, backend: object, verify: object) -> None:
    """Validate the settings of a network."""
    check.choice("backend", backend, get_args(BackendName))
    check.choice("verify", verify, get_args(VerifyMode))
    if memory not in MEMORY and not (type(memory) is int and memory > 0):
        check.add(f"memory is {memory!r}, wanted {', '.join(MEMORY)} or a number of bytes")


class NoPlanWarning(UserWarning):
    """A recurrent network does not run by the plan that was asked for; the warning says by what, and why.

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
    """What runs one kind of sequence, and why; without an engine it is the eager loop."""

    kind: str
    engine: Backend | None
    backend: str
    why: str
    warning: str | None = None
    """For the user, once."""
    family: Hashable = None
    """Equal for kinds that differ in the number of rows only."""
    impossible: bool = False
    """Whether the backend that was asked for must not be replaced: an explicit "c" is an error then."""
    held: tuple[object, ...] = ()
    """Objects whose addresses are part of the key, kept alive with it."""

    def explain(self) -> str:
        """For a person."""
        head = f"{self.kind}: {self.backend}, because {self.why}"
        return head if self.engine is None else f"{head}\n\n{self.engine.explain()}"


class PlanCache:
    """The plans of one network, by kind of sequence."""

    def __init__(self, backend: BackendName = "auto", memory: Memory = "full", verify: VerifyMode = "first") -> None:
        self.settings = (backend, memory, verify)
        self._backend = backend
        self._memory: Memory = memory
        self._verify = verify
        self._known: OrderedDict[_Key, PlanChoice] = OrderedDict()
        self._gone: deque[_Key] = deque()
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._unused = 0

    def run(self, job: eager.SequenceRun) -> eager.Unrolled:
        """Run by a plan, or by the eager loop; with a warning, once, if it is not by the plan asked for."""
        if torch.is_inference_mode_enabled():  # a plan that is made in it could not be used outside
            with torch.inference_mode(False), torch.no_grad():
                found, choice = self._by_plan(job)
        else:
            found, choice = self._by_plan(job)
        if choice.impossible:
            job.head(1).run()  # if the cell itself is faulty, its own error says more
            raise UsageError(
                f'backend="c" cannot run cell {job.cell.name}: {choice.why}; change the cell, or use backend="auto", '
                "which runs it by another plan, or by the eager loop"
            )
        found, warning = job.run() if found is None else found, choice.warning
        if warning is not None and warning not in self._warned:
            # Only now that it ran: if the cell is faulty, the eager loop's error says more.
            self._warned.add(warning)
            warnings.warn(warning, NoPlanWarning, stacklevel=2)
        return found

    def _by_plan(self, job: eager.SequenceRun) -> tuple[eager.Unrolled | None, PlanChoice]:
        """The results, None if the eager loop must run it; and what was chosen."""
        call, choice = self._planned(job)
        return None if call is None or choice.engine is None else call.run(choice.engine, self._memory), choice

    def _planned(self, job: eager.SequenceRun) -> "tuple[PlannedCall | None, PlanChoice]":
        """What runs a sequence; a plan is made, if there is none yet."""
        kind, why, warning, strict = "sequences of every kind", "it was asked for", None, False
        if self._backend != "eager":
            reason = unfit(job.inputs, job.initial)
            kind, why = f"calls where {reason}", "no plan can run those"
            if reason is None:
                call = PlannedCall(job)
                if not call.computed:
                    return call, self._choice(call)
                kind, why = "calls where the cell reads a computed tensor", COMPUTED
                warning = f"cell {job.cell.name} runs by the eager loop: {COMPUTED}"
                strict = self._backend == "c"
        choice = PlanChoice(kind, None, "eager", why, warning, strict)
        with self._lock:
            self._known.setdefault((kind, None), choice)
        return None, choice

    def forecast(self, job: eager.SequenceRun, steps: int) -> dict[str, int]:
        """See `Recurrent.forecast`; makes the plan, if there is none yet."""
        call, choice = self._planned(job)
        if call is None or choice.engine is None:
            raise UsageError(
                f"no forecast for cell {job.cell.name}: {choice.kind} run by the eager loop, because {choice.why}"
            )
        size = size_of(choice.engine, steps, call.states)
        return {mode: size.peak(choose_policy(mode, size)) for mode in MEMORY}

    def choices(self) -> list[PlanChoice]:
        """What was chosen for every kind of sequence seen."""
        with self._lock:
            return list(self._known.values())

    def _choice(self, call: "PlannedCall") -> PlanChoice:
        if call.guards.unready:
            return PlanChoice(call.kind, None, "eager", "a lazy module of the cell has yet to see its first input")
        key = (call.step_key(), call.cell_key)
        with self._lock:
            while self._gone:
                self._known.pop(self._gone.popleft(), None)
            found = self._known.get(key)
            if found is None:
                return self._added(call, key)
            self._unused = 0
            self._known.move_to_end(key)
            return found

    def _added(self, call: "PlannedCall", key: _Key) -> PlanChoice:
        """A choice for a kind that is new."""
        # New shapes of the same cell are no waste; a cell that reads something new at every call is.
        new = all(call.cell_key != read for _, read in self._known)
        if new and self._unused >= MAX_UNUSED_PLANS:
            why = f"the last {MAX_UNUSED_PLANS} plans were used once each: what the cell is or reads is new every time"
            return PlanChoice(call.kind, None, "eager", why, f"cell {call.cell.name} runs by the eager loop: {why}")
        self._unused += new
        gone = self._gone  # with the first tensor of the cell that is collected, the plan goes at the next call
        watched = [weakref.ref(each, lambda _: gone.append(key)) for each in call.guards.tensors]
        found = self._known[key] = replace(self._made(call), held=(*call.guards.held, *watched))
        if len(self._known) > MAX_PLANS:
            self._known.popitem(last=False)
        return found

    def _filled_up(self, call: "PlannedCall") -> CppBackend | None:
        """The plan for a few more rows, if it gives these the same bits: from the third size of a batch on, so that a
        last batch that is smaller than the others is not filled up."""
        family, same = call.step_key(1), [each for (_, cell), each in self._known.items() if cell == call.cell_key]
        relatives = [e.engine for e in same if e.family == family and isinstance(e.engine, CppBackend)]
        if len(relatives) < 2 or call.rows is None or isinstance(self._memory, int):
            return None
        rows, first = 1 << (call.rows - 1).bit_length(), relatives[0]
        rows = rows * 3 // 4 if 4 * call.rows <= 3 * rows else rows  # 1, 2, 3, 4, 6, 8, 12, 16, 24 ...
        if rows == call.rows or not (first.apart and same_but_rows(first.captured, relatives[1].captured)):
            return None
        engine = self._choice(call.with_rows(rows)).engine
        if not (isinstance(engine, CppBackend) and engine.apart and same_but_rows(first.captured, engine.captured)):
            return None
        found = engine.for_rows(call.rows)
        if self._verify == "first":
            try:
                with unobserved():
                    call.verify(found, self._memory)
            except Exception:  # a plan of its own serves, then
                return None
        return found

    def _made(self, call: "PlannedCall") -> PlanChoice:
        larger = self._filled_up(call)
        if larger is not None:
            why = f"its rows are filled up by {larger.missing}, to a number for which there is a plan"
            return PlanChoice(call.kind, larger, "c", why)
        return replace(self._planned_anew(call), family=call.step_key(1))

    def _planned_anew(self, call: "PlannedCall") -> PlanChoice:
        refused, wrong, planned = dict[str, list[str]](), False, None
        strict = self._backend == "c"
        # On CUDA "auto" leaves out Inductor: its recorded graphs have never run on a GPU.
        automatic = ("python",) if call.inputs.device.type == "cuda" else ("c", "python")
        names: tuple[str, ...] = automatic if self._backend == "auto" else (self._backend,)
        for name in names:
            try:
                with unobserved():
                    engine = call.make(name)
                    if self._verify == "first":
                        call.verify(engine, self._memory)
            except MisfitError as error:
                return PlanChoice(call.kind, None, "eager", str(error), impossible=strict)
            except Exception as error:  # whatever tracing a user's code may raise: another plan, or the eager loop
                told = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {str(error)[:500]}"
                refused.setdefault(told, []).append(name)
                wrong = wrong or isinstance(error, PlanError)  # worth a warning even where another plan is right
            else:
                planned = name, engine
                break
        reasons = [f"not {' or '.join(each)}: {told}" for told, each in refused.items()]
        why = "; ".join(reasons)
        none = PlanChoice(call.kind, None, "eager", why, impossible=strict)
        choice = self._chosen(call, *planned, reasons) if planned else none
        if wrong or not planned:
            way = "the eager loop" if choice.engine is None else f"the {choice.backend} plan"
            return replace(choice, warning=f"cell {call.cell.name} runs by {way}: {why}")
        return choice

    def _chosen(self, call: "PlannedCall", name: str, engine: Backend, refused: list[str]) -> PlanChoice:
        """The plan; for "auto" the faster one of it and the eager loop, by the first steps of this sequence."""
        if self._backend != "auto":
            return PlanChoice(call.kind, engine, name, "it was asked for")
        if name == "c":
            return PlanChoice(call.kind, engine, name, "its loops could be compiled, and nothing here is faster")
        ours, loop = call.race(engine)
        told = f"{1e3 * ours:.2f} ms by the {name} plan and {1e3 * loop:.2f} ms by the eager loop"
        why = "; ".join([f"{RACE_STEPS} steps took {told}", *refused])
        return PlanChoice(call.kind, engine, name, why) if ours < loop else PlanChoice(call.kind, None, "eager", why)


_CAPTURING = threading.RLock()
"""Held while a cell is traced, which patches modules for the whole process."""


class PlannedCall:
    """One call of a network as plans see it: its key, how a plan for it is made and verified, and running it.

    Attributes:
        states: the initial ones of the captured step, flat.
        cell_key: what the cell is and reads, as it is now: a plan was made for just that.
        computed: whether the cell reads what was computed from other tensors: another one at every call.
    """

    def __init__(self, job: eager.SequenceRun) -> None:
        cell, inputs, rows, state = job.cell, job.inputs, job.rows, job.initial
        self.cell, self.inputs, self._job = cell, inputs, job
        self._on = Conditions(rows.valid is not None, rows.reset is not None, job.truncate is not None, cell.time_step)
        fresh = (state if job.fresh is None else job.fresh) if self._on.reset else ()
        references = cell.references if isinstance(cell, StepNetCell) and cell.references is not None else ()
        held = [] if rows.valid is None else padding_values(inputs, rows.valid)
        self.states, self._structure = flatten((state, fresh, references, held))
        self.guards = CellGuards(cell.function)
        self.cell_key = tuple(self.guards.key)
        self.computed = not all([each.is_leaf for each in self.guards.tensors])
        grad = torch.is_grad_enabled()
        self._wants = tuple([grad and leaf.requires_grad for leaf in inputs.leaves])
        """Which inputs want a gradient."""

    @property
    def kind(self) -> str:
        """For a person: shape and dtype of a step."""
        shapes = ", ".join(
            f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape[1:])}" for each in self.inputs.leaves
        )
        flags = [name for name, on in self._on._asdict().items() if on]
        return f"steps of {shapes}" + (f" with {', '.join(flags)}" if flags else "")

    @property
    def rows(self) -> int | None:
        """N, where all states have rows, and nothing else is read that could have some."""
        by_rows = all(isinstance(each, Tensor) and each.shape[:1] == (self.inputs.rows,) for each in self.states)
        return self.inputs.rows if by_rows and getattr(self.cell, "references", None) is None else None

    def with_rows(self, rows: int) -> "PlannedCall":
        """The same call, filled up to so many rows."""
        job, more = self._job, rows - (self.rows or 0)
        over, first = (partial(filled_up, axis=axis, more=more) for axis in (1, 0))
        inputs = replace(self.inputs, leaves=[*map(over, self.inputs.leaves)], rows=rows)
        tables = RowMasks(*(None if each is None else over(each) for each in (job.rows.valid, job.rows.reset)))
        initial, fresh = (None if each is None else map_leaves(first, each) for each in (job.initial, job.fresh))
        return PlannedCall(replace(job, inputs=inputs, rows=tables, initial=initial, fresh=fresh))

    def step_key(self, begin: int = 0) -> Hashable:
        """All that a plan depends on besides the cell: tensors and structure of one step, and PyTorch's modes.

        Shapes count from axis `begin` on.
        """
        casting = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        return (
            self.cell.form,
            self._on,
            self.inputs.structure,
            self._structure,
            tuple([_meta(leaf[0], begin) for leaf in self.inputs.leaves]),
            tuple([_meta(leaf, begin) for leaf in self.states]),
            self._wants,
            *casting,
            torch.is_grad_enabled(),  # a cell may ask, and a plan without backward is the smaller one
            torch.get_default_dtype(),
        )

    def _leaves(self) -> list[Tensor]:
        """The inputs, T x ..., with those that conditions add."""
        if not any(self._on):
            return [*self.inputs.leaves]
        start, truncate, rows = self._job.start, self._job.truncate, self._job.rows
        numbers = torch.arange(start, start + self.inputs.steps, device=self.inputs.device)
        cut = None if truncate is None else (numbers % truncate == 0) & (numbers > 0)
        more = (rows.valid, rows.reset, cut, numbers if self._on.time else None)
        return [*self.inputs.leaves, *(each for each in more if each is not None)]

    def _step(self) -> MaskedStep:
        return MaskedStep(self.cell, self._on)

    def make(self, name: str) -> Backend:
        """A new plan by this backend. Raises CaptureError, Unsupported and CompileError."""
        if not all(isinstance(each, Tensor) for each in self.states):
            raise CaptureError("not all references are tensors; let the step net close over what is none")
        if self.guards.refusal is not None:
            raise CaptureError(self.guards.refusal)
        if name == "c" and any(each.device.type != "cpu" for each in self.inputs.leaves):
            raise Unsupported(f"loops in C run on the CPU, and the inputs are on {self.inputs.device}")
        captured = self._captured(decomposition_table() if name == "c" else None)
        own = {id(each) for each in self.guards.tensors}
        read = [(node, captured.reference(node)) for node in captured.signature.references]
        # What the step itself makes out of plain numbers is none of them.
        made = [(made_in_the_step(node) or not each.dim()) and not each.requires_grad for node, each in read]
        strange = sum(id(each) not in own and not here for (_, each), here in zip(read, made, strict=True))
        if strange:
            raise CaptureError(
                f"it reads {strange} tensors that are neither parameters nor buffers of it; register them"
            )
        backends = {"c": CppBackend, "inductor": InductorBackend, "python": PythonBackend}
        return backends[name](captured.weakly_bound(self.guards.tensors))

    def _captured(self, operators: Mapping[Any, Any] | None) -> StepGraph:
        """Capture the step. The cell runs without observable side effects, and draws nothing the caller would miss."""
        leaves = self._leaves()
        count = len(self.inputs.leaves)
        first = [each[0] for each in leaves]
        nest = unflatten(self.inputs.structure, first[:count]), first[count:]
        wants = [*self._wants, *[False] * (len(leaves) - count)]
        step, state = self._step(), unflatten(self._structure, self.states)

        def once() -> Any:
            with torch.no_grad():
                return step(*(map_leaves(torch.clone, each) for each in (nest, state)))

        with torch.random.fork_rng(self._devices()), _CAPTURING, self.guards.restore_state(), no_foreign_draws(once):
            parameters, tensors = self.guards.parameters, self.guards.tensors
            captured = capture(step, nest, state, parameters, wanted_inputs=wants, composed=operators, watched=tensors)
            if self._on.time:
                check_number(captured.signature.inputs[len(leaves) - 1], [*first, *self.states])
            changed = CellGuards(self.cell.function).key != self.guards.key
            if captured.draws and not changed:
                after = flatten(once()[1])[0]
                if any(memory_order(old) != memory_order(new) for old, new in zip(self.states, after, strict=True)):
                    raise CaptureError(
                        "the cell draws, which may be in the memory order of a state, and the first state has another "
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
        """See `weft.recurrent.verify`."""
        with self.guards.restore_state():
            verify(engine, self._step(), self._leaves(), self.states, memory, self.guards.widened)

    def run(self, engine: Backend, memory: Memory) -> eager.Unrolled:
        """The whole sequence."""
        captured, device, inputs = engine.captured, self.inputs.device, self._leaves()
        restored = partial(self.guards.restored, self.cell.function)
        replay = EagerReplay(captured, self._step(), device, restored) if torch.is_grad_enabled() else None
        if captured.draws:
            inputs += drawn(captured.draws, self.inputs.steps, device)
        leaves = run_derived(engine, inputs, self.states, memory, replay)
        outputs = iter(leaves.outputs)
        y = unflatten(captured.output_structure, [next(outputs) if given else None for given in captured.given])
        # A state of the graph is (the cell's, what resets bring back, references, stand-ins); the first is the user's.
        last = unflatten(captured.state_structure, leaves.last)[0]
        states = unflatten(captured.state_structure, leaves.states)[0] if leaves.states else None
        return y, last, states

    def race(self, engine: Backend) -> tuple[float, float]:
        """Seconds that `RACE_STEPS` of this sequence take by the engine, and by the eager loop; drawing nothing."""
        steps = torch.arange(RACE_STEPS, device=self.inputs.device) % self.inputs.steps
        part = replace(self.inputs, leaves=[each.detach()[steps] for each in self.inputs.leaves], steps=RACE_STEPS)
        tables = self._job.rows.valid, self._job.rows.reset
        rows = RowMasks(*(None if each is None else each[steps] for each in tables))
        # Cut from the caller's graph, which its own backward will want whole.
        state, fresh, *_ = unflatten(self._structure, [each.detach() for each in self.states])
        job = replace(self._job, inputs=part, rows=rows, initial=state, fresh=fresh if self._on.reset else None)
        call = PlannedCall(job)
        ways = partial(call.run, engine, "full"), job.run
        with unobserved(), torch.random.fork_rng(self._devices()), self.guards.restore_state():
            ours, loop = (
                min(_seconds(each, self.guards.parameters, self.inputs.device) for _ in range(2)) for each in ways
            )
        return ours, loop

    def _devices(self) -> list[torch.device]:
        return [self.inputs.device] if self.inputs.device.type == "cuda" else []


def unfit(inputs: SequenceInputs, state: Any) -> str | None:
    """Why no plan at all can run this call; None if one may."""
    if not inputs.steps:
        return "there are no steps"
    if cast(Any, _CAPTURING)._is_owned():
        return "a cell contains a network, and the plan of the outer one is being made"
    leaves = [*inputs.leaves, *flatten(state)[0]]
    if not all([isinstance(leaf, Tensor) for leaf in inputs.leaves]):
        return "an input is no tensor"
    if any([type(leaf) not in (Tensor, nn.Parameter) for leaf in leaves]):
        return "a tensor is of a subclass"
    if not all([leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]):
        return "a tensor is empty"
    if not all([getattr(mode, "lets_plans_run", False) for mode in _get_current_dispatch_mode_stack()]):
        # Tracers and counters of operators see no loop in C, nor its making; a counter of bytes may declare otherwise.
        return "a mode that watches operators is on, as a tracer or FlopCounterMode is"
    if cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None:
        return "it is being transformed by torch.func"
    if cast(Any, torch.jit).is_tracing():
        return "it is being traced by torch.jit"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode gradients are on"
    if cast(Any, parametrize)._cache_enabled:  # it would keep weights that a trace had made
        return "parametrized weights are cached"
    return None


def _meta(value: Any, begin: int) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(type(cast(object, value)))
    plain = value.layout is torch.strided and value.is_contiguous()
    return value.shape[begin:], value.dtype, value.device, None if plain else memory_order(value)


def _seconds(run: Callable[[], eager.Unrolled], parameters: Sequence[Tensor], device: torch.device) -> float:
    """The seconds of a run with its backward, on this device and those of the parameters."""
    devices = {device, *(each.device for each in parameters)}
    begin = time_after(devices)
    leaves = flatten(run()[:2])[0]
    ends = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if ends and parameters:
        torch.autograd.grad(ends, parameters, [torch.ones_like(each) for each in ends], allow_unused=True)
    return time_after(devices) - begin
