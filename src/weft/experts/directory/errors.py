"""What a directory answers when it cannot do what was asked.

WeftError
└── DirectoryError (RuntimeError)
    ├── AwayError (ConnectionError)     it does not answer now; a snapshot still serves
    ├── LeaseLostError                  the lease ended, and all that stood under it is gone: declare again
    ├── OwnedError                      another server owns the expert: follow it
    ├── DeclaredError                   another server lists the expert, and it is no replica
    ├── FencedError                     this owner was replaced: stop writing
    └── WatchLostError                  events were missed: take a new snapshot
"""

from weft.core.errors import WeftError


class DirectoryError(WeftError, RuntimeError):
    """A directory cannot do what was asked."""


class AwayError(DirectoryError, ConnectionError):
    """The directory does not answer, or was closed."""


class LeaseLostError(DirectoryError):
    """The lease ended before it was renewed; what was declared and claimed under it is gone."""


class OwnedError(DirectoryError):
    """Another server owns this expert. ``address`` says which."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class DeclaredError(DirectoryError):
    """Another server lists this expert, and neither says that it has replicas."""


class FencedError(DirectoryError):
    """A newer owner exists, and so this one's writes are refused."""


class WatchLostError(DirectoryError):
    """Events were missed, since the watch was too far behind."""
