"""Every error that an expert answers with, so that who asked can tell what to do next.

    WeftError
    └── ExpertError (RuntimeError)
        ├── RefusedError                     nothing ran, nothing changed
        │   ├── TooManyRowsError (ValueError)    one task alone is larger than the largest batch: send less
        │   ├── OverloadError                    the queue is full: come back later, or ask a replica
        │   ├── QuotaError                       this client has too much waiting: wait for own answers first
        │   ├── ExpiredError (TimeoutError)      the deadline passed before its turn came
        │   ├── ClosedError                      the pool takes no more tasks: ask elsewhere
        │   ├── ResultEvictedError               this key was applied already, but its result is no longer stored
        │   ├── KeyReusedError (ValueError)      this key was used with another payload: use a new one
        │   ├── CommitError                      the mini-batch is not there, or was committed before
        │   └── InputsGoneError                  the inputs of a backward that came without them are not here: send them
        ├── GradientError                    a gradient is not finite or too large; the weights are as before
        ├── StepError                        the optimizer itself raised; the weights may have changed
        ├── ModuleExitError                  the module tried to end the process
        └── ReplayError                      a log does not fit the expert that it is replayed on

    UserWarning
    └── StepsLostWarning                 a server came back with older weights than the client had heard of

A tensor that does not look as the schema says is a ``SpecError``, as everywhere. Errors of the user's own module
are never wrapped: they keep their type and get a note that names the expert and the client.
`reason_of` gives the short word under which statistics count an error.

The errors of wire/, directory/, checkpoint/ and mixture/ can be imported from here as well. They are loaded when they
are first touched, since all but those of a directory need the extra ``experts``.
"""

from typing import TYPE_CHECKING, ClassVar

from weft.core.errors import SpecError, UsageError, WeftError
from weft.core.lazy import attributes

if TYPE_CHECKING:
    from weft.experts.checkpoint.errors import CheckpointError, DamagedError, TornError
    from weft.experts.directory.errors import (
        AwayError,
        DeclaredError,
        DirectoryError,
        FencedError,
        LeaseLostError,
        OwnedError,
        WatchLostError,
    )
    from weft.experts.mixture.errors import AnomalyError, MixtureCommitError, NoExpertsError, TooFewAnswersError
    from weft.experts.wire.errors import (
        CertificateError,
        DeadlineError,
        DrainingError,
        ExpertFailedError,
        ForbiddenError,
        LimitError,
        LostError,
        MalformedError,
        NotOwnerError,
        RemoteError,
        TruncatedError,
        UnknownExpertError,
        UnreachableError,
        WireError,
    )
else:
    __getattr__, __dir__ = attributes(
        __name__,
        {
            "weft.experts.checkpoint.errors": ("CheckpointError", "DamagedError", "TornError"),
            "weft.experts.directory.errors": (
                *("AwayError", "DeclaredError", "DirectoryError", "FencedError", "LeaseLostError", "OwnedError"),
                "WatchLostError",
            ),
            "weft.experts.mixture.errors": (
                *("AnomalyError", "MixtureCommitError", "NoExpertsError", "TooFewAnswersError"),
            ),
            "weft.experts.wire.errors": (
                "CertificateError",
                *("DeadlineError", "DrainingError", "ExpertFailedError", "ForbiddenError", "LimitError", "LostError"),
                *("MalformedError", "NotOwnerError", "RemoteError", "TruncatedError", "UnknownExpertError"),
                *("UnreachableError", "WireError"),
            ),
        },
    )

__all__ = [
    "AnomalyError",
    "AwayError",
    "CertificateError",
    "CheckpointError",
    "ClosedError",
    "CommitError",
    "DamagedError",
    "DeadlineError",
    "DeclaredError",
    "DirectoryError",
    "DrainingError",
    "ExpertError",
    "ExpertFailedError",
    "ExpiredError",
    "FencedError",
    "ForbiddenError",
    "GradientError",
    "InputsGoneError",
    "KeyReusedError",
    "LeaseLostError",
    "LimitError",
    "LostError",
    "MalformedError",
    "MixtureCommitError",
    "ModuleExitError",
    "NoExpertsError",
    "NotOwnerError",
    "OverloadError",
    "OwnedError",
    "QuotaError",
    "RefusedError",
    "RemoteError",
    "ReplayError",
    "ResultEvictedError",
    "StepError",
    "StepsLostWarning",
    "TooFewAnswersError",
    "TooManyRowsError",
    "TornError",
    "TruncatedError",
    "UnknownExpertError",
    "UnreachableError",
    "WatchLostError",
    "WireError",
]


class ExpertError(WeftError, RuntimeError):
    """An expert could not do what was asked."""

    reason: ClassVar[str] = "expert"


class RefusedError(ExpertError):
    """Refused before anything ran."""

    reason: ClassVar[str] = "refused"


class TooManyRowsError(RefusedError, ValueError):
    """One task alone has more rows than a batch may have."""

    reason: ClassVar[str] = "rows"


class OverloadError(RefusedError):
    """The queue is full."""

    reason: ClassVar[str] = "overload"


class QuotaError(RefusedError):
    """This client has too many tasks or rows waiting at this expert."""

    reason: ClassVar[str] = "quota"


class ExpiredError(RefusedError, TimeoutError):
    """The deadline passed while the task waited."""

    reason: ClassVar[str] = "expired"


class ClosedError(RefusedError):
    """The pool takes no more tasks."""

    reason: ClassVar[str] = "closed"


class ResultEvictedError(RefusedError):
    """The request of this key was applied, and its result is no longer stored."""

    reason: ClassVar[str] = "evicted"


class KeyReusedError(RefusedError, ValueError):
    """The key was used for a request with another payload."""

    reason: ClassVar[str] = "reused"


class CommitError(RefusedError):
    """There is no such mini-batch to commit, or to add to."""

    reason: ClassVar[str] = "commit"


class InputsGoneError(RefusedError):
    """A backward came without its inputs, and those of its forward are not held any more."""

    reason: ClassVar[str] = "inputs"


class GradientError(ExpertError):
    """A gradient is not finite or too large; weights, buffers and optimizer are as before."""

    reason: ClassVar[str] = "gradient"


class StepError(ExpertError):
    """The optimizer, its schedule or an overridden ``apply_gradients`` raised."""

    reason: ClassVar[str] = "step"


class ModuleExitError(ExpertError):
    """The module raised ``SystemExit`` or ``KeyboardInterrupt``, which must not end the process that serves it."""

    reason: ClassVar[str] = "exit"


class ReplayError(ExpertError):
    """A log of batches does not fit the expert that it is replayed on."""

    reason: ClassVar[str] = "replay"


class StepsLostWarning(UserWarning):
    """A server came back with fewer steps of an expert than its client had heard of: older weights, or fresh ones.

    To have it raised: ``warnings.simplefilter("error", StepsLostWarning)``.
    """

    def __init__(self, uid: str, before: int, after: int, server: str) -> None:
        super().__init__(
            f"expert {uid!r} went back from step {before} to step {after}: the server at {server} was started again, "
            "or took the expert over, with an older state; what it had learned in between is lost"
        )
        self.uid, self.before, self.after, self.server = uid, before, after, server


def reason_of(error: BaseException) -> str:
    """One short word for an error, for counting: those above, ``spec``, ``usage``, or ``module`` for all others."""
    if isinstance(error, ExpertError):
        return error.reason
    if isinstance(error, SpecError):
        return "spec"
    return "usage" if isinstance(error, UsageError) else "module"
