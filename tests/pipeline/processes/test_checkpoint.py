"""Checkpoints are saved with one number of stages, loaded with another, and complete at any time."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import torchweft as weft
from tests.pipeline.processes import weights
from tests.pipeline.processes.launch import fresh_ranks
from torchweft.errors import UsageError, WeightsError


def plain_run(folder: Path | None = None) -> tuple[list[float], dict[str, Any]]:
    """The losses of steps 3 to 5 and the state afterwards in one process: from the start, or from a checkpoint."""
    pipe = weights.serial(weights.model(seed=3 if folder is None else 9))
    optimizer = weights.adam(pipe)
    if folder is None:
        weights.train(pipe, optimizer, range(3))
    else:
        assert weft.checkpoint.load(folder, pipe, optimizer) == {"step": 3, "rank": 0}
    return weights.train(pipe, optimizer, range(3, 6)), weights.state_of(pipe)


def assert_equal_runs(seen: tuple[list[float], dict[str, Any]], expected: tuple[list[float], dict[str, Any]]) -> None:
    assert seen[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-12)
    for key, value in seen[1].items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[1][key]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_training_goes_on_with_other_stages(ranks, size: int, tmp_path: Path) -> None:
    folder, expected = tmp_path / "latest", plain_run()
    ranks(3).run(weights.train_and_save, str(folder))
    assert weights.nothing_is_left(folder)
    results = ranks(size).run(weights.load_and_train, str(folder))
    for extra, losses, state in results:
        assert extra == {"step": 3, "rank": 0}
        assert_equal_runs((losses, state), expected)
    assert {key for _, _, state in results for key in state} == expected[1].keys()
    assert_equal_runs(plain_run(folder), expected)


def test_a_plain_checkpoint_is_loaded_by_ranks(ranks, tmp_path: Path) -> None:
    folder = tmp_path / "latest"
    pipe = weights.serial(weights.model())
    optimizer = weights.adam(pipe)
    weights.train(pipe, optimizer, range(3))
    weft.checkpoint.save(folder, pipe, optimizer)
    for extra, losses, state in ranks(2).run(weights.load_and_train, str(folder)):
        assert extra is None
        assert_equal_runs((losses, state), plain_run())


@pytest.mark.long
def test_training_survives_restarts(tmp_path: Path) -> None:
    """Each attempt has new processes and a new store, as with torchrun, and ends by the death of a rank."""
    folder, steps = str(tmp_path / "latest"), 7
    for attempt in range(steps):
        with fresh_ranks(2, timeout=30.0) as two:
            last = attempt == steps - 1
            outcomes = two.outcomes(weights.train_until_killed, folder, steps, without=() if last else (1,))
        for outcome in outcomes if last else outcomes[:1]:
            assert outcome and not outcome.text, outcome
            assert outcome.result[0] == "" if last else "rank 1 (host" in outcome.result[0]
    pipe = weights.serial(weights.model())
    expected = weights.train(pipe, weights.adam(pipe), range(steps)), weights.state_of(pipe)
    for outcome in outcomes:
        assert_equal_runs((expected[0], outcome.result[1]), expected)


@pytest.mark.long
def test_replicas_save_each_tensor_once(ranks, tmp_path: Path) -> None:
    folder = tmp_path / "latest"
    for differences in ranks(4).run(weights.save_with_replicas, str(folder)):
        assert max(differences) < 1e-12
    plain = weights.serial(weights.model(seed=9))
    assert weft.checkpoint.load(folder, plain, weights.adam(plain)) == "replicas"
    numbers = sum(parameter.numel() for parameter in plain.parameters())
    metadata = dcp.FileSystemReader(folder).read_metadata()
    stored = [key for key in metadata.state_dict_metadata if key.startswith("model.")]
    assert sorted(stored) == sorted(f"model.{key}" for key in plain.state_dict() if key != "5.linear.weight")
    assert sum(int(torch.Size(metadata.state_dict_metadata[key].size).numel()) for key in stored) == numbers + 13


def test_optimizer_keys_are_those_of_pytorch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = weights.adam(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weft.checkpoint.save(tmp_path / "latest", model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = {f"model.{key}" for key in model.state_dict()}
    theirs |= {f"optimizer.{key}" for key in get_optimizer_state_dict(model, optimizer, options=options)}
    assert dcp.FileSystemReader(tmp_path / "latest").read_metadata().state_dict_metadata.keys() == theirs


def test_an_interrupted_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tmp_path / "latest", nn.Linear(2, 2)
    weft.checkpoint.save(folder, model, extra=1)
    rename = Path.rename
    for count in (0, 1):  # before the first rename, and between the two
        done: list[Path] = []

        def stop(path: Path, target: Path, done: list[Path] = done, count: int = count) -> Any:
            if path.parent == tmp_path and len(done) == count:
                raise KeyboardInterrupt
            done += [path] * (path.parent == tmp_path)
            return rename(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", stop)
            with pytest.raises(KeyboardInterrupt):
                weft.checkpoint.save(folder, model, extra=2)
        assert weft.checkpoint.load(folder, nn.Linear(2, 2)) == 1
    weft.checkpoint.save(folder, model, extra=3)
    assert weft.checkpoint.load(folder, nn.Linear(2, 2)) == 3
    assert weights.nothing_is_left(folder)


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("keep")
    with pytest.raises(UsageError, match="is not a checkpoint"):
        weft.checkpoint.save(tmp_path, nn.Linear(2, 2))
    assert (tmp_path / "notes").read_text() == "keep"


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    model, folder = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), tmp_path / "latest"
    weft.checkpoint.save(folder, model, torch.optim.Adam(model[0].parameters()))
    other = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(4, 2), nn.Linear(2, 2, bias=False))
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(WeightsError) as caught:
        weft.checkpoint.load(folder, other, torch.optim.Adam(other[1].parameters()))
    for words in (
        "model.0.bias: in the checkpoint, but not in the model",
        "2.weight: in the model, but not in the checkpoint",
        "1.weight: [2, 3] in the checkpoint, but [2, 4] in the model",
        "1.bias: in the optimizer, but not in that of the checkpoint",
        "0.weight: in the optimizer of the checkpoint, but not here",
    ):
        assert words in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    with pytest.raises(WeightsError, match="FileNotFoundError"):
        weft.checkpoint.load(tmp_path / "none", other)


def test_other_groups_of_the_optimizer_are_refused(tmp_path: Path) -> None:
    model, folder = nn.Linear(2, 2), tmp_path / "latest"
    weft.checkpoint.save(folder, model, weights.adam(model))
    with pytest.raises(WeightsError, match="different options in the checkpoint"):
        weft.checkpoint.load(folder, model, torch.optim.Adam(model.parameters()))


def test_mismatch_on_one_rank_is_raised_on_all(ranks, tmp_path: Path) -> None:
    ranks(3).run(weights.train_and_save, str(tmp_path / "latest"))
    for outcome in ranks(2).outcomes(weights.load_other, str(tmp_path / "latest")):
        assert isinstance(outcome.error, WeightsError) and "3.weight" in str(outcome.error), outcome.text


def test_a_load_that_fails_on_one_rank_fails_on_all(ranks, tmp_path: Path) -> None:
    """A foreign parameter is reported to all ranks before any rank raises, although checkpoint and model match."""
    ranks(2).run(weights.train_and_save, str(tmp_path / "latest"))
    for outcome in ranks(2).outcomes(weights.load_where_one_fails, str(tmp_path / "latest")):
        assert isinstance(outcome.error, UsageError) and "rank 1: the optimizer has 1 " in str(outcome.error), (
            outcome.text
        )


def test_a_damaged_checkpoint_is_a_weights_error(tmp_path: Path) -> None:
    folder = tmp_path / "latest"
    weft.checkpoint.save(folder, nn.Linear(2, 2))
    (folder / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(WeightsError, match="cannot be read: "):
        weft.checkpoint.load(folder, nn.Linear(2, 2))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        weft.checkpoint.save(tmp_path / "file" / "latest", nn.Linear(2, 2))
    assert any("can be written to" in note for note in caught.value.__notes__)


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks, tmp_path: Path) -> None:
    ranks(2).run(weights.train_and_save, str(tmp_path / "latest"))
    for outcome in ranks(2).outcomes(weights.save_where_one_fails, str(tmp_path / "latest")):
        assert isinstance(outcome.error, UsageError) and "rank 1: the optimizer has 1 " in str(outcome.error), (
            outcome.text
        )
    plain_run(tmp_path / "latest")
