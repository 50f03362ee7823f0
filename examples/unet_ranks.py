"""Across processes: an ordinary U-Net trains on three ranks, loses one, and continues from its checkpoint with two.

    python examples/unet_ranks.py [--steps 24]           start three ranks, lose one, start two, compare
    torchrun --standalone --nproc-per-node 2 examples/unet_ranks.py --folder DIR [--steps 24]         train only

    rank 0              rank 1                 rank 2
    enter, fine_down ── middle_down, bottom ── middle_up ─ cat ─ fine_up ─ leave ─ minus
      │         └────── fine: past rank 1 ─────────────────┘                       │
      └──────────────── noisy: past rank 1 ────────────────────────────────────────┘

Each rank is a process with the parameters of its own stage. Every few steps, all of them write one checkpoint together.
It does not depend on the number of ranks. At the end, plain PyTorch trains the same steps in one process, and the
weights of both must be equal to rounding.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft

SPLIT = {2: ["bottom"], 3: ["middle_down", "middle_up"], 4: ["middle_down", "middle_up", "fine_up"]}
ROWS, CHUNKS, WIDTH, NOISE, RATE = 32, 4, 8, 0.3, 4e-3
SAVE_EVERY, LOSE_AT, LOST_RANK = 4, 10, 1
SECONDS = 60.0  # limit for one start of the ranks
LIMIT = 1e-8  # rounding in float64, after some steps of Adam


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    """Removes the noise of images N x 1 x H x W, where H and W are multiples of 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = block(1, width)
        self.fine_down = block(width, width)
        self.middle_down = block(width, 2 * width)
        self.bottom = nn.Sequential(block(2 * width, 4 * width), block(4 * width, 2 * width))
        self.middle_up = block(4 * width, width)
        self.fine_up = block(2 * width, width)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        fine = self.fine_down(self.enter(noisy))
        middle = self.middle_down(functional.avg_pool2d(fine, 2))
        x = self.bottom(functional.avg_pool2d(middle, 2))
        x = self.middle_up(torch.cat([functional.interpolate(x, scale_factor=2), middle], 1))
        x = self.fine_up(torch.cat([functional.interpolate(x, scale_factor=2), fine], 1))
        return noisy - self.leave(x)


def make_model() -> nn.Module:
    """The same model in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the ranks run at the same time
    return UNet(WIDTH).double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The noisy and the clean images of a step. They depend only on its number, so a step can be repeated exactly."""
    torch.manual_seed(step)
    clean = functional.interpolate(torch.rand(ROWS, 1, 4, 4).double(), size=(16, 16), mode="bilinear")
    return clean + NOISE * torch.randn_like(clean), clean


def train_rank(folder: Path, steps: int, lose_at: int) -> None:
    """Train as one rank of a torchrun group, from the last checkpoint on."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = {"chunks": CHUNKS, "schedule": "1f1b", "loss": functional.mse_loss}
    pipe = weft.Pipe(make_model(), split=SPLIT[size], group=dist.group.WORLD, **settings)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=RATE)
    step, checkpoint = 0, folder / "latest"
    if checkpoint.exists():
        step = weft.checkpoint.load(checkpoint, pipe, optimizer)["step"]
    if rank == 0:
        print(f"  {size} ranks, after step {step}", flush=True)
    while step < steps:
        if step == lose_at and rank == LOST_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        noisy, clean = batch_of(step)
        pipe.batch_tag = step  # an error on all ranks if their steps differ
        optimizer.zero_grad()
        try:
            loss = pipe(noisy, target=clean)
            loss.backward()
        except weft.errors.RankLostError as error:
            print(f"  rank {rank} raised RankLostError: {error}", flush=True)
            raise
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0 or step == steps:
            weft.checkpoint.save(checkpoint, pipe, optimizer, extra={"step": step})
            if rank == 0:
                print(f"    step {step}   loss {loss.item():.4f}   saved", flush=True)
    if rank == 0:
        sent = {other: sum(routes.values()) for other, routes in pipe.statistics()["wire"].items()}
        print("  bytes from rank 0:", ", ".join(f"{count} to rank {other}" for other, count in sent.items()))
    dist.destroy_process_group()


def start_ranks(size: int, *words: str) -> tuple[int, str]:
    """Run this script as `size` ranks by torchrun. Returns the exit code and standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen([*command, *words], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = agent.communicate(timeout=SECONDS)
    except BaseException:
        agent.terminate()  # torchrun then ends its ranks
        with suppress(subprocess.TimeoutExpired):
            agent.communicate(timeout=10)
        agent.kill()
        raise
    return agent.returncode, errors


def largest_difference(folder: Path, steps: int) -> float:
    """The largest difference of any weight of the checkpoint from plain PyTorch's after the same steps."""
    saved, plain = UNet(WIDTH).double(), make_model()
    weft.checkpoint.load(folder / "latest", saved)
    optimizer = torch.optim.Adam(plain.parameters(), lr=RATE)
    for step in range(steps):
        noisy, clean = batch_of(step)
        optimizer.zero_grad()
        functional.mse_loss(plain(noisy), clean).backward()
        optimizer.step()
    weights = zip(saved.parameters(), plain.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in weights)


def main(steps: int) -> None:
    began = time.perf_counter()
    print("across processes: an ordinary U-Net, one stage per rank", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--folder", folder, "--steps", str(steps)]
        _, errors = start_ranks(3, *words, "--lose-at", str(LOSE_AT))
        saved = weft.checkpoint.load(Path(folder) / "latest", UNet(WIDTH).double())["step"]
        if "SIGKILL" not in errors or saved != LOSE_AT // SAVE_EVERY * SAVE_EVERY:
            raise SystemExit(f"expected the loss of a rank, but got this after step {saved}:\n{errors}")
        print(f"  rank {LOST_RANK} was killed in step {LOSE_AT + 1}; two ranks continue after step {saved}", flush=True)
        code, errors = start_ranks(2, *words)
        if code:
            raise SystemExit(f"the second start ended with code {code}:\n{errors}")
        worst = largest_difference(Path(folder), steps)
    print(f"  largest difference of any weight from plain PyTorch, float64: {worst:.1e}")
    print(f"  {time.perf_counter() - began:.0f} s")
    if not worst < LIMIT:
        raise SystemExit("the weights differ by more than rounding")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints, under torchrun")
    parser.add_argument("--lose-at", type=int, default=-1, help="kill one rank before this step, under torchrun")
    arguments = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        main(arguments.steps)
    elif arguments.folder is None:
        parser.error("under torchrun, --folder must be given")
    else:
        train_rank(arguments.folder, arguments.steps, arguments.lose_at)
