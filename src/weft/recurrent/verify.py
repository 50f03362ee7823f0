"""The check before a plan is first used: a few steps by the plan and by the eager loop, forward and back.

It catches faults of the analysis, and of PyTorch's tracing, before they train a model silently wrong. Values are
compared in units of what the cell itself computes: the largest difference against the largest value, within what the
dtype can hold. Where the cell cancels, as a norm of two elements does, both can differ by more although both are right.
So a value that differs is compared once more, with what the eager loop computes in float64: the plan must be about as
near to that as the eager loop is in the dtype of the cell.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from weft.core.autograd import quiet_hooks
from weft.core.context import float32_precision
from weft.core.errors import WeftError, listed
from weft.core.segment import differentiable
from weft.recurrent.capture import Cell
from weft.recurrent.graph import StepGraph, drawn
from weft.recurrent.plan_backends import Backend, Memory
from weft.recurrent.sequence_function import SequenceLeaves, run_derived, stepwise

TRIALS = ((3, True), (1, False))
"""Steps, and whether gradients come to the states after all of them too, or only to what most losses read. Gradients of
states make a new tensor at every step; without them, and in a single one, what is carried stays the very tensor."""
ROUNDINGS = 256
NEAR = 8
"""How many times the eager loop's own error, against float64, a plan may have."""
Widened = Callable[[], AbstractContextManager[Mapping[int, Tensor]]]
"""Inside, the cell reads its tensors in float64; yields them by the ids of the originals."""
_as_it_is: Widened = partial(nullcontext, dict[int, Tensor]())
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUNDED_FACTORS = {"tf32": 2e-3, "bf16": TOLERANCE[torch.bfloat16]}
"""Tolerance for float32 where PyTorch may round the factors of products to this precision."""


class PlanError(WeftError, RuntimeError):
    """A plan does not compute what its cell computes; it must not be used."""


def verify(
    plan: Backend,
    cell: Cell,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    memory: Memory = "full",
    widened: Widened = _as_it_is,
) -> None:
    """Compare the plan with the eager loop over the first steps of a sequence (inputs T x ..., T at least 1).

    Forward and back; forward alone where gradients are off, as they were when the plan was made.

    Raises PlanError that names every value which differs, with the difference.
    """
    for steps, every in TRIALS:
        trial = _Trial(plan, cell, [each[:steps] for each in inputs], states, every)
        faults = trial.faults("states" if isinstance(memory, int) else memory, widened)  # it makes use of every routine
        if faults:
            raise PlanError(listed("a derived plan does not compute what its cell computes:", faults))


@dataclass
class _Trial:
    plan: Backend
    cell: Cell
    inputs: Sequence[Tensor]
    states: Sequence[Tensor]
    every: bool

    def faults(self, memory: Memory, widened: Widened) -> list[str]:
        plan, short, states = self.plan, self.inputs, self.states
        device, parameters = short[0].device, plan.captured.parameters
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed = int(torch.randint(2**31, (1,)))
            torch.manual_seed(seed)  # what the cell draws, drawn for both alike
            random = drawn(plan.captured.draws, len(short[0]), device)
            ours, theirs = _leaves(plan, [*short, *random], states), _leaves(plan, short, states)
            derived = run_derived(plan, *ours, memory)
            torch.manual_seed(seed)
            eager = stepwise(plan.captured, self.cell, *theirs)
        if not derived.states:  # not all are kept, so none is there to be compared
            eager.states.clear()
            self.every = False
        wanted, seen = (
            _values(parameters, ends, *leaves, self.every) for ends, leaves in ((eager, theirs), (derived, ours))
        )
        more = rounded_factors(plan.captured, device.type)
        faults = {name: fault for name, each in wanted.items() if (fault := difference(name, each, seen[name], more))}
        exact = self._exact(widened) if faults and not plan.captured.draws else {}  # float64 would draw other numbers
        near = [name for name in faults.keys() & exact.keys() if _near(wanted[name], seen[name], exact[name])]
        return [fault for name, fault in faults.items() if name not in near]

    def _exact(self, widened: Widened) -> dict[str, Tensor]:
        """The values of the eager loop in float64; none if the cell cannot be run so."""
        parts = (self.inputs, self.states)
        wide = [[each.double() if each.is_floating_point() else each for each in part] for part in parts]
        try:
            with widened() as held:
                leaves = _leaves(self.plan, *wide)
                parameters = [held[id(each)] for each in self.plan.captured.parameters]
                return _values(parameters, stepwise(self.plan.captured, self.cell, *leaves), *leaves, self.every)
        except Exception:  # whatever a cell of the user's raises that is bound to its dtype
            return {}


def rounded_factors(captured: StepGraph, kind: str) -> float:
    """Tolerance for the step's products in float32 on this type of device; 0 where their factors are not rounded."""
    # cuDNN's convolutions use TF32 by default. A step without one is compared as strictly as ever.
    convolves = any("convolution" in str(node.target) for node in captured.nodes)
    backend, operators = "cuda" if kind == "cuda" else "mkldnn", ("matmul", "conv") if convolves else ("matmul",)
    return max(ROUNDED_FACTORS.get(float32_precision(backend, each), 0.0) for each in operators)


def _near(wanted: Tensor, seen: Tensor, exact: Tensor) -> bool:
    """Whether a plan's value is about as near to the exact one as the eager loop's; NaN is near to nothing."""
    if not differentiable(wanted) or not wanted.shape == seen.shape == exact.shape or wanted.dtype != seen.dtype:
        return False
    theirs, ours = (float((each.double() - exact).abs().max()) for each in (wanted, seen))
    return ours <= max(NEAR * theirs, _allowed(wanted, float(exact.abs().max())))


def _leaves(plan: Backend, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    asked = zip(inputs, plan.captured.wanted_inputs, strict=False)  # draws come last, and the loop has none
    one = [each.detach().clone().requires_grad_(wanted and differentiable(each)) for each, wanted in asked]
    return one, [each.detach().clone().requires_grad_(differentiable(each)) for each in states]


def _values(
    parameters: Sequence[Tensor],
    ends: SequenceLeaves[Tensor],
    inputs: list[Tensor],
    states: list[Tensor],
    every: bool,
) -> dict[str, Tensor]:
    """Outputs and states, and, where gradients are on, those of everything, each with its name; zeros for none."""
    named = ends.named()
    parts = {"input": inputs, "initial state": states, "parameter": parameters}
    sources = [(f"{what} {i}", each) for what, part in parts.items() for i, each in enumerate(part)]
    asked = [(name, each) for name, each in sources if each.requires_grad]
    read = ends if every else replace(ends, states=[])
    roots = [end for _, end in read.named() if end.requires_grad]
    found = {name: end.detach() for name, end in named}
    if not roots or not asked or not torch.is_grad_enabled():
        return found
    numbers = [torch.linspace(0.5, 1.5, each.numel(), device=each.device).view_as(each) for each in roots]
    seeds = [each.to(root.dtype) for each, root in zip(numbers, roots, strict=True)]
    leaves = [each for _, each in asked]
    with quiet_hooks(parameters):
        gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True, materialize_grads=True)
    return found | {f"gradient of {name}": each for (name, _), each in zip(asked, gradients, strict=True)}


def difference(name: str, wanted: Tensor, seen: Tensor, rounded: float = 0.0) -> str | None:
    """A description of the difference; None if it is rounding. For `rounded` see `rounded_factors`."""
    if wanted.shape != seen.shape or wanted.dtype != seen.dtype:
        kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (seen, wanted)]
        return f"{name} is {kinds[0]}, the cell's is {kinds[1]}"
    if not differentiable(wanted):
        return None if torch.equal(wanted, seen) else f"{name} differs"
    if not torch.equal(wanted.isnan(), seen.isnan()):
        return f"{name} is NaN at other places"
    if not torch.equal(wanted.isinf(), seen.isinf()):
        return f"{name} is infinite at other places"
    wanted, seen = wanted.nan_to_num(), seen.nan_to_num()
    gap, size = (float(each.abs().max()) if each.numel() else 0.0 for each in (seen - wanted, wanted))
    if gap <= _allowed(wanted, size, rounded):
        return None
    return f"{name} differs by {gap:.1e} at most (its largest value is {size:.1e})"


def _allowed(wanted: Tensor, size: float, rounded: float = 0.0) -> float:
    """The largest difference that is rounding, for values of this dtype, the largest of which is `size`."""
    # What cancels to nearly nothing is as wrong as the sums that it is the difference of: a few units of rounding.
    kind = wanted.device.type
    coarse = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else wanted.dtype
    allowed = max(TOLERANCE.get(each, 1e-4) for each in (wanted.dtype, coarse))
    allowed = max(allowed, rounded) if wanted.dtype is torch.float32 else allowed
    return allowed * size + ROUNDINGS * torch.finfo(coarse).eps
