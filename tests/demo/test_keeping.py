"""Peaks are predicted for every mode, measured, and the gradients of all modes have the same bits."""

import pytest
import torch

from weft.demo import keeping
from weft.demo.keeping import LOOP, MEMORIES, Planned, curves
from weft.demo.speller import IntegratingCell
from weft.demo.stage import ProofError
from weft.recurrent import engine
from weft.recurrent.cpp.compiler import compiler

BACKENDS = [
    "python",
    pytest.param("c", marks=pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_less_is_kept_in_each_mode_and_measured_so(backend: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(engine, "CHUNK_ROWS", 64)
    monkeypatch.setattr(keeping, "_LENGTHS", [32, 48])
    found = curves(IntegratingCell(4, 8), backend, (48,))
    assert [each.mode for each in found.measured] == list(MEMORIES) == list(found.predicted)
    by_mode = {each.mode: each for each in found.measured}
    assert by_mode["full"].measured > by_mode["states"].measured > 0
    for each in found.measured:
        assert each.steps == 48 and each.seconds > 0
    assert [steps for steps, _ in found.loop] == [] and LOOP not in found.predicted


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_large_buffers_are_measured_as_well() -> None:
    for each in curves(IntegratingCell(64, 96), "c", (128,)).measured:
        assert 0.9 < each.measured / each.predicted < 1.1, f"{each.mode}: {each.measured} of {each.predicted} bytes"


@pytest.mark.parametrize("backend", BACKENDS)
def test_longer_sequences_are_predicted_to_take_more_and_a_budget_is_kept(
    backend: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 4 << 20
    monkeypatch.setitem(keeping.MEMORIES, "64 MiB", budget)
    predicted = curves(IntegratingCell(4, 8), backend, ()).predicted
    for name in ("full", "states", "sqrt"):
        steps, sizes = zip(*predicted[name], strict=True)
        assert list(steps) == keeping._LENGTHS and sizes[0] < min(sizes[4:]) and max(sizes[:-4]) < sizes[-1]
    assert all(size <= budget for _, size in predicted["64 MiB"])
    assert 0 < len(predicted["64 MiB"]) < len(predicted["full"]), "it ends where nothing fits any more"


def test_gradients_that_differ_in_one_bit_are_told() -> None:
    one = torch.ones(3)
    other = torch.nextafter(one, 2 * one)
    keeping._check_same({"full": [one], "states": [one.clone()]}, 7)
    with pytest.raises(ProofError, match="over 7 steps memory 'sqrt' gives other gradients than 'full'"):
        keeping._check_same({"full": [one, one], "sqrt": [one, other]}, 7)
