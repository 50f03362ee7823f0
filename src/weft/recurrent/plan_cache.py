"""The plans of a network, by kind of sequence: which backend runs a call, and why.

    "auto"      the fastest of those below that can
    "c"         the derived plan as a compiled loop; on the CPU, if there is a C++ compiler and C knows what is carried
    "inductor"  the derived plan with compiled steps; any operator and device; on CUDA a chunk is launched as a whole
    "python"    the derived plan: bulk operators around two minimal loops, run by Python
    "eager"     every step by plain autograd; whatever the cell does

A plan is made at the first sequence of its kind (shapes of one step, dtypes, which tensors want gradients, what the
cell reads), verified against the eager loop, and cached. Where there can be none, the eager loop runs, and a warning
says why, once. `Recurrent.explain()` tells what was chosen for which kind, and why.
"""

import threading
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from weft.core.errors import UsageError, WeftError
from weft.core.pytree import flatten, map_leaves, unflatten
from weft.core.validation import Validator
from weft.recurrent import eager
from weft.recurrent.autograd import EagerReplay, run_derived
from weft.recurrent.backends import Backend
from weft.recurrent.capture import CaptureError, MisfitError, capture
from weft.recurrent.cpp.backend import CppBackend
from weft.recurrent.cpp.compiler import CompileError
from weft.recurrent.cpp.decompositions import decomposition_table
from weft.recurrent.cpp.ir import Unsupported
from weft.recurrent.graph import StepGraph
from weft.recurrent.guards import CellGuards, no_foreign_draws, unobserved
from weft.recurrent.inductor_backend import InductorBackend
from weft.recurrent.links import Linked
from weft.recurrent.masking import (
    ALL_ROWS,
    UNCONDITIONAL,
    MaskedStep,
    RowMasks,
    check_number,
    conditions_of,
    held_inputs,
    more_inputs,
)
from weft.recurrent.memory import NAMES as MEMORY
from weft.recurrent.memory import Memory, SequenceSize, choose_policy, size_of
from weft.recurrent.passes import made_in_the_step
from weft.recurrent.python_backend import PythonBackend
from weft.recurrent.random import drawn, layouts_drawn, memory_order
from weft.recurrent.sequence import SequenceInputs
from weft.recurrent.verify import PlanError, verify

BackendName = Literal["auto", "c", "inductor", "python", "eager"]
NAMES: tuple[BackendName, ...] = ("auto", "c", "inductor", "python", "eager")
VerifyMode = Literal["first", "never"]
VERIFY: tuple[VerifyMode, ...] = ("first", "never")
MAX_UNUSED_PLANS = 32
"""After this many plans in a row that were used once each, whatever is new runs by the eager loop."""
MAX_PLANS = 64
"""Plans that a network keeps; the least recently used goes first."""
RACE_STEPS = 32
"""Steps of a sequence that a race takes, or all if there are fewer."""
COMPUTED = (
    "it reads a tensor that was computed from others, as by torch.func.functional_call, which is another one at every "
    "call, so that no plan could be kept; hand it over as an input, a state, or one of references="
)
_Key = tuple[Hashable, Hashable]


def check_settings(check: Validator, memory: object, backend: object, verify: object) -> None:
    """Validate the settings of a network."""
    check.choice("backend", backend, NAMES)
    check.choice("verify", verify, VERIFY)
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
    held: tuple[object, ...] = ()
    """Objects whose addresses are part of the key, kept alive with it."""
    measured: int = 0
    """Steps over which the candidates were timed; 0: they were not."""
    candidates: dict[str, Backend] = field(default_factory=dict[str, Backend])
    """Timed again, with the eager loop, when sequences become longer than `measured`."""
    refused: tuple[str, ...] = ()

    def outgrown(self, steps: int) -> bool:
        """Whether a race over so many steps would tell more: twice as many as before, or the most there may be."""
        return 0 < self.measured < steps and (steps == RACE_STEPS or steps >= 2 * self.measured)

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
        if self._backend == "eager":
            return self._eagerly(job, "sequences of every kind", "it was asked for")
        reason = unfit(job.inputs, job.initial)
        if reason is not None:
            return self._eagerly(job, f"calls where {reason}", "no plan can run those")
        if torch.is_inference_mode_enabled():  # a plan that is made in it could not be used outside
            with torch.inference_mode(False), torch.no_grad():
                found, warning = self._by_plan(job)
        else:
            found, warning = self._by_plan(job)
        found = job.run() if found is None else found
        if warning is not None and warning not in self._warned:
            # Only now that it ran: if the cell is faulty, the eager loop's error says more.
            self._warned.add(warning)
            warnings.warn(warning, NoPlanWarning, stacklevel=2)
        return found

    def _eagerly(self, job: eager.SequenceRun, kind: str, why: str) -> eager.Unrolled:
        self._note(kind, why)
        return job.run()

    def _note(self, kind: str, why: str) -> None:
        """Record, for `reasons`, that the eager loop runs calls of this kind whatever the sequence looks like."""
        with self._lock:
            self._known.setdefault((kind, None), PlanChoice(kind, None, "eager", why))

    def _by_plan(self, job: eager.SequenceRun) -> tuple[eager.Unrolled | None, str | None]:
        """The results, None if the eager loop must run it; and the warning for the user."""
        call = PlannedCall(job)
        if call.computed:
            self._note("calls where the cell reads a computed tensor", COMPUTED)
            return None, f"cell {call.cell.name} runs by the eager loop: {COMPUTED}"
        choice = self._choice(call)
        return None if choice.engine is None else call.run(choice.engine, self._memory), choice.warning

    def forecast(self, job: eager.SequenceRun, steps: int) -> dict[str, int]:
        """See `Recurrent.forecast`; makes the plan, if there is none yet."""
        why = unfit(job.inputs, job.initial)
        if self._backend == "eager":
            why = 'the network has backend="eager"'
        elif why is None:
            call = PlannedCall(job)
            choice = None if call.computed else self._choice(call)
            if choice is not None and choice.engine is not None:
                size = call.size(choice.engine, steps)
                return {mode: size.peak(choose_policy(mode, size)) for mode in MEMORY}
            why = COMPUTED if choice is None else choice.why
        raise UsageError(f"no forecast for cell {job.cell.name}: such sequences run by the eager loop, because {why}")

    def explanations(self) -> list[str]:
        """For every kind, what was chosen, in words."""
        return [each.explain() for each in self._choices()]

    def reasons(self) -> list[tuple[str, str, str]]:
        """For every kind of sequence seen: the kind, what runs it, and why."""
        return [(each.kind, each.backend, each.why) for each in self._choices()]

    def _choices(self) -> list[PlanChoice]:
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
            if found.measured and found.outgrown(call.race_steps):
                again = self._fastest(call, found.candidates, found.refused)
                found = self._known[key] = replace(again, held=found.held, warning=found.warning)
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

    def _made(self, call: "PlannedCall") -> PlanChoice:
        refused: list[str] = []
        wrong = False
        candidates: dict[str, Backend] = {}
        automatic = ("inductor", "python") if call.on_cuda else ("c", "python")
        names: tuple[str, ...] = automatic if self._backend == "auto" else (self._backend,)
        for name in names:
            try:
                with unobserved():
                    engine = call.make(name)
                    if self._verify == "first":
                        call.verify(engine, self._memory)
            except MisfitError as error:  # the eager loop's error says more, or it accepts it
                return PlanChoice(call.kind, None, "eager", str(error))
            except (Unsupported, CompileError) as error:
                refused.append(f"not {name}: {error}")
            except PlanError as error:
                refused.append(f"not {name}: {error}")
                wrong = True  # worth a warning even where another plan is right
            except Exception as error:  # whatever tracing a user's code may raise: the eager loop is there
                refused.append(f"no plan could be made: {_words(error)}")
                break
            else:
                candidates[name] = engine
                if name != "inductor":
                    break
        why = "; ".join(refused)
        choice = self._chosen(call, candidates, refused) if candidates else PlanChoice(call.kind, None, "eager", why)
        if wrong or not candidates:
            way = "the eager loop" if choice.engine is None else f"the {choice.backend} plan"
            return replace(choice, warning=f"cell {call.cell.name} runs by {way}: {why}")
        return choice

    def _chosen(self, call: "PlannedCall", candidates: dict[str, Backend], refused: list[str]) -> PlanChoice:
        name, engine = next(iter(candidates.items()))
        if self._backend != "auto":
            return PlanChoice(call.kind, engine, name, "it was asked for")
        if name == "c":
            return PlanChoice(call.kind, engine, name, "its loops could be compiled, and nothing here is faster")
        return self._fastest(call, candidates, tuple(refused))

    def _fastest(self, call: "PlannedCall", candidates: dict[str, Backend], refused: tuple[str, ...]) -> PlanChoice:
        """The fastest of the candidates and the eager loop, by the first steps of this sequence."""
        steps = call.race_steps
        times = {name: call.race(engine) for name, engine in candidates.items()}
        best = min(times, key=lambda name: times[name][0])
        loop = min(slow for _, slow in times.values())
        told = ", ".join(f"{1e3 * ours:.2f} ms by the {name} plan" for name, (ours, _) in times.items())
        why = "; ".join([f"{steps} steps took {told} and {1e3 * loop:.2f} ms by the eager loop", *refused])
        engine, name = (candidates[best], best) if times[best][0] < loop else (None, "eager")
        left = {} if steps == RACE_STEPS else candidates
        return PlanChoice(call.kind, engine, name, why, measured=steps, candidates=left, refused=refused)


def _words(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, WeftError) else f"{type(error).__name__}: {text[:500]}"


class _CaptureLock:
    """Serialises tracing, which patches modules for the whole process, and knows the thread that traces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self.owner = None
        self._lock.release()


_CAPTURING = _CaptureLock()


class PlannedCall:
    """One call of a network as plans see it: its key, how a plan for it is made and verified, and running it.

    Attributes:
        cell_key: what the cell is and reads, as it is now: a plan was made for just that.
        computed: whether the cell reads what was computed from other tensors: another one at every call.
    """

    def __init__(self, job: eager.SequenceRun) -> None:
        cell, inputs, rows, state = job.cell, job.inputs, job.rows, job.initial
        self.cell, self._inputs, self._rows = cell, inputs, rows
        self._start, self._truncate = job.start, job.truncate
        plain = rows is ALL_ROWS and job.truncate is None and not cell.time_step
        self._on = UNCONDITIONAL if plain else conditions_of(cell, rows, job.truncate)
        fresh = (state if job.fresh is None else job.fresh) if self._on.reset else ()
        references = cell.references if isinstance(cell, Linked) and cell.references is not None else ()
        held = [] if rows.valid is None or not self._on.valid else held_inputs(inputs, rows.valid)
        self._states, self._structure = flatten((state, fresh, references, held))
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
            f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape[1:])}" for each in self._inputs.leaves
        )
        flags = [name for name in ("valid", "reset", "cut", "time") if getattr(self._on, name)]
        return f"steps of {shapes}" + (f" with {', '.join(flags)}" if flags else "")

    def step_key(self) -> Hashable:
        """All that a plan depends on besides the cell: tensors and structure of one step, and PyTorch's modes."""
        casting = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        return (
            self.cell.form,
            self._on,
            self._inputs.structure,
            self._structure,
            tuple([_meta(leaf[0]) for leaf in self._inputs.leaves]),
            tuple([_meta(leaf) for leaf in self._states]),
            self._wants,
            *casting,
            torch.is_grad_enabled(),  # a cell may ask, and a plan without backward is the smaller one
            torch.get_default_dtype(),
        )

    def _leaves(self) -> list[Tensor]:
        """The inputs, T x ..., with those that conditions add."""
        if self._on is UNCONDITIONAL:
            return [*self._inputs.leaves]
        return [*self._inputs.leaves, *more_inputs(self._on, self._inputs, self._rows, self._start, self._truncate)]

    def _step(self) -> MaskedStep:
        return MaskedStep(self.cell, self._on, self._inputs.rows)

    def make(self, name: str) -> Backend:
        """A new plan by this backend. Raises CaptureError, Unsupported and CompileError."""
        if not all(isinstance(each, Tensor) for each in self._states):
            raise CaptureError("not all references are tensors; let the step net close over what is none")
        if self.guards.refusal is not None:
            raise CaptureError(self.guards.refusal)
        if name == "c" and any(each.device.type != "cpu" for each in self._inputs.leaves):
            raise Unsupported(f"loops in C run on the CPU, and the inputs are on {self._inputs.device}")
        captured = self._captured(decomposition_table() if name == "c" else None)
        own = {id(each) for each in self.guards.tensors}
        read = [(node, captured.reference(node)) for node in captured.signature.references]
        strange = sum(id(each) not in own and not _constant(node, each) for node, each in read)
        if strange:
            raise CaptureError(
                f"it reads {strange} tensors that are neither parameters nor buffers of it; register them"
            )
        backends = {"c": CppBackend, "inductor": InductorBackend, "python": PythonBackend}
        return backends[name](captured.weakly_bound(self.guards.tensors))

    def _captured(self, operators: Mapping[Any, Any] | None) -> StepGraph:
        """Capture the step. The cell runs without observable side effects, and draws nothing the caller would miss."""
        leaves = self._leaves()
        count = len(self._inputs.leaves)
        first = [each[0] for each in leaves]
        nest = unflatten(self._inputs.structure, first[:count]), first[count:]
        wants = [*self._wants, *[False] * (len(leaves) - count)]
        step, state = self._step(), unflatten(self._structure, self._states)

        def once(before: Any = state) -> Any:
            with torch.no_grad():
                return step(*(map_leaves(torch.clone, each) for each in (nest, before)))

        with torch.random.fork_rng(self._devices()), _CAPTURING, self.guards.undone(), no_foreign_draws(once):
            captured = capture(
                step,
                nest,
                state,
                self.guards.parameters,
                wanted_inputs=wants,
                composed=operators,
                watched=self.guards.tensors,
            )
            if self._on.time:
                check_number(captured.signature.inputs[len(leaves) - 1], [*first, *self._states])
            changed = CellGuards(self.cell.function).key != self.guards.key
            if captured.draws and not changed:
                first, *later = layouts_drawn(once, state)
                if any(each != first for each in later):
                    raise CaptureError(
                        "the cell draws numbers in the memory order of a state, and the first state has another memory "
                        "layout than later ones, as a transposed tensor has; make both contiguous, as by .contiguous()"
                    )
        if changed:
            raise CaptureError(
                "the cell changes what it reads in a step (an attribute of its own, a variable that it closes over or "
                "a global one); carry what changes as a state"
            )
        return captured

    def size(self, engine: Backend, steps: int) -> SequenceSize:
        """Memory that a sequence like this one takes over so many steps."""
        return size_of(engine, steps, self._states)

    def verify(self, engine: Backend, memory: Memory) -> None:
        """See `weft.recurrent.verify`."""
        with self.guards.undone():
            verify(engine, self._step(), self._leaves(), self._states, memory)

    def run(self, engine: Backend, memory: Memory) -> eager.Unrolled:
        """The whole sequence."""
        captured, device, inputs = engine.captured, self._inputs.device, self._leaves()
        replay = None
        if torch.is_grad_enabled():
            restored = partial(self.guards.restored, self.cell.function)
            replay = EagerReplay.capture(captured, self._step(), device, restored)
        if captured.draws:
            inputs += drawn(captured.draws, self._inputs.steps, device)
        leaves = run_derived(engine, inputs, self._states, memory, replay)
        outputs = iter(leaves.outputs)
        y = unflatten(captured.output_structure, [next(outputs) if given else None for given in captured.given])
        # A state of the graph is (the cell's, what resets bring back, references, stand-ins); the first is the user's.
        last = unflatten(captured.state_structure, leaves.last)[0]
        states = unflatten(captured.state_structure, leaves.states)[0] if leaves.states else None
        return y, last, states

    @property
    def race_steps(self) -> int:
        """The number of steps that `race` takes."""
        return min(self._inputs.steps, RACE_STEPS)

    def race(self, engine: Backend) -> tuple[float, float]:
        """Seconds that a short part of this sequence takes by the engine, and by the eager loop; drawing nothing."""
        short = self.race_steps
        part = replace(self._inputs, leaves=[each[:short].detach() for each in self._inputs.leaves], steps=short)
        rows = RowMasks(*(None if each is None else each[:short] for each in (self._rows.valid, self._rows.reset)))
        # Cut from the caller's graph, which its own backward will want whole.
        state, fresh, *_ = unflatten(self._structure, [each.detach() for each in self._states])
        again = fresh if self._on.reset else None
        job = eager.SequenceRun(self.cell, part, rows, state, again, self._start, self._truncate)
        call = PlannedCall(job)

        def by_plan() -> eager.Unrolled:
            return call.run(engine, "full")

        with unobserved(), torch.random.fork_rng(self._devices()), self.guards.undone():
            ours, loop = (min(_seconds(each, self.guards.parameters) for _ in range(2)) for each in (by_plan, job.run))
        return ours, loop

    @property
    def on_cuda(self) -> bool:
        """Whether the sequence is on a GPU."""
        return bool(self._devices())

    def _devices(self) -> list[torch.device]:
        return [self._inputs.device] if self._inputs.device.type == "cuda" else []


def unfit(inputs: SequenceInputs, state: Any) -> str | None:
    """Why no plan at all can run this call; None if one may."""
    if not inputs.steps:
        return "there are no steps"
    if _CAPTURING.owner == threading.get_ident():
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
    return None


def _meta(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(type(cast(object, value)))
    plain = value.layout is torch.strided and value.is_contiguous()
    return value.shape, value.dtype, value.device, None if plain else memory_order(value)


def _constant(node: fx.Node, tensor: Tensor) -> bool:
    """Whether a tensor that the graph refers to was made in the step itself, out of plain numbers."""
    return (made_in_the_step(node) or tensor.dim() == 0) and not tensor.requires_grad


def _seconds(run: Callable[[], eager.Unrolled], parameters: Sequence[Tensor]) -> float:
    """The seconds of a run with its backward."""
    begin = time.perf_counter()
    outputs, last, _ = run()
    ends = [
        leaf for leaf in (*flatten(outputs)[0], *flatten(last)[0]) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if ends and parameters:
        torch.autograd.grad(ends, parameters, [torch.ones_like(each) for each in ends], allow_unused=True)
    if ends and ends[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
