"""What runs a sequence: the eager loop, or a plan that was derived from the cell.

    "eager"    every step by plain autograd; whatever the cell does, and gradients of gradients
    "python"   the derived plan: bulk operators around two minimal loops, run by Python

A plan is made at the first sequence of its kind (shapes of one step, dtypes, training flags, the very parameters),
checked against the eager loop, and kept. Where there can be none, the eager loop runs, and a warning says why, once.
"""

import warnings
from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.core.tree import flatten, unflatten
from weft.recurrent import eager
from weft.recurrent.capture import CaptureError, capture
from weft.recurrent.cells import Cell
from weft.recurrent.derived import run_derived
from weft.recurrent.plan import Plan
from weft.recurrent.rows import Rows
from weft.recurrent.sequence import Inputs
from weft.recurrent.verify import PlanError, verify

Name = Literal["eager", "python"]
NAMES: tuple[Name, ...] = ("eager", "python")


class NoPlanWarning(UserWarning):
    """A recurrent network runs by the eager loop, although a plan was asked for."""


class Plans:
    """The plans of one network, by kind of sequence; in place of a plan, the reason why there is none."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Plan | str] = {}

    def find(self, cell: Cell, inputs: Inputs, state: Any) -> Plan | str:
        """The plan for this kind of sequence, made and checked if it is new; or the reason why there is none."""
        module = cell.function
        key = _kind(module, inputs, state) if isinstance(module, nn.Module) else "a function"
        if key not in self._known:
            found = self._known[key] = _planned(cell, module, inputs, state)
            if isinstance(found, str):
                warnings.warn(f"cell {cell.name} runs by the eager loop: {found}", NoPlanWarning, stacklevel=2)
        return self._known[key]

    def explanations(self) -> list[str]:
        """Every plan in words; in place of one, the reason why there is none."""
        return [each.explain() if isinstance(each, Plan) else f"eager loop: {each}" for each in self._known.values()]


def unfit(cell: Cell, inputs: Inputs, rows: Rows, truncate: int | None) -> str | None:
    """Why this call cannot be run by any plan; None if it can."""
    if not inputs.steps:
        return "there are no steps"
    if cell.time_step:
        return "the cell reads the number of the step"
    if rows.valid is not None or rows.reset is not None:
        return "there are lengths, a mask or resets"
    if truncate is not None:
        return "backpropagation is truncated"
    if not all(isinstance(leaf, Tensor) for leaf in inputs.leaves):
        return "an input is no tensor"
    return None


def unroll_planned(plan: Plan, inputs: Inputs, state: Any) -> eager.Unrolled:
    """As `eager.unroll`, by a plan."""
    captured = plan.captured
    leaves = run_derived(plan, inputs.leaves, [each.contiguous() for each in flatten(state)[0]])
    return (
        unflatten(captured.output_structure, leaves.outputs),
        unflatten(captured.state_structure, leaves.last),
        unflatten(captured.state_structure, leaves.states),
    )


def _planned(cell: Cell, module: object, inputs: Inputs, state: Any) -> Plan | str:
    if not isinstance(module, nn.Module):
        return "it is a function, and what that closes over may change unseen; make it a module"

    def step(x: Any, before: Any) -> tuple[Any, Any]:
        return cell(x, before, 0)

    first = unflatten(inputs.structure, next(inputs.each()))
    parameters: list[Tensor] = [each for each in module.parameters() if each.requires_grad]
    try:
        plan = Plan(capture(step, first, state, parameters))
        strange = _strangers(plan, module)
        if strange:
            return f"it reads {strange} tensors that are neither parameters nor buffers of it; register them"
        verify(plan, step, inputs.leaves, flatten(state)[0])
    except (CaptureError, PlanError) as error:
        return str(error)
    return plan


def _strangers(plan: Plan, module: nn.Module) -> int:
    """How many tensors the graph refers to that the module does not own: they might be replaced unseen."""
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    captured = plan.captured
    read = [getattr(captured.module, str(node.target)) for node in captured.roles.references]
    return sum(id(each) not in own for each in read)


def _kind(module: nn.Module, inputs: Inputs, state: Any) -> Hashable:
    """What a plan depends on: how a step looks, and what the cell consists of."""
    step = tuple((leaf.shape[1:], leaf.dtype, leaf.device) for leaf in inputs.leaves)
    before = tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in flatten(state)[0])
    owned = tuple((id(each), each.requires_grad) for each in (*module.parameters(), *module.buffers()))
    training = tuple(each.training for each in module.modules())
    casting = tuple((kind, torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda"))
    return (inputs.structure, step, before, owned, training, casting)
