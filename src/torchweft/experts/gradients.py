"""Gradients on their way into the weights: guarded, in memory of their own, applied, and the weights checked.

One NaN in one client's gradient turns all weights of an expert into NaN, permanently and for all clients. So nothing is
applied unchecked: the gradients of a task's outputs, the batch's gradients of the parameters, and the running
statistics that it leaves. A norm that overflows its dtype counts as not finite, because Adam squares it too.

gradients ── guards ── private ──> .grad ── hooks ── apply_gradients ──> weights, steps + 1
                                          '────────raises──> StepError         .grad is empty before and after, always

``loss.backward()`` copies gradients where needed before it puts them into ``.grad``. `torch.autograd.grad`, which does
not touch ``.grad``, does not copy:

    y = x @ (a + b)                  one gradient tensor for both a and b
    y = (x + p) * 2, one row         the gradient of p is also the answer to the client
    y = x + p.sum()                  one number, expanded: its strides are 0
    y = x @ torch.cat([q, k], 1)     the gradients of q and k are columns of one matrix

Clipping would scale the first one twice, and the client's answer. Fused steps walk raw memory, and would run past the
end of the others. Gradients that fit are not copied: on the CPU, copying all of them takes as long as the step.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchweft.core.validation import Validator, is_number
from torchweft.experts.errors import GradientError, StepError
from torchweft.experts.side_effects import TensorSnapshot


@dataclass(frozen=True)
class Guards:
    """Limits for gradients. Tasks beyond them are rejected and not clipped, which `ExpertBackend` can do as well.

    Args:
        finite: reject gradients that hold NaN or infinity, and batches that would put them into running statistics.
        max_output_norm: the largest L2 norm of one task's gradients of all outputs.
        max_norm: the largest L2 norm of the gradients of all parameters. A batch beyond it is split, and tasks that
            are beyond it alone are rejected.

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
                check.require(valid, f"{name} is {limit!r}, wanted a number above 0, or None")
            check.boolean("finite", self.finite)

    def accept_outputs(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the output gradients of all tasks of a batch certainly pass. False: check every task."""
        # The norm of the whole batch bounds that of each task, and one reduction is cheaper than one per task.
        if self.max_output_norm is not None:
            return norm(gradients) <= self.max_output_norm
        return not self.finite or math.isfinite(norm(gradients))

    def output_fault(self, gradients: Sequence[Tensor]) -> str | None:
        if self.finite and not all(map(_is_finite, gradients)):
            return "the gradients of its outputs hold NaN or infinity, wanted finite numbers"
        if self.max_output_norm is not None and not (length := norm(gradients)) <= self.max_output_norm:
            return f"the gradients of its outputs have norm {length:.6g}, wanted at most {self.max_output_norm:.6g}"
        return None

    def check_parameters(self, gradients: Sequence[Tensor]) -> None:
        if not self.finite and self.max_norm is None:
            return
        length, most = norm(gradients), math.inf if self.max_norm is None else self.max_norm
        if not length <= most or (self.finite and not math.isfinite(length)):  # NaN fails every comparison
            limit, advice = "a finite one", ""
            if self.max_norm is not None:
                limit = f"at most {most:.6g}" + (" and finite" if self.finite else "")
                advice = ", or raise max_norm" if math.isfinite(length) else ""
            raise GradientError(
                f"the gradients of the parameters have norm {length:.6g}, wanted {limit}; nothing was changed. Look "
                f"for NaN or huge numbers in inputs and gradients{advice}"
            )

    def check_buffers(self, before: TensorSnapshot, after: TensorSnapshot) -> None:
        """Raise `GradientError` if a batch put NaN or infinity into the module's own tensors: running statistics."""
        now = after.copies
        if not now or not self.finite or math.isfinite(norm(list(now.values()))):
            return
        # Tensors that were not finite before are not this batch's fault, and must not block all later batches.
        sound = {slot for slot, copy in before.copies.items() if _is_finite(copy)}
        spoiled = {slot[1]: None for slot in now if slot in sound and not _is_finite(now[slot])}
        if spoiled:
            raise GradientError(
                f"{', '.join(spoiled)} of the module would hold NaN or infinity from then on; nothing "
                "was changed. Look for NaN, infinity or huge numbers in the inputs"
            )


def norm(gradients: Sequence[Tensor]) -> float:
    """The L2 norm of all of them together. Of a sparse one, only the stored values count."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    dense = [_with_norm(gradient) for gradient in dense if gradient.is_floating_point() or gradient.is_complex()]
    # On the CPU each norm is a Python number at once, and `hypot` is faster than further tensors. On a GPU every
    # `float` waits for the device, so there is only one.
    if all(gradient.is_cpu for gradient in dense):
        return math.hypot(*[float(cast("Tensor", torch.linalg.vector_norm(gradient))) for gradient in dense])
    return float(torch.nn.utils.get_total_norm(dense))


def _is_finite(tensor: Tensor) -> bool:
    return bool(_with_norm(tensor).isfinite().all())


def _with_norm(tensor: Tensor) -> Tensor:
    # PyTorch has no norms for floats of eight bits.
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


_REST = 50.0  # a check after a step follows a rest of so many times its duration, so that steps take 2% longer at most


class WeightCheck:
    """Check that steps leave no NaN or infinity in the parameters of a module. Guarded by the expert's lock.

    Guards keep such gradients out, but an optimizer can make weights infinite, such as by a learning rate of 1e38. Then
    ``fault`` says so, and the expert answers every call with `NotFiniteError`, until a sound state is loaded.
    """

    def __init__(self, name: str, module: nn.Module, *, enabled: bool) -> None:
        self.fault: str | None = None
        self._name, self._module, self._enabled = name, module, enabled
        self._exempt: set[str] = set()  # parameters that are not finite by intention
        self._next = 0.0
        if enabled:
            self.accept()

    def accept(self) -> None:
        """Take the present parameters as they are, such as those of a new module."""
        self._exempt, self.fault, self._next = set(), None, 0.0
        self._exempt = {name for name, parameter in self._module.named_parameters() if not _is_finite(parameter)}

    def after_load(self) -> None:
        self.fault, self._next = None, 0.0
        self.check("after its state was loaded")

    def after_step(self, step: int) -> None:
        begin = time.monotonic()
        if begin >= self._next:
            self.check(f"after step {step}")
            end = time.monotonic()
            self._next = end + _REST * (end - begin)

    def check(self, when: str) -> None:
        if self.fault is not None or not self._enabled:
            return
        named = [(name, p.detach()) for name, p in self._module.named_parameters() if name not in self._exempt]
        # One norm first, because it is cheap. A sum of large finite numbers can also overflow.
        names = [] if math.isfinite(norm([p for _, p in named])) else [name for name, p in named if not _is_finite(p)]
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            self.fault = (
                f"{shown} of expert {self._name!r} hold NaN or infinity, seen {when}. No client is at fault: see its "
                "optimizer, the learning rate first. Nothing is served or saved until a sound checkpoint is loaded: "
                "by `torchweft rollback`, or by a restart of the server, which loads the newest one"
            )


def private_gradients(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], shared_storages: set[int]
) -> list[Tensor | None]:
    seen, private = set(shared_storages), list[Tensor | None]()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.clone()
        elif gradient is not None:
            address = gradient.untyped_storage().data_ptr()
            gradient = match_layout(parameter, gradient, copy=address in seen)
            seen.add(address)
        private.append(gradient)
    return private


def match_layout(parameter: Tensor, tensor: Tensor, *, copy: bool = False) -> Tensor:
    if not copy and has_same_layout(parameter, tensor):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def has_same_layout(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether a kernel that walks both memories from end to end meets the same elements, and all of them."""
    if parameter.is_contiguous():
        return gradient.is_contiguous()
    dense = torch.empty_like(parameter, device="meta")  # the layout of optimizer states
    return gradient.stride() == dense.stride()


def unfuse_on_demand(optimizer: Optimizer) -> None:
    # A fused step is one kernel over all parameters, and takes a tenth of the time. But PyTorch rejects sparse
    # gradients, and parameters of which only some have momentum, within the step, when some weights have changed
    # already.
    def before_step(*_: object) -> None:
        for group in optimizer.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None] if group.get("fused") else []
            without_momentum = {optimizer.state.get(p, {}).get("momentum_buffer") is None for p in stepped}
            mixed = group.get("momentum") and len(without_momentum) == 2
            if mixed or any([p.grad.is_sparse for p in stepped]):
                for other in optimizer.param_groups:
                    other["fused"] = None

    optimizer.register_step_pre_hook(before_step)


class OptimizerStep:
    """Steps of one expert and their counts. Guarded by the expert's lock."""

    def __init__(self, name: str, apply: Callable[[], None] | None) -> None:
        self.steps = self.backward_batches = 0
        self.changes = 0  # of hyperparameters, by an administrator
        self.trains = apply is not None
        self._name, self._apply = name, apply

    def step(
        self,
        every: Sequence[nn.Parameter],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        shared_storages: set[int],
        *,
        backward: bool = False,
    ) -> None:
        """One optimizer step. Raises `StepError`, and does not count it, if the optimizer or a hook raises."""
        # ``every`` parameter of the module, because frozen ones can hold a gradient too. ``shared_storages`` are
        # addresses of memory that must not be written to: others continue to use it. The optimizer can hold parameters
        # that are frozen now. A gradient that was left on them would be applied.
        for parameter in every:
            parameter.grad = None
        try:
            private = private_gradients(parameters, gradients, shared_storages)
            for parameter, gradient in zip(parameters, private, strict=True):
                parameter.grad = gradient
                # Autograd calls these hooks only where it accumulates into ``.grad`` itself.
                if gradient is not None and parameter._post_accumulate_grad_hooks:
                    hooks: Any = parameter._post_accumulate_grad_hooks
                    with torch.no_grad():
                        for hook in list(hooks.values()):
                            hook(parameter)
            if self._apply is not None:
                self._apply()
        except Exception as error:
            raise StepError(
                f"applying the gradients of expert {self._name!r} raised {type(error).__name__}: {error}. Some weights "
                "may have changed; load a checkpoint"
            ) from error
        finally:
            for parameter in every:
                parameter.grad = None
            self.backward_batches += backward
        self.steps += 1

    def count_backward(self) -> None:
        self.backward_batches += 1

    def count_change(self) -> None:
        self.changes += 1

    @property
    def revision(self) -> int:
        """A number that grows with every change of the expert's state, such as gradients without a step."""
        return self.backward_batches + self.changes

    def resume_from(self, steps: int, batches: int, changes: int) -> None:
        self.steps, self.backward_batches, self.changes = steps, batches, changes
