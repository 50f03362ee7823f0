"""What every act gets: the options, a voice, and a place for its files."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from weft.core.errors import WeftError

_EVERY = 5.0  # seconds between plain lines of progress; a terminal line moves at once


class ProofError(WeftError, RuntimeError):
    """Something that the demo claims to hold was measured, and does not hold."""


@dataclass(frozen=True)
class Options:
    """What the user may choose."""

    out: Path
    """The folder of the report; made if it is not there."""
    steps: int = 400
    """Training ends after so many steps..."""
    seconds: float = 25.0
    """...or after so many seconds, whichever comes first."""
    seed: int = 0
    threads: int = 1
    """How many CPU threads an operator may use. With one, what runs side by side is stages; and torch's own choice
    is the number of cores that it sees, which in a container may be far more than it can have."""


@runtime_checkable
class Voice(Protocol):
    """What the demo speaks to: a text file, or anything like it."""

    def write(self, words: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


@dataclass
class Stagehand:
    """Says what happens, on `voice` (standard output unless told otherwise), and knows where files go."""

    options: Options
    voice: Voice = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.perf_counter
    _open: bool = False
    _last: float = float("-inf")

    def say(self, words: str) -> None:
        """A line that stays."""
        if self._open:
            self.voice.write("\n")
        self._open = False
        self._last = float("-inf")
        self.voice.write(words + "\n")
        self.voice.flush()

    def progress(self, words: str) -> None:
        """How far it is: one line that is written over on a terminal, else a line every few seconds."""
        if self.voice.isatty():
            self.voice.write(f"\r\x1b[K{words}")
            self.voice.flush()
            self._open = True
        elif self.clock() - self._last >= _EVERY:
            self.voice.write(words + "\n")
            self.voice.flush()
            self._last = self.clock()

    def wrote(self, path: Path, what: str) -> None:
        """Tell of a file."""
        self.say(f"wrote {path.resolve()}  ({what})")
