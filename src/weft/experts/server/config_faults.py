"""What goes wrong while the parts of a configuration are made: noted, so that all of it is told at once."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from weft.core.errors import UsageError, WeftError, listed, unlisted

Made = TypeVar("Made")


class Faults(list[str]):
    """In words, each with where it is. The last error is the cause of what `check` raises."""

    def __init__(self) -> None:
        super().__init__()
        self._cause: Exception | None = None

    def made(self, where: str, make: Callable[[], Made]) -> Made | None:
        """What ``make`` returns; None if it raised, which is noted."""
        try:
            return make()
        except Exception as error:  # also what users' modules raise: it is their configuration that names these
            self._cause = error
            self.extend(f"{where}: {each}" for each in _told(error))
            return None

    def check(self) -> None:
        """Raise ``UsageError`` that lists the faults, if there are any."""
        if self:
            raise UsageError(listed("the server cannot be made:", self)) from self._cause


def _told(error: Exception) -> list[str]:
    """The faults that an error lists, or the one that it is."""
    if isinstance(error, WeftError):
        return unlisted(str(error))
    return [f"{type(error).__name__}: {error}{_place(error)}"]


def _place(error: Exception) -> str:
    """Where it was raised, for who has to mend it without a traceback."""
    frames: list[Any] = list(traceback.extract_tb(error.__traceback__))
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
