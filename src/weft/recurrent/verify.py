"""The check before a plan is first used: a few steps by the plan and by the eager loop, forward and back.

It catches faults of the analysis, and of PyTorch's tracing, before they train a model silently wrong. Values are
compared in units of what the cell itself computes: the largest difference against the largest value, within what the
dtype can hold.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.core.autograd import quiet_hooks
from weft.core.errors import WeftError, listed
from weft.core.segment import differentiable
from weft.recurrent.autograd import SequenceLeaves, run_derived, stepwise
from weft.recurrent.backends import Backend, Memory
from weft.recurrent.capture import Cell
from weft.recurrent.graph import drawn

TRIALS = ((3, True), (1, False))
"""Steps, and whether gradients come to the states after all of them too, or only to what most losses read. Gradients of
states make a new tensor at every step; without them, and in a single one, what is carried stays the very tensor."""
ROUNDINGS = 256
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class PlanError(WeftError, RuntimeError):
    """A plan does not compute what its cell computes; it must not be used."""


def verify(
    plan: Backend, cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor], memory: Memory = "full"
) -> None:
    """Compare the plan with the eager loop over the first steps of a sequence (inputs T x ..., T at least 1).

    Forward and back; forward alone where gradients are off, as they were when the plan was made.

    Raises PlanError that names every value which differs, with the difference.
    """
    for steps, every in TRIALS:
        faults = _faults(plan, cell, [each[:steps] for each in inputs], states, memory, every)
        if faults:
            raise PlanError(listed("a derived plan does not compute what its cell computes:", faults))


def _faults(
    plan: Backend, cell: Cell, short: Sequence[Tensor], states: Sequence[Tensor], memory: Memory, every: bool
) -> list[str]:
    way = "states" if isinstance(memory, int) else memory  # it makes use of every routine
    device = short[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed = int(torch.randint(2**31, (1,)))
        torch.manual_seed(seed)  # what the cell draws, drawn for both alike
        random = drawn(plan.captured.draws, len(short[0]), device)
        ours, theirs = _leaves(plan, [*short, *random], states), _leaves(plan, short, states)
        derived = run_derived(plan, *ours, way)
        torch.manual_seed(seed)
        eager = stepwise(plan.captured, cell, *theirs)
    if not derived.states:  # not all are kept, so none is there to be compared
        eager.states.clear()
    pairs = zip(_values(plan, eager, *theirs, every), _values(plan, derived, *ours, every), strict=True)
    return [fault for (name, wanted), (_, seen) in pairs if (fault := _difference(name, wanted, seen))]


def _leaves(plan: Backend, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    asked = zip(inputs, plan.captured.wanted_inputs, strict=False)  # draws come last, and the loop has none
    one = [each.detach().clone().requires_grad_(wanted and differentiable(each)) for each, wanted in asked]
    return one, [each.detach().clone().requires_grad_(differentiable(each)) for each in states]


def _values(
    plan: Backend, ends: SequenceLeaves[Tensor], inputs: list[Tensor], states: list[Tensor], every: bool
) -> list[tuple[str, Tensor]]:
    """Outputs and states, and, where gradients are on, those of everything, each with its name; zeros for none."""
    parameters, named = plan.captured.parameters, ends.named()
    parts = {"input": inputs, "initial state": states, "parameter": parameters}
    sources = [(f"{what} {i}", each) for what, part in parts.items() for i, each in enumerate(part)]
    asked = [(name, each) for name, each in sources if each.requires_grad]
    read = ends if every else replace(ends, states=[])
    roots = [end for _, end in read.named() if end.requires_grad]
    found = [(name, end.detach()) for name, end in named]
    if not roots or not asked or not torch.is_grad_enabled():
        return found
    seeds = [
        torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype, device=each.device).view_as(each) for each in roots
    ]
    leaves = [each for _, each in asked]
    with quiet_hooks(parameters):
        gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True, materialize_grads=True)
    return found + [(f"gradient of {name}", each) for (name, _), each in zip(asked, gradients, strict=True)]


def _difference(name: str, wanted: Tensor, seen: Tensor) -> str | None:
    """A description of the difference; None if it is rounding."""
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
    # What cancels to nearly nothing is as wrong as the sums that it is the difference of: a few units of rounding.
    kind = wanted.device.type
    coarse = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else wanted.dtype
    allowed = max(TOLERANCE.get(each, 1e-4) for each in (wanted.dtype, coarse))
    if gap <= allowed * size + ROUNDINGS * torch.finfo(coarse).eps:
        return None
    return f"{name} differs by {gap:.1e} at most (its largest value is {size:.1e})"
