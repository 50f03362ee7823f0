"""What a mixture answers when it cannot go on.

ExpertError (RuntimeError)
├── NoExpertsError                      nobody in the directory stands in the grid
├── TooFewAnswersError (TimeoutError)   some samples have fewer answers than they need; says who failed, and how
├── AnomalyError (ValueError)           the caller's own numbers are not finite, and it asked to be told
└── CommitError
    └── MixtureCommitError              experts that did not step with their mini-batch; says which, and why

An expert that fails is no error by itself: its weight is zero.
"""

from collections.abc import Mapping
from typing import ClassVar

from weft.core.errors import listed
from weft.experts.client.retry import Retry
from weft.experts.errors import CommitError, ExpertError
from weft.experts.wire.errors import UnreachableError

MOST = 10  # faults that a message names; there may be as many as experts


class NoExpertsError(ExpertError):
    """No expert of the grid lives."""

    reason: ClassVar[str] = "nobody"


class TooFewAnswersError(ExpertError, TimeoutError):
    """Samples without enough answers. ``faults`` says, by expert, what came instead."""

    reason: ClassVar[str] = "answers"

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class AnomalyError(ExpertError, ArithmeticError, ValueError):
    """NaN or Inf in what the caller gave, with ``detect_anomalies``. Nothing was sent."""

    reason: ClassVar[str] = "anomaly"


class MixtureCommitError(CommitError):
    """Too few experts have their whole mini-batch, or stepped with it. ``faults`` says, by expert, what went wrong."""

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


def few_live(living: int, needed: int) -> TooFewAnswersError:
    """The error where every sample needs more answers than there are experts. Nobody was asked."""
    return TooFewAnswersError(
        f"forward of a mixture: every sample needs {needed} answers (k_min), but the directory knows only {living} "
        "living experts of the grid. Start more, need fewer (k_min), or let such samples be zero (allow_zero_outputs)."
    )


def too_few(
    what: str, samples: int, short: int, needed: int, faults: Mapping[str, BaseException], retry: Retry
) -> TooFewAnswersError:
    """The error for ``short`` of ``samples`` that have fewer than ``needed`` answers, asked for by this rule."""
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in list(faults.items())[:MOST]]
    lines += [f"and {len(faults) - MOST} more"] * (len(faults) > MOST)
    head = (
        f"{what}: {short} of {samples} samples have fewer than {needed} answers. Wait longer, ask more experts "
        "(k_best), need fewer (k_min), or let such samples be zero (allow_zero_outputs)."
    )
    if any(isinstance(error, CommitError) for error in faults.values()):
        head += " Where a mini-batch has ended, as by a commit that was interrupted, discard() begins a new one."
    away = bool(faults) and all(isinstance(error, UnreachableError) for error in faults.values())
    if away and retry.attempts is not None:
        head += " Where servers are being started again, retry=Retry() waits for them, until the timeout of the call."
    return TooFewAnswersError(listed(f"{head} Who failed:", lines) if lines else head, faults)
