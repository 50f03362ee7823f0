"""Work for ranks that do not call the pipe alike, or that share gradients of what they give it."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchweft as weft
from tests.pipeline.processes.failing import batch, make, outcome, outcome_between_steps, train


def make_loader(kind: str) -> Any:
    """A loader of four rows per batch that differs between ranks, as the kind says."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    rows = TensorDataset(*(torch.randn(48, 4, generator=generator) for _ in range(2)))
    if kind == "sampler":
        return DataLoader(rows, 4, sampler=DistributedSampler(rows))
    return DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(rank))


def batches_differ(kind: str) -> tuple[str, str]:
    pipe = make()
    x, y = next(iter(make_loader(kind)))
    return outcome_between_steps(pipe, lambda: pipe(x, target=y))


def a_part_differs(part: str, keyword: bool = False) -> tuple[str, str]:
    """The last rank gets another input or target than the first one."""
    pipe = make()
    x, y = batch()
    other = 1.0 + (dist.get_rank() == 2)
    if part == "input":
        return outcome_between_steps(pipe, lambda: pipe(x * other, target=y))
    return outcome_between_steps(pipe, lambda: pipe(x, target=y * other))


def batches_are_compared_at(due: list[int]) -> list[int]:
    """The steps at which a difference was found, of 1 to 101; the length is another one at step 15."""
    pipe, found = make(), []
    for step in range(1, 102):
        x, y = batch(3 if step == 15 else 4)
        if outcome(lambda: pipe(x * (1 + dist.get_rank()), target=y))[0] == "BatchError":  # noqa: B023
            found.append(step)
    return found


def batches_are_not_compared() -> list[float]:
    """Steps with another input on each rank: with the option, and with ranks that leave parts out."""
    losses: list[float] = []
    for options, leaves_out in (({"check_batches": False}, False), ({}, True)):
        pipe, rank = make(**options), dist.get_rank()
        x, y = batch()
        if leaves_out:
            losses.append(float(pipe(x if rank == 0 else None, target=y if rank == 2 else None)))
        else:
            losses.append(float(pipe(x * (1 + rank), target=y + (rank < 2))))
    return losses


def mode_differs(where: str) -> tuple[str, str]:
    """One rank is in eval(): the whole pipe, one layer of another rank, or the loss."""
    loss = nn.MSELoss()
    pipe = make(loss=loss)
    module: nn.Module = {"pipe": pipe, "layer": pipe[0].linear, "loss": loss}[where]

    def call() -> None:
        if dist.get_rank() == 1:
            module.eval()
        try:
            train(pipe)
        finally:
            module.train()

    return outcome_between_steps(pipe, call)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def error_has_no_text() -> tuple[str, str]:
    pipe = make()

    def fail(*_: Any) -> None:
        raise Wordless

    def call() -> None:
        handle = pipe[1].register_forward_pre_hook(fail) if dist.get_rank() == 1 else None
        try:
            train(pipe)
        except Wordless:
            raise ValueError("as expected") from None
        finally:
            if handle is not None:
                handle.remove()

    return outcome_between_steps(pipe, call)


def backward_is_missed(schedule: str) -> tuple[str, str]:
    """Rank 1 forgets backward() and begins the next step."""
    pipe = make(schedule)
    x, y = batch()

    def call() -> None:
        loss = pipe(x, target=y)
        if dist.get_rank() != 1:
            loss.backward()
        pipe(x, target=y)

    return outcome_between_steps(pipe, call)


def group_is_none() -> tuple[list[tuple[str, str]], bool]:
    """The error of an explicit None. Without the argument, each rank has a pipe of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refused = outcome(lambda: weft.Pipe(model, chunks=2, group=None))
    alone = weft.Pipe(model, chunks=2, devices=["cpu"] * 2)
    return [refused], alone.group is None and alone(torch.ones(2, 4)).shape == (2, 4)


class Net(nn.Module):
    """A module in front of a pipe that is used again after it, and that each rank has whole."""

    def __init__(self, kind: str, piped: Callable[[nn.Sequential], Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.kind = kind
        self.front = nn.Embedding(7, 4) if kind in ("front", "tied head") else nn.Linear(4, 4)
        self.first, self.second = (piped(nn.Sequential(*(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        if self.kind == "front":
            return self.first(h)
        if self.kind == "tied head":
            return nn.functional.linear(self.first(h), self.front.weight)
        if self.kind == "residual":
            return self.first(h) + h
        return self.second(self.first(h))


def shares_input_gradients(kind: str, schedule: str) -> float:
    """The worst difference from the model without a pipe, of all parameters that this rank has, after two steps."""
    stages = 2 * dist.get_world_size() if schedule == "interleaved" else dist.get_world_size()

    def piped(model: nn.Sequential) -> Any:
        model += nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages - 2)))
        balance = [2] + [1] * (stages - 1)
        loss: Any = None if schedule == "gpipe" else nn.functional.mse_loss
        settings: dict[str, Any] = {"chunks": 2, "balance": balance, "schedule": schedule, "loss": loss}
        return weft.Pipe(model, group=dist.group.WORLD, **settings)

    torch.set_default_dtype(torch.float64)
    try:
        plain = Net(kind, lambda model: model + nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages - 2))))
        net = Net(kind, piped)
        optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (plain, net)]
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randint(7, (6,), generator=generator)
            x = x if kind in ("front", "tied head") else torch.randn(6, 4, generator=generator)
            if schedule == "gpipe":
                losses = [module(x).square().mean() for module in (plain, net)]
            else:
                y = torch.randn(6, 4, generator=generator)
                losses = [nn.functional.mse_loss(plain.first(plain.front(x)), y), net.first(net.front(x), target=y)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        theirs = dict(plain.named_parameters())
        return max(float((x - theirs[name]).abs().max()) for name, x in net.named_parameters())
    finally:
        torch.set_default_dtype(torch.float32)


def shares_target_gradients(schedule: str) -> list[float]:
    """The gradients of the target and of a mask, and the same without a pipe."""
    size = dist.get_world_size() * (2 if schedule == "zbv" else 1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(size)))
    plain = copy.deepcopy(model)
    pipe = weft.Pipe(model, chunks=2, schedule=schedule, loss=nn.functional.mse_loss, group=dist.group.WORLD)
    x, y = (tensor.requires_grad_() for tensor in batch())
    pipe(x, target=y).backward()
    seen = [x.grad, y.grad]
    x, y = (tensor.requires_grad_() for tensor in batch())
    nn.functional.mse_loss(plain(x), y).backward()
    return [float((one - other.grad).abs().max()) for one, other in zip(seen, (x, y), strict=True)]


def gradient_on_one_rank_only() -> tuple[str, str]:
    """The input requires a gradient on rank 1, but not on the rank that computes it."""
    pipe = make("gpipe")
    x, y = batch()
    return outcome_between_steps(pipe, lambda: pipe(x.requires_grad_(dist.get_rank() == 1), target=y))


def gradient_on_the_first_rank() -> list[float]:
    """Only the first rank has the input, which requires a gradient."""
    pipe = make("gpipe")
    x, y = batch()
    x = x.requires_grad_() if dist.get_rank() == 0 else None
    pipe(x, target=y).backward()
    return [] if x is None else [float(x.grad.abs().sum())]


def trains_two_pipes() -> list[float]:
    """Two pipes of one script in turns, each with a tied weight."""
    pipes = [make(schedule) for schedule in ("gpipe", "1f1b")]
    x, y = batch()
    losses: list[float] = []
    for pipe in itertools.chain(pipes, reversed(pipes), pipes):
        loss = pipe(x, target=y)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses
