"""Gradients on their way to the optimizer: guarded, and summed where a caller commits several backwards as one step.

One NaN in one client's gradient turns all weights of an expert into NaN, for everybody and for good. So none is applied
unchecked: neither those of a task's outputs, nor those that a batch has for the parameters, nor what it makes of
running statistics. A norm that overflows its dtype counts as not finite: the optimizer would square it too.

    backward(mini_batch="m")  ──+
    backward(mini_batch="m")  ──+──> one sum per (client, mini-batch) ── commit("m") ──> one optimizer step
    backward(mini_batch="m")  ──+

A sum takes as much memory as the parameters, so there are few of them, and each principal has a share. One is dropped
when nothing adds to it or commits it for a while, soon after the stream that it was last added to by has ended, or when
its caller discards it. Its name is not begun anew then: a commit would apply a part of a mini-batch.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from weft.core.segment import GradientSum
from weft.core.validation import Validator, is_number
from weft.experts.errors import CommitError, GradientError, OverloadError, QuotaError
from weft.experts.side_effects import TensorSnapshot
from weft.experts.task import CallerStream, Task
from weft.experts.tensors import tensor_bytes


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


Owner = tuple[str | None, str]
"""Client and name of the mini-batch."""


@dataclass(frozen=True)
class AccumulationOptions:
    """Bounds of the mini-batches that are open at a time.

    Args:
        mini_batches: number of open mini-batches of all clients.
        max_client_mini_batches: number that one principal may have open; None: three quarters of ``mini_batches``.
        seconds: without a gradient or a commit, after which a mini-batch is dropped.
        orphan_seconds: after the end of the stream by which its last gradient came, after which it is dropped. A
            client that connects again and adds to it in time keeps it.

    Example:
        >>> rows, sums = (weft.TensorSpec((None, 8), torch.float32),), weft.experts.AccumulationOptions(mini_batches=4)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, mini_batches=sums)
    """

    mini_batches: int = 16
    max_client_mini_batches: int | None = None
    seconds: float = 600.0
    orphan_seconds: float = 30.0

    def __post_init__(self) -> None:
        with Validator("invalid options of open mini-batches") as check:
            check.count("mini_batches", self.mini_batches)
            check.count("max_client_mini_batches", self.max_client_mini_batches, optional=True)
            check.seconds("seconds", self.seconds)
            check.seconds("orphan_seconds", self.orphan_seconds, zero=True)

    @property
    def client_share(self) -> int:
        """The number of mini-batches that one principal may have open."""
        return self.max_client_mini_batches or max(1, self.mini_batches * 3 // 4)


@dataclass
class GradientAccumulator:
    """The gradients of these parameters so far."""

    parameters: list[nn.Parameter]
    total: GradientSum
    terms: int = 0
    touched: float = 0.0
    principal: str | None = None
    stream: CallerStream | None = None  # by which the last gradient came


class GradientAccumulators(dict[Owner, GradientAccumulator]):
    """The open mini-batches of one expert by owner; others raise `CommitError`. Guarded by the expert's lock."""

    def __init__(self, options: AccumulationOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options or AccumulationOptions()
        self._clock = clock
        self.discarded: dict[Owner, str | None] = {}  # with their principals, of any thread; `old` returns each once

    @property
    def nbytes(self) -> int:
        """The memory of all sums."""
        # Of copies: the statistics of a busy expert ask beside its batch.
        totals = [t for one in list(self.values()) for t in list(one.total.totals)]
        return sum(tensor_bytes(t) for t in totals if t is not None)

    def check(self, owner: Owner, principal: str | None, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `OverloadError`, `QuotaError` or `CommitError` if gradients of these parameters cannot be added."""
        if owner in self:
            if [*map(id, self[owner].parameters)] != [*map(id, parameters)]:
                raise CommitError(
                    f"layers were frozen or freed while mini-batch {owner[1]!r} was open; begin a new one"
                )
            return
        if len(self) >= self._options.mini_batches:
            raise OverloadError(
                f"{len(self)} mini-batches are open, and no more are allowed (mini_batches); commit or discard "
                f"one, or come back later. {self._holders()}"
            )
        own = sum(each.principal == principal for each in self.values())
        if own >= self._options.client_share:
            raise QuotaError(
                f"client {principal!r} has {own} mini-batches open, and one client may have "
                f"{self._options.client_share} (max_client_mini_batches); commit or discard one. {self._holders()}"
            )

    def add(self, task: Task, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, in private memory, to the sum of a task that was checked."""
        new = GradientAccumulator(list(parameters), GradientSum(len(parameters)), principal=task.principal)
        one = self.setdefault(task.owner, new)
        one.total.add(gradients)
        one.terms += 1
        one.touched, one.stream = self._clock(), task.stream

    def __missing__(self, owner: Owner) -> GradientAccumulator:
        raise CommitError(
            f"there is no open mini-batch {owner[1]!r} of client {owner[0]!r}: nothing was added to it, or it was "
            "committed or dropped: its connection had ended, or nothing came for too long. Run it again"
        )

    def old(self) -> dict[Owner, str | None]:
        """The sums that are to be dropped, with their principals: discarded, untouched for too long, or orphaned."""
        now = self._clock()
        found = dict(self.discarded.popitem() for _ in range(len(self.discarded)))
        for owner, one in self.items():
            ended_at = None if one.stream is None else one.stream.ended_at
            orphaned = ended_at is not None and ended_at <= now - self._options.orphan_seconds
            if orphaned or one.touched <= now - self._options.seconds:
                found[owner] = one.principal
        return found

    def _holders(self) -> str:
        """Whose mini-batches are open, in words."""
        held = Counter(client for client, _ in self).most_common(5)
        idle = {client: self._clock() - one.touched for (client, _), one in reversed(self.items())}
        told = [f"client {client!r} has {count} (the oldest idle for {idle[client]:.0f} s)" for client, count in held]
        return ", ".join(told)
