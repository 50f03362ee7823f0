"""What can go wrong with a checkpoint.

WeftError
└── CheckpointError (RuntimeError)      it cannot be written, or there are some and none can be read
    ├── TornError                       the value changed while it was copied: it would be of two steps
    └── DamagedError                    this file is not what was once written
"""

from weft.core.errors import WeftError


class CheckpointError(WeftError, RuntimeError):
    """A checkpoint cannot be written, or there are checkpoints and none of them can be read."""


class TornError(CheckpointError):
    """A tensor was written to while it was copied, so the copy would be of two steps at once."""


class DamagedError(CheckpointError):
    """A file is not what was once written into it."""
