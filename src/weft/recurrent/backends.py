"""What runs a sequence: the eager loop, or a plan that was derived from the cell.

    "auto"      the fastest of those below that can
    "c"         the derived plan as a compiled loop; on the CPU, if there is a C++ compiler and C knows what is carried
    "inductor"  the derived plan with compiled steps; any operator and device; on CUDA a chunk is launched as a whole
    "python"    the derived plan: bulk operators around two minimal loops, run by Python
    "eager"     every step by plain autograd; whatever the cell does

A plan is made at the first sequence of its kind (shapes of one step, dtypes, which tensors want gradients, what the
cell reads), checked against the eager loop, and kept. Where there can be none, the eager loop runs, and a warning says
why, once. `Recurrent.explain()` tells what was chosen for which kind, and why.
"""

import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from weft.core.errors import UsageError, WeftError
from weft.recurrent import eager
from weft.recurrent.capture import MisfitError
from weft.recurrent.cpp.compiler import CompileError
from weft.recurrent.cpp.ir import Unsupported
from weft.recurrent.engine import Engine
from weft.recurrent.guards import unobserved
from weft.recurrent.memory import NAMES as MEMORY
from weft.recurrent.memory import Memory, keeping
from weft.recurrent.planned import RACE_STEPS, PlannedCall, unfit
from weft.recurrent.verify import PlanError

Name = Literal["auto", "c", "inductor", "python", "eager"]
NAMES: tuple[Name, ...] = ("auto", "c", "inductor", "python", "eager")
Verify = Literal["first", "never"]
VERIFY: tuple[Verify, ...] = ("first", "never")
IN_VAIN = 32
"""After so many plans of which none was used again, the eager loop runs what is new."""
KINDS = 64
"""So many plans a network keeps; the one that was used longest ago goes first."""
COMPUTED = (
    "it reads a tensor that was computed from others, as by torch.func.functional_call, which is another one at every "
    "call, so that no plan could be kept; hand it over as an input, a state, or one of references="
)
_Key = tuple[Hashable, Hashable]


def settings_faults(memory: object, backend: object, verify: object) -> list[str]:
    """What is wrong with the settings of a network."""
    faults: list[str] = []
    if backend not in NAMES:
        faults.append(f"backend is {backend!r}; there are {', '.join(NAMES)}")
    if verify not in VERIFY:
        faults.append(f"verify is {verify!r}; there are {', '.join(VERIFY)}")
    if memory not in MEMORY and not (type(memory) is int and memory > 0):
        faults.append(f"memory is {memory!r}, wanted {', '.join(MEMORY)} or a number of bytes")
    return faults


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
class Choice:
    """What runs one kind of sequence, and why; without an engine it is the eager loop."""

    kind: str
    engine: Engine | None
    backend: str
    why: str
    warning: str | None = None
    """What its user should be told."""
    held: tuple[object, ...] = ()
    """What the plan is found by, as far as that is a place in memory."""
    measured: int = 0
    """With how many steps the candidates were timed; 0: they were not."""
    candidates: dict[str, Engine] = field(default_factory=dict[str, Engine])
    """What is timed again, with the eager loop, when sequences become longer than `measured`."""
    refused: tuple[str, ...] = ()

    def outgrown(self, steps: int) -> bool:
        """Whether a race over so many steps would tell more: twice as many as before, or the most there may be."""
        return 0 < self.measured < steps and (steps == RACE_STEPS or steps >= 2 * self.measured)

    def explain(self) -> str:
        """For a person."""
        head = f"{self.kind}: {self.backend}, because {self.why}"
        return head if self.engine is None else f"{head}\n\n{self.engine.explain()}"


class Plans:
    """The plans of one network, by kind of sequence."""

    def __init__(self, backend: Name = "auto", memory: Memory = "full", verify: Verify = "first") -> None:
        self.settings = (backend, memory, verify)
        self._backend = backend
        self._memory: Memory = memory
        self._verify = verify
        self._known: OrderedDict[_Key, Choice] = OrderedDict()
        self._gone: deque[_Key] = deque()
        self._told: set[str] = set()
        self._lock = threading.RLock()
        self._wasted = 0

    def run(self, job: eager.Job) -> eager.Unrolled:
        """By a plan, or by the eager loop; with a warning, once, if it is not by the plan asked for."""
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
        if warning is not None:
            self._say(warning)  # now that it ran: a cell that is faulty fails in the loop, which tells more
        return found

    def _eagerly(self, job: eager.Job, kind: str, why: str) -> eager.Unrolled:
        """By the eager loop, whatever the sequence looks like; `reasons` will say so."""
        with self._lock:
            self._known.setdefault((kind, None), Choice(kind, None, "eager", why))
        return job.run()

    def _by_plan(self, job: eager.Job) -> tuple[eager.Unrolled | None, str | None]:
        """The results, None if the eager loop must do it; and what is to be told."""
        call = PlannedCall(job)
        if call.computed:
            choice = Choice("calls where the cell reads a computed tensor", None, "eager", COMPUTED)
            with self._lock:
                self._known.setdefault((choice.kind, None), choice)
            return None, f"cell {call.cell.name} runs by the eager loop: {COMPUTED}"
        choice = self._choice(call)
        return None if choice.engine is None else call.run(choice.engine, self._memory), choice.warning

    def forecast(self, job: eager.Job, steps: int) -> dict[str, int]:
        """See `Recurrent.forecast`; makes the plan, if there is none yet."""
        why = unfit(job.inputs, job.initial)
        if self._backend == "eager":
            why = 'the network has backend="eager"'
        elif why is None:
            call = PlannedCall(job)
            choice = None if call.computed else self._choice(call)
            if choice is not None and choice.engine is not None:
                size = call.size(choice.engine, steps)
                return {mode: size.peak(keeping(mode, size)) for mode in MEMORY}
            why = COMPUTED if choice is None else choice.why
        raise UsageError(f"no forecast for cell {job.cell.name}: such sequences run by the eager loop, because {why}")

    def explanations(self) -> list[str]:
        """What was chosen for every kind, in words."""
        return [each.explain() for each in self._choices()]

    def reasons(self) -> list[tuple[str, str, str]]:
        """For every kind of sequence seen: the kind, what runs it, and why."""
        return [(each.kind, each.backend, each.why) for each in self._choices()]

    def _say(self, warning: str) -> None:
        if warning not in self._told:
            self._told.add(warning)
            warnings.warn(warning, NoPlanWarning, stacklevel=2)

    def _choices(self) -> list[Choice]:
        with self._lock:
            return list(self._known.values())

    def _choice(self, call: PlannedCall) -> Choice:
        if call.unready:
            return Choice(call.kind, None, "eager", "a lazy module of the cell has yet to see its first input")
        key = (call.looks(), call.reads)
        with self._lock:
            while self._gone:
                self._known.pop(self._gone.popleft(), None)
            found = self._known.get(key)
            if found is None:
                # New shapes of the same cell are no waste; a cell that reads something new at every call is.
                new = all(call.reads != read for _, read in self._known)
                if new and self._wasted >= IN_VAIN:
                    why = f"the last {IN_VAIN} plans were used once each: what the cell is or reads is new every time"
                    words = f"cell {call.cell.name} runs by the eager loop: {why}"
                    return Choice(call.kind, None, "eager", why, words)
                self._wasted += new
                found = self._known[key] = replace(self._made(call), held=(*call.held, *self._watched(call, key)))
                if len(self._known) > KINDS:
                    self._known.popitem(last=False)
            else:
                self._wasted = 0
                self._known.move_to_end(key)
                if found.outgrown(call.race_steps):
                    again = self._fastest(call, found.candidates, found.refused)
                    found = self._known[key] = replace(again, held=found.held, warning=found.warning)
            return found

    def _watched(self, call: PlannedCall, key: _Key) -> list[object]:
        """Weak references to what the cell reads: with the first that is gone, so is the plan at the next call."""
        gone = self._gone
        return [weakref.ref(each, lambda _: gone.append(key)) for each in call.tensors]

    def _made(self, call: PlannedCall) -> Choice:
        refused: list[str] = []
        wrong = False
        candidates: dict[str, Engine] = {}
        automatic = ("inductor", "python") if call.on_cuda else ("c", "python")
        names: tuple[str, ...] = automatic if self._backend == "auto" else (self._backend,)
        for name in names:
            try:
                with unobserved():
                    engine = call.engine(name)
                    if self._verify == "first":
                        call.verify(engine, self._memory)
            except MisfitError as error:  # the eager loop says what is wrong, or bears it
                return Choice(call.kind, None, "eager", str(error))
            except (Unsupported, CompileError) as error:
                refused.append(f"not {name}: {error}")
            except PlanError as error:
                refused.append(f"not {name}: {error}")
                wrong = True  # worth a word, even where another plan is right
            except Exception as error:  # whatever tracing a user's code may raise: the eager loop is there
                refused.append(f"no plan could be made: {_words(error)}")
                break
            else:
                candidates[name] = engine
                if name != "inductor":
                    break
        why = "; ".join(refused)
        choice = self._chosen(call, candidates, refused) if candidates else Choice(call.kind, None, "eager", why)
        if wrong or not candidates:
            way = "the eager loop" if choice.engine is None else f"the {choice.backend} plan"
            return replace(choice, warning=f"cell {call.cell.name} runs by {way}: {why}")
        return choice

    def _chosen(self, call: PlannedCall, candidates: dict[str, Engine], refused: list[str]) -> Choice:
        name, engine = next(iter(candidates.items()))
        if self._backend != "auto":
            return Choice(call.kind, engine, name, "it was asked for")
        if name == "c":
            return Choice(call.kind, engine, name, "its loops could be compiled, and nothing here is faster")
        return self._fastest(call, candidates, tuple(refused))

    def _fastest(self, call: PlannedCall, candidates: dict[str, Engine], refused: tuple[str, ...]) -> Choice:
        """The fastest of the candidates and the eager loop, by the first steps of this sequence."""
        steps = call.race_steps
        times = {name: call.race(engine) for name, engine in candidates.items()}
        best = min(times, key=lambda name: times[name][0])
        loop = min(slow for _, slow in times.values())
        told = ", ".join(f"{1e3 * ours:.2f} ms by the {name} plan" for name, (ours, _) in times.items())
        why = "; ".join([f"{steps} steps took {told} and {1e3 * loop:.2f} ms by the eager loop", *refused])
        engine, name = (candidates[best], best) if times[best][0] < loop else (None, "eager")
        left = {} if steps == RACE_STEPS else candidates
        return Choice(call.kind, engine, name, why, measured=steps, candidates=left, refused=refused)


def _words(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, WeftError) else f"{type(error).__name__}: {text[:500]}"
