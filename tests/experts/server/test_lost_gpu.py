"""A failed GPU ends its server with one message, because every later call would fail."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.processes import ROOT, SOURCE
from torchweft import ExpertBackend, RemoteExpert, Server, TensorSpec
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import Retry
from torchweft.experts.errors import ClosedError, DeviceLostError, ExpertError


@contextmanager
def serving(kind: str, folder: Path) -> "Iterator[subprocess.Popen[str]]":
    words = [f"--expert=f={kind}", "--expert=g=ffn:hidden=8", "--optimizer=SGD", "--lr=0.1"]
    words += ["--address=127.0.0.1:0", f"--checkpoints={folder}", "--import=tests.experts.server.lost_gpu"]
    path = os.pathsep.join([str(SOURCE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": path}
    child = subprocess.Popen(
        [sys.executable, "-m", "torchweft", "serve", *words], stdout=pipe, stderr=pipe, text=True, env=env
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=20)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["breaking", pytest.param("look-up", marks=pytest.mark.cuda)])
def test_a_failed_gpu_ends_the_server_with_one_message(kind: str, tmp_path: Path) -> None:
    with serving(kind, tmp_path) as child:
        assert child.stdout is not None
        address = child.stdout.readline().split()[-1]
        once = Retry(attempts=1)
        with RemoteExpert("f", address, retry=once) as expert, RemoteExpert("g", address, retry=once) as other:
            for _ in range(3):
                expert(torch.ones(2, 2)).sum().backward()
                other(torch.ones(2, 8)).sum().backward()
            with pytest.raises(ExpertError, match="GPU failed in expert 'f'"):
                expert(torch.full((2, 2), 1000.0))
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    (message,) = [line for line in errors.splitlines() if line.startswith("torchweft: ")]
    assert "CUDA error: device-side assert triggered" in message and "restart it" in message
    saved = FolderCheckpointStore(tmp_path)
    assert saved.steps("g")[0] == 3, "the experts of other devices are saved"
    assert kind != "breaking" or saved.steps("f")[0] == 3


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            raise torch.AcceleratorError("CUDA error: invalid configuration argument")
        return x + 1


@pytest.mark.parametrize("dead", [False, True])
def test_only_an_error_that_left_the_gpu_dead_ends_its_experts(dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def synchronize(device: object = None) -> None:
        asked.append(device)
        if dead:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    good, bad = torch.ones(1, 2), torch.full((1, 2), 1000.0)
    backend = ExpertBackend("f", Raising(), args_schema=(TensorSpec((None, 2), torch.float32),))
    with Server([backend]) as server:
        assert server.lost is None
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        failure = backend.forward_pool.submit_task(bad).exception(20)
        assert isinstance(failure, DeviceLostError if dead else torch.AcceleratorError) and asked
        if dead:
            server._runtimes._by_device["cpu"]._thread.join(20)  # type: ignore[union-attr]
            with pytest.raises(ClosedError, match="GPU failed in expert 'f'"):
                backend.forward_pool.submit_task(good)
            assert server.lost is not None and "runtime cpu" in server.statistics().failures
        else:
            assert backend.forward_pool.submit_task(good).result(20)[0].tolist() == [[2.0, 2.0]]
            assert server.lost is None


def test_without_a_gpu_no_error_ends_the_experts() -> None:
    """The text of a module's error is irrelevant."""
    backend = ExpertBackend("f", Raising(), args_schema=(TensorSpec((None, 2), torch.float32),))
    if not torch.cuda.is_initialized():
        with Server([backend]) as server:
            failure = backend.forward_pool.submit_task(torch.full((1, 2), 1000.0)).exception(20)
            assert isinstance(failure, torch.AcceleratorError) and server.lost is None
