"""Clock readings after queued device work, and the note on an error that a GPU reports with a delay."""

import time

import pytest
import torch

from torchweft.core.errors import add_advice
from torchweft.core.timing import time_after


def test_time_is_read_after_every_gpu_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    gpus = [torch.device("cuda", index) for index in range(2)]
    before = time.perf_counter()
    assert before <= time_after([gpus[0], torch.device("cpu"), *gpus]) <= time.perf_counter()
    assert sorted(done, key=str) == gpus
    time_after([torch.device("cpu")])
    assert len(done) == 2


@pytest.mark.cuda
def test_time_includes_queued_work_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    begin = time_after([device])
    torch.cuda._sleep(200_000_000)
    launched = time.perf_counter() - begin
    assert time_after([device]) - begin > 2 * launched
    assert torch.cuda.current_stream(device).query()


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
def test_gpu_error_gets_a_note_on_its_delay(kind: type[RuntimeError]) -> None:
    error, other = kind("CUDA error: device-side assert triggered"), kind("something else")
    add_advice(error)
    add_advice(other)
    assert "CUDA_LAUNCH_BLOCKING=1" in error.__notes__[0] and not hasattr(other, "__notes__")
