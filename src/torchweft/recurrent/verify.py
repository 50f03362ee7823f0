"""The check before a plan is first used: a few steps by the plan and by the eager loop, forward and back.

It detects errors of the analysis, and of PyTorch's tracing, before they train a wrong model without notice. A fixed
tolerance per value is the obvious criterion, but fails where the cell cancels, e.g. in a norm of two elements: there
the plan and the eager loop can differ although both are right. The comparison therefore has two stages:

    1  the largest difference, relative to the largest value, within the resolution of the dtype
    2  only where that fails: the eager loop in float64 as the reference. The plan must be about as near to it as the
       eager loop is in the dtype of the cell, on these numbers and on numbers that differ from them by a rounding
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from torchweft.core.autograd import silence_hooks
from torchweft.core.context import float32_precision
from torchweft.core.errors import WeftError, join_faults
from torchweft.core.segment import can_have_gradient
from torchweft.recurrent.capture import Cell
from torchweft.recurrent.graph import StepGraph, draw_numbers
from torchweft.recurrent.plan_backends import Backend, Memory
from torchweft.recurrent.sequence_function import SequenceLeaves, run_derived, run_stepwise

# Number of steps, and whether the states after all steps get gradients too. These create a new tensor at every step.
# Without them, and in a single step, the carried gradient stays the same tensor: another path through a backend.
TRIALS = ((3, True), (1, False))
ROUNDINGS = 256
NEAR = 8  # how many times the eager loop's own error, against float64, a plan can have
NUDGES = 2  # runs of the eager loop on nudged numbers. Where the cell cancels, one run can be near to float64 by luck.
# Inside, the cell reads its tensors in float64. Yields these by the ids of the originals.
Widened = Callable[[], AbstractContextManager[Mapping[int, Tensor]]]
_unwidened: Widened = partial(nullcontext, dict[int, Tensor]())
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Tolerance for float32 if PyTorch can round the factors of products to this precision.
ROUNDED_FACTORS = {"tf32": 2e-3, "bf16": TOLERANCE[torch.bfloat16]}


class PlanError(WeftError, RuntimeError):
    """The results of a plan are not those of its cell, so it must not be used."""


def verify(
    plan: Backend,
    cell: Cell,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    memory: Memory = "full",
    widened: Widened = _unwidened,
) -> None:
    """Compare the plan with the eager loop over the first steps of a sequence (inputs T x ..., T at least 1)."""
    # Forward and back; forward alone if gradients are off, as they were when the plan was made. Raises PlanError that
    # names every differing value, with the difference.
    for steps, every in TRIALS:
        trial = _Trial(plan, cell, [leaf[:steps] for leaf in inputs], states, every)
        # A number of bytes has no meaning for three steps. "states" runs every routine, including the recomputation.
        faults = trial.find_faults("states" if isinstance(memory, int) else memory, widened)
        if faults:
            raise PlanError(join_faults("a derived plan does not compute what its cell computes:", faults))


@dataclass(frozen=True)
class _Trial:
    plan: Backend
    cell: Cell
    inputs: Sequence[Tensor]
    states: Sequence[Tensor]
    every: bool

    def find_faults(self, memory: Memory, widened: Widened) -> list[str]:
        plan, inputs, states = self.plan, self.inputs, self.states
        device, parameters = inputs[0].device, plan.captured.parameters
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed = int(torch.randint(2**31, (1,)))
            torch.manual_seed(seed)  # both runs get the same random numbers
            random = draw_numbers(plan.captured.draws, len(inputs[0]), device)
            plan_leaves, loop_leaves = _new_leaves(plan, [*inputs, *random], states), _new_leaves(plan, inputs, states)
            by_plan = run_derived(plan, *plan_leaves, memory)
            torch.manual_seed(seed)
            by_loop = run_stepwise(plan.captured, self.cell, *loop_leaves)
        every = self.every
        if not by_plan.states:  # the policy does not keep all states, so they cannot be compared
            by_loop, every = replace(by_loop, states=[]), False
        expected = _values_and_gradients(parameters, by_loop, *loop_leaves, every)
        seen = _values_and_gradients(parameters, by_plan, *plan_leaves, every)
        rounded = rounded_factors(plan.captured, device.type)
        faults = {name: f for name, value in expected.items() if (f := difference(name, value, seen[name], rounded))}
        # Not for a cell that draws, because it would draw other numbers in float64.
        exact = self._exact_values(widened, every) if faults and not plan.captured.draws else {}
        samples = [expected, *(self._nudged_values(number, every) for number in range(NUDGES))] if exact else []
        near = [
            name
            for name in faults.keys() & exact.keys()
            if _is_near([values[name] for values in samples], seen[name], exact[name])
        ]
        return [fault for name, fault in faults.items() if name not in near]

    def _nudged_values(self, number: int, every: bool) -> dict[str, Tensor]:
        """The values of the eager loop on inputs and states that differ by a rounding."""
        signs = torch.Generator().manual_seed(number)

        def nudged(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            sign = torch.randint(2, leaf.shape, generator=signs).to(leaf.device) * 2 - 1
            return leaf + leaf * (torch.finfo(leaf.dtype).eps * sign)

        leaves = _new_leaves(self.plan, [*map(nudged, self.inputs)], [*map(nudged, self.states)])
        ends = run_stepwise(self.plan.captured, self.cell, *leaves)
        return _values_and_gradients(self.plan.captured.parameters, ends, *leaves, every)

    def _exact_values(self, widened: Widened, every: bool) -> dict[str, Tensor]:
        # The values of the eager loop in float64. Empty if the cell cannot run in float64.
        inputs, states = (
            [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]
            for leaves in (self.inputs, self.states)
        )
        try:
            with widened() as wide_tensors:
                leaves = _new_leaves(self.plan, inputs, states)
                parameters = [wide_tensors[id(parameter)] for parameter in self.plan.captured.parameters]
                ends = run_stepwise(self.plan.captured, self.cell, *leaves)
                return _values_and_gradients(parameters, ends, *leaves, every)
        except Exception:  # a user's cell that is bound to its dtype can raise anything
            return {}


def rounded_factors(captured: StepGraph, kind: str) -> float:
    """Tolerance for the step's products in float32 on this type of device, or 0 if their factors are not rounded."""
    # cuDNN's convolutions use TF32 by default. A step without a convolution must not get their tolerance.
    convolves = any("convolution" in str(node.target) for node in captured.nodes)
    backend, operators = "cuda" if kind == "cuda" else "mkldnn", ("matmul", "conv") if convolves else ("matmul",)
    return max(ROUNDED_FACTORS.get(float32_precision(backend, operator), 0.0) for operator in operators)


def _is_near(samples: Sequence[Tensor], seen: Tensor, exact: Tensor) -> bool:
    """Whether the plan's value is about as near to the exact one as those of the eager loop."""
    expected = samples[0]
    if (
        not can_have_gradient(expected)
        or not expected.shape == seen.shape == exact.shape
        or expected.dtype != seen.dtype
    ):
        return False
    *of_loop, of_plan = (float((value.double() - exact).abs().max()) for value in (*samples, seen))
    return of_plan <= max(NEAR * max(of_loop), _allowed_difference(expected, float(exact.abs().max())))


def _new_leaves(plan: Backend, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = zip(
        inputs, plan.captured.wanted_inputs, strict=False
    )  # random numbers come last, and only the plan has them
    leaves = [leaf.detach().clone().requires_grad_(wanted and can_have_gradient(leaf)) for leaf, wanted in pairs]
    return leaves, [state.detach().clone().requires_grad_(can_have_gradient(state)) for state in states]


def _values_and_gradients(
    parameters: Sequence[Tensor], ends: SequenceLeaves[Tensor], inputs: list[Tensor], states: list[Tensor], every: bool
) -> dict[str, Tensor]:
    """Outputs and states by name, and in grad mode all gradients, with zeros where there is none."""
    groups = {"input": inputs, "initial state": states, "parameter": parameters}
    sources = [(f"{role} {i}", tensor) for role, group in groups.items() for i, tensor in enumerate(group)]
    learned = [(name, tensor) for name, tensor in sources if tensor.requires_grad]
    read = ends if every else replace(ends, states=[])
    roots = [end for _, end in read.named() if end.requires_grad]
    values = {name: end.detach() for name, end in ends.named()}
    if not roots or not learned or not torch.is_grad_enabled():
        return values
    # Seeds that differ everywhere, so that swapped gradients do not pass as right.
    numbers = [torch.linspace(0.5, 1.5, root.numel(), device=root.device).view_as(root) for root in roots]
    seeds = [number.to(root.dtype) for number, root in zip(numbers, roots, strict=True)]
    leaves = [tensor for _, tensor in learned]
    with silence_hooks(parameters):
        gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True, materialize_grads=True)
    return values | {f"gradient of {name}": grad for (name, _), grad in zip(learned, gradients, strict=True)}


def difference(name: str, expected: Tensor, seen: Tensor, rounded: float = 0.0) -> str | None:
    """A description of the difference, or None if it is rounding. For `rounded` see `rounded_factors`."""
    if expected.shape != seen.shape or expected.dtype != seen.dtype:
        plan_form, cell_form = (f"{value.dtype} of shape {tuple(value.shape)}" for value in (seen, expected))
        return f"{name} is {plan_form}, the cell's is {cell_form}"
    if not can_have_gradient(expected):
        return None if torch.equal(expected, seen) else f"{name} differs"
    if not torch.equal(expected.isnan(), seen.isnan()):
        return f"{name} is NaN at other places"
    if not torch.equal(expected.isinf(), seen.isinf()):
        return f"{name} is infinite at other places"
    expected, seen = expected.nan_to_num(), seen.nan_to_num()
    gap, size = (float(value.abs().max()) if value.numel() else 0.0 for value in (seen - expected, expected))
    if gap <= _allowed_difference(expected, size, rounded):
        return None
    return f"{name} differs by {gap:.1e} at most (its largest value is {size:.1e})"


def _allowed_difference(expected: Tensor, size: float, rounded: float = 0.0) -> float:
    """The largest difference that is rounding, for values of this dtype, the largest of which is `size`."""
    kind = expected.device.type
    coarse = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else expected.dtype
    allowed = max(TOLERANCE.get(dtype, 1e-4) for dtype in (expected.dtype, coarse))
    allowed = max(allowed, rounded) if expected.dtype is torch.float32 else allowed
    # The second term is for values that cancel to nearly nothing. Their error is a few roundings of the summands.
    return allowed * size + ROUNDINGS * torch.finfo(coarse).eps
