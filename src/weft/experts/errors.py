"""Errors and warnings of experts: what an expert answers, and what fails on the way to it.

    WeftError
    ├── ExpertError (RuntimeError)
    │   ├── RefusedError                     nothing ran, nothing changed
    │   │   ├── TooManyRowsError (ValueError)    one task alone is larger than the largest batch: send less
    │   │   ├── OverloadError                    the queue is full: retry later, or ask a replica
    │   │   ├── QuotaError                       too much of this client waits: wait for own answers first
    │   │   ├── ExpiredError (TimeoutError)      the deadline passed while the task was queued
    │   │   ├── ClosedError                      the pool takes no more tasks: ask elsewhere
    │   │   ├── ResultEvictedError               this key was applied already, but its result is no longer stored
    │   │   ├── KeyReusedError (ValueError)      this key was used with another payload: use a new one
    │   │   ├── CommitError                      the mini-batch does not exist, or was committed before
    │   │   │   └── MixtureCommitError               experts that did not step with their mini-batch, and why
    │   │   └── InputsGoneError                  a backward came without inputs that are no longer stored: send them
    │   ├── GradientError                    a gradient is not finite or too large; the weights are as before
    │   ├── StepError                        the optimizer itself raised; the weights may have changed
    │   ├── ModuleExitError                  the module tried to end the process
    │   ├── ReplayError                      a log does not fit the expert that it is replayed on
    │   ├── RemoteError                      an error on the way, or no answer
    │   │   ├── UnknownExpertError               the server has no expert of this name
    │   │   ├── ForbiddenError (PermissionError) the certificate or its role does not allow the call
    │   │   ├── ExpertFailedError                the expert's own module raised; `details["type"]` is the class
    │   │   ├── DeadlineError (TimeoutError)     no answer before the deadline; whether the call ran is unknown
    │   │   ├── LostError (ConnectionError)      the connection ended first; whether the call ran is unknown
    │   │   ├── UnreachableError (ConnectionError)   no connection, so the request was not sent
    │   │   │   └── CertificateError                 because one end rejects the other's certificate
    │   │   ├── DrainingError                    the server is shutting down and takes no new work
    │   │   └── NotOwnerError                    another server owns the expert; `details["address"]` if known
    │   ├── NoExpertsError                   a mixture: the directory lists no expert of the grid
    │   ├── TooFewAnswersError (TimeoutError)    a mixture: samples without enough answers, and who failed
    │   └── AnomalyError (ValueError)        a mixture: the caller's own numbers are not finite
    ├── WireError (ValueError)               bytes that are no frame, or a call that cannot become one
    │   ├── MalformedError                       not the format, or a header that contradicts itself
    │   ├── TruncatedError                       fewer or more bytes than the header says
    │   └── LimitError                           over the limits; seen in the header, nothing was allocated
    ├── DirectoryError (RuntimeError)
    │   ├── AwayError (ConnectionError)          no answer now; a snapshot still serves
    │   ├── LeaseLostError                       the lease ended with all entries under it: declare again
    │   ├── OwnedError                           another server owns the expert: follow it
    │   ├── DeclaredError                        another server lists the expert, and it is no replica
    │   ├── FencedError                          this owner was replaced: stop writing
    │   └── WatchLostError                       events were missed: take a new snapshot
    └── CheckpointError (RuntimeError)       it cannot be written, or there are some and none can be read
        ├── TornError                            the value changed while it was copied
        └── DamagedError                         a file is not what was once written

    UserWarning
    └── StepsLostWarning                 a server came back with older weights than the client has seen

A tensor that does not match the schema raises `SpecError`, as everywhere. Errors of the user's own module keep their
type in the process that runs it, with a note that names the expert and the client. Most of these are the same class
on both sides of a connection; `weft.experts.wire.fault` has the number of each. `reason_of` gives the short word under
which statistics count an error.
"""

from collections.abc import Mapping
from typing import ClassVar

from weft.core.errors import SpecError, UsageError, WeftError


class ExpertError(WeftError, RuntimeError):
    """An expert could not do what was asked.

    Example:
        >>> issubclass(weft.errors.ExpertError, RuntimeError)  # the base of all that an expert answers
        True
    """

    reason: ClassVar[str] = "expert"


class RefusedError(ExpertError):
    """Refused before anything ran.

    Example:
        >>> issubclass(weft.errors.RefusedError, weft.errors.ExpertError)  # nothing changed, so asking again is safe
        True
    """

    reason: ClassVar[str] = "refused"


class TooManyRowsError(RefusedError, ValueError):
    """One task alone has more rows than a batch may have.

    Example:
        >>> rows = (weft.TensorSpec((None, 2), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn", nn.Linear(2, 2), args_schema=rows, max_batch_size=4)
        >>> forward, backward = expert.get_pools()
        >>> forward.submit_task(torch.ones(5, 2))
        Traceback (most recent call last):
        weft.errors.TooManyRowsError: ...
    """

    reason: ClassVar[str] = "rows"


class OverloadError(RefusedError):
    """The queue is full.

    Example:
        >>> rows = (weft.TensorSpec((None, 2), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn", nn.Linear(2, 2), args_schema=rows, max_tasks=1)
        >>> forward, backward = expert.get_pools()
        >>> waiting = forward.submit_task(torch.ones(1, 2))
        >>> forward.submit_task(torch.ones(1, 2))
        Traceback (most recent call last):
        weft.errors.OverloadError: ...
    """

    reason: ClassVar[str] = "overload"


class QuotaError(RefusedError):
    """This client has too many tasks or rows waiting at this expert.

    Example:
        >>> rows = (weft.TensorSpec((None, 2), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn", nn.Linear(2, 2), args_schema=rows, max_client_tasks=1)
        >>> forward, backward = expert.get_pools()
        >>> waiting = forward.submit_task(torch.ones(1, 2), client="me")
        >>> forward.submit_task(torch.ones(1, 2), client="me")
        Traceback (most recent call last):
        weft.errors.QuotaError: ...
    """

    reason: ClassVar[str] = "quota"


class ExpiredError(RefusedError, TimeoutError):
    """The deadline passed while the task waited.

    Example:
        >>> import time
        >>> rows = (weft.TensorSpec((None, 2), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn", nn.Linear(2, 2), args_schema=rows, max_batch_size=4)
        >>> forward, backward = expert.get_pools()
        >>> forward.submit_task(torch.ones(1, 2), deadline=time.monotonic() - 1)
        Traceback (most recent call last):
        weft.errors.ExpiredError: ...
    """

    reason: ClassVar[str] = "expired"


class ClosedError(RefusedError):
    """The pool takes no more tasks.

    Example:
        >>> issubclass(weft.errors.ClosedError, weft.errors.RefusedError)  # nothing ran: ask another server
        True
    """

    reason: ClassVar[str] = "closed"


class ResultEvictedError(RefusedError):
    """The request of this key was applied, and its result is no longer stored.

    Example:
        >>> issubclass(weft.errors.ResultEvictedError, weft.errors.RefusedError)  # it has stepped: go on
        True
    """

    reason: ClassVar[str] = "evicted"


class KeyReusedError(RefusedError, ValueError):
    """The key was used for a request with another payload.

    Example:
        >>> issubclass(weft.errors.KeyReusedError, ValueError)  # a bug of the client: keys are never used twice
        True
    """

    reason: ClassVar[str] = "reused"


class CommitError(RefusedError):
    """There is no such mini-batch to commit, or to add to.

    Example:
        >>> rows = (weft.TensorSpec((None, 2), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn", nn.Linear(2, 2), torch.optim.SGD, args_schema=rows, max_batch_size=4)
        >>> forward, backward = expert.get_pools()
        >>> with weft.Runtime([expert]):
        ...     expert.commit("none").result(10)
        Traceback (most recent call last):
        weft.errors.CommitError: ...
    """

    reason: ClassVar[str] = "commit"


class InputsGoneError(RefusedError):
    """A backward came without its inputs, and those of its forward are not held any more.

    Example:
        >>> issubclass(weft.errors.InputsGoneError, weft.errors.RefusedError)  # `RemoteExpert` sends them
        True
    """

    reason: ClassVar[str] = "inputs"


class GradientError(ExpertError):
    """A gradient is not finite or too large; weights, buffers and optimizer are as before.

    Example:
        >>> rows = (weft.TensorSpec((None, 2), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn", nn.Linear(2, 2), torch.optim.SGD, args_schema=rows, max_batch_size=4)
        >>> forward, backward = expert.get_pools()
        >>> with weft.Runtime([expert]):
        ...     backward.submit_task(torch.ones(1, 2), torch.full((1, 2), float("nan"))).result(10)
        Traceback (most recent call last):
        weft.errors.GradientError: ...
    """

    reason: ClassVar[str] = "gradient"


class StepError(ExpertError):
    """The optimizer, its schedule or an overridden ``apply_gradients`` raised.

    Example:
        >>> issubclass(weft.errors.StepError, weft.errors.ExpertError)  # load a checkpoint
        True
    """

    reason: ClassVar[str] = "step"


class ModuleExitError(ExpertError):
    """The module raised ``SystemExit`` or ``KeyboardInterrupt``, which must not end the process that serves it.

    Example:
        >>> issubclass(weft.errors.ModuleExitError, weft.errors.ExpertError)  # and no SystemExit: the server goes on
        True
    """

    reason: ClassVar[str] = "exit"


class ReplayError(ExpertError):
    """A log of batches does not fit the expert that it is replayed on.

    Example:
        >>> issubclass(weft.errors.ReplayError, weft.errors.ExpertError)  # load the state before the log
        True
    """

    reason: ClassVar[str] = "replay"


class RemoteError(ExpertError):
    """The other side answered with an error or not at all. ``details`` are words by name, such as an address.

    Example:
        >>> error = weft.errors.RemoteError("moved", {"address": "10.0.0.7:7070"})
        >>> error.details["address"]
        '10.0.0.7:7070'
    """

    reason: ClassVar[str] = "remote"

    def __init__(self, message: str, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, str] = dict(details or {})


class UnknownExpertError(RemoteError):
    """There is no expert of this name.

    Example:
        >>> with weft.Server() as server, weft.RemoteExpert("ffn.9", server.address) as remote:
        ...     remote(torch.ones(1, 2))
        Traceback (most recent call last):
        weft.errors.UnknownExpertError: ...
    """

    reason: ClassVar[str] = "unknown"


class ForbiddenError(RemoteError, PermissionError):
    """The caller's certificate, or the role that it stands for, does not allow the call.

    Example:
        >>> issubclass(weft.errors.ForbiddenError, PermissionError)  # asking again would not help
        True
    """

    reason: ClassVar[str] = "forbidden"


class ExpertFailedError(RemoteError):
    """The expert's own module raised; ``details["type"]`` names the class of what it raised.

    Example:
        >>> error = weft.errors.ExpertFailedError("no such row", {"type": "IndexError"})
        >>> error.details["type"]
        'IndexError'
    """

    reason: ClassVar[str] = "module"


class DeadlineError(RemoteError, TimeoutError):
    """The deadline passed before the answer came. Whether the work was done is not known.

    Example:
        >>> issubclass(weft.errors.DeadlineError, TimeoutError)  # give the `RemoteExpert` a longer `timeout`
        True
    """

    reason: ClassVar[str] = "deadline"


class LostError(RemoteError, ConnectionError):
    """The connection ended before the answer came. Whether the work was done is not known.

    Example:
        >>> issubclass(weft.errors.LostError, ConnectionError)  # `Retry` says how often a call is sent again
        True
    """

    reason: ClassVar[str] = "lost"


class UnreachableError(RemoteError, ConnectionError):
    """There is no connection, and so the request never left.

    Example:
        >>> with weft.RemoteExpert("ffn.0", "127.0.0.1:9", timeout=0.5) as remote:
        ...     remote(torch.ones(1, 2))
        Traceback (most recent call last):
        weft.errors.UnreachableError: ...
    """

    reason: ClassVar[str] = "unreachable"


class CertificateError(UnreachableError):
    """No connection, for one end does not believe the other's certificate. Asking again would not help.

    Example:
        >>> issubclass(weft.errors.CertificateError, weft.errors.UnreachableError)  # but not retried
        True
    """

    reason: ClassVar[str] = "certificate"


class DrainingError(RemoteError):
    """The server is going away and takes no new work.

    Example:
        >>> issubclass(weft.errors.DrainingError, weft.errors.RemoteError)  # ask another server
        True
    """

    reason: ClassVar[str] = "draining"


class NotOwnerError(RemoteError):
    """Another server owns this expert; ``details["address"]`` says which, where it is known.

    Example:
        >>> weft.errors.NotOwnerError("moved", {"address": "10.0.0.7:7070"}).details["address"]
        '10.0.0.7:7070'
    """

    reason: ClassVar[str] = "owner"


class NoExpertsError(ExpertError):
    """No expert of the grid lives.

    Example:
        >>> with weft.Connections({}) as connections:
        ...     options = {"in_features": 4, "grid_size": [2], "uid_prefix": "ffn", "connections": connections}
        ...     weft.RemoteMixtureOfExperts(**options, forward_timeout=1.0)(torch.ones(1, 4))
        Traceback (most recent call last):
        weft.errors.NoExpertsError: ...
    """

    reason: ClassVar[str] = "nobody"


class TooFewAnswersError(ExpertError, TimeoutError):
    """Samples without enough answers. ``faults`` says, by expert, what came instead.

    Example:
        >>> error = weft.errors.TooFewAnswersError("row 0 has 1 of 2 answers", {"ffn.1": TimeoutError()})
        >>> list(error.faults)
        ['ffn.1']
    """

    reason: ClassVar[str] = "answers"

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class AnomalyError(ExpertError, ArithmeticError, ValueError):
    """NaN or Inf in what the caller gave, with ``detect_anomalies``. Nothing was sent.

    Example:
        >>> issubclass(weft.errors.AnomalyError, ValueError)  # the fault is in this process: look at the layer before
        True
    """

    reason: ClassVar[str] = "anomaly"


class MixtureCommitError(CommitError):
    """Too few experts have their whole mini-batch, or stepped with it. ``faults`` says, by expert, what went wrong.

    Example:
        >>> error = weft.errors.MixtureCommitError("ffn.1 has no gradient", {"ffn.1": TimeoutError()})
        >>> list(error.faults)
        ['ffn.1']
    """

    def __init__(self, message: str, faults: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class WireError(WeftError, ValueError):
    """Bytes that are no valid frame. ``reason`` is one word for counting, ``call_id`` the call at fault if known.

    Example:
        >>> from weft.experts.wire import decode
        >>> try:
        ...     decode(b"GET / HTTP/1.1")
        ... except weft.errors.WireError as error:
        ...     print(error.reason)
        field
    """

    def __init__(self, message: str, *, reason: str = "unspecified", call_id: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.call_id = call_id


class MalformedError(WireError):
    """Not this format, or a header that contradicts itself.

    Example:
        >>> issubclass(weft.errors.MalformedError, weft.errors.WireError)  # the peer is no weft of this version
        True
    """


class TruncatedError(WireError):
    """The bytes end before, or go on after, what their header says.

    Example:
        >>> issubclass(weft.errors.TruncatedError, weft.errors.WireError)  # the message was cut
        True
    """


class LimitError(WireError):
    """The header asks for more than the limits allow. Nothing was allocated for it.

    Example:
        >>> issubclass(weft.errors.LimitError, weft.errors.WireError)  # send less, or raise the `Limits`
        True
    """


class DirectoryError(WeftError, RuntimeError):
    """A directory cannot do what was asked.

    Example:
        >>> issubclass(weft.errors.DirectoryError, RuntimeError)  # the base of all that a directory answers
        True
    """


class AwayError(DirectoryError, ConnectionError):
    """The directory does not answer, or was closed.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> directory = LocalDirectory()
        >>> directory.close()
        >>> directory.watch("ffn")
        Traceback (most recent call last):
        weft.errors.AwayError: ...
    """


class LeaseLostError(DirectoryError):
    """The lease ended before it was renewed; what was declared and claimed under it is gone.

    Example:
        >>> issubclass(weft.errors.LeaseLostError, weft.errors.DirectoryError)  # a `Server` declares again
        True
    """


class OwnedError(DirectoryError):
    """Another server owns this expert. ``address`` says which.

    Example:
        >>> weft.errors.OwnedError("ffn.0 has an owner", "10.0.0.7:7070").address
        '10.0.0.7:7070'
    """

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class DeclaredError(DirectoryError):
    """Another server lists this expert, and neither says that it has replicas.

    Example:
        >>> issubclass(weft.errors.DeclaredError, weft.errors.DirectoryError)  # choose another name
        True
    """


class FencedError(DirectoryError):
    """A newer owner exists, and so this one's writes are refused.

    Example:
        >>> issubclass(weft.errors.FencedError, weft.errors.DirectoryError)  # a newer owner steps the expert
        True
    """


class WatchLostError(DirectoryError):
    """Events were missed, since the watch was too far behind.

    Example:
        >>> issubclass(weft.errors.WatchLostError, weft.errors.DirectoryError)  # take a new snapshot
        True
    """


class CheckpointError(WeftError, RuntimeError):
    """A checkpoint cannot be written, or there are checkpoints and none of them can be read.

    Example:
        >>> issubclass(weft.errors.CheckpointError, RuntimeError)  # the expert goes on; its file is as before
        True
    """


class TornError(CheckpointError):
    """A tensor was written to while it was copied, so the copy would be of two steps at once.

    Example:
        >>> issubclass(weft.errors.TornError, weft.errors.CheckpointError)  # try again when nobody writes to the tensor
        True
    """


class DamagedError(CheckpointError):
    """A file is not what was once written into it.

    Example:
        >>> issubclass(weft.errors.DamagedError, weft.errors.CheckpointError)  # an older one is read
        True
    """


class StepsLostWarning(UserWarning):
    """A server came back with fewer steps of an expert than its client had heard of: older weights, or fresh ones.

    To have it raised: ``warnings.simplefilter("error", StepsLostWarning)``.

    Example:
        >>> warning = weft.errors.StepsLostWarning("ffn.0", 120, 100, "10.0.0.7:7070")
        >>> warning.before - warning.after
        20
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
