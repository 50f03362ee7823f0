"""Checkpoints of experts: the interface of their storage, and a storage in a folder of a file system.

    root/
      ffn.3/                                              one folder per expert, see `folder_name`
        000000000007-000000004200-<hash>.safetensors      serial, step, hash of all its bytes
        000000000008-000000004300-<hash>.safetensors      the newest, because it has the highest serial
        .new-000000000009                                 being written, or left by a crash; never read
        .lock                                             held by the server that serves this expert

    save     encode -> write .new, fsync -> rename -> fsync the folder -> remove the oldest files
                       |                    |
                       |                    before: the old file is the newest; after: the new one is
                       disk full: remove the oldest if a newer one is whole, and try again

Overwriting one file would not be safe: a crash in the middle would lose the old state and the new one. Here a file is
complete or absent, and the hash in its name detects later damage. A serial orders the files because steps repeat after
a return to an earlier state.
"""

import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from torchweft.core.errors import UsageError, escape, join_faults
from torchweft.experts import extras as extras  # noqa: PLC0414  (reports missing packages)
from torchweft.experts.errors import CheckpointError, DamagedError, FormatError
from torchweft.experts.serialization import deserialize, serialize

_LOG = logging.getLogger("torchweft.experts.checkpoints")
_FILE = re.compile(r"(\d{12})-(\d{12,})-([0-9a-f]{32})\.safetensors")  # serial, step, hash
_DRAFT = ".new-"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. ``location``: where it was read from. ``skipped``: faults of newer ones, one text each."""

    uid: str
    step: int
    state: Any
    extra: Any
    location: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedCheckpoint:
    uid: str
    step: int
    data: bytes | memoryview = field(repr=False)


@runtime_checkable
class CheckpointLock(Protocol):
    """The right to save one expert, until it is released."""

    def hold(self) -> None:
        """Take the lock again if it was lost. Raises ``CheckpointError`` if another server has it."""

    def release(self) -> None: ...


@runtime_checkable
class CheckpointStore(Protocol):
    """The storage that a server saves its experts in and restores them from. Thread-safe."""

    # `encode` and `write` are two calls, because the state is copied under the expert's lock and written without it.
    def lock(self, uid: str, *, shared: bool = False) -> CheckpointLock:
        """Lock the checkpoints of an expert, ``shared`` among its replicas. Raises ``CheckpointError`` if locked."""
        ...

    def encode(self, uid: str, state: Any, step: int, extra: Any = None) -> EncodedCheckpoint:
        """A copy of ``state`` (a state dict) and ``extra`` (such as idempotency keys). Raises ``UsageError``."""
        ...

    def write(self, encoded: EncodedCheckpoint) -> object:
        """Make a checkpoint durable before this returns. Raises ``CheckpointError``; then the previous one is."""

    def load_newest(self, uid: str) -> Checkpoint | None:
        """The newest whole checkpoint, on the CPU, or None. Raises ``CheckpointError`` if all are damaged."""
        # Raises ``FormatError`` if another version wrote the newest whole one: an older one would lose its steps.
        ...

    def load(self, uid: str, step: int) -> Checkpoint:
        """The newest checkpoint of this step. Raises ``CheckpointError``."""
        ...

    def has(self, uid: str, step: int) -> bool:
        """Whether a checkpoint of this step exists. True if the storage does not answer."""
        ...


class Disk:
    """The operations of a file system that a checkpoint needs. A crash can follow each of them."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(0o700, exist_ok=True)

    def is_folder(self, folder: Path) -> bool:
        return folder.is_dir()

    def is_writable(self, folder: Path) -> bool:
        return os.access(folder, os.R_OK | os.W_OK | os.X_OK)

    def names(self, folder: Path) -> list[str]:
        with suppress(FileNotFoundError):
            return os.listdir(folder)
        return []

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        # When this returns, the data is on the disk, but the name is not yet.
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        # Atomic for readers. The new name is on the disk after `sync`.
        os.rename(old, new)

    def sync(self, folder: Path) -> None:
        # When this returns, all creations, renames and removals in the folder are on the disk. That is POSIX as file
        # systems implement it: Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014).
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


_LOCKS: set[int] = set()
# A forked child inherits the descriptors. If it outlived its parent, it would keep the parent's locks.
os.register_at_fork(after_in_child=lambda: [os.close(_LOCKS.pop()) for _ in range(len(_LOCKS))])

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.")
_LONGEST = 200  # bytes of a folder's name; most file systems allow 255


def folder_name(uid: str) -> str:
    """The folder name for any name of an expert. Two experts never share a folder.

        ffn.3.14      ffn.3.14             letters a-z, digits, "-", "_" and "." stand for themselves
        Ffn           %46fn                some file systems ignore case
        ../../etc     %2E.%2F..%2Fetc      a name cannot leave the root, and cannot start with a dot
        ä             %C3%A4
        (too long)    %~ and a hash

    Raises ``UsageError`` for an empty name.
    """
    if not uid:
        raise UsageError("an expert's uid is empty; wanted at least one character")
    data = uid.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data)
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return name if len(name) <= _LONGEST else f"%~{blake2b(data, digest_size=32).hexdigest()}"


class FolderLock:
    def __init__(self, uid: str, folder: Path, make_folder: Callable[[Path], None], shared: bool) -> None:
        self._uid, self._folder, self._make_folder = uid, folder, make_folder
        self._kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        self._handle: int | None = None
        self._warned = False

    def hold(self) -> None:
        """Take the lock if it is not held, or was removed with its folder. Raises ``CheckpointError``."""
        if self._handle is not None and os.fstat(self._handle).st_nlink > 0:
            return
        self.release()
        holder = ""
        try:
            self._make_folder(self._folder)
            self._handle = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            holder = os.pread(self._handle, 100, 0).decode("utf-8", "replace").strip()
            fcntl.flock(self._handle, self._kind)
        except BlockingIOError:
            self.release()
            raise CheckpointError(
                f"the checkpoints of expert {self._uid!r} in {self._folder} belong to another server, "
                f"{escape(holder)}: both would overwrite what the other saves. End that one, or give this one another "
                "folder"
            ) from None
        except OSError as error:
            # Some network file systems have no locks. Serving without a lock is better than not serving.
            self.release()
            if not self._warned:
                words = "the checkpoints of expert %r in %s cannot be locked: %s. See that no other server uses them"
                _LOG.warning(words, self._uid, self._folder, error)
            self._warned = True
            return
        _LOCKS.add(self._handle)
        with suppress(OSError):  # on a full disk the lock is held all the same, only without the holder's name
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def release(self) -> None:
        if self._handle is not None:
            _LOCKS.discard(self._handle)
            os.close(self._handle)
            self._handle = None


class FolderCheckpointStore:
    """A `CheckpointStore` in a folder: the ``keep`` newest checkpoints of any number of experts. Thread-safe.

    It removes only files that it wrote, or found when it last loaded. Files of another server stay. Creates ``root`` if
    it is missing. Raises ``UsageError`` if ``keep`` is not positive, ``CheckpointError`` if ``root`` is not writable.
    """

    def __init__(self, root: str | Path, *, keep: int = 3, disk: Disk | None = None) -> None:
        if keep < 1:
            raise UsageError(f"keep is {keep}, wanted at least 1: the newest checkpoint always stays")
        self.root = Path(root).absolute()
        self._keep = keep
        self._disk = disk or Disk()
        self._locks: dict[str, threading.Lock] = {}
        self._removable: dict[str, set[str]] = {}  # by expert: names of files
        self._warned: set[str] = set()  # experts for which the log says that the disk is too small
        # Here, because the first save can come only after many steps.
        why = "it is read-only for this user"
        try:
            if not self._disk.is_folder(self.root):
                self._make_folder(self.root)
            is_writable = self._disk.is_writable(self.root)
        except OSError as error:
            is_writable, why = False, str(error)
        if not is_writable:
            raise CheckpointError(
                f"checkpoints cannot be saved in {self.root}: {why}. Give another folder, or make this one writable "
                f"for user {os.getuid()}"
            )

    def lock(self, uid: str, *, shared: bool = False) -> FolderLock:
        lock = FolderLock(uid, self._folder(uid), self._make_folder, shared)
        lock.hold()
        return lock

    def save(self, uid: str, state: Any, step: int, extra: Any = None) -> Path:
        return self.write(self.encode(uid, state, step, extra))

    def encode(self, uid: str, state: Any, step: int, extra: Any = None) -> EncodedCheckpoint:
        if step < 0:
            raise UsageError(f"step is {step}, wanted 0 or more")
        return EncodedCheckpoint(uid, step, serialize({"uid": uid, "step": step, "state": state, "extra": extra}))

    def write(self, encoded: EncodedCheckpoint) -> Path:
        """On a full disk, older checkpoints are removed to make room, but never the newest whole one."""
        folder = self._folder(encoded.uid)
        with self._locks.setdefault(encoded.uid, threading.Lock()):
            try:
                # Files that another server wrote later are not in it, and stay.
                self._removable.setdefault(encoded.uid, set(self._names(folder)))
                path = self._publish(encoded, folder)
            except OSError as error:
                raise CheckpointError(
                    f"step {encoded.step} of expert {encoded.uid!r} cannot be saved in {folder}: {error}. Make room or "
                    "mend the folder; the older checkpoints are safe"
                ) from error
            removable = self._removable[encoded.uid]
            removable.add(path.name)
            with suppress(OSError):  # the new checkpoint is safe, so removing old ones can wait for the next save
                names = self._names(folder)
                removable &= {*names}  # a user can remove files or the whole folder, and then serials repeat
                for name in [name for name in names if name in removable][self._keep :]:
                    self._disk.remove(folder / name)
            return path

    def load_newest(self, uid: str) -> Checkpoint | None:
        # Damaged files raise. None would start with new weights, and overwrite files that can still be repaired.
        folder = self._folder(uid)
        try:
            names = self._names(folder)
        except OSError as error:
            raise CheckpointError(
                f"the folder of the checkpoints of expert {uid!r} cannot be read: {error}. Mend the folder, "
                "or give the server another one"
            ) from error
        self._removable[uid] = set(names)
        while names:
            faults: list[str] = []
            for name in names:
                try:
                    value = self._read(folder / name, uid)
                except FormatError as error:
                    raise FormatError(
                        f"the newest checkpoint of expert {uid!r} cannot be read, {folder / name}: {error}. To go on "
                        "from an older one instead, move that file away"
                    ) from None
                except (OSError, DamagedError) as error:
                    faults.append(f"{name}: {error}")
                    continue
                return Checkpoint(uid, value["step"], value["state"], value["extra"], str(folder / name), tuple(faults))
            before, names = names, self._names(folder)
            if names == before:  # otherwise another server replaced the files during the loop
                raise CheckpointError(join_faults(f"no checkpoint of expert {uid!r} in {folder} can be read:", faults))
        return None

    def load(self, uid: str, step: int) -> Checkpoint:
        folder = self._folder(uid)
        try:
            names = [name for name in self._names(folder) if int(name.split("-")[1]) == step]
            if not names:
                kept = ", ".join(map(str, self.steps(uid))) or "none"
                raise CheckpointError(f"expert {uid!r} has no checkpoint of step {step} in {folder}; kept are {kept}")
            value = self._read(folder / names[0], uid)
        except OSError as error:
            raise CheckpointError(f"the checkpoints of expert {uid!r} in {folder} cannot be read: {error}") from error
        return Checkpoint(uid, value["step"], value["state"], value["extra"], str(folder / names[0]))

    def steps(self, uid: str) -> list[int]:
        """The steps of this expert's checkpoints, newest first. Damaged files are included."""
        return [int(name.split("-")[1]) for name in self._names(self._folder(uid))]

    def has(self, uid: str, step: int) -> bool:
        with suppress(OSError):
            return step in self.steps(uid)
        return True

    def _publish(self, encoded: EncodedCheckpoint, folder: Path) -> Path:
        self._make_folder(folder)
        for name in self._disk.names(folder):  # drafts that a crash left
            if name.startswith(_DRAFT):
                self._disk.remove(folder / name)
        names = self._names(folder)
        serial = int(names[0].split("-")[0]) + 1 if names else 1
        draft = folder / f"{_DRAFT}{serial:012d}"
        final = folder / f"{serial:012d}-{encoded.step:012d}-{_hash_bytes(encoded.data)}.safetensors"
        try:
            self._write_draft(draft, encoded, folder)
            # The rename is the moment at which the new checkpoint exists. Its data is on the disk by now.
            self._disk.rename(draft, final)
        except OSError:
            with suppress(OSError):  # the first error is the one to raise
                self._disk.remove(draft)
            raise
        # Without this sync, a crash of the machine could undo the rename after `write` has returned.
        self._disk.sync(folder)
        return final

    def _write_draft(self, draft: Path, encoded: EncodedCheckpoint, folder: Path) -> None:
        old: list[str] | None = None
        while True:
            try:
                self._disk.write(draft, encoded.data)
                return
            except OSError as error:
                if old is None:
                    old = self._dispensable(encoded.uid, folder) if error.errno in (errno.ENOSPC, errno.EDQUOT) else []
                if not old:
                    raise
                # The draft goes first: it is incomplete and holds the space that the next attempt needs.
                self._disk.remove(draft)
                self._disk.remove(folder / old.pop())
            if encoded.uid not in self._warned:
                words = "the disk has no room for %d checkpoints of expert %r in %s: older ones are removed first"
                _LOG.warning(words, self._keep + 1, encoded.uid, folder)
            self._warned.add(encoded.uid)

    def _dispensable(self, uid: str, folder: Path) -> list[str]:
        """Removable files, oldest last, without the newest whole one: it must stay until the new one is safe."""
        names = self._names(folder)
        for name in names:
            with suppress(OSError, DamagedError):
                with suppress(FormatError):  # whole, and to be kept
                    self._read(folder / name, uid)
                return [other for other in names if other != name and other in self._removable[uid]]
        return []

    def _make_folder(self, folder: Path) -> None:
        # An existing folder is synced too, because its creator can have crashed before it did.
        if not self._disk.is_folder(folder.parent):
            self._make_folder(folder.parent)
        self._disk.make_folder(folder)
        self._disk.sync(folder.parent)

    def _names(self, folder: Path) -> list[str]:
        return sorted(filter(_FILE.fullmatch, self._disk.names(folder)), reverse=True)

    def _read(self, path: Path, uid: str) -> dict[str, Any]:
        data = self._disk.read(path)
        step, expected = path.stem.split("-")[1:]
        if _hash_bytes(data) != expected:
            raise DamagedError(f"its {len(data)} bytes are not those that were written")
        value = deserialize(data)
        fields = cast("dict[str, Any]", value if isinstance(value, dict) else {})
        if fields.keys() != {"uid", "step", "state", "extra"} or (fields["uid"], fields["step"]) != (uid, int(step)):
            seen = f"expert {fields.get('uid')!r} at step {fields.get('step')}"
            raise DamagedError(f"it holds {seen}, wanted all of expert {uid!r} at step {int(step)}")
        return fields

    def _folder(self, uid: str) -> Path:
        return self.root / folder_name(uid)


def _hash_bytes(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=16).hexdigest()
