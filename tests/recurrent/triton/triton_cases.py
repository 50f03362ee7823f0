"""Helpers for the tests of generated Triton kernels, which run in Triton's interpreter where there is no GPU."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from torchweft.recurrent.capture import capture
from torchweft.recurrent.cpp.lowering import decomposition_table
from torchweft.recurrent.triton import triton_backend
from torchweft.recurrent.triton.loops import Tier
from torchweft.recurrent.triton.triton_backend import TritonBackend

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(),
    reason="the package triton is not installed, or would run on a GPU instead of in its interpreter",
)
TIERS: tuple[Tier, ...] = ("rows", "segments")


def choose(monkeypatch: pytest.MonkeyPatch, tier: Tier) -> None:
    """Let every plan of kernels be of this tier."""
    monkeypatch.setattr(triton_backend, "choose_tier", lambda functions: (tier, "of a test"))


def backend_of(cell: Any, x: torch.Tensor, state: Any, tier: Tier | None) -> TritonBackend:
    """The plan of a cell for a step with this input and state."""
    return TritonBackend(capture(cell, x, state, composed=decomposition_table()), tier)
