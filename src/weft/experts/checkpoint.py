"""Checkpoints of experts: atomic, of one step, retained, found by themselves at the next start.

    root/
      ffn.3/                                              one folder per expert, see `folder_name`
        000000000007-000000004200-<hash>.safetensors      serial, step, hash of all its bytes
        000000000008-000000004300-<hash>.safetensors      the newest: it has the highest serial
        .new-000000000009                                 being written, or left by a crash; never read
        .lock                                             held by the server whose expert it is

    save     encode -> write .new, fsync -> rename -> fsync the folder -> remove what is too old
                       |                    |
                       |                    before: the old file is the newest; after: the new one is
                       disk full: remove the oldest if a newer one is whole, and try again

A file is there whole, or not at all, or is known to be damaged by its hash. The serial orders what was saved, since
steps repeat after a return to an earlier one.
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
from typing import Any, cast

from weft.core.errors import UsageError, escaped, listed
from weft.experts import extras as extras  # noqa: PLC0414  (says what is not installed)
from weft.experts.errors import CheckpointError, DamagedError
from weft.experts.serialization import deserialize, serialize

_LOG = logging.getLogger("weft.experts.checkpoints")
_FILE = re.compile(r"(\d{12})-(\d{12,})-([0-9a-f]{32})\.safetensors")  # serial, step, hash
_DRAFT = ".new-"


class Disk:
    """What a checkpoint needs of a file system, after each of which a crash may follow.

    The rules are POSIX's as file systems keep them: Pillai et al., "All File Systems Are Not Created Equal" (OSDI
    2014). Every method raises ``OSError``. Files are made with mode 0600, folders with 0700.
    """

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(0o700, exist_ok=True)

    def is_folder(self, folder: Path) -> bool:
        return folder.is_dir()

    def names(self, folder: Path) -> list[str]:
        """Names of all files in ``folder``; none if there is no such folder."""
        with suppress(FileNotFoundError):
            return os.listdir(folder)
        return []

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """A new file that holds ``data``, which is on the disk when this returns; its name is not yet."""
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, at once for all readers; on the disk it has that after `sync`."""
        os.rename(old, new)

    def sync(self, folder: Path) -> None:
        """Return when what was created, renamed or removed in ``folder`` is on the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


_LOCKS: set[int] = set()
# A forked child that outlives its parent must not go on holding the parent's locks.
os.register_at_fork(after_in_child=lambda: [os.close(_LOCKS.pop()) for _ in range(len(_LOCKS))])

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.")
_LONGEST = 200  # bytes of a folder's name; most file systems end at 255


def folder_name(uid: str) -> str:
    """The name of an expert as the name of a folder, whatever the expert is called.

        ffn.3.14      ffn.3.14             letters a-z, digits, "-", "_" and "." stand for themselves
        Ffn           %46fn                not all file systems tell large from small letters
        ../../etc     %2E.%2F..%2Fetc      no name leads out of the root, and none starts with a dot
        ä             %C3%A4
        (too long)    %~ and a hash

    Two experts never share a folder. Raises ``UsageError`` for an empty name.
    """
    if not uid:
        raise UsageError("an expert's uid is empty; wanted at least one character")
    data = uid.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data)
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return name if len(name) <= _LONGEST else f"%~{blake2b(data, digest_size=32).hexdigest()}"


class FolderLock:
    """A lock on the folder of one expert; see `CheckpointStore.lock`."""

    def __init__(self, uid: str, folder: Path, make: Callable[[Path], None], shared: bool) -> None:
        self._uid, self._folder, self._make = uid, folder, make
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
            self._make(self._folder)
            self._handle = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            holder = os.pread(self._handle, 100, 0).decode("utf-8", "replace").strip()
            fcntl.flock(self._handle, self._kind)
        except BlockingIOError:
            self.release()
            raise CheckpointError(
                f"the checkpoints of expert {self._uid!r} in {self._folder} belong to another server, "
                f"{escaped(holder)}: both would overwrite what the other saves. End that one, or give this one another "
                "folder"
            ) from None
        except OSError as error:
            self.release()
            if not self._warned:
                words = "the checkpoints of expert %r in %s cannot be locked: %s. See that no other server uses them"
                _LOG.warning(words, self._uid, self._folder, error)
            self._warned = True
            return
        _LOCKS.add(self._handle)
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def release(self) -> None:
        if self._handle is not None:
            _LOCKS.discard(self._handle)
            os.close(self._handle)
            self._handle = None


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded. ``skipped``: for every newer file that could not be used, why."""

    uid: str
    step: int
    state: Any
    extra: Any
    path: Path
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedCheckpoint:
    """A copy of an expert as the bytes of its file."""

    uid: str
    step: int
    data: bytes | memoryview = field(repr=False)


class CheckpointStore:
    """Checkpoints of any number of experts below ``root``; the ``keep`` newest of each stay. Thread-safe.

    It removes what it wrote, or found when it last loaded; what another server writes beside it stays.
    Makes ``root`` if it is missing. Raises ``UsageError`` if ``keep`` is not positive.
    """

    def __init__(self, root: str | Path, *, keep: int = 3, disk: Disk | None = None) -> None:
        if keep < 1:
            raise UsageError(f"keep is {keep}, wanted at least 1: the newest checkpoint always stays")
        self.root = Path(root).absolute()
        self._keep = keep
        self._disk = disk or Disk()
        self._locks: dict[str, threading.Lock] = {}
        self._line: dict[str, set[str]] = {}  # of each expert, the files that this store may remove
        self._short_of_room: set[str] = set()  # experts of which the log says so
        if not self._disk.is_folder(self.root):
            self._make(self.root)

    def lock(self, uid: str, *, shared: bool = False) -> FolderLock:
        """Lock the folder of this expert, until `FolderLock.release` or the end of the process.

        ``shared``: for replicas. Raises ``CheckpointError`` that says which process has it, also if it is this one.
        """
        lock = FolderLock(uid, self._folder(uid), self._make, shared)
        lock.hold()
        return lock

    def save(self, uid: str, state: Any, step: int, extra: Any = None) -> Path:
        """`encode` and `write` in one: when this returns, the checkpoint survives a crash of the machine."""
        return self.write(self.encode(uid, state, step, extra))

    def encode(self, uid: str, state: Any, step: int, extra: Any = None) -> EncodedCheckpoint:
        """A copy of ``state`` (a state dict) and ``extra`` (such as the keys of applied steps), both as of ``step``.

        Call it between two steps. Raises ``UsageError`` that lists what cannot be stored.
        """
        if step < 0:
            raise UsageError(f"step is {step}, wanted 0 or more")
        return EncodedCheckpoint(uid, step, serialize({"uid": uid, "step": step, "state": state, "extra": extra}))

    def write(self, encoded: EncodedCheckpoint) -> Path:
        """Write a checkpoint. When this returns it survives a crash; until then, the one before does.

        On a full disk, older checkpoints make room, all but the newest that is whole. Raises ``CheckpointError``.
        """
        folder = self._folder(encoded.uid)
        with self._locks.setdefault(encoded.uid, threading.Lock()):
            try:
                self._line.setdefault(encoded.uid, set(self._names(folder)))
                path = self._publish(encoded, folder)
            except OSError as error:
                raise CheckpointError(
                    f"step {encoded.step} of expert {encoded.uid!r} cannot be saved in {folder}: {error}. Make room or "
                    "mend the folder; the older checkpoints are safe"
                ) from error
            line = self._line[encoded.uid]
            line.add(path.name)
            with suppress(OSError):  # the new one is safe by now: a disk that refuses is asked again next time
                names = self._names(folder)  # somebody may have removed files, or the whole folder: serials begin anew
                line &= {*names}
                for name in [name for name in names if name in line][self._keep :]:
                    self._disk.remove(folder / name)
            return path

    def load_newest(self, uid: str) -> Checkpoint | None:
        """The newest checkpoint of this expert that is whole, its tensors on the CPU; ``None`` if it has none.

        Raises ``CheckpointError`` if the folder cannot be read, or all are damaged: to start anew would lose them.
        """
        folder = self._folder(uid)
        try:
            names = self._names(folder)
        except OSError as error:
            raise CheckpointError(
                f"the folder of the checkpoints of expert {uid!r} cannot be read: {error}. Mend what is there, "
                "or give the server another folder"
            ) from error
        self._line[uid] = set(names)
        while names:
            faults: list[str] = []
            for name in names:
                try:
                    value = self._read(folder / name, uid)
                except (OSError, DamagedError) as error:
                    faults.append(f"{name}: {error}")
                    continue
                return Checkpoint(uid, value["step"], value["state"], value["extra"], folder / name, tuple(faults))
            before, names = names, self._names(folder)
            if names == before:  # otherwise they were replaced by newer ones while they were read
                raise CheckpointError(listed(f"no checkpoint of expert {uid!r} in {folder} can be read:", faults))
        return None

    def steps(self, uid: str) -> list[int]:
        """The steps of this expert's checkpoints, newest first; whether they are whole is seen when loading."""
        return [int(name.split("-")[1]) for name in self._names(self._folder(uid))]

    def has(self, uid: str, step: int) -> bool:
        """Whether there is a checkpoint of this step; True also if the disk does not answer."""
        with suppress(OSError):
            return step in self.steps(uid)
        return True

    def _publish(self, encoded: EncodedCheckpoint, folder: Path) -> Path:
        self._make(folder)
        for name in self._disk.names(folder):  # what a crash left half written
            if name.startswith(_DRAFT):
                self._disk.remove(folder / name)
        names = self._names(folder)
        serial = int(names[0].split("-")[0]) + 1 if names else 1
        draft = folder / f"{_DRAFT}{serial:012d}"
        final = folder / f"{serial:012d}-{encoded.step:012d}-{_digest(encoded.data)}.safetensors"
        try:
            self._write(draft, encoded, folder)
            self._disk.rename(draft, final)
        except OSError:
            with suppress(OSError):  # the reason that counts is the first
                self._disk.remove(draft)
            raise
        self._disk.sync(folder)
        return final

    def _write(self, draft: Path, encoded: EncodedCheckpoint, folder: Path) -> None:
        """Write a draft; on a full disk, make room by removing one older checkpoint after the other."""
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
                self._disk.remove(draft)
                self._disk.remove(folder / old.pop())
            if encoded.uid not in self._short_of_room:
                words = "the disk has no room for %d checkpoints of expert %r in %s: older ones are removed first"
                _LOG.warning(words, self._keep + 1, encoded.uid, folder)
            self._short_of_room.add(encoded.uid)

    def _dispensable(self, uid: str, folder: Path) -> list[str]:
        """What may be removed before a new checkpoint is safe: all but the newest whole one, oldest last."""
        names = self._names(folder)
        for name in names:
            with suppress(OSError, DamagedError):
                self._read(folder / name, uid)
                return [other for other in names if other != name and other in self._line[uid]]
        return []

    def _make(self, folder: Path) -> None:
        """Make a folder that survives a crash, and those above it. One that exists may not be synced yet."""
        if not self._disk.is_folder(folder.parent):
            self._make(folder.parent)
        self._disk.make_folder(folder)
        self._disk.sync(folder.parent)

    def _names(self, folder: Path) -> list[str]:
        """The checkpoints in ``folder``, newest first."""
        return sorted(filter(_FILE.fullmatch, self._disk.names(folder)), reverse=True)

    def _read(self, path: Path, uid: str) -> dict[str, Any]:
        data = self._disk.read(path)
        step, digest = path.stem.split("-")[1:]
        if _digest(data) != digest:
            raise DamagedError(f"its {len(data)} bytes are not those that were written")
        value = deserialize(data)
        fields = cast("dict[str, Any]", value if isinstance(value, dict) else {})
        if fields.keys() != {"uid", "step", "state", "extra"} or (fields["uid"], fields["step"]) != (uid, int(step)):
            seen = f"expert {fields.get('uid')!r} at step {fields.get('step')}"
            raise DamagedError(f"it holds {seen}, wanted all of expert {uid!r} at step {int(step)}")
        return fields

    def _folder(self, uid: str) -> Path:
        return self.root / folder_name(uid)


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=16).hexdigest()
