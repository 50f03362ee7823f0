"""Plans by generated kernels: recorded segments, the choice of a tier, and where Triton cannot run."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from tests.recurrent.recurrent_cases import as_the_loop, eagerly, outcome, planned
from tests.recurrent.triton.triton_cases import TIERS, backend_of, needs_triton
from torchweft.recurrent.plan_cache import NoPlanWarning
from torchweft.recurrent.recordings import Recordings
from torchweft.recurrent.triton import toolchain, triton_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@needs_triton
def test_segments_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a substitute for a CUDA graph, which runs the same work on the memory of the recording."""
    replays: list[int] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            replays.append(1)
            work()

        return replay

    monkeypatch.setattr(triton_backend, "choose_tier", lambda functions: ("segments", "of a test"))
    monkeypatch.setattr(triton_backend, "Recordings", lambda recorder: Recordings(record))
    torch.manual_seed(0)
    cell = nn.LSTMCell(3, 4).double()
    net = as_the_loop(cell, "triton", torch.randn(3, 5, 3).double().requires_grad_(), verify="never")
    assert len(replays) == 4 and "launches recorded" in net.explain()  # each is checked, then used
    x = torch.randn(3, 5, 3).double().requires_grad_()
    for one, other in zip(outcome(net, x)[1], outcome(eagerly(cell), x)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert len(replays) == 6


@needs_triton
@pytest.mark.parametrize(("width", "rows", "tier"), [(8, 16, "rows"), (512, 16, "segments"), (64, 4096, "rows")])
def test_tier_follows_the_sizes(width: int, rows: int, tier: str) -> None:
    def step(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(x + h @ weight)
        return h, h

    weight = torch.zeros(width, width)
    made = backend_of(step, torch.zeros(rows, width), torch.zeros(rows, width), None)
    assert made.tier == tier and made.tier in TIERS and "us by rows" in made.explain()


def test_places_where_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is not None and toolchain.is_interpreted():
        assert toolchain.why_unavailable(CPU) is None
        assert "is for tensors on a CPU" in (toolchain.why_unavailable(CUDA) or "")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert toolchain.why_unavailable(CUDA) == "the package triton is not installed"
    net = planned(nn.GRUCell(3, 4), "triton")
    with pytest.warns(NoPlanWarning, match="runs by the eager loop: not triton: the package triton is not installed"):
        net(torch.randn(2, 1, 3))
