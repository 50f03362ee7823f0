"""Guards against gradients that would spoil the weights.

One NaN in one client's gradient turns all weights of an expert into NaN, for everybody and for good. So nothing is
applied unchecked:

    gradients of the outputs     each task's own: finite, and no longer than ``max_output_norm``
    gradients of the parameters  the batch's: finite, and no longer than ``max_norm``
    running statistics           what the batch makes of them: finite, where they were

A gradient of the outputs belongs to one task. For those of the parameters the batch is taken apart; see
`weft.experts.executor`. A norm that overflows its dtype counts as not finite: the optimizer would square it too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from weft.core.validation import Validator, is_number
from weft.experts.errors import GradientError
from weft.experts.side_effects import TensorSnapshot


@dataclass(frozen=True)
class Guards:
    """Args:
    finite: refuse gradients that hold NaN or infinity, and batches that would put them into running statistics.
    max_output_norm: the largest L2 norm of one task's gradients of all outputs.
    max_norm: the largest L2 norm of the gradients of all parameters. A batch beyond it is taken apart, and tasks
        that alone are beyond it are refused. This is no clipping, which `ExpertBackend` has as well.

    Example:
        >>> rows, guards = (weft.TensorSpec((None, 8), torch.float32),), weft.experts.Guards(max_norm=1000.0)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, guards=guards)
    """

    finite: bool = True
    max_output_norm: float | None = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        with Validator("invalid guards of gradients") as check:
            for name, limit in {"max_output_norm": self.max_output_norm, "max_norm": self.max_norm}.items():
                valid = limit is None or (is_number(limit) and limit > 0)
                check.that(valid, f"{name} is {limit!r}, wanted a number above 0, or None")
            check.boolean("finite", self.finite)

    def sound_outputs(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the gradients of the outputs of a whole batch pass for sure. False: look at every task."""
        if self.max_output_norm is not None:
            return norm(gradients) <= self.max_output_norm  # then so is every part of it
        return not self.finite or math.isfinite(norm(gradients))

    def output_fault(self, gradients: Sequence[Tensor]) -> str | None:
        """What is wrong with the gradients of the outputs of one task, in words."""
        if self.finite and not all(map(_finite, gradients)):
            return "the gradients of its outputs hold NaN or infinity, wanted finite numbers"
        if self.max_output_norm is not None and not (length := norm(gradients)) <= self.max_output_norm:
            return f"the gradients of its outputs have norm {length:.6g}, wanted at most {self.max_output_norm:.6g}"
        return None

    def check_parameters(self, gradients: Sequence[Tensor]) -> None:
        """Raise `GradientError` if the gradients of the parameters must not be applied."""
        if not self.finite and self.max_norm is None:
            return
        length, most = norm(gradients), math.inf if self.max_norm is None else self.max_norm
        if not length <= most or (self.finite and not math.isfinite(length)):
            raise GradientError(
                f"the gradients of the parameters have norm {length:.6g}, wanted at most {most:.6g} and finite; "
                "nothing was changed. Look for NaN or huge numbers in inputs and gradients, or raise max_norm"
            )

    def check_own(self, before: TensorSnapshot, after: TensorSnapshot) -> None:
        """Raise `GradientError` if a batch has made NaN or infinity of what the module keeps: running statistics."""
        now = after.copies
        if not now or not self.finite or math.isfinite(norm(list(now.values()))):
            return
        sound = {place for place, copy in before.copies.items() if _finite(copy)}
        spoiled = {place[1]: None for place in now if place in sound and not _finite(now[place])}
        if spoiled:
            raise GradientError(
                f"{', '.join(spoiled)} of the module would hold NaN or infinity from then on; nothing "
                "was changed. Look for NaN, infinity or huge numbers in the inputs"
            )


def norm(gradients: Sequence[Tensor]) -> float:
    """The L2 norm of all of them together, of which only the values that a sparse one stores count."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    dense = [_wide(gradient) for gradient in dense if gradient.is_floating_point() or gradient.is_complex()]
    if all(gradient.is_cpu for gradient in dense):  # each norm is at hand, and the rest is faster without tensors
        return math.hypot(*[float(cast("Tensor", torch.linalg.vector_norm(gradient))) for gradient in dense])
    return float(torch.nn.utils.get_total_norm(dense))


def _finite(tensor: Tensor) -> bool:
    return bool(_wide(tensor).isfinite().all())


def _wide(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that has norms, which the floats of eight bits have not."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
