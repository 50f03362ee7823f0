"""The few things that a checkpoint asks of a file system, each of which a crash may follow.

    write    create, fill, fsync       only then is the content on the disk
    rename   atomic for whoever looks  but on the disk only after the folder was synced
    sync     fsync of a folder         what was created, renamed or removed in it stays so

They stand together in one class so that tests can put a disk in its place that forgets, at a crash, all that was
not synced. The rules are POSIX's as file systems keep them: see Pillai et al., "All File Systems Are Not Created
Equal" (OSDI 2014).
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_LOCKS: set[int] = set()
"""Open descriptors of lock files."""


class Disk:
    """A real file system. Every method raises ``OSError`` as the operating system does.

    What it makes can be read by the user of this process alone: files have mode 0600, folders 0700.
    """

    def make_folder(self, folder: Path) -> None:
        """Make ``folder`` in a folder that exists; it may be there already."""
        folder.mkdir(0o700, exist_ok=True)

    def make_private(self, folder: Path) -> None:
        """Take an existing folder from all other users; where it is another user's, it stays as it is."""
        with suppress(PermissionError):
            if folder.stat().st_mode & 0o077:
                folder.chmod(0o700)

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
        with open(path, "xb", opener=_private) as file:
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

    def lock(self, path: Path, *, shared: bool = False) -> int:
        """Lock a file, made if there is none, until `unlock` or the end of this process, and write its number there.

        Any number of processes may hold a ``shared`` lock, or one alone another. Raises ``BlockingIOError`` with the
        content of the file if it is locked already, also by this process.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(handle, 100, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(error.errno, holder) from None
            raise
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        _LOCKS.add(handle)
        return handle

    def locked(self, handle: int) -> bool:
        """Whether a locked file is still where it was: without its name, it keeps nobody out."""
        return os.fstat(handle).st_nlink > 0

    def unlock(self, handle: int) -> None:
        """Let a file go."""
        _LOCKS.discard(handle)
        os.close(handle)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _leave_locks() -> None:
    """A forked child that outlives its parent must not go on holding the parent's locks."""
    for handle in _LOCKS:
        os.close(handle)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_leave_locks)
