"""Checkpoints of experts: atomic, of one step, retained, and resumed from by themselves.

    root/
      ffn.3/                                              one folder per expert, see names.py
        000000000007-000000004200-<hash>.safetensors      serial, step, hash of all its bytes
        000000000008-000000004300-<hash>.safetensors      the newest: it has the highest serial
        .new-000000000009                                 being written, or left by a crash: nobody reads it
        .lock                                             held by the server whose expert it is

    save     copy -> write .new, fsync -> rename -> fsync the folder -> remove what is too old
                     |                    |
                     |                    before: the old one is the newest; after: the new one is
                     disk full: remove the oldest, if a newer one is whole, and try again

One file is one checkpoint, and its name holds the hash of its content: it is there whole, or not at all, or it is
known to be damaged. The serial orders what was saved, since after a return to an earlier step the steps repeat.
Only files that led to the state in hand are removed: those found when the folder was first touched or loaded from, and
those written since. What another process writes into the folder meanwhile is not ours to remove.
"""

import errno
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from weft.core.errors import UsageError, escaped, listed
from weft.experts.checkpoint.content import from_file, to_file
from weft.experts.checkpoint.disk import Disk
from weft.experts.checkpoint.names import folder_name
from weft.experts.errors import CheckpointError, DamagedError

_NAME = re.compile(r"(\d{12,})-(\d{12,})-([0-9a-f]{32})\.safetensors")
_DRAFT = ".new-"
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOG = logging.getLogger("weft.experts.checkpoints")


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded. ``skipped`` says, for every newer file that could not be used, why."""

    uid: str
    step: int
    state: Any
    extra: Any
    path: Path
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Taken:
    """A copy of an expert, ready to be written: the bytes of its file."""

    uid: str
    step: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, order=True)
class _Entry:
    serial: int
    step: int
    digest: str

    @property
    def name(self) -> str:
        return f"{self.serial:012d}-{self.step:012d}-{self.digest}.safetensors"


class FolderLock:
    """A lock on the folder of one expert; see `CheckpointStore.lock`."""

    def __init__(self, disk: Disk, uid: str, folder: Path, make: Callable[[Path], None], shared: bool) -> None:
        self._disk, self._uid, self._folder, self._make, self._shared = disk, uid, folder, make, shared
        self._handle: int | None = None
        self._warned = False

    def hold(self) -> None:
        """Take the lock if it is not held, or was removed with its folder.

        Raises ``CheckpointError`` if another has it. Where a file system knows no locks, the log says so.
        """
        if self._handle is not None and self._disk.locked(self._handle):
            return
        self.release()
        try:
            self._make(self._folder)
            self._disk.make_private(self._folder)
            self._handle = self._disk.lock(self._folder / _LOCK, shared=self._shared)
        except BlockingIOError as error:
            raise CheckpointError(
                f"the checkpoints of expert {self._uid!r} in {self._folder} belong to another server, "
                f"{escaped(error.strerror or 'which still runs')}: both would overwrite what the other saves. End "
                "that one, or give this one another folder"
            ) from None
        except OSError as error:
            if not self._warned:
                self._warned = True
                _LOG.warning(
                    "the checkpoints of expert %r in %s cannot be locked: %s. See to it that no other server uses them",
                    self._uid,
                    self._folder,
                    error,
                )

    def release(self) -> None:
        """Let the folder go. May be called twice."""
        if self._handle is not None:
            self._disk.unlock(self._handle)
            self._handle = None


class CheckpointStore:
    """Checkpoints of any number of experts below ``root``; the ``keep`` newest of each stay.

    All methods may be called from any thread. One expert is to be written by one process at a time, its owner, which
    `lock` makes sure of. Folders get mode 0700 and files 0600; a ``root`` that is there already keeps its mode.
    """

    def __init__(self, root: str | Path, *, keep: int = 3, disk: Disk | None = None) -> None:
        """Make ``root`` if it is missing. Raises ``UsageError`` if ``keep`` is not positive."""
        if keep < 1:
            raise UsageError(f"keep is {keep}, wanted at least 1: the newest checkpoint always stays")
        self.root = Path(root).absolute()
        self._keep = keep
        self._disk = disk or Disk()
        self._locks: dict[str, threading.Lock] = {}
        self._made: set[Path] = set()
        self._ours: dict[str, set[str]] = {}  # by expert: the files that led to its state
        self._tight: set[str] = set()  # experts of which the disk holds fewer than `keep`
        self._counts = Counter[str]()
        self._counting = threading.Lock()
        for folder in [*reversed(self.root.parents), self.root]:
            if not self._disk.is_folder(folder):
                self._make(folder)

    def lock(self, uid: str, *, shared: bool = False) -> FolderLock:
        """Lock the folder of this expert, until `FolderLock.release` or the end of the process.

        ``shared``: for replicas, whose directory says which of them writes; they keep out all others.
        Raises ``CheckpointError``, with the process that holds it, if it is locked; also by this process.
        """
        lock = FolderLock(self._disk, uid, self._folder(uid), self._make, shared)
        lock.hold()
        return lock

    def save(self, uid: str, state: Any, step: int, extra: Any = None) -> Path:
        """`take` and `write` in one: when this returns, the checkpoint survives a crash of the machine."""
        return self.write(self.take(uid, state, step, extra))

    def take(self, uid: str, state: Any, step: int, extra: Any = None) -> Taken:
        """A copy of ``state`` (a state dict) and ``extra`` (such as the keys of applied steps), both as of ``step``.

        ``state`` is to stand still meanwhile, so this belongs between two steps; `write` may follow in any thread.
        Raises ``TornError`` if it did not stand still, ``UsageError`` that lists what cannot be stored.
        """
        if step < 0:
            raise UsageError(f"step is {step}, wanted 0 or more")
        folder_name(uid)  # refuses what cannot be one
        return Taken(uid, step, to_file({"uid": uid, "step": step, "state": state, "extra": extra}))

    def write(self, taken: Taken) -> Path:
        """Make a checkpoint of what was taken. When this returns it survives a crash; until then, the one before does.

        On a full disk, older checkpoints make room for it: all but the newest that is whole. Raises ``CheckpointError``
        if the disk does not take it even so; then that one stays.
        """
        folder = self._folder(taken.uid)
        with self._lock(taken.uid):
            try:
                path = self._publish(taken, folder)
            except OSError as error:
                self._count(failed=1)
                what = f"step {taken.step} of expert {taken.uid!r} cannot be saved in {folder}: {error}"
                raise CheckpointError(
                    f"{what}. Make room or mend the folder; the older checkpoints are safe"
                ) from error
            self._count(saved=1, saved_bytes=len(taken.data))
            self._prune(taken.uid, folder)
            return path

    def load_newest(self, uid: str) -> Checkpoint | None:
        """The newest checkpoint of this expert that is whole, its tensors on the CPU; ``None`` if it has none.

        Damaged files are passed over. Raises ``CheckpointError`` that lists them if there are only such: to start
        from nothing would then be a loss that somebody should decide on; and if the folder cannot be looked into.
        """
        folder = self._folder(uid)
        try:
            entries = self._entries(folder)
        except OSError as error:
            raise CheckpointError(
                f"the folder of the checkpoints of expert {uid!r} cannot be looked into: {error}. Mend what is there, "
                "or give the server another folder"
            ) from error
        while entries:
            found, faults = self._first_whole(uid, folder, entries)
            if found is not None:
                with self._lock(uid):
                    self._known(uid, folder).update(entry.name for entry in entries)
                self._count(loaded=1, skipped=len(faults))
                return found
            before, entries = entries, self._entries(folder)
            if entries == before:  # otherwise they were replaced by newer ones while they were read
                raise CheckpointError(listed(f"no checkpoint of expert {uid!r} in {folder} can be read:", faults))
        return None

    def steps(self, uid: str) -> list[int]:
        """The steps of this expert's checkpoints, the newest first. Whether they are whole is seen when loading."""
        return [entry.step for entry in self._entries(self._folder(uid))]

    def has(self, uid: str, step: int) -> bool:
        """Whether there is a checkpoint of this step; also where nobody can tell, since the disk does not answer."""
        try:
            return step in self.steps(uid)
        except OSError:
            return True

    def statistics(self) -> dict[str, int]:
        """How many were saved, with how many bytes, failed to be saved, loaded, and skipped as damaged."""
        with self._counting:
            return {name: self._counts[name] for name in ("saved", "saved_bytes", "failed", "loaded", "skipped")}

    def _publish(self, taken: Taken, folder: Path) -> Path:
        self._make(folder)
        self._sweep(folder)
        known = self._known(taken.uid, folder)
        serial = max((entry.serial for entry in self._entries(folder)), default=0) + 1
        draft = folder / f"{_DRAFT}{serial:012d}"
        final = folder / _Entry(serial, taken.step, _digest(taken.data)).name
        try:
            self._write(draft, taken, folder)
            self._disk.rename(draft, final)
        except OSError:
            with suppress(OSError):  # the reason that counts is the first
                self._disk.remove(draft)
            raise
        known.add(final.name)
        self._disk.sync(folder)
        return final

    def _write(self, draft: Path, taken: Taken, folder: Path) -> None:
        """Write a draft; on a full disk, make room by removing one older checkpoint after the other."""
        old: list[_Entry] | None = None
        while True:
            try:
                self._disk.write(draft, taken.data)
                return
            except OSError as error:
                if old is None:
                    old = self._dispensable(taken.uid, folder) if error.errno in _FULL else []
                if not old:
                    raise
                self._disk.remove(draft)
                self._disk.remove(folder / old.pop().name)
            if taken.uid not in self._tight:
                self._tight.add(taken.uid)
                _LOG.warning(
                    "the disk has no room for %d checkpoints of expert %r in %s: older ones are removed before a new "
                    "one is written",
                    self._keep + 1,
                    taken.uid,
                    folder,
                )

    def _dispensable(self, uid: str, folder: Path) -> list[_Entry]:
        """What may go before a new checkpoint is safe: all of ours but the newest whole one, the oldest last."""
        ours = [entry for entry in self._entries(folder) if entry.name in self._known(uid, folder)]
        for entry in ours:
            try:
                self._read(folder / entry.name, entry, uid)
            except (OSError, DamagedError):
                continue
            return [other for other in ours if other is not entry]
        return []

    def _known(self, uid: str, folder: Path) -> set[str]:
        """The files that led to the state in hand; what is there when the folder is first touched counts as such."""
        if uid not in self._ours:
            self._ours[uid] = {entry.name for entry in self._entries(folder)}
        return self._ours[uid]

    def _make(self, folder: Path) -> None:
        """A folder that survives a crash. It may be there, and yet not be on the disk, so once each it is synced.

        One that somebody removed is made again, with those above it.
        """
        if folder in self._made and self._disk.is_folder(folder):
            return
        if not self._disk.is_folder(folder.parent):
            self._make(folder.parent)
        self._disk.make_folder(folder)
        self._disk.sync(folder.parent)
        self._made.add(folder)

    def _sweep(self, folder: Path) -> None:
        """Remove what a crash left half written."""
        for name in self._disk.names(folder):
            if name.startswith(_DRAFT):
                self._disk.remove(folder / name)

    def _prune(self, uid: str, folder: Path) -> None:
        """Remove what is too old. The new one is safe by now, so a disk that refuses is asked again next time."""
        with suppress(OSError):
            known, entries = self._known(uid, folder), self._entries(folder)
            known.intersection_update(entry.name for entry in entries)
            for entry in [entry for entry in entries if entry.name in known][self._keep :]:
                self._disk.remove(folder / entry.name)

    def _entries(self, folder: Path) -> list[_Entry]:
        """The checkpoints in ``folder``, the newest first."""
        found = [match for name in self._disk.names(folder) if (match := _NAME.fullmatch(name))]
        return sorted((_Entry(int(one[1]), int(one[2]), one[3]) for one in found), reverse=True)

    def _first_whole(self, uid: str, folder: Path, entries: list[_Entry]) -> tuple[Checkpoint | None, list[str]]:
        """The first of these that can be read, and why those before it cannot."""
        faults: list[str] = []
        for entry in entries:
            path = folder / entry.name
            try:
                value = self._read(path, entry, uid)
            except (OSError, DamagedError) as error:
                faults.append(f"{entry.name}: {error}")
                continue
            return Checkpoint(uid, value["step"], value["state"], value["extra"], path, tuple(faults)), faults
        return None, faults

    def _read(self, path: Path, entry: _Entry, uid: str) -> dict[str, Any]:
        data = self._disk.read(path)
        if _digest(data) != entry.digest:
            raise DamagedError(f"its {len(data)} bytes are not those that were written")
        value = from_file(data)
        if not isinstance(value, dict) or {"uid", "step", "state", "extra"} != set(cast("dict[Any, Any]", value)):
            raise DamagedError("it holds something else than an expert")
        fields = cast("dict[str, Any]", value)
        if (fields["uid"], fields["step"]) != (uid, entry.step):
            raise DamagedError(f"it is of expert {fields['uid']!r}, step {fields['step']}")
        return fields

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts.update(more)

    def _folder(self, uid: str) -> Path:
        return self.root / folder_name(uid)

    def _lock(self, uid: str) -> threading.Lock:
        return self._locks.setdefault(uid, threading.Lock())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
