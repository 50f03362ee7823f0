"""Work for ranks: replicas of a pipeline, long training, observation, copies."""

import copy
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchweft as weft
from tests.pipeline.processes.compositions import net


def train_replicas(inside: bool) -> float:
    """The largest difference from plain PyTorch on the whole batch, after five steps of Adam."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)  # ranks that are spawned would have other weights
    plain = net(nn.Linear(6, 6).double())
    loss = nn.functional.mse_loss
    settings: Any = {"schedule": "1f1b", "loss": loss} if inside else {}
    pipe = weft.Pipe(copy.deepcopy(plain), chunks=2, balance=[2, 3], group=mesh["pp"], **settings)
    replica = DistributedDataParallel(pipe, process_group=mesh["dp"].get_group())
    fired: list[str] = []
    for name, parameter in pipe.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    optimizers = [torch.optim.Adam(module.parameters(), 0.01) for module in (replica, plain)]
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(12, 6, generator=generator).double() for _ in range(2))
        rows = slice(6 * mesh["dp"].get_local_rank(), 6 * mesh["dp"].get_local_rank() + 6)
        value = replica(x[rows], target=y[rows]) if inside else loss(replica(x[rows]), y[rows])
        value.backward()
        loss(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(fired) == sorted(5 * [name for name, _ in pipe.named_parameters()]), "hooks fire once per step"
    named = dict(plain.named_parameters())
    return max(float((value - named[name]).abs().max().detach()) for name, value in pipe.named_parameters())


class Waits(nn.Module):
    """A layer with an action in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(6, 6), nothing

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.act())
        return y


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was not noted"
        time.sleep(0.01)


def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("on purpose")


def reduce_early(folder: str, kind: str, inside: bool) -> list[str]:
    """Reduce over replicas of two stages. In the first step, the backward of the first stage, or of the loss on its
    rank, waits until the last stage reduces. In the second one it fails, in the last one a module in front of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    front, model = Waits().double(), nn.Sequential(Waits(), nn.Tanh(), nn.Linear(6, 6)).double()
    loss, first = nn.functional.mse_loss, mesh.get_local_rank("pp") == 0
    settings: Any = {"schedule": "1f1b", "loss": loss} if inside else {}
    pipe: Any = weft.Pipe(model, chunks=2, balance=[2, 1], group=mesh["pp"], **settings)
    noted = Path(folder) / f"{kind} {inside} {mesh.get_local_rank('dp')}"
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce = getattr(dist, name)

    def note_scatter(*args: Any, **kwargs: Any) -> Any:
        if not first:
            noted.touch()
        return reduce(*args, **kwargs)

    def note_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not first:
            noted.touch()
        return allreduce_hook(state, bucket)

    if kind == "FSDP":
        fully_shard(pipe, mesh=mesh["dp"])
        replica = pipe
    else:
        replica = DistributedDataParallel(pipe, process_group=mesh["dp"].get_group())
        replica.register_comm_hook(mesh["dp"].get_group(), note_bucket)
    layer, outcomes = pipe[0], []
    # The wrappers cannot go on if a backward fails after they have begun to reduce, and FSDP2 never.
    for event in ("wait", "layer", "", "front") if kind == "DDP" else ("wait", ""):
        layer.act = (
            fail if event == "layer" else partial(wait_for, noted) if event == "wait" and not inside else nothing
        )
        front.act = fail if first else nothing
        x, y = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double() for _ in range(2))
        replica.zero_grad()
        try:
            with patch.object(dist, name, note_scatter):
                h = front(x) if event == "front" else x
                value = replica(h, target=y) if inside else loss(replica(h), y)
                if event == "wait" and inside and first:
                    value.register_hook(lambda _: wait_for(noted))
                value.backward()
            outcomes.append("")
        except Exception as error:
            outcomes.append(type(error).__name__)
    return outcomes


def train_pipe_per_rank() -> float:
    """A pipe in every process under DistributedDataParallel, without `group`."""
    torch.manual_seed(0)
    plain = net()
    pipe = weft.Pipe(copy.deepcopy(plain), chunks=2, balance=[2, 2], devices=["cpu"] * 2, executor="serial")
    replica = DistributedDataParallel(pipe)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    replica(x[rows]).square().mean().backward()
    plain(x).square().mean().backward()
    pairs = zip(pipe.parameters(), plain.parameters(), strict=True)
    return max(float((one.grad - other.grad).abs().max()) for one, other in pairs)  # type: ignore[operator]


def train_fifty_steps(schedule: str) -> float:
    """The largest difference of parameters from plain PyTorch's after fifty steps of SGD."""
    plain = net(nn.Linear(6, 6).double(), nn.Tanh(), nn.Linear(6, 6).double(), nn.Tanh())
    stages = 2 * dist.get_world_size() if schedule in ("interleaved", "zbv") else dist.get_world_size()
    balance = [2] * stages if stages == 4 else [4] * stages
    pipe = weft.Pipe(
        copy.deepcopy(plain),
        chunks=4,
        balance=balance,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        group=dist.group.WORLD,
    )
    optimizers = [torch.optim.SGD(module.parameters(), 0.05, momentum=0.9) for module in (pipe, plain)]
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(4 + step % 6, 6, generator=generator).double() for _ in range(2))
        pipe(x, target=y).backward()
        nn.functional.mse_loss(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    named = dict(plain.named_parameters())
    return max(float((value - named[name]).abs().max().detach()) for name, value in pipe.named_parameters())


def observe() -> dict[str, Any]:
    """The recording and the statistics of one step on this rank."""
    pipe = weft.Pipe(net(), chunks=2, balance=[2, 2], loss=nn.MSELoss(), schedule="1f1b", group=dist.group.WORLD)
    recorder = weft.Recorder()
    x = torch.randn(4, 6).double()
    with pipe.observed_by(recorder):
        pipe(x, target=x).backward()
    return {"stages": sorted({event.action.stage for event in recorder.events}), "wire": pipe.statistics()["wire"]}


def copy_and_pickle() -> list[str]:
    """Whether a copy trains like its pipe, and the error of a pickled pipe."""
    import pickle  # noqa: PLC0415 - only here

    pipe = weft.Pipe(net(), chunks=2, balance=[2, 2], loss=nn.MSELoss(), group=dist.group.WORLD)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).double()
    pipe(x, target=x).backward()
    other = copy.deepcopy(pipe)
    other.zero_grad()
    other(x, target=x).backward()
    pairs = zip(pipe.parameters(), other.parameters(), strict=True)
    equal = all(one is not two and torch.equal(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]
    try:
        pickle.loads(pickle.dumps(pipe))(x, target=x)
    except weft.errors.UsageError as error:
        return [str(equal), str(error)]
    return ["no error"]


def output_on_last() -> list[float]:
    """Differences between the gradients of output="last" and output="all"."""
    differences: list[float] = []
    pipes = [
        weft.Pipe(net(), chunks=2, balance=[2, 2], group=dist.group.WORLD, output=output)  # type: ignore[arg-type]
        for output in ("all", "last")
    ]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).double()
    pipes[0](x).square().mean().backward()
    result = pipes[1](x)
    (result.square().mean() if dist.get_rank() == 1 else result).backward()
    for one, other in zip(pipes[0].parameters(), pipes[1].parameters(), strict=True):
        differences.append(float((one.grad - other.grad).abs().max()))  # type: ignore[operator]
    return differences
