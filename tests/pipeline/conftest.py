"""Fixtures shared by the tests of Pipe."""

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group whose only rank is this process."""
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
