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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchweft.core.errors import UsageError, WeftError
from torchweft.core.pytree import flatten, map_leaves
from torchweft.core.validation import Validator
from torchweft.recurrent import backend_registry, eager
from torchweft.recurrent.backend_registry import BackendName, serves_smaller_batches
from torchweft.recurrent.capture import MisfitError
from torchweft.recurrent.cell import StepSpec
from torchweft.recurrent.graph import same_but_rows
from torchweft.recurrent.guards import without_observers
from torchweft.recurrent.plan_backends import MEMORY_MODES, Backend, Memory, choose_policy, size_of
from torchweft.recurrent.planned_call import PlannedCall, race_length, unfit
from torchweft.recurrent.prepared_call import PreparedCall
from torchweft.recurrent.verify import PlanError

VerifyMode = Literal["first", "never"]
# After this many consecutive plans that were used only once, every new kind runs by the eager loop.
MAX_UNUSED_PLANS = 32
CHEAP_OPERATORS = 40  # of a step: up to so many take less time one by one than the fixed cost of a plan
MAX_PLANS = 64  # plans that a network keeps. The least recently used is dropped first.
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
class LostRace:
    """A plan that was slower than the eager loop, over sequences of so many steps."""

    name: str
    engine: Backend
    rejections: list[str]
    steps: int


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
    settling: bool = False  # whether step 0 changes the form of the states, so that only later steps have a plan
    lost: LostRace | None = None  # to race again for longer sequences

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
        self._prepared: dict[Hashable, PreparedCall] = {}
        self._warned: set[str] = set()
        # Reentrant, because planning for filled-up rows plans for more rows first.
        self._lock = threading.RLock()
        self._unused = 0

    def run(self, job: eager.SequenceRun, reserved: int = 0) -> eager.Unrolled:
        """Run a sequence. `reserved` are bytes that the caller adds to those of the sequence."""
        if torch.is_inference_mode_enabled():
            # A plan holds tensors. Created in inference mode, they could not be used outside of it.
            with torch.inference_mode(False), torch.no_grad():
                results, choice = self._run_by_plan(job, reserved)
        else:
            results, choice = self._run_by_plan(job, reserved)
        if choice.impossible:
            job.head(1).run()  # if the cell itself is faulty, its own error says more
            raise UsageError(
                f'backend="c" cannot run cell {job.cell.name}: {choice.why}; change the cell, or use backend="auto", '
                "which runs it by another plan, or by the eager loop"
            )
        if choice.settling and not job.settled:
            results = self._run_first_step_apart(job)
        results, warning = job.run() if results is None else results, choice.warning
        # Warn only after the run: if the cell is faulty, the error of the eager loop says more.
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            warnings.warn(warning, NoPlanWarning, stacklevel=2)
        return results

    def _run_by_plan(self, job: eager.SequenceRun, reserved: int) -> tuple[eager.Unrolled | None, PlanChoice]:
        call, choice = self._plan_for(job)
        if call is None or choice.engine is None:
            return None, choice
        if job.call_key is not None:
            self._prepare(job, call, choice.engine)
        if job.inputs.steps == 1 and self._is_step_cheap(choice.engine):
            return None, choice
        return call.run(choice.engine, self._memory, reserved), choice

    def _is_step_cheap(self, engine: Backend) -> bool:
        # Whether "auto" runs a sequence of one step by the cell itself: a plan has a fixed cost.
        return self._backend == "auto" and engine.captured.forward_operators <= CHEAP_OPERATORS

    def forget_prepared(self) -> None:
        """Drop all prepared calls. They keep the cell and its tensors alive."""
        with self._lock:
            self._prepared.clear()

    def find_prepared(self, key: Hashable) -> PreparedCall | None:
        """The prepared call with this key, if its plan is alive."""
        if self._dead_keys or (prepared := self._prepared.pop(key, None)) is None:
            return None
        self._prepared[key] = prepared  # in the order of use
        return prepared

    def run_prepared(self, prepared: PreparedCall, x: Tensor, state: Any, tensors: Sequence[Tensor]) -> eager.Unrolled:
        self._unused = 0
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return prepared.run(x, state, tensors)
        return prepared.run(x, state, tensors)

    def _prepare(self, job: eager.SequenceRun, call: PlannedCall, engine: Backend) -> None:
        snapshot = call.guards.snapshot(call.cell.function)
        if snapshot is not None:
            prepared = PreparedCall(
                job, engine, self._memory, snapshot, (call.step_key(), call.cell_key), self._is_step_cheap(engine)
            )
            with self._lock:
                if len(self._prepared) >= MAX_PLANS:
                    self._prepared.clear()
                self._prepared[job.call_key] = prepared

    def _run_first_step_apart(self, job: eager.SequenceRun) -> eager.Unrolled:
        """Step 0 by the eager loop, because it settles the dtypes and shapes of the states. Later steps have a plan."""
        first = job.head(1).run()
        if job.inputs.steps == 1:
            return first
        rest = self.run(job.after_first_step(first[1]), _joined_bytes(first, job.inputs.steps, self._memory))
        return join_steps(first, rest, job.start)

    def _plan_for(self, job: eager.SequenceRun) -> tuple[PlannedCall | None, PlanChoice]:
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
        if choice.settling and not job.settled:
            first = job.head(1).run()
            peaks = self.forecast(job.head(1).settle(first[1]), max(steps - 1, 1))
            return {mode: peaks[mode] + _joined_bytes(first, steps, mode) for mode in MEMORY_MODES}
        if call is None or choice.engine is None:
            raise UsageError(
                f"no forecast for cell {job.cell.name}: {choice.kind} run by the eager loop, because {choice.why}"
            )
        size = size_of(choice.engine, steps, call.states)
        return {mode: size.peak(choose_policy(mode, size)) for mode in MEMORY_MODES}

    def choices(self) -> list[PlanChoice]:
        with self._lock:
            return list(self._choices.values())

    def _find_choice(self, call: PlannedCall) -> PlanChoice:
        if call.guards.unready:
            return PlanChoice(call.kind, None, "eager", "a lazy module of the cell has yet to see its first input")
        key = (call.step_key(), call.cell_key)
        # Held while a plan is made, so that threads that share a network do not compile the same plan twice.
        with self._lock:
            if self._dead_keys:
                self._prepared.clear()
            while self._dead_keys:
                self._choices.pop(self._dead_keys.popleft(), None)
            choice = self._choices.get(key)
            if choice is None:
                return self._add_choice(call, key)
            self._unused = 0
            self._choices.move_to_end(key)
            lost = choice.lost
            if lost is not None and race_length(call.inputs.steps)[1] >= 2 * lost.steps:
                # The fixed cost of a call counts less in a longer sequence, so the race is repeated.
                raced = self._choose_faster(call, lost.name, lost.engine, lost.rejections)
                choice = self._choices[key] = replace(raced, family=choice.family, held=choice.held)
            return choice

    def _add_choice(self, call: PlannedCall, key: _Key) -> PlanChoice:
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
            # Prepared calls do not move their plans to the end, so this is done here, which is rare.
            for prepared in [*self._prepared.values()]:  # another thread can look one up meanwhile
                if prepared.plan_key in self._choices:
                    self._choices.move_to_end(prepared.plan_key)
            self._choices.move_to_end(key)
            self._prepared.clear()
            self._choices.popitem(last=False)
        return choice

    def _fill_up(self, call: PlannedCall) -> Backend | None:
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

    def _make_choice(self, call: PlannedCall) -> PlanChoice:
        larger = self._fill_up(call)
        if larger is not None and not larger.missing:
            why = "a plan for other numbers of rows serves this one too"
            return PlanChoice(call.kind, larger, "triton", why)
        if larger is not None:
            why = f"its rows are filled up by {larger.missing}, to a number for which there is a plan"
            return PlanChoice(call.kind, larger, "c", why)
        return replace(self._make_plan(call), family=call.step_key(1))

    def _make_plan(self, call: PlannedCall) -> PlanChoice:
        rejections, incorrect, planned = dict[str, list[str]](), False, None
        strict = self._backend == "c"
        for name in backend_registry.candidate_backends(self._backend, call.inputs.device):
            try:
                with without_observers():
                    engine = call.make(name)
                    if self._verify == "first":
                        call.verify(engine, self._memory)
            except MisfitError as error:
                why = f"later steps have another form: {error}"
                return PlanChoice(f"step 0 of {call.kind}", None, "eager", why, settling=True)
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

    def _choose_faster(self, call: PlannedCall, name: str, engine: Backend, rejections: list[str]) -> PlanChoice:
        """The plan. For "auto", the faster of it and the eager loop, measured on the first steps of this sequence."""
        if self._backend != "auto":
            return PlanChoice(call.kind, engine, name, "it was asked for")
        if backend_registry.is_always_faster(name):
            return PlanChoice(call.kind, engine, name, "its loops could be compiled, and nothing here is faster")
        try:
            by_plan, by_loop = call.race(engine)
        except Exception as error:  # a plan that fails is lost, but the sequence is not
            why = "; ".join(
                [f"not {name}: in a race it raised {type(error).__name__}: {str(error)[:500]}", *rejections]
            )
            return PlanChoice(
                call.kind, None, "eager", why, warning=f"cell {call.cell.name} runs by the eager loop: {why}"
            )
        times = f"{1e3 * by_plan:.2f} ms by the {name} plan and {1e3 * by_loop:.2f} ms by the eager loop"
        runs, steps = race_length(call.inputs.steps)
        repeated = f", as {runs} sequences of {steps}" if runs > 1 else ""
        why = "; ".join([f"{runs * steps} steps took {times}{repeated}", *rejections])
        if by_plan < by_loop:
            return PlanChoice(call.kind, engine, name, why)
        return PlanChoice(call.kind, None, "eager", why, lost=LostRace(name, engine, rejections, steps))


def join_steps(first: eager.Unrolled, rest: eager.Unrolled, start: int) -> eager.Unrolled:
    """One sequence of its first step, number `start`, and of the others. Raises SpecError if the outputs do not fit."""
    spec = StepSpec("output", None)
    for t, outputs in enumerate((first[0], rest[0]), start):
        spec.accept(map_leaves(_first_row, outputs), t)
    joined: dict[tuple[int, int], Tensor] = {}

    def join_leaf(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        if one is None or other is None:
            return None
        # An output that is also a state stays one tensor. The first output can have a wider dtype, as in a plain loop.
        key = id(one), id(other)
        if key not in joined:
            joined[key] = torch.cat([one, other])
        return joined[key]

    outputs = map_leaves(join_leaf, first[0], rest[0])
    return outputs, rest[1], None if rest[2] is None else map_leaves(join_leaf, first[2], rest[2])


def _first_row(leaf: Tensor | None) -> Tensor | None:
    return None if leaf is None else leaf[0]


def _joined_bytes(first: eager.Unrolled, steps: int, memory: Memory) -> int:
    """Bytes of the outputs and states of a sequence that `join_steps` copies."""
    leaves = flatten(first[::2] if memory != "sqrt" else first[:1])[0]
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values()
    return steps * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
