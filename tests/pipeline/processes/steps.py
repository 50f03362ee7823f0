"""Work for ranks: a pipe over processes and the serial pipe on the same batches."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft
from torchweft import pop, skippable, stash


@skippable(stash=["a"])
class Stash(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor):
        yield stash("a", x)
        return torch.tanh(self.linear(x))


@skippable(pop=["a"])
class Pop(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor):
        a = yield pop("a")
        return torch.tanh(self.linear(x)) + a


@skippable(stash=["b"])
class StashAgain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor):
        y = self.linear(x)
        yield stash("b", y)
        return torch.tanh(y)


@skippable(pop=["b"])
class Add(nn.Module):
    """One of several readers of the skip "b"."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor):
        b = yield pop("b")
        return self.drop(torch.tanh(self.linear(x) * b))


def layers(stages: int, width: int = 6, drop: float = 0.2) -> nn.Sequential:
    """One layer per stage, with a long skip and dropout. From four stages on, a value has several readers."""
    torch.manual_seed(3)
    blocks: list[nn.Module] = [Stash(width)]
    if stages > 3:
        blocks += [StashAgain(width), *(Add(width) for _ in range(stages - 3))]
    else:
        blocks += [nn.Sequential(nn.Linear(width, width), nn.Dropout(drop), nn.Tanh()) for _ in range(stages - 2)]
    blocks.append(Pop(width))
    return nn.Sequential(*blocks).double()


def tied(stages: int, width: int = 6) -> nn.Sequential:
    """Layers with one shared bias, of which the first and the last also share a weight."""
    model = layers(stages, width)
    model[-1].module.linear.weight = model[0].module.linear.weight
    for layer in model[1:]:
        linear = next(module for module in layer.modules() if isinstance(module, nn.Linear))
        linear.bias = model[0].module.linear.bias
    return model


def batch(rows: int, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, width, generator=generator).double() for _ in range(2))
    return x, y


def compare(stages: int, schedule: str, checkpoint: str, sizes: list[int], ties: bool = False) -> dict[str, Any]:
    """Differences between a pipe over the ranks and a serial pipe under the same table."""
    rank = dist.get_rank()
    model = tied(stages) if ties else layers(stages)
    settings: Any = {"chunks": 4, "balance": [1] * stages, "schedule": schedule, "checkpoint": checkpoint}
    settings["loss"] = nn.functional.mse_loss
    serial = weft.Pipe(copy.deepcopy(model), devices=["cpu"] * stages, executor="serial", **settings)
    pipe = weft.Pipe(copy.deepcopy(model), group=dist.group.WORLD, **settings)
    worst, states = 0.0, True
    for rows in sizes:
        x, y = batch(rows)
        for net in (serial, pipe):
            net.zero_grad()
        torch.manual_seed(rows)
        expected = serial(x, target=y)
        expected.backward()
        state = torch.get_rng_state()
        torch.manual_seed(rows)
        has_first, has_last = (pipe._layout._stage_ranks[stage] == rank for stage in (0, -1))
        loss = pipe(x if has_first else None, target=y if has_last else 0)
        loss.backward()
        states = states and bool(torch.equal(torch.get_rng_state(), state))
        named = dict(serial.named_parameters())
        worst = max([worst, abs(float((loss - expected).detach()))])
        for name, parameter in pipe.named_parameters():
            worst = max(worst, float((parameter.grad - named[name].grad).abs().max()))
    keys = [name for name, _ in pipe.named_parameters()]
    return {"worst": worst, "states": states, "keys": keys, "all_keys": sorted(dict(serial.named_parameters()))}
