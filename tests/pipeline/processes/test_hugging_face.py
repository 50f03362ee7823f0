"""Trainer, accelerate and save_pretrained over the ranks of a pipe."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.pipe_cases import assert_close
from tests.pipeline.processes import trainers
from tests.pipeline.split.test_zoo import needs_transformers
from torchweft.errors import UsageError

pytestmark = [needs_transformers, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
TOLERANCE = 1e-12


def assert_logs_equal(seen: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(seen) == len(expected)
    for one, other in zip(seen, expected, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)


def saved_tensors(folder: Path) -> dict[str, Any]:
    """The weights and the state of the optimizer in a checkpoint of Trainer."""
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    if (folder / "optimizer.pt").exists():
        optimizer = torch.load(folder / "optimizer.pt")
        tensors["groups"] = [group["params"] for group in optimizer["param_groups"]]
        tensors |= {f"{number} {key}": x for number, state in optimizer["state"].items() for key, x in state.items()}
    return tensors


@pytest.mark.long
def test_trainer_over_ranks_is_trainer_in_one_process(ranks, tmp_path: Path) -> None:
    """Losses, norms, evaluation, predictions, and every file of weights and optimizer states. Each resumes from the
    checkpoints of the other."""
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    expected = trainers.train(str(alone), trainers.unchanged)
    for seen in ranks(2).run(trainers.train, str(spread), seconds=250):
        assert_logs_equal(seen, expected)
    for folder in ("checkpoint-2", "checkpoint-4", "saved"):
        theirs, ours = saved_tensors(alone / folder), saved_tensors(spread / folder)
        assert theirs.pop("groups", None) == ours.pop("groups", None)
        assert_close(ours, theirs, TOLERANCE)
    half = "checkpoint-2"
    for seen in ranks(2).run(
        trainers.train, str(tmp_path / "again"), trainers.over_ranks, str(alone / half), seconds=250
    ):
        assert_logs_equal(seen, expected)
    seen = trainers.train(str(tmp_path / "alone again"), trainers.unchanged, str(spread / half))
    assert_logs_equal(seen, expected)


@pytest.mark.long
def test_script_of_the_tutorial_needs_only_a_group(ranks, tmp_path: Path) -> None:
    expected = trainers.run_tutorial(str(tmp_path / "alone"), False)
    for seen in ranks(2).run(trainers.run_tutorial, str(tmp_path / "spread"), True, seconds=250):
        for key in ("loss", "eval"):
            assert seen[key] == pytest.approx(expected[key], rel=TOLERANCE)
        assert_close(seen["weights"], expected["weights"], TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lora", "sft"])
def test_adapters_train_as_in_one_process(ranks, kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    pytest.importorskip("trl", reason="there is no TRL; the extra `lora` brings it", exc_type=ImportError)
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    expected = trainers.fine_tune(str(alone), kind, trainers.unchanged)
    for seen in ranks(2).run(trainers.fine_tune, str(spread), kind, trainers.adapted_over_ranks, seconds=250):
        assert seen == pytest.approx(expected, rel=TOLERANCE)
    ours, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (spread, alone))
    assert_close(ours, theirs, TOLERANCE)


def assert_loops_equal(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    assert seen["counts"] == expected["counts"] and sum(seen["counts"]) == 42
    assert seen["rate"] == expected["rate"]
    assert seen["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    for key in ("saved", "loaded"):
        assert_close(seen[key], expected[key], TOLERANCE)
    assert_close(seen["loaded"], seen["saved"])


@pytest.mark.long
def test_loop_of_accelerate_trains_as_in_one_process(ranks, tmp_path: Path) -> None:
    (expected,) = ranks(1).run(trainers.loop, str(tmp_path / "alone"), 1, False, seconds=250)
    first, second = ranks(2).run(trainers.loop, str(tmp_path / "spread"), 1, seconds=250)
    assert_loops_equal(first, expected)
    assert second["norms"] == first["norms"]


@pytest.mark.long
def test_replicas_train_as_data_parallel_processes(ranks, tmp_path: Path) -> None:
    """Two replicas of two ranks each, against two processes that have the whole model each."""
    expected, _ = ranks(2).run(trainers.loop, str(tmp_path / "whole"), 2, False, seconds=250)
    seen = ranks(4).run(trainers.loop, str(tmp_path / "spread"), 2, seconds=250)
    assert_loops_equal(seen[0], expected)
    assert all(other["norms"] == seen[0]["norms"] for other in seen[1:])


def test_ranks_of_a_pipe_get_the_same_streamed_rows(ranks) -> None:
    first, second = ranks(2).run(trainers.streamed_rows)
    assert first == second and first[:11] == [*range(11)]


def test_pretrained_files_have_the_whole_model(ranks, tmp_path: Path) -> None:
    ranks(2).run(trainers.save_both, str(tmp_path))
    trainers.language_model().save_pretrained(tmp_path / "expected")
    for name in ("pipe", "model"):
        assert_close(saved_tensors(tmp_path / name), saved_tensors(tmp_path / "expected"))
        assert (tmp_path / name / "config.json").read_text() == (tmp_path / "expected" / "config.json").read_text()


def test_failed_save_raises_on_all_ranks(ranks, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    first, second = ranks(2).run(trainers.save_into_file, str(path))
    assert first.startswith("NotADirectoryError") and "NotADirectoryError" in second


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (trainers.wrap_in_ddp, r"would average the ranks \[0, 1\], which have different stages of one Pipe; give"),
        (trainers.sampler_of_all_processes, "DistributedSampler divides the rows among 2 processes, but there are 1"),
        (trainers.loader_before_the_pipe, "make the Pipe first"),
        (trainers.scaled_loss, "use 'bf16'"),
    ],
    ids=["DDP", "sampler", "loader", "fp16"],
)
def test_what_would_be_wrong_is_refused(ranks, work: Any, words: str) -> None:
    for outcome in ranks(2).outcomes(work):
        assert outcome is not None
        with pytest.raises(UsageError, match=words):
            raise outcome.error or AssertionError("no error")
