"""Weights of a pipe over processes: from seeds, from files, and from a whole state_dict."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pipeline import loading
from tests.pipeline.processes import weights
from torchweft.errors import UsageError, WeightsError


def joined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of all ranks together. Ranks that have the same key must have the same value."""
    whole: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            assert whole.setdefault(key, value) == value
    return whole


def serially_trained(materialize: Any) -> dict[str, Any]:
    return weights.trained(materialize(weights.serial(weights.on_meta())))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_are_initialised_as_one_process(ranks, size: int) -> None:
    def materialize(pipe: Any) -> Any:
        torch.manual_seed(5)
        return pipe.materialize()

    expected = serially_trained(materialize)
    for ranks_differ in (False, True):  # the seed is that of the first rank
        assert joined(ranks(size).run(weights.initialize, ranks_differ)) == expected


@pytest.mark.parametrize("tied", ["0.linear.weight", "5.linear.weight"])
def test_ranks_read_their_own_keys(ranks, tied: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="weights: needs safetensors")
    state = {key: value.clone() for key, value in weights.model(seed=8).state_dict().items()}
    del state[tied]
    safetensors.save_file(state, tmp_path / "model.safetensors")
    expected = serially_trained(lambda pipe: pipe.materialize(tmp_path))
    assert joined(ranks(2).run(weights.read, str(tmp_path))) == expected


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory: needs the peak that Linux records")
@pytest.mark.parametrize("cut", ["balance=", "split="])
def test_loading_holds_the_share_and_one_layer(ranks, cut: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch", reason="weights: needs safetensors")
    file, layer = tmp_path / "model.safetensors", 1024 * 1024 * 4
    loading.write_weights(file, 1024, cut)
    ranks(2).run(loading.load, 64, cut, None)  # connections and imports take memory once
    for share, peak in ranks(2).run(loading.load, 1024, cut, str(file)):
        assert share == 6 * layer
        assert peak - share < 3 * layer  # some slack, because malloc keeps small blocks


def test_faults_of_any_rank_are_raised_on_all(ranks, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="weights: needs safetensors")
    state = {key: value.clone() for key, value in weights.model().state_dict().items()}
    del state["1.bias"], state["3.bias"]
    safetensors.save_file({**state, "more": torch.ones(1)}, tmp_path / "model.safetensors")
    for outcome in ranks(2).outcomes(weights.read, str(tmp_path)):
        assert isinstance(outcome.error, WeightsError), outcome.text
        for words in ("1.bias: in the model", "3.bias: in the model", "more: in the files"):
            assert words in str(outcome.error)
        assert "linear" not in str(outcome.error)


def test_a_rank_loads_the_state_of_the_whole_model(ranks) -> None:
    expected = weights.trained(weights.serial(weights.model(seed=7)))
    assert joined(ranks(3).run(weights.load_whole_state, False)) == expected


def test_loading_stays_strict_for_local_keys(ranks) -> None:
    first, second = ranks(2).outcomes(weights.load_whole_state, True)
    assert "1.bias: missing" in str(first.error) and "unknown: unexpected" in str(first.error)
    assert "1.bias" not in str(second.error) and "unknown: unexpected" in str(second.error)


def test_a_scaler_of_one_process_is_refused(ranks) -> None:
    for outcome in ranks(2).outcomes(weights.scale_alone):
        assert isinstance(outcome.error, UsageError) and "ShardedGradScaler" in str(outcome.error), outcome.text


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_sharded_grad_scaler_agrees_over_ranks(ranks, schedule: str) -> None:
    first, second = ranks(2).run(weights.scale_gradients, schedule)
    assert [scale for scale, _, _ in first] == [2.0**16, 2.0**15, 2.0**15]
    for (scale, norm, weight), (other_scale, other_norm, other_weight) in zip(first, second, strict=True):
        assert scale == other_scale and norm == pytest.approx(other_norm, nan_ok=True)
        assert weight == pytest.approx(other_weight, abs=1e-6)
    assert first[0][2] == first[1][2] == pytest.approx(1.0 - 1e-4, abs=1e-6)  # the second step was skipped
    assert first[2][2] < first[1][2]
