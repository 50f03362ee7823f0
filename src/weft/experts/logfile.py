"""A file of lines to which lines are only added, and in which a torn line never joins the next one.

crash amid a line      ... entry 6 ⏎ {"kind": "ba          the next opening cuts it off
disk full amid a line  ... entry 6 ⏎ {"kind": "ba          cut off at once; whoever wrote it gets the error
file too large         log ──> log.1 ──> log.2 ──> ...     a new file is begun, and the oldest one removed
"""

import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from weft.core.errors import UsageError

_BLOCK = 1 << 16


class LogFile:
    """Args:
    path: of the file; made if there is none, for the user of this process alone to read.
    begins: what every line begins with, so that nobody's other file is written to.
    is_whole: whether a text is a line that lacks nothing but its end.
    max_bytes: the size at which a new file is begun; None: never.
    max_files: the number of files that stay, with the one that is written to.

    Raises ``UsageError`` if the file holds something else, and what opening it raises.
    """

    def __init__(
        self,
        path: Path,
        begins: str,
        is_whole: Callable[[str], bool],
        *,
        max_bytes: int | None = None,
        max_files: int = 2,
    ) -> None:
        self._path, self._max_bytes, self._max_files = path, max_bytes, max_files
        if path.is_file():
            _mend(path, begins.encode(), is_whole)
        self._file = _opened(path)
        self._seekable = self._file.seekable()

    def append(self, lines: str) -> None:
        """Write all of that, or nothing and raise."""
        rest = lines.encode()
        end = self._file.seek(0, os.SEEK_END) if self._seekable else 0
        if self._max_bytes is not None and self._seekable and end and end + len(rest) > self._max_bytes:
            self._rotate()
            end = 0
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            if self._seekable:
                self._file.truncate(end)
            raise

    def close(self) -> None:
        """Nothing is written any more."""
        self._file.close()

    def _rotate(self) -> None:
        """Begin a new file. If that raises, what is there stays, and is written to as before."""
        os.fsync(self._file.fileno())  # only the newest file may end with a torn line
        files = [self._path, *(numbered(self._path, number) for number in range(1, self._max_files))]
        for new, old in zip(files[:0:-1], files[-2::-1], strict=True):
            if old.exists():
                os.replace(old, new)
        before, self._file = self._file, _opened(self._path)
        before.close()


def numbered(path: Path, number: int) -> Path:
    """The file that was written to so many files before the one at ``path``."""
    return path.with_name(f"{path.name}.{number}") if number else path


def _opened(path: Path) -> FileIO:
    return FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def _mend(path: Path, begins: bytes, is_whole: Callable[[str], bool]) -> None:
    """Have the file end with a whole line, and without what was torn."""
    with path.open("r+b") as file:
        head = file.read(len(begins)).rstrip(b"\0")  # after a loss of power, some disks hold zeros where they were full
        if not begins.startswith(head):
            raise UsageError(f"{path} is no journal, for it begins with {head!r}; give the path of another file")
        size = end = file.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - _BLOCK)
            file.seek(start)
            tail, end = file.read(end - start) + tail, start
        tail = tail[tail.rfind(b"\n") + 1 :]
        if is_whole(tail.decode(errors="replace")):
            file.seek(size)
            file.write(b"\n")
        elif tail:
            file.truncate(size - len(tail))
