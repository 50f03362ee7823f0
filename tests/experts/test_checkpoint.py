"""After any crash the old or the new checkpoint is readable, and no completed save is lost."""

import errno
import fcntl
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.experts.concurrency import in_threads
from tests.experts.crashing_disk import Crash, CrashingDisk
from tests.processes import forked
from torchweft.core.errors import UsageError
from torchweft.experts.checkpoint import Disk, EncodedCheckpoint, FolderCheckpointStore
from torchweft.experts.errors import CheckpointError, DamagedError
from torchweft.experts.serialization import serialize

ROOT = Path("/data/experts")
UID = "ffn.0"


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5,), float(step)), "b": torch.full((2, 2), step), "lr": step / 7}


def step_of(loaded: Any) -> int | None:
    """Return the step of a loaded checkpoint, and assert that all its parts agree on it."""
    if loaded is None:
        return None
    tensors = torch.cat([loaded.state["w"].double(), loaded.state["b"].double().ravel()])
    steps = {*tensors.tolist(), float(loaded.step), float(loaded.extra["keys"][-1]), round(loaded.state["lr"] * 7, 6)}
    assert len(steps) == 1, steps
    return loaded.step


def save(store: FolderCheckpointStore, step: int) -> None:
    store.save(UID, state(step), step, {"keys": [step - 1, step]})


def run(disk: CrashingDisk, steps: range, keep: int) -> int | None:
    """Open, load and save each of `steps`. Returns the last step whose save completed before the crash or the end."""
    promised = None
    try:
        store = FolderCheckpointStore(ROOT, keep=keep, disk=disk)
        promised = step_of(store.load_newest(UID))
        for step in steps:
            save(store, step)
            promised = step
    except Crash:
        pass
    return promised


def moments(keep: int) -> int:
    disk = CrashingDisk()
    run(disk, range(1, 5), keep)
    return disk.moments


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_crash_leaves_the_old_or_the_new_checkpoint(keep: int, seed: int) -> None:
    count = moments(keep)
    assert count > 40
    for crash_at in range(count):
        disk = CrashingDisk(crash_at)
        promised = run(disk, range(1, 5), keep)
        after = disk.after_crash(random.Random(1000 * seed + crash_at))
        loaded = step_of(FolderCheckpointStore(ROOT, keep=keep, disk=after).load_newest(UID))
        assert loaded in ({promised, promised + 1} if promised else {None, 1}), (crash_at, promised, loaded)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 1 << 30))
def test_repeated_crashes_lose_no_completed_save(crashes: list[int], keep: int, seed: int) -> None:
    disk, draw, promised = CrashingDisk(), random.Random(seed), 0
    for crash_at in crashes:
        disk.crash_at, disk.moments = crash_at, 0
        promised = run(disk, range(promised + 1, promised + 4), keep) or promised
        disk = disk.after_crash(draw)
        loaded = step_of(FolderCheckpointStore(ROOT, keep=keep, disk=disk).load_newest(UID)) or 0
        assert promised <= loaded <= promised + 1
        promised = loaded


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_process_loses_no_reported_checkpoint(tmp_path: Path) -> None:
    draw = random.Random(5)
    for _ in range(8):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store = FolderCheckpointStore(tmp_path, keep=2)
                loaded = store.load_newest(UID)
                for step in range((loaded.step if loaded else 0) + 1, 1 << 30):
                    save(store, step)
                    os.write(writer, step.to_bytes(8, "little"))
            finally:
                os._exit(1)
        os.close(writer)
        reported = os.read(reader, 8)  # the child has saved its first step
        threading.Event().wait(draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reader, 1 << 16):
            reported = more[-8:]
        os.close(reader)
        promised = int.from_bytes(reported, "little")
        assert step_of(FolderCheckpointStore(tmp_path).load_newest(UID)) in (promised, promised + 1)


def test_damaged_file_is_skipped_and_reported(tmp_path: Path) -> None:
    store = FolderCheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3):
        save(store, step)
    files = sorted((tmp_path / UID).iterdir())
    files[2].write_bytes(files[2].read_bytes()[:-1])
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    loaded = store.load_newest(UID)
    assert loaded is not None and step_of(loaded) == 1
    assert len(loaded.skipped) == 2 and "are not those that were written" in loaded.skipped[0]
    for step, content in ((4, serialize([1, 2])), (5, b"no safetensors at all")):  # intact, but not an expert
        store.write(EncodedCheckpoint(UID, step, content))
        loaded = store.load_newest(UID)
        assert loaded is not None and step_of(loaded) == 1
    assert any("holds expert None" in reason for reason in loaded.skipped)
    for file in set((tmp_path / UID).iterdir()) - set(files[1:]):
        if file.suffix:
            file.unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of expert 'ffn.0'.*can be read(.|\n)*not those"
    ) as caught:
        store.load_newest(UID)
    assert str(caught.value).count("\n") == 2


def test_unreadable_folder_is_reported(store: FolderCheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("a file in its place")
    with pytest.raises(CheckpointError, match=r"expert 'ffn\.0' cannot be read: .*Not a dir") as caught:
        store.load_newest(UID)
    assert str(folder) in str(caught.value)


def test_file_of_another_expert_is_rejected(store: FolderCheckpointStore, tmp_path: Path) -> None:
    path = store.save("a", state(1), 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="it holds expert 'a' at step 1, wanted all of expert 'b'"):
        store.load_newest("b")


def test_newest_checkpoints_stay_after_a_return(tmp_path: Path) -> None:
    store = FolderCheckpointStore(tmp_path, keep=3)
    for step in range(10, 20):
        save(store, step)
    assert store.steps(UID) == [19, 18, 17]
    assert store.steps("other") == [] and store.load_newest("other") is None
    save(store, 15)
    assert step_of(store.load_newest(UID)) == 15


def test_store_prunes_only_its_own_checkpoints(tmp_path: Path) -> None:
    """Without working locks, two servers can write to one folder. Neither removes files of the other."""
    save(FolderCheckpointStore(tmp_path, keep=2), 1)
    mine, other = FolderCheckpointStore(tmp_path, keep=2), FolderCheckpointStore(tmp_path, keep=2)
    for step in (10, 11, 12):
        save(mine, step)
    save(other, 50)
    for step in range(13, 20):
        save(mine, step)
    assert mine.steps(UID) == [19, 18, 50]
    assert step_of(other.load_newest(UID)) == 19  # by loading, it adopts all of these
    save(other, 20)
    assert mine.steps(UID) == [20, 19]


def test_removed_folder_is_created_again(tmp_path: Path) -> None:
    store = FolderCheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        save(store, step)
    shutil.rmtree(tmp_path / UID)
    for step in (6, 7, 8):
        save(store, step)
        assert step_of(store.load_newest(UID)) == step
    assert store.steps(UID) == [8, 7]


@given(st.lists(st.text(min_size=1, max_size=300), min_size=2, max_size=6, unique=True))
@example(["..", ".", "../../etc/passwd", "a/b", "A", "a", "ä", "\udc80", "x" * 900, "CON", "a\0b"])
@settings(max_examples=30)
def test_folders_of_any_name_are_distinct_and_below_the_root(uids: list[str]) -> None:
    disk = CrashingDisk()
    store = FolderCheckpointStore(ROOT, disk=disk)
    for number, uid in enumerate(uids):
        folder = store.save(uid, {"n": number}, number).parent
        assert folder.parent == ROOT and not folder.name.startswith(".") and len(os.fsencode(folder.name)) <= 200
        assert folder.name == folder.name.lower() or "%" in folder.name  # some file systems ignore case
    for number, uid in enumerate(uids):
        loaded = store.load_newest(uid)
        assert loaded is not None and (loaded.state["n"], loaded.uid) == (number, uid)


def test_encoded_state_is_independent_of_later_steps(tmp_path: Path) -> None:
    store, w = FolderCheckpointStore(tmp_path), torch.zeros(3)
    encoded = store.encode(UID, {"w": w}, 1)
    w.add_(1)
    store.write(encoded)
    loaded = store.load_newest(UID)
    assert loaded is not None and not loaded.state["w"].any()


def test_many_threads_save_many_experts(tmp_path: Path) -> None:
    store = FolderCheckpointStore(tmp_path, keep=2)
    in_threads(lambda uid: [store.save(uid, state(step), step) for step in range(6)], ["a", "a", "b", "c"])
    assert store.steps("a")[0] == 5 and len(store.steps("a")) == 2


def test_loading_during_a_save_finds_a_checkpoint(tmp_path: Path) -> None:
    writer = FolderCheckpointStore(tmp_path, keep=1)
    save(writer, 1)

    class Slow(Disk):
        step = 1

        def read(self, path: Path) -> bytes:
            if self.step < 4:  # the owner saves just before the read, which removes this file
                self.step += 1
                save(writer, self.step)
            return super().read(path)

    assert step_of(FolderCheckpointStore(tmp_path, disk=Slow()).load_newest(UID)) == 4


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep is 0"):
        FolderCheckpointStore(tmp_path, keep=0)
    store = FolderCheckpointStore(tmp_path)
    with pytest.raises(UsageError, match="uid is empty"):
        store.save("", {}, 0)
    with pytest.raises(UsageError, match="step is -1"):
        store.save("a", {}, -1)
    assert issubclass(DamagedError, CheckpointError)


class Small(Disk):
    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, path: Path, data: bytes | memoryview) -> None:
        if len(self.names(path.parent)) >= self.room:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, data)


@pytest.mark.parametrize(("room", "keep"), [(3, 3), (2, 3), (2, 2), (4, 3)])
def test_full_disk_keeps_fewer_old_checkpoints(
    room: int, keep: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FolderCheckpointStore(tmp_path, keep=keep, disk=Small(room))
    for step in range(1, 8):
        save(store, step)
        assert step_of(store.load_newest(UID)) == step
    assert store.steps(UID) == list(range(7, 7 - min(room, keep), -1))
    assert caplog.text.count("the disk has no room for") == (room <= keep)  # once, not per save


def test_newest_whole_checkpoint_is_never_removed(tmp_path: Path) -> None:
    store = FolderCheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    newest = max((tmp_path / UID).iterdir())
    newest.write_bytes(b"torn")
    full = FolderCheckpointStore(tmp_path, disk=Small(0))
    with pytest.raises(CheckpointError, match=r"step 4 of expert 'ffn.0' cannot be saved in .*No space left"):
        save(full, 4)
    assert step_of(full.load_newest(UID)) == 2
    assert not [name for name in os.listdir(tmp_path / UID) if name.startswith(".")]


def test_a_folder_belongs_to_one_server_at_a_time(tmp_path: Path) -> None:
    store, other = FolderCheckpointStore(tmp_path), FolderCheckpointStore(tmp_path)
    lock = store.lock(UID)
    for shared in (False, True):
        with pytest.raises(CheckpointError, match=rf"expert 'ffn\.0' in .* belong to .* process {os.getpid()} on"):
            other.lock(UID, shared=shared)
    lock.release()
    lock.release()
    replicas = [replica.lock(UID, shared=True) for replica in (store, other)]
    with pytest.raises(CheckpointError, match="belong to another server"):
        store.lock(UID)
    for lock in replicas:
        lock.release()
    lock = store.lock(UID)
    shutil.rmtree(tmp_path)
    lock.hold()  # locks the recreated folder
    with pytest.raises(CheckpointError, match="belong to another server"):
        other.lock(UID)
    lock.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A forked child does not hold the lock."""
    lock, (reader, writer), (began, begin) = FolderCheckpointStore(tmp_path).lock(UID), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(begin, b"!")
        os.read(reader, 1)  # outlives the lock
        os._exit(0)
    os.read(began, 1)
    lock.release()
    FolderCheckpointStore(tmp_path).lock(UID).release()
    for handle in (writer, reader, began, begin):
        os.close(handle)
    os.waitpid(child, 0)
    assert forked(lambda: FolderCheckpointStore(tmp_path).lock(UID))
    FolderCheckpointStore(tmp_path).lock(UID).release()


def test_file_system_without_locks_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockless(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", lockless)
    lock = FolderCheckpointStore(tmp_path).lock(UID)
    lock.hold()
    lock.release()
    assert caplog.text.count("cannot be locked: [Errno 37] No locks available") == 1


def test_checkpoints_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FolderCheckpointStore(tmp_path / "a" / "b")
        lock = store.lock(UID)
        save(store, 1)
    finally:
        os.umask(before)
    lock.release()
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    files = {path.suffix: mode for path, mode in modes.items() if path.is_file()}
    assert files == {"": 0o600, ".safetensors": 0o600}
