"""Errors and warnings of experts: what an expert answers, and what fails on the way to it.

    WeftError
    ├── ExpertError ──┬── RefusedError       nothing ran, nothing changed
    │                 └── RemoteError        an error on the way, or no answer
    ├── WireError                            bytes that are no frame, or a call that cannot become one
    ├── DirectoryError                       who serves what cannot be asked, or not be changed
    └── CheckpointError                      it cannot be written, or there are some and none can be read

A tensor that does not match the schema raises `SpecError`, as everywhere. Errors of the user's own module keep their
type in the process that runs it, with a note that names the expert and the client. Most of these are the same class
on both sides of a connection; `weft.experts.wire.service` has the number of each.
"""

from collections.abc import Mapping
from typing import ClassVar

from weft.core.errors import SpecError, UsageError, WeftError


class ExpertError(WeftError, RuntimeError):
    """An expert could not do what was asked. ``reason`` is one word for counting, inherited unless given."""

    reason: ClassVar[str] = "expert"

    def __init_subclass__(cls, *, reason: str = "") -> None:
        super().__init_subclass__()
        cls.reason = reason or cls.reason


class RefusedError(ExpertError, reason="refused"):
    """Refused before anything ran."""


class TooManyRowsError(RefusedError, ValueError, reason="rows"):
    """One task alone has more rows than a batch may have: send less."""


class OverloadError(RefusedError, reason="overload"):
    """The queue is full: retry later, or ask a replica."""


class QuotaError(RefusedError, reason="quota"):
    """This client has too many tasks or rows waiting at this expert: wait for own answers first."""


class ExpiredError(RefusedError, TimeoutError, reason="expired"):
    """The deadline passed while the task waited."""


class ClosedError(RefusedError, reason="closed"):
    """The pool takes no more tasks: ask elsewhere."""


class ResultEvictedError(RefusedError, reason="evicted"):
    """The request of this key was applied, and its result is no longer stored."""


class KeyReusedError(RefusedError, ValueError, reason="reused"):
    """The key was used for a request with another payload: use a new one."""


class CommitError(RefusedError, reason="commit"):
    """There is no such mini-batch to commit or to add to, or it was committed before."""


class InputsGoneError(RefusedError, reason="inputs"):
    """A backward came without its inputs, and those of its forward are not held any more: send them."""


class GradientError(ExpertError, reason="gradient"):
    """A gradient is not finite or too large; weights, buffers and optimizer are as before."""


class StepError(ExpertError, reason="step"):
    """The optimizer, its schedule or an overridden ``apply_gradients`` raised; the weights may have changed."""


class ModuleExitError(ExpertError, reason="exit"):
    """The module raised ``SystemExit`` or ``KeyboardInterrupt``, which must not end the process that serves it."""


class DeviceLostError(ExpertError, reason="device"):
    """A GPU failed such that the process cannot use it any more."""


class ReplayError(ExpertError, reason="replay"):
    """A log of batches does not fit the expert that it is replayed on."""


class RemoteError(ExpertError, reason="remote"):
    """The other side answered with an error or not at all. ``details`` are words by name, such as an address."""

    def __init__(self, message: str, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, str] = dict(details or {})


class UnknownExpertError(RemoteError, reason="unknown"):
    """There is no expert of this name."""


class ForbiddenError(RemoteError, PermissionError, reason="forbidden"):
    """The caller's certificate, or the role that it stands for, does not allow the call."""


class ExpertFailedError(RemoteError, reason="module"):
    """The expert's own module raised; ``details["type"]`` names the class of what it raised."""


class DeadlineError(RemoteError, TimeoutError, reason="deadline"):
    """The deadline passed before the answer came. Whether the work was done is not known."""


class LostError(RemoteError, ConnectionError, reason="lost"):
    """The connection ended before the answer came. Whether the work was done is not known."""


class UnreachableError(RemoteError, ConnectionError, reason="unreachable"):
    """There is no connection, and so the request never left."""


class CertificateError(UnreachableError, reason="certificate"):
    """No connection, since one end rejects the other's certificate. Asking again would not help."""


class DrainingError(RemoteError, reason="draining"):
    """The server is going away and takes no new work."""


class NotOwnerError(RemoteError, reason="owner"):
    """Another server owns this expert; ``details["address"]`` says which, where it is known."""


class NoExpertsError(ExpertError, reason="nobody"):
    """No expert of the grid lives."""


class TooFewAnswersError(ExpertError, TimeoutError, reason="answers"):
    """Samples without enough answers. ``faults`` says, by expert, what came instead."""

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class AnomalyError(ExpertError, ArithmeticError, ValueError, reason="anomaly"):
    """NaN or Inf in what the caller gave, with ``detect_anomalies``. Nothing was sent."""


class MixtureCommitError(CommitError):
    """Too few experts have their whole mini-batch, or stepped with it. ``faults`` says, by expert, what went wrong."""

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class WireError(WeftError, ValueError):
    """Bytes that are no valid frame. ``reason`` is one word for counting, ``call_id`` the call at fault if known."""

    def __init__(self, message: str, *, reason: str = "unspecified", call_id: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.call_id = call_id


class MalformedError(WireError):
    """Not this format, or a header that contradicts itself."""


class TruncatedError(WireError):
    """The bytes end before, or go on after, what their header says."""


class LimitError(WireError):
    """The header asks for more than the limits allow. Nothing was allocated for it."""


class DirectoryError(WeftError, RuntimeError):
    """A directory cannot do what was asked."""


class DirectoryUnavailableError(DirectoryError, ConnectionError):
    """The directory does not answer, or was closed; a snapshot still serves."""


class LeaseLostError(DirectoryError):
    """The lease ended before it was renewed, with all entries under it: declare again."""


class ExpertOwnedError(DirectoryError):
    """Another server, at ``address``, owns this expert."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class AlreadyDeclaredError(DirectoryError):
    """Another server lists this expert, and neither says that it has replicas."""


class FencedError(DirectoryError):
    """This owner was replaced: stop writing."""


class CheckpointError(WeftError, RuntimeError):
    """A checkpoint cannot be written, or there are checkpoints and none of them can be read."""


class DamagedError(CheckpointError):
    """A file is not what was once written into it."""


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
