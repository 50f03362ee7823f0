"""A peer that ships with PyTorch: 1F1B of `torch.distributed.pipelining`, over two processes and gloo.

    this process --"step"--> rank 0, rank 1          each runs its half of the schedule
                 <--"done"-- rank 0, rank 1          the step has ended when both have

The processes wait for a word on a pipe in between, so that they cost the other candidates nothing.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

RANKS = 2
PATIENCE = 120  # seconds until a silent rank counts as dead

MakeStage = Callable[[int, int], nn.Module]
"""``make(size, rank) -> stage``; a function of a module, since it travels to another process."""


class TorchPeer:
    """Two processes that train together, one step per word. Use as a context manager."""

    def __init__(self, make: MakeStage, size: int, x: Tensor, target: Tensor, chunks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._lines: list[Connection] = []
        self._ranks: list[multiprocessing.context.SpawnProcess] = []
        for rank, data in enumerate((x, target)):
            line, theirs = context.Pipe()
            # Data as numpy arrays: tensors would travel through files that both sides must clean up.
            job = (theirs, store, rank, make, size, data.numpy(), chunks)
            process = context.Process(target=_serve, args=job, daemon=True)
            process.start()
            theirs.close()
            self._lines.append(line)
            self._ranks.append(process)

    @property
    def processes(self) -> list[int]:
        """The process numbers of the ranks."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def step(self) -> None:
        """One step of both, from the first to the last of them. Raises RuntimeError when a rank is gone."""
        for line in self._lines:
            line.send("step")
        for rank, line in enumerate(self._lines):
            if not line.poll(PATIENCE):
                raise RuntimeError(f"rank {rank} of the peer did not answer for {PATIENCE} s")
            try:
                line.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} of the peer has ended; its own words are above") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for line in self._lines:
            line.close()
        for rank in self._ranks:
            rank.join(10)
            rank.kill()
            rank.join()
        self._folder.cleanup()


def _serve(line: Connection, store: str, rank: int, make: MakeStage, size: int, data: object, chunks: int) -> None:
    """Main loop of a rank, until its line is closed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    module = make(size, rank)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=chunks, loss_fn=functional.mse_loss)
    tensor = torch.as_tensor(data)
    try:
        while True:
            line.recv()
            module.zero_grad(set_to_none=True)
            if rank == 0:
                schedule.step(tensor)
            else:
                schedule.step(target=tensor)
            line.send("done")
    except EOFError:
        pass
    dist.destroy_process_group()
