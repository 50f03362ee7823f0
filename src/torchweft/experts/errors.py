"""Errors and warnings of experts, of the connections to them, and of their directories and checkpoints.

    WeftError
    ├── ExpertError ──┬── RefusedError       nothing ran, nothing changed
    │                 └── RemoteError        the other side failed, or did not answer
    ├── WireError                            bytes that are not a valid frame, or a call that cannot be encoded
    ├── DirectoryError                       a directory of experts cannot be read or changed
    └── CheckpointError                      it cannot be written, or none of the existing ones can be read

Errors of the user's own module keep their type in the process that runs it, with a note that names the expert and the
client. Most of these are the same class on both sides of a connection, see `weft.experts.wire.service`.
"""

from collections.abc import Mapping
from typing import ClassVar

from torchweft.core.errors import SpecError, UsageError, WeftError


class ExpertError(WeftError, RuntimeError):
    """A request to an expert failed. ``reason`` is one word for counting, inherited unless given."""

    reason: ClassVar[str] = "expert"

    def __init_subclass__(cls, *, reason: str = "") -> None:
        super().__init_subclass__()
        cls.reason = reason or cls.reason


class RefusedError(ExpertError, reason="refused"):
    """Rejected before anything ran."""


class TooManyRowsError(RefusedError, ValueError, reason="rows"):
    """One task has more rows than the largest batch: split it."""


class OverloadError(RefusedError, reason="overload"):
    """The queue is full: retry later, or use a replica."""


class QuotaError(RefusedError, reason="quota"):
    """This client has too many tasks or rows waiting at this expert: wait for its answers first."""


class ExpiredError(RefusedError, TimeoutError, reason="expired"):
    """The deadline passed while the task waited."""


class ClosedError(RefusedError, reason="closed"):
    """The pool accepts no more tasks: use another server."""


class ResultEvictedError(RefusedError, reason="evicted"):
    """The request of this key was applied, and its result is no longer stored."""


class KeyReusedError(RefusedError, ValueError, reason="reused"):
    """The key was used for a request with another payload: use a new one."""


class CommitError(RefusedError, reason="commit"):
    """The mini-batch to commit or to add to does not exist, or was committed before."""


class InputsGoneError(RefusedError, reason="inputs"):
    """A backward came without inputs, and those of its forward are no longer kept: send them."""


class GradientError(ExpertError, reason="gradient"):
    """A gradient is not finite or too large. Weights, buffers and optimizer are as before."""


class StepError(ExpertError, reason="step"):
    """The optimizer, its schedule or an overridden ``apply_gradients`` raised. The weights can have changed."""


class NotFiniteError(ExpertError, reason="finite"):
    """The expert's own weights hold NaN or infinity. The caller's tensors are not at fault."""


class ModuleExitError(ExpertError, reason="exit"):
    """The module raised ``SystemExit`` or ``KeyboardInterrupt``, which must not end the process that serves it."""


class DeviceLostError(ExpertError, reason="device"):
    """A GPU failed, and this process cannot use it any more."""


class RemoteError(ExpertError, reason="remote"):
    """The other side answered with an error or not at all. ``details`` are texts by name, such as an address."""

    def __init__(self, message: str, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, str] = dict(details or {})


class UnknownExpertError(RemoteError, reason="unknown"):
    """No expert has this name."""


class ForbiddenError(RemoteError, PermissionError, reason="forbidden"):
    """The caller's certificate, or its role, does not allow the call."""


class ExpertFailedError(RemoteError, reason="module"):
    """The expert's own module raised an exception, of the class ``details["type"]``."""


class DeadlineError(RemoteError, TimeoutError, reason="deadline"):
    """The deadline passed before the answer came. Whether the work was done is unknown."""


class LostError(RemoteError, ConnectionError, reason="lost"):
    """The connection ended before the answer came. Whether the work was done is unknown."""


class UnreachableError(RemoteError, ConnectionError, reason="unreachable"):
    """No connection could be made, so the request was never sent."""


class CertificateError(UnreachableError, reason="certificate"):
    """One end rejects the other's certificate. A retry would fail again."""


class DrainingError(RemoteError, reason="draining"):
    """The server is shutting down and accepts no new work."""


class NotOwnerError(RemoteError, reason="owner"):
    """Another server owns this expert, at ``details["address"]`` if known."""


class NoExpertsError(ExpertError, reason="nobody"):
    """No expert of the grid is alive."""


class TooFewAnswersError(ExpertError, TimeoutError, reason="answers"):
    """Some samples have too few answers. ``faults`` holds the errors by expert."""

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class AnomalyError(ExpertError, ArithmeticError, ValueError, reason="anomaly"):
    """NaN or Inf in the caller's tensors, with ``detect_anomalies``. Nothing was sent."""


class MixtureCommitError(CommitError):
    """Too few experts have their whole mini-batch, or stepped with it. ``faults`` holds the errors by expert."""

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class WireError(WeftError, ValueError):
    """An invalid frame. ``reason`` is one word for counting, ``call_id`` the call at fault if known."""

    def __init__(self, message: str, *, reason: str = "unspecified", call_id: int | None = None) -> None:
        super().__init__(message)
        self.reason, self.call_id = reason, call_id


class MalformedError(WireError):
    """Not this format, or a header that contradicts itself."""


class TruncatedError(WireError):
    """The bytes end before the length in their header, or continue after it."""


class LimitError(WireError):
    """The header describes more than the limits allow. Nothing was allocated for it."""


class DirectoryError(WeftError, RuntimeError):
    """A request to a directory failed."""


class DirectoryUnavailableError(DirectoryError, ConnectionError):
    """The directory does not answer, or was closed. The last snapshot is still used."""


class LeaseLostError(DirectoryError):
    """The lease expired before it was renewed, with all entries under it: declare them again."""


class ExpertOwnedError(DirectoryError):
    """Another server, at ``address``, owns this expert."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class AlreadyDeclaredError(DirectoryError):
    """Another server lists this expert, and neither declares it as a replica."""


class FencedError(DirectoryError):
    """This owner was replaced: stop writing."""


class CheckpointError(WeftError, RuntimeError):
    """A checkpoint cannot be written, or none of the existing ones can be read."""


class DamagedError(CheckpointError):
    """The content of a file has changed since it was written."""


class FormatError(CheckpointError):
    """The file is intact, but another version of torchweft wrote it in a format that this one cannot read."""


class StepsLostWarning(UserWarning):
    """A restarted server has fewer steps of an expert than before, so its weights are older, or new ones.

    To turn it into an error: ``warnings.simplefilter("error", StepsLostWarning)``.
    """

    def __init__(self, uid: str, before: int, after: int, server: str) -> None:
        super().__init__(
            f"expert {uid!r} went back from step {before} to step {after}: the server at {server} was restarted, or "
            "took the expert over, with an older state; the steps in between are lost"
        )
        self.uid, self.before, self.after, self.server = uid, before, after, server


def reason_of(error: BaseException) -> str:
    """One word for counting an error: its own ``reason``, ``spec``, ``usage``, or ``module`` for all others."""
    if isinstance(error, ExpertError):
        return error.reason
    if isinstance(error, SpecError):
        return "spec"
    return "usage" if isinstance(error, UsageError) else "module"
