"""A peer that ships with PyTorch: 1F1B of `torch.distributed.pipelining`, over two processes and gloo.

    this process --"step"--> rank 0, rank 1          each runs its half of the schedule
                 <--"done"-- rank 0, rank 1          a step ends with its last rank

Between steps the ranks block on a connection, so that they do not slow the other candidates.
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
PATIENCE = 120  # seconds that a rank can take for a step

MakeStage = Callable[[int, int], nn.Module]
"""``make(size, rank) -> stage``. Must be a module-level function, because it is pickled."""


class TorchPeer:
    """Two processes that train together, one step per message. Use as a context manager."""

    def __init__(self, make: MakeStage, size: int, x: Tensor, target: Tensor, chunks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._connections: list[Connection] = []
        self._ranks: list[multiprocessing.context.SpawnProcess] = []
        for rank, data in enumerate((x, target)):
            connection, remote_end = context.Pipe()
            # Pass data as numpy arrays: tensors would be sent through files that both sides must remove.
            job = (remote_end, store, rank, make, size, data.numpy(), chunks)
            process = context.Process(target=_serve, args=job, daemon=True)
            process.start()
            remote_end.close()
            self._connections.append(connection)
            self._ranks.append(process)

    @property
    def processes(self) -> list[int]:
        """The process numbers of the ranks."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def step(self) -> None:
        """Run one step on both ranks and wait for it. Raises RuntimeError if a rank has ended."""
        for connection in self._connections:
            connection.send("step")
        for rank, connection in enumerate(self._connections):
            if not connection.poll(PATIENCE):
                raise RuntimeError(f"rank {rank} of the peer did not answer for {PATIENCE} s")
            try:
                connection.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} of the peer has ended; its output is above") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection in self._connections:
            connection.close()
        for rank in self._ranks:
            rank.join(10)
            rank.kill()
            rank.join()
        self._folder.cleanup()


def _serve(asker: Connection, store: str, rank: int, make: MakeStage, size: int, data: object, chunks: int) -> None:
    """Main loop of a rank, until its connection is closed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    module = make(size, rank)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=chunks, loss_fn=functional.mse_loss)
    tensor = torch.as_tensor(data)
    try:
        while True:
            asker.recv()
            module.zero_grad(set_to_none=True)
            if rank == 0:
                schedule.step(tensor)
            else:
                schedule.step(target=tensor)
            asker.send("done")
    except EOFError:
        pass
    dist.destroy_process_group()
