"""Gradients on their way to the optimizer: guarded, and summed if a caller commits several backwards as one step.

One NaN in one client's gradient turns all weights of an expert into NaN, permanently and for all clients. So nothing is
applied unchecked: the gradients of a task's outputs, the batch's gradients of the parameters, and the running
statistics that it leaves. A norm that overflows its dtype counts as not finite, because Adam squares it too.

    backward(mini_batch="m")  ──+
    backward(mini_batch="m")  ──+──> one sum per (client, mini-batch) ── commit("m") ──> one optimizer step
    backward(mini_batch="m")  ──+

A sum takes as much memory as the parameters, so their number is limited, and each principal has a share. A sum is
dropped when nothing adds to it or commits it for a while, soon after the stream of its last gradient has ended, or when
its caller discards it. Its name cannot be reused then, because a commit would apply only a part of the mini-batch.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from torchweft.core.segment import GradientSum
from torchweft.core.validation import Validator, is_number
from torchweft.experts.errors import CommitError, GradientError, OverloadError, QuotaError
from torchweft.experts.graph_cache import strided_parts
from torchweft.experts.side_effects import TensorSnapshot
from torchweft.experts.task import CallerStream, Task


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


Owner = tuple[str | None, str]  # Client and name of the mini-batch


@dataclass(frozen=True)
class AccumulationOptions:
    """Bounds of the mini-batches that are open at a time.

    Args:
        mini_batches: number of open mini-batches of all clients.
        max_client_mini_batches: number that one principal can have open; None: three quarters of ``mini_batches``.
        seconds: a mini-batch is dropped after so long without a gradient or a commit.
        orphan_seconds: a mini-batch is dropped so long after the stream of its last gradient has ended. A client that
            reconnects and adds to it in time keeps it.

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
        return self.max_client_mini_batches or max(1, self.mini_batches * 3 // 4)


@dataclass
class GradientAccumulator:
    parameters: list[nn.Parameter]
    total: GradientSum
    principal: str | None
    touched: float = 0.0
    stream: CallerStream | None = None
    is_prepared: bool = False  # by the first phase of a commit

    def add(self, gradients: Sequence[Tensor | None], now: float, stream: CallerStream | None) -> None:
        self.total.add(gradients)
        self.touched, self.stream = now, stream

    def prepare(self, now: float) -> None:
        # Without its stream: the caller can reconnect before it commits, and other experts can have stepped by then.
        self.touched, self.stream, self.is_prepared = now, None, True

    def is_expired(self, now: float, options: AccumulationOptions) -> bool:
        ended_at = None if self.stream is None else self.stream.ended_at
        orphaned = ended_at is not None and ended_at <= now - options.orphan_seconds
        return orphaned or self.touched <= now - options.seconds


class GradientAccumulators(dict[Owner, GradientAccumulator]):
    """Open mini-batches of one expert by owner. Other owners raise `CommitError`. Guarded by the expert's lock."""

    def __init__(self, options: AccumulationOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options or AccumulationOptions()
        self._clock = clock
        self.discarded: dict[Owner, str | None] = {}  # with their principals

    @property
    def nbytes(self) -> int:
        # Copies of the lists, because statistics are read without the lock while a batch runs.
        totals = [total for accumulator in list(self.values()) for total in list(accumulator.total.totals)]
        return sum(part.nbytes for total in totals if total is not None for part in strided_parts(total))

    def check_room(self, owner: Owner, principal: str | None, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `OverloadError`, `QuotaError` or `CommitError` if gradients of these parameters cannot be added."""
        if owner in self:
            if self[owner].is_prepared:
                raise CommitError(f"mini-batch {owner[1]!r} is being committed, and takes no more gradients")
            # By identity: parameters compare element by element.
            if [*map(id, self[owner].parameters)] != [*map(id, parameters)]:
                raise CommitError(f"layers were frozen or unfrozen in mini-batch {owner[1]!r}; start a new one")
            return
        if len(self) >= self._options.mini_batches:
            raise OverloadError(
                f"{len(self)} mini-batches are open, and no more are allowed (mini_batches); commit or discard "
                f"one, or retry later. {self._describe_holders()}"
            )
        held = sum(accumulator.principal == principal for accumulator in self.values())
        if held >= self._options.client_share:
            raise QuotaError(
                f"client {principal!r} has {held} mini-batches open, and the limit for one client is "
                f"{self._options.client_share} (max_client_mini_batches); commit or discard one. "
                f"{self._describe_holders()}"
            )

    def add(self, task: Task, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        new = GradientAccumulator(list(parameters), GradientSum(len(parameters)), task.principal)
        self.setdefault(task.owner, new).add(gradients, self._clock(), task.stream)

    def prepare(self, owner: Owner) -> None:
        self[owner].prepare(self._clock())

    def is_prepared(self, owner: Owner) -> bool:
        one = self.get(owner)
        return one is not None and one.is_prepared

    def __missing__(self, owner: Owner) -> GradientAccumulator:
        raise CommitError(
            f"there is no open mini-batch {owner[1]!r} of client {owner[0]!r}: nothing was added to it, it was "
            "committed, or it was dropped because its connection ended or nothing was added for too long. Run it again"
        )

    def discard(self, owner: Owner, principal: str | None) -> None:
        # For any thread. The sum is dropped before the next batch, because the caller must not wait for a running one.
        self.discarded[owner] = principal

    def expired_owners(self) -> dict[Owner, str | None]:
        now = self._clock()
        # Emptied item by item, because other threads can add some at the same time.
        expired = dict(self.discarded.popitem() for _ in range(len(self.discarded)))
        return expired | {owner: one.principal for owner, one in self.items() if one.is_expired(now, self._options)}

    def _describe_holders(self) -> str:
        most = Counter(client for client, _ in self).most_common(5)
        idle = {client: self._clock() - one.touched for (client, _), one in reversed(self.items())}
        words = [f"client {client!r} has {count} (the oldest idle for {idle[client]:.0f} s)" for client, count in most]
        return ", ".join(words)
