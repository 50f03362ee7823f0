"""DistributedDataParallel around a Pipe: two processes get the gradients of plain DDP.

This file is also the program of both processes: ``python test_pipe_ddp.py RANK STORE``.
"""

import copy
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchweft as weft

ROOT = Path(__file__).parents[2]
WORLD = 2
INTERFACE = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
DEADLINE = 100  # seconds for both processes
CASES = [
    {"checkpoint": checkpoint, "schedule": schedule, "executor": executor}
    for checkpoint in ("always", "except_last", "never")
    for schedule in ("gpipe", "1f1b")
    for executor in ("serial", "threads")
]


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank has different rows."""
    source = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(7, 4, dtype=torch.float64, generator=source)
    return x, torch.randn(7, 2, dtype=torch.float64, generator=source)


def train(wrapped: nn.Module, rank: int, loss) -> list[torch.Tensor]:
    """The gradients after two steps that accumulate."""
    for step in range(2):
        loss(wrapped, *batch(rank, step)).backward()
    return [parameter.grad for parameter in wrapped.parameters()]


def outside_loss(wrapped: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(wrapped(x), y)


def inside_loss(wrapped: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return wrapped(x, target=y)


def check(case: dict, rank: int, expected: list[torch.Tensor]) -> None:
    for loss in (outside_loss, inside_loss) if case["schedule"] == "gpipe" else (inside_loss,):
        pipe = weft.Pipe(model(), chunks=3, devices=["cpu", "cpu"], balance=[3, 2], loss=nn.MSELoss(), **case)
        calls: list[int] = []
        pipe[0].weight.register_hook(lambda gradient, calls=calls: calls.append(1))
        seen = train(DistributedDataParallel(pipe), rank, loss)
        for mine, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert len(calls) == 2, f"a hook fired {len(calls)} times in two steps"


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    plain = model()
    expected = train(DistributedDataParallel(copy.deepcopy(plain)), rank, outside_loss)
    alone = train(copy.deepcopy(plain), rank, outside_loss)
    assert not torch.allclose(expected[0], alone[0]), "the ranks should have averaged their gradients"
    for case in CASES:
        check(case, rank, expected)
    dist.destroy_process_group()
    print(f"{len(CASES)} cases hold on rank {rank}")


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
def test_gradients_are_those_of_plain_ddp_in_every_mode(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": path, **INTERFACE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, outputs[rank]
        assert f"{len(CASES)} cases hold on rank {rank}" in outputs[rank]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
