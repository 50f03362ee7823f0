"""A recomputation reads the buffers and generators as its forward did, and does not change them."""

import contextlib
import threading
from collections.abc import Generator, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.pipeline.pipe_cases import (
    CHECKPOINTS,
    CUTS,
    EXECUTORS,
    assert_close,
    assert_gradients_equal,
    backward,
    every_run,
    piped,
    rows,
    with_batch_norm,
)
from torchweft.core.context import ExecutionContext, set_phase
from torchweft.core.errors import ModuleChangedError
from torchweft.core.rng import RandomUse, RngStreams, generators_of
from torchweft.core.segment import MicroBatchContext
from torchweft.pipeline.microbatch import split
from torchweft.pipeline.routing import StreamLock
from torchweft.pipeline.stage import Stage


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 4).double()


class Averages(nn.Module):
    """Layer that writes into its buffers, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("absent", None)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            self.count += 1
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return (x - self.mean) * self.count.clone()  # a copy, or plain autograd would detect the next write


class Replaces(Averages):
    """Layer that replaces its buffers by new tensors."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return (x - self.mean) * self.count


class Borrows(nn.Module):
    """Two modules share one buffer: one writes, the other reads."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = Averages(), nn.Module()
        self.reader.register_buffer("mean", self.writer.mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.writer(x) * self.reader.mean.clone()


class Draws(nn.Module):
    """Layer that draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()
        self.source.manual_seed(3)

    def __deepcopy__(self, memo: Any) -> "Draws":
        return Draws()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.source, dtype=x.dtype)


LAYERS = {
    "averages": Averages,
    "replaces": Replaces,
    "borrows": Borrows,
    "spectral norm": lambda: spectral_norm(linear()),
    "draws": Draws,
    "batch norm": lambda: nn.BatchNorm1d(4).double(),
}


@with_batch_norm
@every_run
@pytest.mark.parametrize("name", LAYERS)
def test_layer_changes_itself_once_per_micro_batch(name: str, executor: str, checkpoint: str) -> None:
    pipe, plain = piped(nn.Sequential(linear(), LAYERS[name]()), executor=executor, checkpoint=checkpoint)
    buffers = dict(pipe.named_buffers())
    for step in range(3):
        x = rows(7, 4, seed=step)
        output = backward(pipe, x)
        expected = torch.cat([plain(piece) for piece in split(x, 3)])
        expected.square().sum().backward()
        assert_close(output, expected)
        assert_gradients_equal(pipe, plain)
        for key, value in plain.state_dict().items():
            assert_close(pipe.state_dict()[key], value)
    if name != "replaces":
        assert all(buffer is buffers[key] for key, buffer in pipe.named_buffers())


@pytest.mark.parametrize("executor", CUTS)
def test_a_retained_recomputation_is_repeatable(executor: str) -> None:
    pipe, _ = piped(nn.Sequential(linear(), Averages()), executor=executor, checkpoint="always")
    loss = pipe(rows(7, 4)).square().sum()
    first, second = (torch.autograd.grad(loss, pipe[0].weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and pipe[1].count == 3


@pytest.mark.parametrize("executor", EXECUTORS)
def test_layer_that_writes_later_is_named_once(executor: str) -> None:
    """Later steps are exact."""
    pipe, plain = piped(nn.Sequential(linear(), nn.Sequential(Averages())), executor=executor, checkpoint="always")
    for model in (pipe, plain):
        model[1][0].on = False
        model[1][0].count.fill_(1)
    backward(pipe, rows(7, 4))
    pipe[1][0].on = plain[1][0].on = True
    with pytest.raises(ModuleChangedError, match=r"layer '1\.0' \(Averages\) of stage 1 .*run the step again"):
        backward(pipe, rows(7, 4))
    plain.load_state_dict(pipe.state_dict())
    for model in (pipe, plain):
        model.zero_grad()
    backward(pipe, rows(7, 4))
    torch.cat([plain(piece) for piece in split(rows(7, 4), 3)]).square().sum().backward()
    assert_gradients_equal(pipe, plain)


def test_stages_take_turns_at_a_shared_norm() -> None:
    norm = nn.BatchNorm1d(2).double()
    cpu = torch.device("cpu")
    stages = [Stage(i, [("a", layer)], cpu, (), ()) for i, layer in enumerate([norm, norm, nn.BatchNorm1d(2).double()])]
    entered: list[Stage] = []

    class Turns(StreamLock):
        @contextlib.contextmanager
        def held(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> Generator[None]:
            entered.append(stage)
            yield

    for stage in stages:
        stage.replay.serialize([norm], Turns())
    context = MicroBatchContext(
        0,
        ExecutionContext.capture(["cpu"]),
        RngStreams({k: RandomUse(generators_of([cpu])) for k, _ in enumerate(stages)}, dict.fromkeys(range(3), 0)),
    )
    for stage in stages:
        stage.scan()
        stage(context, rows(4, 2))
    assert entered == stages[:2]
    norm.eval()
    for _ in range(2):  # only after the first step, the norm is known to write nothing
        entered.clear()
        for stage in stages:
            stage.scan()
            with set_phase("checkpointing"):
                stage(context, rows(4, 2))
    assert not entered


@with_batch_norm
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_norm_of_two_stages_counts_every_micro_batch(checkpoint: str) -> None:
    norm = nn.BatchNorm1d(4).double()
    model = nn.Sequential(linear(), norm, linear(), norm)
    pipe, _ = piped(model, chunks=8, executor="threads", checkpoint=checkpoint)
    mean = norm.running_mean
    for _ in range(3):
        backward(pipe, rows(64, 4))
    assert norm.num_batches_tracked == 48 and norm.running_mean is mean


def test_two_threads_may_train_a_deferred_norm_at_once() -> None:
    class Meets(nn.Module):
        barrier: threading.Barrier | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.barrier is not None:
                self.barrier.wait(60)
            return x

    model = nn.Sequential(nn.BatchNorm1d(4).double(), Meets())
    pipe, _ = piped(model, chunks=2, executor="serial", checkpoint="never", deferred_batch_norm=True)
    pipe(rows(8, 4))  # now the layers are known to draw nothing, so no step locks the generator
    pipe[1].barrier = threading.Barrier(2)
    threads = [threading.Thread(target=pipe, args=(rows(8, 4),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pipe[0].num_batches_tracked == 3
