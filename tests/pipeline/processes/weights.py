"""Work for ranks: weights, checkpoints, clipping and scaling of pipes over processes."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import torchweft as weft
from tests.pipeline.processes.steps import Pop, Stash

mse = nn.functional.mse_loss


def model(seed: int = 3) -> nn.Sequential:
    """Six layers with a long skip, a buffer, and a weight that the first and the last layer share."""
    torch.manual_seed(seed)
    layers = [Stash(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), Pop(6)]
    layers[-1].module.linear.weight = layers[0].module.linear.weight
    return nn.Sequential(*layers).double()


def piped(layers: nn.Sequential, group: Any = None, **settings: Any) -> weft.Pipe:
    group = dist.group.WORLD if group is None else group
    settings = {"chunks": 2, "schedule": "1f1b", "loss": mse, "deferred_batch_norm": True, **settings}
    return weft.Pipe(layers, balance=balance(group.size()), group=group, **settings)


def balance(stages: int) -> list[int]:
    return [6 // stages + (stage < 6 % stages) for stage in range(stages)]


def serial(layers: nn.Sequential) -> weft.Pipe:
    settings: Any = {"chunks": 2, "schedule": "1f1b", "loss": mse, "deferred_batch_norm": True}
    return weft.Pipe(layers, balance=[3, 3], devices=["cpu", "cpu"], executor="serial", **settings)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(8, 6, generator=generator).double() for _ in range(2))
    return x, y


def adam(pipe: nn.Module) -> torch.optim.Adam:
    """An optimizer with two groups, one of which can be empty on a rank."""
    parameters = list(pipe.parameters())
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    plain = [parameter for parameter in parameters if parameter.dim() == 1]
    return torch.optim.Adam([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 0.02}], lr=0.01)


def train(pipe: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    """Take some steps, and return their losses."""
    losses: list[float] = []
    for number in numbers:
        x, y = batch(number)
        torch.manual_seed(number)
        loss = pipe(x, target=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def state_of(pipe: nn.Module) -> dict[str, Any]:
    return {key: value.tolist() for key, value in pipe.state_dict().items()}


def train_and_save(folder: str) -> None:
    pipe = piped(model())
    optimizer = adam(pipe)
    train(pipe, optimizer, range(3))
    weft.checkpoint.save(folder, pipe, optimizer, extra={"step": 3, "rank": dist.get_rank()})


def load_and_train(folder: str) -> Any:
    """Load a checkpoint and train. Return the extra value, the losses, and the local state."""
    pipe = piped(model(seed=9))
    optimizer = adam(pipe)
    extra = weft.checkpoint.load(folder, pipe, optimizer)
    return extra, train(pipe, optimizer, range(3, 6)), state_of(pipe)


def train_until_killed(folder: str, steps: int) -> tuple[str, dict[str, Any]]:
    """Go on from the last checkpoint as after an elastic restart: a step and a checkpoint; then the last rank dies in
    the next step. Return the error of this rank and its state, without an error after all steps."""
    pipe = piped(model(seed=3))
    optimizer = adam(pipe)
    first = weft.checkpoint.load(folder, pipe, optimizer)["step"] if Path(folder).exists() else 0
    train(pipe, optimizer, range(first, first + 1))
    weft.checkpoint.save(folder, pipe, optimizer, extra={"step": first + 1})
    if first + 1 == steps:
        return "", state_of(pipe)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(pipe, optimizer, range(first + 1, steps))
    except weft.errors.RankLostError as error:
        return str(error), {}
    return "no error", {}


def load_other(folder: str) -> None:
    """Load into a model that does not fit on the last rank."""
    layers = model()
    layers[3] = nn.Linear(6, 7).double()
    weft.checkpoint.load(folder, piped(layers))


def save_with_replicas(folder: str) -> list[float]:
    """Train and save two replicas of a pipe of two stages. Return the differences from a serial pipe on all rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = piped(model(), mesh.get_group("pp"), deferred_batch_norm=False)
    pipe.eval()  # in training, running statistics would depend on the replica
    wrapped = DistributedDataParallel(pipe, process_group=mesh.get_group("dp"))
    plain = serial(model()).eval()
    optimizer, plain_optimizer = adam(wrapped), adam(plain)
    worst = 0.0
    half = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 8)
    for number in range(3):
        x, y = batch(number)
        wrapped(x[half], target=y[half]).backward()
        plain(x, target=y).backward()
        norm = weft.clip_grad_norm_(wrapped, 0.05)
        worst = max(worst, abs(float(norm - nn.utils.clip_grad_norm_(plain.parameters(), 0.05))))
        for candidate in (optimizer, plain_optimizer):
            candidate.step()
            candidate.zero_grad()
    weft.checkpoint.save(folder, wrapped, optimizer, extra="replicas")
    whole = plain.state_dict()
    return [worst, *(float((value - whole[key]).abs().max()) for key, value in pipe.state_dict().items())]


def adam_of_another(pipe: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has a foreign parameter on rank 1."""
    optimizer = adam(pipe)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    return optimizer


def save_where_one_fails(folder: str) -> None:
    pipe = piped(model())
    weft.checkpoint.save(folder, pipe, adam_of_another(pipe))


def load_where_one_fails(folder: str) -> None:
    pipe = piped(model())
    weft.checkpoint.load(folder, pipe, adam_of_another(pipe))


def on_meta() -> nn.Sequential:
    with weft.build_on_meta():
        return model()


def initialize(ranks_differ: bool) -> dict[str, Any]:
    """The local weights after initialisation from a seed and two steps."""
    pipe = piped(on_meta())
    torch.manual_seed(5 + ranks_differ * dist.get_rank())
    return trained(pipe.materialize())


def trained(pipe: weft.Pipe) -> dict[str, Any]:
    train(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), range(2))
    return state_of(pipe)


def read(source: str) -> dict[str, Any]:
    return trained(piped(on_meta()).materialize(source))


def load_whole_state(strict_fault: bool) -> dict[str, Any]:
    """Load the state_dict of the whole model into a pipe."""
    state = model(seed=7).state_dict()
    pipe = piped(model())
    if strict_fault:
        del state["1.bias"]
        state["unknown"] = torch.ones(1)
    pipe.load_state_dict(state)
    return trained(pipe)


def clip(norm_type: float, max_norm: float) -> dict[str, Any]:
    """The norm, and differences from the serial pipe."""
    pipe, plain = piped(model()), serial(model())
    x, y = batch(0)
    for net in (pipe, plain):
        torch.manual_seed(0)
        net(x, target=y).backward()
    norm = weft.clip_grad_norm_(pipe, max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    named = dict(plain.named_parameters())
    worst = max((float((p.grad - named[key].grad).abs().max()) for key, p in pipe.named_parameters()), default=0.0)
    return {"norm": float(norm), "difference": abs(float(norm - expected)), "worst": worst}


def clip_not_finite(error_if_nonfinite: bool) -> float:
    pipe = piped(model())
    x, y = batch(0)
    pipe(x, target=y).backward()
    if dist.get_rank() == 0:
        next(pipe.parameters()).grad[0] = torch.nan
    return float(weft.clip_grad_norm_(pipe, 1.0, torch.inf, error_if_nonfinite=error_if_nonfinite))


def clip_around() -> None:
    weft.clip_grad_norm_(nn.Sequential(piped(model())), 1.0)


def scale_alone() -> None:
    piped(model(), loss_scale=torch.amp.GradScaler("cpu").get_scale)


class Half(nn.Module):
    """Product in half precision, where gradients underflow below 6e-8 and overflow above 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * self.weight.half()).float()


def scale_gradients(schedule: str) -> list[Any]:
    """Scales, gradients and weights of three steps. The gradient of the second one overflows on the last rank only."""
    scaler = ShardedGradScaler("cpu", init_scale=2.0**16, process_group=dist.group.WORLD)
    pipe = weft.Pipe(
        nn.Sequential(Half(), Half()), chunks=2, balance=[1, 1], schedule=schedule, group=dist.group.WORLD,
        loss=lambda output, target: (output - target).mean() * 1e-8, loss_scale=scaler.get_scale,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e4)
    steps: list[Any] = []
    for number in range(3):
        scaler.scale(pipe(torch.ones(4, 1), target=torch.zeros(4, 1))).backward()
        gradient = next(pipe.parameters()).grad
        if number == 1 and dist.get_rank() == 1:
            gradient.fill_(torch.inf)
        scaler.unscale_(optimizer)
        norm = float(weft.clip_grad_norm_(pipe, 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append((scaler.get_scale(), norm, float(next(pipe.parameters()).detach())))
    return steps


def nothing_is_left(folder: Path) -> bool:
    return sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
