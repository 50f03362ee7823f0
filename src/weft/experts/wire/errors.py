"""What can go wrong between a client and an expert.

    WeftError
    ├── WireError (ValueError)                  these bytes are no frame, or this call cannot become one
    │   ├── MalformedError                      not the format, or the header contradicts itself
    │   ├── TruncatedError                      the bytes end before, or go on after, what the header says
    │   └── LimitError                          more than the limits allow; seen in the header, nothing was allocated
    └── ExpertError (RuntimeError)              what the expert itself answers, see experts/errors.py
        └── RemoteError                         what the way to it answers, or that nothing came back
            ├── UnknownExpertError              no such expert there
            ├── ForbiddenError (PermissionError)   the certificate or its role does not allow the call
            ├── ExpertFailedError               the expert's own module raised; `details["type"]` says what
            ├── DeadlineError (TimeoutError)    the deadline passed first; whether it was done is not known
            ├── LostError (ConnectionError)     the connection went while waiting; whether it was done is not known
            ├── UnreachableError (ConnectionError)   no connection, and so the request never left
            │   └── CertificateError            for one end does not believe the other's certificate
            ├── DrainingError                   the server is going away and takes no new work
            └── NotOwnerError                   another server owns the expert; `details["address"]` if known

An error is the same class on both sides: `fault.py` has the number of each, and says which may be asked again.
"""

from collections.abc import Mapping
from typing import ClassVar

from weft.core.errors import WeftError
from weft.experts.errors import ExpertError


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


class RemoteError(ExpertError):
    """The other side answered with an error or not at all. ``details`` are words by name, such as an address."""

    reason: ClassVar[str] = "remote"

    def __init__(self, message: str, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, str] = dict(details or {})


class UnknownExpertError(RemoteError):
    """There is no expert of this name."""

    reason: ClassVar[str] = "unknown"


class ForbiddenError(RemoteError, PermissionError):
    """The caller's certificate, or the role that it stands for, does not allow the call."""

    reason: ClassVar[str] = "forbidden"


class ExpertFailedError(RemoteError):
    """The expert's own module raised; ``details["type"]`` names the class of what it raised."""

    reason: ClassVar[str] = "module"


class DeadlineError(RemoteError, TimeoutError):
    """The deadline passed before the answer came. Whether the work was done is not known."""

    reason: ClassVar[str] = "deadline"


class LostError(RemoteError, ConnectionError):
    """The connection ended before the answer came. Whether the work was done is not known."""

    reason: ClassVar[str] = "lost"


class UnreachableError(RemoteError, ConnectionError):
    """There is no connection, and so the request never left."""

    reason: ClassVar[str] = "unreachable"


class CertificateError(UnreachableError):
    """No connection, for one end does not believe the other's certificate. Asking again would not help."""

    reason: ClassVar[str] = "certificate"


class DrainingError(RemoteError):
    """The server is going away and takes no new work."""

    reason: ClassVar[str] = "draining"


class NotOwnerError(RemoteError):
    """Another server owns this expert; ``details["address"]`` says which, where it is known."""

    reason: ClassVar[str] = "owner"
