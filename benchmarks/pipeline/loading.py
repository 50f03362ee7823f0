"""Peak memory of a rank that loads a model: built without storage, then filled from a file or from seeds.

    build_on_meta, Pipe(group=), materialize        peak <= the rank's share of the parameters + one layer

Memory is the resident set of the process, including mapped pages of files. The kernel records its peak, which each load
resets. A small model is loaded first, so that imports and connections do not count.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft
from benchmarks.harness import progress
from benchmarks.table import Row, Table, at_most
from tests.pipeline.processes.launch import fresh_ranks

LAYERS = 12
SLACK = 0.25
"""Allowed memory for messages, headers and the allocator, in layers."""


class Blocks(nn.Module):
    """Model that is not an `nn.Sequential`, so that split= must cut it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Peak(NamedTuple):
    """Bytes of parameters on one rank, and the increase of its peak memory during the load."""

    share: int
    peak: int


def run(quick: bool) -> Table:
    """Peaks on 2 and 3 ranks, of an `nn.Sequential` and of a model with split points."""
    width = 1024 if quick else 3072  # malloc returns freed blocks above 32 MiB to the system at once
    rows: list[Row] = []
    for size in (2, 3):
        with tempfile.TemporaryDirectory() as folder, fresh_ranks(size) as ranks:
            for cut in ("balance=", "split="):
                file = Path(folder) / f"{cut}.safetensors"
                write_weights(file, width, cut)
                for source, path in (("safetensors", str(file)), ("seeds", None)):
                    progress(f"{size} ranks, {cut}, {source}")
                    ranks.run(load, 64, cut, None)
                    peaks = ranks.run(load, width, cut, path)
                    rows.append(_row(size, cut, source, peaks, width * width * 4))
    title = f"peak memory of a rank that loads {LAYERS} layers of {width * width * 4 >> 20} MiB"
    return Table(title, rows, ["  in layers; peak: increase of the resident set by building and loading, worst rank"])


def write_weights(file: Path, width: int, cut: str) -> None:
    import safetensors.torch  # noqa: PLC0415 - an optional package

    prefix = "blocks." if cut == "split=" else ""
    state = {f"{prefix}{number}.weight": torch.randn(width, width) for number in range(LAYERS)}
    safetensors.torch.save_file(state, file)


def _row(size: int, cut: str, source: str, peaks: Sequence[Peak], layer: int) -> Row:
    worst = max(peaks, key=lambda rank: rank.peak - rank.share)
    beyond = (worst.peak - worst.share) / layer
    return {
        "ranks": f"{size}",
        "cut by": cut,
        "from": source,
        "share": f"{worst.share / layer:.2f}",
        "peak": f"{worst.peak / layer:.2f}",
        "beyond": f"{beyond:.2f}",
        **at_most(beyond, 1 + SLACK),
    }


def load(width: int, cut: str, source: str | None) -> Peak:
    """Build and load the model on this rank."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = _status("VmRSS")
    with weft.build_on_meta():
        model = Blocks(width) if cut == "split=" else nn.Sequential(*Blocks(width).blocks)
    size = dist.get_world_size()
    points = [f"blocks.{LAYERS // size * stage}" for stage in range(1, size)]
    settings: Any = {"split": points, "sample": torch.randn(1, width)} if cut == "split=" else {}
    if source is None:
        pipe = weft.Pipe(model, chunks=2, group=dist.group.WORLD, **settings).materialize()
    else:
        pipe = weft.Pipe(model, chunks=2, group=dist.group.WORLD, **settings).materialize(source)
    return Peak(sum(parameter.nbytes for parameter in pipe.parameters()), _status("VmHWM") - before)


def _status(key: str) -> int:
    """Read a size of this process from its status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10
