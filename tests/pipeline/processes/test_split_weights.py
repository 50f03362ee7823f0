"""Weights of a cut model over processes: from seeds, from files, and in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft as weft
from tests.pipeline.processes import split_weights as work


def assert_joined(states: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Check that all ranks together have the whole state."""
    assert {key for state in states for key in state} == expected.keys()
    for state in states:
        for key, value in state.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[key]), rtol=1e-12, atol=1e-12)


def test_ranks_are_initialised_as_one_process(ranks) -> None:
    pipe = work.piped(work.on_meta(), over_ranks=False)
    torch.manual_seed(5)
    assert_joined(ranks(2).run(work.initialize), work.trained(pipe.materialize()))


@pytest.mark.parametrize("tied", ["embed.weight", "head.weight"])
def test_weights_and_checkpoints_equal_one_process(ranks, tied: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="weights: needs safetensors")
    state = {key: value.clone() for key, value in work.build(seed=7).state_dict().items() if key != tied}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    plain = work.piped(work.on_meta(), over_ranks=False).materialize(tmp_path)
    expected = work.trained(plain, str(tmp_path / "plain"))
    assert_joined(ranks(2).run(work.read, str(tmp_path), str(tmp_path / "ranks")), expected)
    resumed = []
    for folder in ("plain", "ranks"):
        pipe = work.piped(work.build(seed=2), over_ranks=False)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        weft.checkpoint.load(tmp_path / folder, pipe, optimizer)
        work.train(pipe, optimizer, range(3, 5))
        resumed.append({key: value.tolist() for key, value in pipe.state_dict().items()})
        assert_joined(ranks(2).run(work.resume, str(tmp_path / folder)), resumed[0])
    assert_joined(resumed[1:], resumed[0])
