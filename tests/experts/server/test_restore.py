"""Experts restored from checkpoints: foreign checkpoints are refused, and differences are reported."""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    MultiStepLR,
    OneCycleLR,
    StepLR,
)

from tests.experts.crashing_disk import CrashingDisk
from torchweft.core.errors import UsageError
from torchweft.experts import ExpertBackend, TensorSpec
from torchweft.experts.checkpoint import EncodedCheckpoint, FolderCheckpointStore
from torchweft.experts.client.status import shown
from torchweft.experts.errors import CheckpointError, FormatError
from torchweft.experts.registry import make_expert
from torchweft.experts.server import Server, ServerOptions


def expert(optimizer: Any = Adam, hidden: int = 4, name: str = "f", **more: Any) -> ExpertBackend:
    return make_expert("ffn", hidden=hidden).backend(name, optimizer, **more)


def take_step(backend: ExpertBackend) -> None:
    x = torch.ones(2, 4)
    backend.backward_pool.submit_task(x, x).result(20)


def save_steps(folder: Path, *steps: int, optimizer: Any = Adam, **more: Any) -> FolderCheckpointStore:
    store, backend = FolderCheckpointStore(folder, keep=9), expert(optimizer, **more)
    with Server([backend], checkpoints=store) as server:
        for target in steps or (1,):
            while backend.steps < target:
                take_step(backend)
            server.checkpoint()
    return store


def rewrite_newest(store: FolderCheckpointStore, change: Callable[[dict[str, Any]], object]) -> None:
    checkpoint = store.load_newest("f")
    assert checkpoint is not None
    change(checkpoint.state)
    store.save("f", checkpoint.state, checkpoint.step, checkpoint.extra)


SCHEDULES = [partial(ExponentialLR, gamma=0.9), partial(StepLR, step_size=2), partial(CosineAnnealingLR, T_max=5)]


OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"optimizer": before}, {"optimizer": after}, "state is of optimizer")
    for before, after in [(partial(SGD, lr=0.1, momentum=0.9), Adam), (Adam, RMSprop), (Adam, AdamW), (RMSprop, SGD)]
]
OTHERS += [  # PyTorch would mix the saved values with those of the new schedule that have other names
    (
        {"schedule": one},
        {"schedule": other},
        f"of schedule {one.func.__name__}, but this expert has {other.func.__name__}",
    )
    for one, other in pairwise([*SCHEDULES, SCHEDULES[0]])
]


@pytest.mark.parametrize(("before", "after", "words"), OTHERS)
def test_checkpoint_of_another_optimizer_is_refused(
    before: dict[str, Any], after: dict[str, Any], words: str, tmp_path: Path
) -> None:
    store = save_steps(tmp_path, **before)
    count, backend = len(store.steps("f")), expert(**before)
    with pytest.raises(UsageError, match=words) as caught:
        Server([expert(**after)], checkpoints=store).start()
    assert "'f'" in str(caught.value) and str(tmp_path) in str(caught.value) and len(store.steps("f")) == count
    with Server([backend], checkpoints=store) as server:
        take_step(backend)
        assert server.statistics().keeping["f"].notes == () and server.statistics().failures == {}
    assert store.steps("f")[0] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda backend: (expert(hidden=8).state_dict(), {"records": backend.idempotency.state_dict()}),
        lambda backend: ([1, 2], {"records": backend.idempotency.state_dict()}),
        lambda backend: (backend.state_dict(), 5),
        lambda backend: (backend.state_dict(), {"records": "x"}),
        lambda backend: ({**backend.state_dict(), "optimizer": {"state": {}, "param_groups": []}}, None),
    ],
)
def test_unloadable_checkpoints_are_listed_by_expert(wrong: Any, tmp_path: Path) -> None:
    store = FolderCheckpointStore(tmp_path)
    for name in ("f", "g"):
        state, extra = wrong(expert(name=name))
        store.save(name, state, 3, extra)
    with pytest.raises(UsageError) as caught:
        Server([expert(), expert(name="g")], checkpoints=store).start()
    text = str(caught.value)
    for word in ("expert 'f' cannot go on from", "expert 'g' cannot go on from", str(tmp_path / "f"), "another folder"):
        assert word in text
    assert store.steps("f") == [3]


def test_hand_made_checkpoint_needs_no_idempotency_keys(tmp_path: Path) -> None:
    FolderCheckpointStore(tmp_path).save("f", expert().state_dict(), 0)
    backend = expert()
    with Server([backend], checkpoints=FolderCheckpointStore(tmp_path)) as server:
        take_step(backend)
        assert server.statistics().keeping["f"].restored == 0


def test_skipped_checkpoints_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = save_steps(tmp_path, 1, 5)
    newest = max((tmp_path / "f").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    with Server([expert()], checkpoints=store) as server:
        status = server.status()
        assert status["keeping"]["f"]["restored"] == 1
        for text in (status["failures"]["restore of f"], shown(status), caplog.text):
            assert "at step 1, as newer" in text and newest.name in text
        server._background.periodic["checkpoints"].act()
        assert server.status()["failures"] == status["failures"]
    store = save_steps(tmp_path, 6)
    caplog.clear()
    with Server([expert()], checkpoints=store) as server:  # a newer checkpoint is intact
        assert server.status()["failures"] == {} and caplog.text == ""


def test_changed_learning_rate_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = save_steps(tmp_path, optimizer=partial(Adam, lr=0.01, betas=(0.5, 0.9)))
    backend = expert(partial(Adam, lr=0.5))
    with caplog.at_level(logging.WARNING), Server([backend], checkpoints=store) as server:
        assert backend.optimizer is not None and backend.optimizer.param_groups[0]["lr"] == 0.01
        for text in ("\n".join(server.statistics().keeping["f"].notes), shown(server.status()), caplog.text):
            assert "lr is 0.01, as in its checkpoint, and not 0.5 as asked for" in text
            assert "betas is [0.5, 0.9]" in text
        assert server.status()["failures"] == {}
    rewrite_newest(store, lambda state: state["optimizer"]["param_groups"][0].update(lr=0.5, betas=(0.9, 0.999)))
    with Server([expert(partial(Adam, lr=0.5))], checkpoints=store) as server:
        assert server.statistics().keeping["f"].notes == ()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            partial(StepLR, step_size=2),
            partial(StepLR, step_size=7, gamma=0.5),
            ["step_size of StepLR is 2", "gamma of StepLR is 0.1"],
        ),
        (
            partial(MultiStepLR, milestones=[2, 4, 4]),
            partial(MultiStepLR, milestones=[2, 5]),
            ['milestones of MultiStepLR is {"2": 1, "4": 2}'],
        ),
        (partial(OneCycleLR, max_lr=1.0, total_steps=9), partial(OneCycleLR, max_lr=2.0, total_steps=9), ["max_lr is"]),
        (
            partial(CosineAnnealingWarmRestarts, T_0=2),
            partial(CosineAnnealingWarmRestarts, T_0=3),
            ["T_0 of CosineAnnealingWarmRestarts is 2"],
        ),
    ],
)
def test_changed_hyperparameters_are_reported(before: Any, after: Any, told: list[str], tmp_path: Path) -> None:
    store = save_steps(tmp_path, 3, optimizer=partial(AdamW, weight_decay=0.1), schedule=before)
    same = expert(partial(AdamW, weight_decay=0.1), schedule=before)
    with Server([same], checkpoints=store) as server:
        assert server.statistics().keeping["f"].notes == ()
    other = expert(partial(AdamW, weight_decay=0.3), schedule=after)
    with Server([other], checkpoints=store) as server:
        text = "\n".join(server.statistics().keeping["f"].notes)
        assert all(words in text for words in ["weight_decay is 0.1", *told]), text


@pytest.mark.parametrize("removed", [".", "saved", "saved/f"])
@pytest.mark.parametrize("steps", [0, 1])
def test_removed_folder_is_created_again(removed: str, steps: int, tmp_path: Path) -> None:
    root = tmp_path / "here"
    store, backend, idle = FolderCheckpointStore(root / "saved"), expert(), expert(name="idle")
    with Server([backend, idle], checkpoints=store) as server:
        take_step(backend)
        assert server.checkpoint() == 1
        shutil.rmtree(root / removed)
        for _ in range(steps):
            take_step(backend)
        assert server.checkpoint() == (1 if removed == "saved/f" else 2)
        assert server.checkpoint() == 0
        assert store.steps("f") == [1 + steps] and store.steps("idle") == [0]


def test_recreated_folder_survives_a_crash() -> None:
    disk, root = CrashingDisk(), Path("/data/experts")
    store = FolderCheckpointStore(root, disk=disk)
    store.save("f", {"a": 1}, 1)
    for files, folders in ((disk.now, disk.folders), (disk.safe, disk.safe_folders)):
        for path in [path for path in (*files, *folders) if path.is_relative_to(root)]:
            files.pop(path, None)
            folders.discard(path)
    store.save("f", {"a": 2}, 2)
    for seed in range(9):
        newest = FolderCheckpointStore(root, disk=disk.after_crash(Random(seed))).load_newest("f")
        assert newest is not None and newest.step == 2


def test_unreadable_folder_counts_as_saved(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 1)
    assert store.has("f", 1) and not store.has("f", 2) and not store.has("g", 1)
    shutil.rmtree(tmp_path / "f")
    (tmp_path / "f").write_text("no folder")
    assert store.has("f", 1)


def test_second_server_on_a_locked_folder_is_refused(tmp_path: Path) -> None:
    first = Server([expert()], checkpoints=FolderCheckpointStore(tmp_path))
    with first:
        second = Server([expert(name="other"), expert()], checkpoints=FolderCheckpointStore(tmp_path))
        with pytest.raises(CheckpointError, match=r"expert 'f' in .* belong to another server, process \d+ on "):
            second.start()
        with Server([expert(name="other")], checkpoints=FolderCheckpointStore(tmp_path)) as third:  # unlocked
            third.remove("other")
            third.add(expert(name="other"))
        first.remove("f")
        with Server([expert()], checkpoints=FolderCheckpointStore(tmp_path)):
            pass
    with Server([expert()], checkpoints=FolderCheckpointStore(tmp_path)):
        pass


def test_periodic_save_pauses_as_long_as_it_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], list[float]()

    class Slow(FolderCheckpointStore):
        def write(self, encoded: EncodedCheckpoint) -> Path:
            now[0] += 0.125
            return super().write(encoded)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=pauses.append)
    monkeypatch.setattr("torchweft.experts.server.server.time", clock)
    server = Server([expert(name=name) for name in ("a", "b")], checkpoints=Slow(tmp_path))
    assert server._save_all(pause=True) == 2 and pauses == [0.125, 0.125]
    assert server._save_all(pause=True) == 0 and pauses[2:] == [0.0, 0.0]  # without a step, nothing is written


def test_newest_checkpoint_of_another_version_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint would lose its steps, and later saves would delete the intact newest one."""
    save_steps(tmp_path, 1, 2)
    with monkeypatch.context() as newer:
        newer.setattr("torchweft.experts.serialization._FORMAT", "torchweft-2")
        FolderCheckpointStore(tmp_path, keep=9).save("f", expert().state_dict(), 3)
    for _ in range(2):
        store = FolderCheckpointStore(tmp_path, keep=1)
        with pytest.raises(FormatError, match=r"newest checkpoint of expert 'f'.*format 'torchweft-2'.*move that file"):
            store.load_newest("f")
        with pytest.raises((FormatError, UsageError), match="format 'torchweft-2'"):
            Server([expert()], checkpoints=store).start()
        assert store.steps("f")[0] == 3 and len(store.steps("f")) > 1


def test_full_disk_keeps_a_checkpoint_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = save_steps(tmp_path, 1)
    with monkeypatch.context() as newer:
        newer.setattr("torchweft.experts.serialization._FORMAT", "torchweft-2")
        store.save("f", expert().state_dict(), 3)
    names = store._names(tmp_path / "f")
    assert names[0] not in store._dispensable("f", tmp_path / "f")


@pytest.mark.parametrize(
    ("saved", "own", "loses"),
    [
        (torch.float32, torch.float64, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_change_of_dtype_is_noted_or_refused(saved: torch.dtype, own: torch.dtype, loses: bool, tmp_path: Path) -> None:
    """Conversion without loss is noted, as for the learning rate. A loss must be asked for."""

    def linear(dtype: torch.dtype) -> ExpertBackend:
        return ExpertBackend("f", torch.nn.Linear(4, 4, dtype=dtype), SGD, args_schema=(TensorSpec((None, 4), dtype),))

    store, before = FolderCheckpointStore(tmp_path), linear(saved)
    with Server([before], checkpoints=store):
        pass
    if loses:
        with pytest.raises(UsageError, match=r"would lose digits: 2 tensors.*weight.*lossy_restore"):
            Server([linear(own)], checkpoints=store).start()
    with Server([linear(own)], checkpoints=store, options=ServerOptions(lossy_restore=loses)) as server:
        (note,) = server.statistics().keeping["f"].notes
        assert str(saved).removeprefix("torch.") in note and str(own).removeprefix("torch.") in note
