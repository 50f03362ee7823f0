"""Training steps that do the same work in different ways, shared by the benchmarks of the pipeline."""

from collections.abc import Callable, Mapping
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.harness import intra_op_threads

try:
    import torchgpipe
except ImportError:
    torchgpipe = None

PEER = "torchgpipe"
TRIALS = 100  # steps within which an "auto" pipe must choose an executor

Loss = Callable[[Tensor], Tensor]
Work = Callable[[], Tensor]


def step(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor, loss: Loss) -> Work:
    """Forward, loss and backward of one mini-batch, with new gradients."""

    def work() -> Tensor:
        _clear_gradients(parameters)
        value = loss(model(x))
        value.backward()
        return value

    return work


def accumulating_step(
    model: nn.Module, x: Tensor, target: Tensor, chunks: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Work:
    """Forward and backward of one micro-batch after another, without a pipe. Each graph is freed at once."""
    parameters = list(model.parameters())
    pieces = list(zip(x.chunk(chunks), target.chunk(chunks), strict=True))

    def work() -> Tensor:
        _clear_gradients(parameters)
        total = torch.zeros(())
        for piece, piece_target in pieces:
            value = loss(model(piece), piece_target) / chunks
            value.backward()
            total += value.detach()
        return total

    return work


def step_with_target(pipe: weft.Pipe, x: Tensor, target: Tensor) -> Work:
    """Like `step`, for a pipe with the loss inside."""
    parameters = list(pipe.parameters())

    def work() -> Tensor:
        _clear_gradients(parameters)
        value: Tensor = pipe(x, target=target)
        value.backward()
        return value

    return work


def in_two_threads(work: Work) -> Work:
    """The same step with two intra-op threads, which is how PyTorch uses two cores without a pipe."""

    def work_in_two_threads() -> Tensor:
        with intra_op_threads(2):
            return work()

    return work_in_two_threads


def in_one_graph(model: nn.Module, chunks: int) -> Callable[[Tensor], Tensor]:
    """The same micro-batches without a pipe: one after another, in one thread and one graph."""

    def forward(x: Tensor) -> Tensor:
        return torch.cat([model(piece) for piece in x.chunk(chunks)])

    return forward


def pipe_of(model: nn.Sequential, stages: int, chunks: int, checkpoint: str, executor: str, **more: Any) -> weft.Pipe:
    """A pipe of equal stages on the CPU."""
    return weft.Pipe(
        model,
        chunks=chunks,
        devices=["cpu"] * stages,
        balance=[len(model) // stages] * stages,
        checkpoint=checkpoint,
        executor=executor,
        **more,
    )


def peer_of(model: nn.Sequential, stages: int, chunks: int, checkpoint: str) -> Callable[[Tensor], Tensor] | None:
    """The same pipe of torchgpipe, or None if it is not installed (the extra `bench`)."""
    if torchgpipe is None:
        return None
    return torchgpipe.GPipe(
        model,
        balance=[len(model) // stages] * stages,
        devices=["cpu"] * stages,
        chunks=chunks,
        checkpoint=checkpoint,
    )


def agree(candidates: Mapping[str, Callable[[], object]]) -> None:
    """Raise RuntimeError if candidates that return a loss return different ones."""
    results = {name: work() for name, work in candidates.items()}
    losses = {name: float(value.detach()) for name, value in results.items() if isinstance(value, Tensor)}
    first = next(iter(losses.values()))
    if any(not isclose(first, loss, rel_tol=1e-3, abs_tol=1e-6) for loss in losses.values()):
        raise RuntimeError(f"the candidates do not do the same work; their losses are {losses}")


def decide(pipe: weft.Pipe, work: Work) -> str:
    """Run steps until an "auto" pipe has chosen its executor, and return the choice."""
    for _ in range(TRIALS):
        work()
        if chosen := pipe.statistics()["chosen"]:
            return ", ".join(chosen.values())
    raise RuntimeError(f"the pipe has not chosen an executor within {TRIALS} steps")


def _clear_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
