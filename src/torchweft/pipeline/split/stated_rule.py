"""The comparison of a rule that the caller states for the numbers of micro-batches, such as a loss, with the model.

    loss_reduction="mean"     the number of all rows is the mean of those of micro-batches, by rows
    loss_reduction="sum"      it is their sum

With such a statement forward() runs on micro-batches to its end, so that a schedule can begin backward before all
forwards have ended. Whether the statement is true can depend on the data (a mask, a rare class), on the step (a ramp)
and on the mode. So it is compared with the model in values and gradients: in the steps 1, 2, 3, 10, 100, 1,000 and so
on of each kind of call.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from torchweft.core.errors import BatchError, join_faults
from torchweft.core.pytree import flatten, structure_paths, unflatten
from torchweft.pipeline.microbatch import SplitPlan
from torchweft.pipeline.split.compare import difference
from torchweft.pipeline.split.isolation import copies, undisturbed
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.recording import Recording

Reduction = Literal["mean", "sum"]


class Numbers(NamedTuple):
    """The numbers in the output of the model for some rows, and the gradients of their sum, both by name."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


class StatedRule:
    """The rule for one kind of call. `run` runs the model for some rows."""

    def __init__(self, model: str, reduction: Reduction, run: Callable[[Any], Numbers]) -> None:
        self._model, self._reduction, self._run = model, reduction, run
        self._steps = 0

    def check(self, plan: SplitPlan, leaves: Sequence[Any], pieces: Sequence[Sequence[Any]]) -> None:
        """Compare in the steps that are due. Raises BatchError that names the numbers which differ."""
        self._steps += 1
        power = self._steps
        while power % 10 == 0:
            power //= 10
        if self._steps not in (2, 3) and power != 1:
            return
        whole = self._run(unflatten(plan.structure, leaves))
        parts = [self._run(unflatten(plan.structure, piece)) for piece in pieces]
        total = sum(plan.sizes)
        weights = [rows / total if self._reduction == "mean" else 1.0 for rows in plan.sizes]
        faults = _differences(whole.values, [part.values for part in parts], weights)
        faults += [f"the gradient of {fault}" for fault in _differences(
            whole.gradients, [part.gradients for part in parts], weights)][:3]  # fmt: skip
        if faults:
            self._steps -= 1  # the next step compares again
            words = "their mean by rows" if self._reduction == "mean" else "their sum"
            headline = (
                f"loss_reduction={self._reduction!r} is stated, but the numbers that {self._model} returns for all "
                f"rows are not {words} over the micro-batches: labels or masks leave out unequal numbers, classes have "
                "weights, or the number is another function of all rows. Leave loss_reduction out, with "
                "schedule='gpipe': then the end of forward() runs on all rows, and any loss is exact. Or give "
                "num_items_in_batch= if the model divides a sum by it, with loss_reduction='sum'; or compute the loss "
                "with loss= and target=. If you want the numbers of micro-batches: verify=False:"
            )
            raise BatchError(join_faults(headline, faults))


def _differences(whole: dict[str, Tensor], parts: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> list[str]:
    faults: list[str] = []
    for name, value in whole.items():
        if not all(name in part for part in parts):
            faults.append(f"{name} is not in the output of every micro-batch")
            continue
        joined = torch.stack([part[name] * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
        # A number that is not finite says nothing. Autograd reports it in the step itself.
        if bool(value.isfinite().all()) and (fault := difference(value, joined)) is not None:
            faults.append(f"{name} differs {fault}")
    return faults


def run_for_numbers(recorder: ForwardRecorder, recording: Recording, call: Any) -> Numbers:
    """The numbers of the model for one call, with blocks in eval mode that do not compute a number themselves, because
    dropout differs from run to run, and a batch norm uses its batch."""
    leaves, structure = flatten(call)
    computes = {
        step.module
        for step in recording.steps
        if step.module is not None and any(value and value.form and not value.form.shape for value in step.makes)
    }
    kept = {inner for module in computes for inner in module.modules()}
    # Only modules that run as blocks. Open code can read the flags of others, such as that of a criterion.
    blocks = {inner: None for step in recording.steps if step.module is not None for inner in step.module.modules()}
    quiet = [m for m in blocks if m.training and m not in recorder.modules.open and m not in kept]
    tracked = torch.is_grad_enabled() and not recorder.watched
    with undisturbed(recorder.model, recorder.devices, recorder.modules.open), torch.set_grad_enabled(tracked):
        try:
            for module in quiet:  # not eval(), which a model can override, and which would reach open modules
                module.training = False
            result, nesting = flatten(recorder.plain(*unflatten(structure, copies(leaves))))
        finally:
            for module in quiet:
                module.training = True
        pairs = zip(structure_paths(nesting, "output"), result, strict=True)
        values = {k: x for k, x in pairs if isinstance(x, Tensor) and not x.dim() and x.is_floating_point()}
        roots = [x for x in values.values() if x.requires_grad]
        named = {name: p for name, p in recorder.model.named_parameters() if p.requires_grad}
        gradients: dict[str, Tensor] = {}
        if roots and named:
            total = torch.stack(roots).sum()
            found = cast("Sequence[Any]", torch.autograd.grad(total, list(named.values()), allow_unused=True))
            pairs = zip(named, found, named.values(), strict=True)
            gradients = {name: torch.zeros_like(p) if x is None else x for name, x, p in pairs}
    return Numbers({name: x.detach() for name, x in values.items()}, gradients)
