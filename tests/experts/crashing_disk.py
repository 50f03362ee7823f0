"""In-memory disk that loses unsynced data at a crash: any subset of the unsynced names survives.
A file whose content was not synced holds a prefix of it, possibly followed by random bytes.
"""

import random
from pathlib import Path

from torchweft.experts.checkpoint import Disk


class Crash(BaseException):
    """The machine stops. A ``BaseException``, because no handler of ``Exception`` would run."""


class CrashingDisk(Disk):
    """Counts the moments at which a crash can happen, and crashes at moment ``crash_at``."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.now: dict[Path, bytes] = {}  # state that a program sees
        self.safe: dict[Path, bytes] = {}  # state that certainly survives a crash
        self.partial: set[Path] = set()  # files whose content was not synced
        self.folders = {Path("/")}
        self.safe_folders = {Path("/")}
        self.moments = 0
        self.crash_at = crash_at
        self.dead = False

    def _moment(self) -> None:
        if self.dead:
            raise Crash
        if self.moments == self.crash_at:
            self.dead = True
            raise Crash
        self.moments += 1

    def after_crash(self, draw: random.Random) -> "CrashingDisk":
        """Disk contents after the machine has restarted."""
        after = CrashingDisk()
        after.safe_folders = {folder for folder in self.folders if folder in self.safe_folders or draw.random() < 0.5}
        after.safe_folders = {f for f in after.safe_folders if all(up in after.safe_folders for up in f.parents)}
        for path in {*self.now, *self.safe}:
            if path.parent not in after.safe_folders:
                continue
            sides = [side.get(path) for side in (self.safe, self.now)]
            content = sides[0] if sides[0] == sides[1] else draw.choice(sides)
            if content is not None and path in self.partial:
                content = content[: draw.randint(0, len(content))] + draw.randbytes(draw.choice([0, 8]))
            if content is not None:
                after.safe[path] = content
        after.now, after.folders = dict(after.safe), set(after.safe_folders)
        return after

    def make_folder(self, folder: Path) -> None:
        self._moment()
        if folder.parent not in self.folders:
            raise FileNotFoundError(folder)
        self.folders.add(folder)
        self._moment()

    def is_folder(self, folder: Path) -> bool:
        return folder in self.folders

    def is_writable(self, folder: Path) -> bool:
        return folder in self.folders

    def names(self, folder: Path) -> list[str]:
        inside = [path.name for path in (*self.now, *self.folders) if path.parent == folder and path != folder]
        return sorted(inside)

    def read(self, path: Path) -> bytes:
        if path not in self.now:
            raise FileNotFoundError(path)
        return self.now[path]

    def write(self, path: Path, data: bytes | memoryview) -> None:
        self._moment()
        if path in self.now:
            raise FileExistsError(path)
        for end in (0, len(data) // 2, len(data)):  # created, half written, written, not synced
            self.now[path] = bytes(data[:end])
            self.partial.add(path)
            self._moment()
        self.partial.discard(path)
        self._moment()

    def rename(self, old: Path, new: Path) -> None:
        self._moment()
        self.now[new] = self.now.pop(old)
        if old in self.partial:
            self.partial.add(new)
        self._moment()

    def sync(self, folder: Path) -> None:
        self._moment()
        for path in [path for path in {*self.now, *self.safe} if path.parent == folder]:
            if path in self.now:
                self.safe[path] = self.now[path]
            else:
                del self.safe[path]
        self.safe_folders |= {inner for inner in self.folders if inner.parent == folder}
        self._moment()

    def remove(self, path: Path) -> None:
        self._moment()
        self.now.pop(path, None)
        self._moment()
