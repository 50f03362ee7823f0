"""The few things that a checkpoint asks of a file system, each of which a crash may follow.

    write    create, fill, fsync       only then is the content on the disk
    rename   atomic for whoever looks  but on the disk only after the folder was synced
    sync     fsync of a folder         what was created, renamed or removed in it stays so

They stand together in one class so that tests can put a disk in its place that forgets, at a crash, all that was
not synced. The rules are POSIX's as file systems keep them: see Pillai et al., "All File Systems Are Not Created
Equal" (OSDI 2014).
"""

import os
from pathlib import Path


class Disk:
    """A real file system. Every method raises ``OSError`` as the operating system does."""

    def make_folder(self, folder: Path) -> None:
        """Make ``folder`` in a folder that exists; it may be there already."""
        folder.mkdir(exist_ok=True)

    def is_folder(self, folder: Path) -> bool:
        """Whether there is such a folder."""
        return folder.is_dir()

    def names(self, folder: Path) -> list[str]:
        """What lies in ``folder``; nothing if there is no such folder."""
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []

    def read(self, path: Path) -> bytes:
        """All of a file."""
        return path.read_bytes()

    def write(self, path: Path, data: bytes) -> None:
        """A new file that holds ``data``, which is on the disk when this returns; its name is not yet."""
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in one step."""
        os.rename(old, new)

    def sync(self, folder: Path) -> None:
        """Return when the names in ``folder`` are on the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """Remove a file, which may be gone already."""
        path.unlink(missing_ok=True)
