"""Work for three ranks: one rank fails, every rank returns its error, and the next step succeeds."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft

ROWS = 6


class Fault(nn.Module):
    """A layer that fails on request, in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise ValueError("the layer failed")
        if self.fails == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        y = self.linear(x)
        if self.fails == "backward" and y.requires_grad:
            y.register_hook(self._fail)
        return y

    @staticmethod
    def _fail(_: Tensor) -> Tensor:
        raise ValueError("the backward failed")


def make(schedule: str = "1f1b", **settings: Any) -> weft.Pipe:
    torch.manual_seed(1)
    model = nn.Sequential(*[Fault() for _ in range(3)])
    options = {"chunks": 3, "balance": [1, 1, 1], "loss": nn.functional.mse_loss, "schedule": schedule, **settings}
    return weft.Pipe(model, group=dist.group.WORLD, **options)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 4), torch.randn(rows, 4)


def train(pipe: weft.Pipe) -> None:
    x, y = batch()
    pipe(x, target=y).backward()


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """The class of the error that a call raises, and its message with all notes."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


def outcome_between_steps(pipe: weft.Pipe, call: Callable[[], Any]) -> tuple[str, str]:
    """The outcome of a call after a good step. Another step must succeed afterwards."""
    train(pipe)
    raised = outcome(call)
    train(pipe)
    return raised


def layer_fails(rank: int, where: str, schedule: str) -> tuple[str, str]:
    pipe = make(schedule)
    train(pipe)
    if dist.get_rank() == rank:
        pipe[rank].fails = where
    raised = outcome(lambda: train(pipe))
    pipe[rank].fails = ""
    train(pipe)
    return raised


def loss_fails() -> tuple[str, str]:
    fails: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("the loss failed")
        return nn.functional.mse_loss(output, target)

    pipe = make(loss=loss)
    train(pipe)
    fails.append(True)
    raised = outcome(lambda: train(pipe))
    fails.clear()
    train(pipe)
    return raised


def batch_is_refused() -> tuple[str, str]:
    """The first rank gets a mini-batch that cannot be cut."""
    pipe = make()
    uneven = {"x": torch.zeros(3, 4), "y": torch.zeros(2, 4)}
    return outcome_between_steps(pipe, lambda: pipe(uneven, target=batch()[1]))


def batch_differs() -> tuple[str, str]:
    """The last rank has the target of another batch."""
    pipe = make()
    return outcome_between_steps(pipe, lambda: pipe(batch()[0], target=batch(5)[1]))


def tag_differs() -> tuple[str, str]:
    pipe = make()
    pipe.batch_tag = 7 if dist.get_rank() == 1 else 8
    raised = outcome(lambda: train(pipe))
    pipe.batch_tag = None
    train(pipe)
    return raised


def target_is_missing() -> tuple[str, str]:
    pipe = make()
    x, y = batch()
    return outcome_between_steps(pipe, lambda: pipe(x) if dist.get_rank() == 1 else pipe(x, target=y))


def settings_differ() -> tuple[str, str]:
    pipe = make(chunks=2 + dist.get_rank())
    return outcome(lambda: train(pipe))


def gradient_differs() -> tuple[str, str]:
    pipe = make()
    x, y = batch()
    return outcome_between_steps(pipe, lambda: torch.autograd.backward(pipe(x, target=y) * (1 + dist.get_rank())))


def layer_changes() -> tuple[str, str]:
    """A layer of one rank changes between forward and recomputation."""
    pipe = make("gpipe", checkpoint="always")
    train(pipe)
    x, y = batch()
    loss = pipe(x, target=y)
    if dist.get_rank() == 1:
        pipe.eval()
    raised = outcome(loss.backward)
    pipe.train()
    train(pipe)
    return raised


class Counts(nn.Module):
    """A layer that writes to a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def buffer_is_shared() -> tuple[str, str]:
    """A layer with a buffer is in stages of two ranks."""
    counts = Counts()
    model = nn.Sequential(counts, nn.Linear(4, 4), counts)
    return outcome(lambda: weft.Pipe(model, chunks=2, balance=[1, 1, 1], group=dist.group.WORLD))


def pipe_is_nested() -> tuple[str, str]:
    """A pipe over processes is a layer of another one."""
    return outcome(lambda: weft.Pipe(nn.Sequential(make(), nn.Linear(4, 4)), chunks=2, devices=["cpu"] * 2))


def backward_twice() -> tuple[str, str]:
    pipe = make("gpipe")
    x, y = batch()
    loss = pipe(x, target=y)
    loss.backward()
    raised = outcome(loss.backward)
    train(pipe)
    return raised


def rank_is_interrupted() -> tuple[str, str]:
    return layer_fails(1, "interrupt", "1f1b")


def trains_until_failure(rank: int, sent: int) -> tuple[str, str, float]:
    """Train until a failure, and return its time too. After two steps, this rank gets a signal while it trains."""
    pipe = make()
    train(pipe)
    train(pipe)
    if dist.get_rank() == rank:
        threading.Timer(0.2, os.kill, (os.getpid(), sent)).start()
    raised: tuple[str, str] = "", ""
    while not raised[0]:
        raised = outcome(lambda: train(pipe))
    return *raised, time.time()


def calls_less_often() -> tuple[str, str]:
    """Rank 2 skips a step, and does other work."""
    pipe = make()
    train(pipe)
    if dist.get_rank() == 2:
        time.sleep(9)
        return "", ""
    return outcome(lambda: train(pipe))


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(4, generator=generator)


def trains_with_a_data_loader() -> list[float]:
    """Losses of steps with a data loader that forks its workers while the links are open."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # allow children
    pipe = make()
    train(pipe)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    losses: list[float] = []
    for x, y in loader:
        loss = pipe(x, target=y)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def threads_after_close() -> list[str]:
    """Names of the threads that remain after the pipe is freed."""
    before = {thread.name for thread in threading.enumerate()}
    pipe = make()
    train(pipe)
    del pipe
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.name not in before]
        if not left:
            return []
        time.sleep(0.05)
    return left
