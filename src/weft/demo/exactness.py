"""The first claim: a model in stages has the gradients of plain PyTorch, in every mode."""

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from weft.pipeline.pipe import Pipe

SCHEDULES = ("gpipe", "1f1b")
CHECKPOINTS: tuple[Literal["never", "except_last", "always"], ...] = ("never", "except_last", "always")
LIMIT = 1e-10
"""What rounding in float64 can explain, with room; a wrong gradient is off by orders of magnitude more."""


def largest_differences(
    model: nn.Sequential,
    balance: tuple[int, ...],
    input: Tensor,
    target: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    chunks: int,
) -> dict[tuple[str, str], float]:
    """By schedule and checkpoint mode, the largest absolute difference of any gradient, also of the input's.

    Everything is computed on copies, in float64.
    """
    input, target = input.double(), target.double()
    plain = copy.deepcopy(model).double()
    wanted = _gradients(plain, input, lambda x: loss(plain(x), target))
    found: dict[tuple[str, str], float] = {}
    for schedule in SCHEDULES:
        for checkpoint in CHECKPOINTS:
            pipe = Pipe(
                copy.deepcopy(model).double(),
                chunks=chunks,
                balance=balance,
                devices=["cpu"] * len(balance),
                schedule=schedule,
                checkpoint=checkpoint,
                loss=loss,
                executor="threads",
            )
            seen = _gradients(pipe, input, lambda x, pipe=pipe: pipe(x, target=target))
            found[schedule, checkpoint] = max(_distance(a, b) for a, b in zip(seen, wanted, strict=True))
    return found


def _gradients(module: nn.Module, input: Tensor, compute: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    image = input.clone().requires_grad_()
    compute(image).backward()
    return [image.grad, *(parameter.grad for parameter in module.parameters())]


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return torch.dist(one, other, p=float("inf")).item()
