"""Calls of a form that was planned before: their arguments are neither checked nor searched for a plan again.

    call_key(...)   the form of every argument, and the modes of PyTorch      a dict lookup
    snapshot        whether the cell still reads the same                     see `guard_snapshot.py`
    initial state   computed as in every call, and its form compared
    run             the plan, with its first states

The fixed cost of a call is what a short sequence takes, as in reinforcement learning. Only the plain form is prepared:
one tensor as input, states as a tensor or a tuple of tensors, no lengths, masks, resets, truncation or step numbers.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchweft.core.pytree import LEAF, Structure, flatten, map_leaves, unflatten
from torchweft.recurrent import eager
from torchweft.recurrent.cell import Cell, StepSpec
from torchweft.recurrent.guard_snapshot import GuardSnapshot
from torchweft.recurrent.guards import tensors_restored
from torchweft.recurrent.masking import Conditions, MaskedStep
from torchweft.recurrent.plan_backends import Backend, Memory
from torchweft.recurrent.pytorch_internals import (
    dispatch_modes,
    forward_ad_level,
    functorch_interpreter,
    is_jit_tracing,
    parametrizations_cached,
)
from torchweft.recurrent.sequence_function import run_plan

_TENSORS = (Tensor, nn.Parameter)
_PLAIN = Conditions(valid=False, reset=False, cut=False, time=False)
CAPTURING = threading.RLock()  # held while a cell is traced, because tracing patches modules for the whole process


def is_capturing() -> bool:
    """Whether this thread traces a cell."""
    return cast(Any, CAPTURING)._is_owned()


def call_key(cell: object, initial: object, x: Any, state: Any, batch_first: bool) -> Hashable | None:
    """Everything that the checks of a call and its plan depend on, except T and what the cell reads.

    None for a call that is not prepared. ``cell`` and ``initial`` are part of the key by address.
    """
    if type(x) not in _TENSORS or x.dim() < 2 or not x.is_contiguous() or not x.numel() or batch_first:
        return None
    form = None if state is None else form_of(state)
    if state is not None and form is None:
        return None
    if (
        dispatch_modes()
        or functorch_interpreter() is not None
        or is_jit_tracing()
        or forward_ad_level() >= 0
        or parametrizations_cached()
        or is_capturing()
    ):
        return None
    grad = torch.is_grad_enabled()
    casting = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    kinds = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")] if casting else ()
    modes = grad, grad and x.requires_grad, torch.is_inference_mode_enabled(), torch.get_default_dtype(), *kinds
    return id(cell), id(initial), x.shape[1:], x.dtype, x.device, form, modes


def form_of(value: Any) -> Hashable | None:
    """The shapes, dtypes and devices of a tensor, or of a tuple of tensors. None for any other value."""
    if type(value) is tuple:
        forms = [_form_of_tensor(item) for item in cast("tuple[Any, ...]", value)]
        return None if None in forms else tuple(forms)
    return _form_of_tensor(value)


def _form_of_tensor(value: Any) -> tuple[Hashable, ...] | None:
    if type(value) not in _TENSORS or value.layout is not torch.strided or not value.is_contiguous():
        return None
    return value.shape, value.dtype, value.device


def _as_tuple(state: Any) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", state) if isinstance(state, tuple) else (state,)


class PreparedStep:
    """One step of a cell by plain autograd, for arguments of a form that was checked before."""

    def __init__(self, cell: Cell, state: Any) -> None:
        self.cell = cell
        leaves, structure = flatten(state)
        self._shapes = [leaf.shape for leaf in leaves]
        self._form, self._nest = form_of(state), nester(structure)

    def run(self, x: Any, state: Any, t: int = 0) -> tuple[Any, Any]:
        """The output and the new state. Raises as `eager.call_cell`, and SpecError if the state does not fit."""
        pairs = zip(_as_tuple(state), self._shapes, strict=True)
        state = self._nest([leaf if leaf.shape == shape else leaf.expand(shape) for leaf, shape in pairs])
        y, new = eager.call_cell(self.cell, x, state, t)
        if self._form is not None and form_of(new) == self._form:
            return y, new
        border = StepSpec.of_states(state, None)
        return y, unflatten(border.structure, border.accept(new, t, self.cell))

    def run_sequence(self, x: Tensor, state: Any) -> eager.Unrolled:
        """A sequence of one step."""
        y, new = self.run(x[0], state)
        stacked: dict[int, Tensor] = {}

        def stack_leaf(leaf: Any) -> Any:
            if leaf is None:
                return None
            # An output that is also a state stays one tensor.
            if id(leaf) not in stacked:
                stacked[id(leaf)] = leaf.unsqueeze(0)
            return stacked[id(leaf)]

        outputs = stack_leaf(y) if type(y) is Tensor else map_leaves(stack_leaf, y)
        if self._form is None:
            return outputs, new, map_leaves(stack_leaf, new)
        return outputs, new, self._nest([*map(stack_leaf, _as_tuple(new))])


class PreparedCall:
    """A plan for calls with one `call_key`."""

    def __init__(
        self,
        job: eager.SequenceRun,
        engine: Backend,
        memory: Memory,
        snapshot: GuardSnapshot,
        plan_key: Any,
        is_step_cheap: bool,
    ) -> None:
        self.plan_key = plan_key
        self._engine, self._snapshot = engine, snapshot
        self._memory: Memory = memory
        self._step = MaskedStep(job.cell, _PLAIN)
        self._own_form = job.own_form
        leaves, structure = flatten(job.initial)
        self._shapes = [leaf.shape for leaf in leaves]
        self._nest_states, self._nest_outputs = nester(structure), nester(engine.captured.output_structure)
        self._all_tensors = all(engine.captured.output_is_tensor)
        self.cell = job.cell  # the key has its function by address
        self.one_step = PreparedStep(job.cell, job.initial) if is_step_cheap else None

    def accepts_own(self, made: Any) -> bool:
        """Whether the network's own initial state has the form that it had when the call was prepared."""
        return self._own_form is not None and form_of(made) == self._own_form

    def unchanged_tensors(self) -> list[Tensor] | None:
        """The tensors that the cell reads, or None if what it reads has changed."""
        return self._snapshot.unchanged_tensors()

    def run(self, x: Tensor, state: Any, tensors: Sequence[Tensor]) -> eager.Unrolled:
        pairs = zip(_as_tuple(state), self._shapes, strict=True)
        states = [leaf if leaf.shape == shape else leaf.expand(shape) for leaf, shape in pairs]
        engine, snapshot = self._engine, self._snapshot
        restored = partial(tensors_restored, snapshot.cell, snapshot.key, tensors)
        leaves = run_plan(engine, self._step, [x], states, restored, x.device, self._memory)
        outputs = leaves.outputs
        if not self._all_tensors:
            remaining = iter(outputs)
            outputs = [next(remaining) if is_tensor else None for is_tensor in engine.captured.output_is_tensor]
        every = self._nest_states(leaves.states) if leaves.states else None
        return self._nest_outputs(outputs), self._nest_states(leaves.last), every


def nester(structure: Structure) -> Callable[[list[Any]], Any]:
    """`unflatten` by a structure, faster for a tensor and for a tuple of tensors."""
    if structure is LEAF:
        return itemgetter(0)
    flat = structure.num_children == structure.num_leaves
    return tuple if structure.type is tuple and flat else partial(unflatten, structure)
