"""One call of a network, seen by plans: its kind, how a plan for it is made and checked, and running it by one."""

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from weft.core.pytree import flatten, map_leaves, unflatten
from weft.recurrent import eager
from weft.recurrent.autograd import Replay, run_derived
from weft.recurrent.capture import CaptureError, capture
from weft.recurrent.captured import Captured
from weft.recurrent.cpp.backend import CppBackend
from weft.recurrent.cpp.decompositions import decomposition_table
from weft.recurrent.cpp.ir import Unsupported
from weft.recurrent.engine import Engine
from weft.recurrent.guards import Guards, no_foreign_draws, unobserved
from weft.recurrent.inductor_backend import InductorEngine
from weft.recurrent.links import Linked
from weft.recurrent.masking import Rows, check_number, conditions_of, held_inputs, more_inputs, nested
from weft.recurrent.memory import Memory, Size, size_of
from weft.recurrent.passes import made_in_the_step
from weft.recurrent.python_backend import PythonEngine
from weft.recurrent.random import drawn, layouts_drawn, lies
from weft.recurrent.sequence import Inputs
from weft.recurrent.verify import verify

RACE_STEPS = 32
"""A race takes so many steps of a sequence, or all if there are fewer."""


class _Turn:
    """One thread traces at a time, since tracing patches modules for the whole process; it says who it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self.owner = None
        self._lock.release()


_CAPTURING = _Turn()


class PlannedCall:
    """One call of a network, seen by plans."""

    def __init__(self, job: eager.Job) -> None:
        cell, inputs, rows, state = job.cell, job.inputs, job.rows, job.initial
        self.cell, self._inputs, self._rows = cell, inputs, rows
        self._start, self._truncate = job.start, job.truncate
        self._on = conditions_of(cell, rows, job.truncate)
        again = (state if job.fresh is None else job.fresh) if self._on.reset else ()
        references = cell.references if isinstance(cell, Linked) and cell.references is not None else ()
        held = [] if rows.valid is None or not self._on.valid else held_inputs(inputs, rows.valid)
        self._states, self._structure = flatten((state, again, references, held))
        self._guards = Guards(cell.function)

    @property
    def kind(self) -> str:
        """For a person: the looks of a step."""
        looks = ", ".join(
            f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape[1:])}" for each in self._inputs.leaves
        )
        flags = [name for name in ("valid", "reset", "cut", "time") if getattr(self._on, name)]
        return f"steps of {looks}" + (f" with {', '.join(flags)}" if flags else "")

    @property
    def reads(self) -> Hashable:
        """What the cell is and reads, as it is now: a plan was made for just that."""
        return tuple(self._guards.key)

    @property
    def held(self) -> tuple[object, ...]:
        """What must live as long as `reads` is to be compared with."""
        return tuple(self._guards.held)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of `reads`; where one of them is gone, nothing is as it was."""
        return self._guards.tensors

    @property
    def computed(self) -> bool:
        """Whether the cell reads what was computed from other tensors: another one at every call."""
        return not all([each.is_leaf for each in self._guards.tensors])

    @property
    def unready(self) -> bool:
        """Whether a lazy module of the cell has yet to see its first input."""
        return self._guards.unready

    def looks(self) -> Hashable:
        """What else a plan depends on: how a step looks."""
        step = tuple([_looks(leaf[0]) for leaf in self._inputs.leaves])
        before = tuple([_looks(leaf) for leaf in self._states])
        casting = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        return (
            self.cell.form,
            self._on,
            self._inputs.structure,
            self._structure,
            step,
            before,
            self._wants(),
            *casting,
            torch.is_grad_enabled(),  # a cell may ask, and a plan without backward is the smaller one
            torch.get_default_dtype(),
        )

    def _wants(self) -> tuple[bool, ...]:
        """Which inputs want a gradient."""
        on = torch.is_grad_enabled()
        return tuple([on and leaf.requires_grad for leaf in self._inputs.leaves])

    def _leaves(self) -> list[Tensor]:
        """The inputs, T x ..., with those that conditions add."""
        return [*self._inputs.leaves, *more_inputs(self._on, self._inputs, self._rows, self._start, self._truncate)]

    def _step(self) -> Callable[..., Any]:
        return self._on.step(self.cell, self._inputs.rows)

    def engine(self, name: str) -> Engine:
        """A new engine. Raises CaptureError, Unsupported and CompileError."""
        if not all(isinstance(each, Tensor) for each in self._states):
            raise CaptureError("not all references are tensors; let the step net close over what is none")
        if self._guards.refusal is not None:
            raise CaptureError(self._guards.refusal)
        if name == "c" and any(each.device.type != "cpu" for each in self._inputs.leaves):
            raise Unsupported(f"loops in C run on the CPU, and the inputs are on {self._inputs.device}")
        captured = self._captured(decomposition_table() if name == "c" else None)
        own = {id(each) for each in self._guards.tensors}
        read = [(node, captured.reference(node)) for node in captured.roles.references]
        strange = sum(id(each) not in own and not _constant(node, each) for node, each in read)
        if strange:
            raise CaptureError(
                f"it reads {strange} tensors that are neither parameters nor buffers of it; register them"
            )
        makers = {"c": CppBackend, "inductor": InductorEngine, "python": PythonEngine}
        return makers[name](captured.lent(self._guards.tensors))

    def _captured(self, operators: Mapping[Any, Any] | None) -> Captured:
        """The step, run for trial: it draws nothing that the caller would miss, and changes nothing."""
        leaves = self._leaves()
        count = len(self._inputs.leaves)
        first = [each[0] for each in leaves]
        nest = nested(self._inputs.structure, first[:count], first[count:])
        wants = [*self._wants(), *[False] * (len(leaves) - count)]
        step, state = self._step(), unflatten(self._structure, self._states)

        def once(before: Any = state) -> Any:
            with torch.no_grad():
                return step(*(map_leaves(torch.clone, each) for each in (nest, before)))

        # Tracing patches modules for the whole process.
        with torch.random.fork_rng(self._devices()), _CAPTURING, self._guards.undone(), no_foreign_draws(once):
            captured = capture(
                step,
                nest,
                state,
                self._guards.parameters,
                wanted_inputs=wants,
                composed=operators,
                watched=self._guards.tensors,
            )
            if self._on.time:
                check_number(captured.roles.inputs[len(leaves) - 1], [*first, *self._states])
            changed = Guards(self.cell.function).key != self._guards.key
            if captured.draws and not changed:
                first, *later = layouts_drawn(once, state)
                if any(each != first for each in later):
                    raise CaptureError(
                        "the cell draws numbers for a state in the order in which that lies in memory, and the first "
                        "state lies in another way than later ones, as a transposed tensor does; make both contiguous, "
                        "as by .contiguous()"
                    )
        if changed:
            raise CaptureError(
                "the cell changes what it reads in a step (an attribute of its own, a variable that it closes over or "
                "a global one); carry what changes as a state"
            )
        return captured

    def size(self, engine: Engine, steps: int) -> Size:
        """What a sequence like this one takes over so many steps."""
        return size_of(engine, steps, self._states)

    def verify(self, engine: Engine, memory: Memory) -> None:
        """See `weft.recurrent.verify`."""
        with self._guards.undone():
            verify(engine, self._step(), self._leaves(), self._states, memory)

    def run(self, engine: Engine, memory: Memory) -> eager.Unrolled:
        """The whole sequence."""
        captured, device = engine.captured, self._inputs.device
        again = (
            Replay.capture(captured, self._step(), device, partial(self._guards.restored, self.cell.function))
            if torch.is_grad_enabled()
            else None
        )
        inputs = [*self._leaves(), *drawn(captured.draws, self._inputs.steps, device)]
        leaves = run_derived(engine, inputs, self._states, memory, again)
        last = unflatten(captured.state_structure, leaves.last)[0]
        states = unflatten(captured.state_structure, leaves.states)[0] if leaves.states else None
        return captured.nested(leaves.outputs), last, states

    @property
    def race_steps(self) -> int:
        """How many steps `race` takes."""
        return min(self._inputs.steps, RACE_STEPS)

    def race(self, engine: Engine) -> tuple[float, float]:
        """Seconds that a short part of this sequence takes by the engine, and by the eager loop; drawing nothing."""
        short = self.race_steps
        part = replace(self._inputs, leaves=[each[:short].detach() for each in self._inputs.leaves], steps=short)
        rows = Rows(*(None if each is None else each[:short] for each in (self._rows.valid, self._rows.reset)))
        # Cut from the caller's graph, which its own backward will want whole.
        state, fresh, *_ = unflatten(self._structure, [each.detach() for each in self._states])
        again = fresh if self._on.reset else None
        job = eager.Job(self.cell, part, rows, state, again, self._start, self._truncate)
        call = PlannedCall(job)

        def by_plan() -> eager.Unrolled:
            return call.run(engine, "full")

        with unobserved(), torch.random.fork_rng(self._devices()), self._guards.undone():
            ours, loop = (min(_seconds(each, self._guards.parameters) for _ in range(2)) for each in (by_plan, job.run))
        return ours, loop

    @property
    def on_cuda(self) -> bool:
        """Whether the sequence is on a GPU."""
        return bool(self._devices())

    def _devices(self) -> list[torch.device]:
        return [self._inputs.device] if self._inputs.device.type == "cuda" else []


def unfit(inputs: Inputs, state: Any) -> str | None:
    """Why this call cannot be run by any plan; None if it can."""
    if not inputs.steps:
        return "there are no steps"
    if _CAPTURING.owner == threading.get_ident():
        return "a cell contains a network, and the plan of the outer one is being made"
    leaves = [*inputs.leaves, *flatten(state)[0]]
    if not all(isinstance(leaf, Tensor) for leaf in inputs.leaves):
        return "an input is no tensor"
    if any(type(leaf) not in (Tensor, nn.Parameter) for leaf in leaves):
        return "a tensor is of a subclass"
    if not all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)):
        return "a tensor is empty"
    if not all(getattr(mode, "lets_plans_run", False) for mode in _get_current_dispatch_mode_stack()):
        # tracers, counters of operators: they see no loop in C, or its making; a counter of bytes may say otherwise
        return "a mode that watches operators is on, as a tracer or FlopCounterMode is"
    if cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None:
        return "it is being transformed by torch.func"
    if cast(Any, torch.jit).is_tracing():
        return "it is being traced by torch.jit"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode gradients are on"
    return None


def _looks(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(type(cast(object, value)))
    return value.shape, value.dtype, value.device, lies(value)


def _constant(node: fx.Node, tensor: Tensor) -> bool:
    """Whether a tensor that the graph refers to was made in the step itself, out of plain numbers."""
    return (made_in_the_step(node) or tensor.dim() == 0) and not tensor.requires_grad


def _seconds(run: Callable[[], eager.Unrolled], parameters: Sequence[Tensor]) -> float:
    """How long it takes, with its backward."""
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
