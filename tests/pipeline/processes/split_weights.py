"""Work for ranks: weights of a cut model over processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft


class Tied(nn.Module):
    """Model with a tied weight, a buffer that is in no file, and a buffer of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("frequencies", torch.arange(6.0), persistent=False)
        self.register_buffer("shift", torch.ones(6))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed(x) + self.frequencies.sin())
        return self.head(self.second(self.scale(x).tanh()) + self.shift)


def build(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return Tied().double()


def on_meta() -> nn.Module:
    with weft.build_on_meta():
        return build()


def ids(number: int) -> Tensor:
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(number))


def piped(model: nn.Module, over_ranks: bool = True) -> weft.Pipe:
    settings: Any = (
        {"group": dist.group.WORLD, "sample": ids(0)} if over_ranks else {"devices": ["cpu"] * 2, "executor": "serial"}
    )
    loss = lambda output, target: output.square().mean()  # noqa: E731
    return weft.Pipe(model, chunks=2, split=["second"], schedule="1f1b", loss=loss, **settings)


def train(pipe: weft.Pipe, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        pipe(ids(number), target=torch.zeros(8)).backward()
        weft.clip_grad_norm_(pipe, 0.01)
        optimizer.step()
        optimizer.zero_grad()


def trained(pipe: weft.Pipe, folder: str | None = None) -> dict[str, Any]:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    train(pipe, optimizer, range(3))
    if folder is not None:
        weft.checkpoint.save(folder, pipe, optimizer)
    return {key: value.tolist() for key, value in pipe.state_dict().items()}


def initialize() -> dict[str, Any]:
    pipe = piped(on_meta())
    torch.manual_seed(5)
    return trained(pipe.materialize())


def read(source: str, folder: str) -> dict[str, Any]:
    return trained(piped(on_meta()).materialize(source), folder)


def resume(folder: str) -> dict[str, Any]:
    pipe = piped(build(seed=2))
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    weft.checkpoint.load(folder, pipe, optimizer)
    train(pipe, optimizer, range(3, 5))
    return {key: value.tolist() for key, value in pipe.state_dict().items()}
