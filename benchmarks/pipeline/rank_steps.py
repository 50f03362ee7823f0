"""Training steps over processes, for `pipeline.processes`: each rank prepares them once and then runs them by name.

    torchweft NAME     `weft.Pipe` over the ranks
    torch NAME         the corresponding schedule of `torch.distributed.pipelining`
    raw NAME           a loop of isend and irecv over the same row of the table, for two ranks only
    plain              the micro-batches one after another on rank 0, without communication

All train the same layers on the same micro-batches. They return the losses on the rank that computes them.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn import functional

import torchweft as weft
from benchmarks.pipeline.transformer import encoder
from torchweft.pipeline.schedule import Schedule, ScheduleFunction, build

Step = Callable[[], list[Tensor]]
_CPU = torch.device("cpu")
MakeLayers = Callable[[int], nn.Sequential]
"""The layers for a number of stages."""


class Kind(NamedTuple):
    """A schedule of torchweft, the class of torch for it, and the number of stages on each rank."""

    schedule_of: Callable[[int], str | ScheduleFunction]
    torch_class: str
    per_rank: int = 1


KINDS = {
    "gpipe": Kind(lambda _: "gpipe", "ScheduleGPipe"),
    "1f1b": Kind(lambda _: "1f1b", "Schedule1F1B"),
    "interleaved x2": Kind(lambda _: "interleaved", "ScheduleInterleaved1F1B", 2),
    "zero bubble x1": Kind(lambda _: "zero_bubble", "ScheduleInterleavedZeroBubble"),
    "zero bubble x2": Kind(
        lambda workers: partial(weft.pipeline.zero_bubble, workers=workers), "ScheduleInterleavedZeroBubble", 2
    ),
    "zbv": Kind(lambda _: "zbv", "ScheduleZBVZeroBubble", 2),
    "dualpipev": Kind(lambda _: "dualpipev", "ScheduleDualPipeV", 2),
}


class Sample(NamedTuple):
    """Wall and processor seconds of one step on one rank, and the mean loss on the rank that computes it.

    `probe` is the duration of fixed work before and after the steps. It does not depend on the candidate.
    """

    wall: float
    processor: float
    loss: float | None
    probe: float


def table_of(kind: str, ranks: int, chunks: int) -> Schedule:
    """torchweft's table of a schedule."""
    schedule_of, _, per_rank = KINDS[kind]
    return build(schedule_of(ranks), ranks * per_rank, chunks)


class SleepInBackward(torch.autograd.Function):
    """Copy whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None


class SplitSleep(nn.Module):
    """Sleeps equally long for the output, the gradient of the input and the gradient of the weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(4)), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return SleepInBackward.apply(x, self.seconds) + SleepInBackward.apply(self.weight, self.seconds)


class _Fused(torch.autograd.Function):
    """Addition with a single backward for both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0].clone(), gradients[0].sum(0), None


class FusedSleep(nn.Module):
    """A `SplitSleep` whose backward cannot be split."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(4)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Fused.apply(x, self.weight, self.seconds)


class Candidates:
    """Steps of one comparison on this rank and its device, by name."""

    def __init__(self, make: MakeLayers, x: Tensor, target: Tensor, chunks: int, device: torch.device = _CPU) -> None:
        self.rank, self.ranks, self._device = dist.get_rank(), dist.get_world_size(), device
        self._make, self._x, self._target, self._chunks = make, x, target, chunks
        self.steps: dict[str, Step] = {}

    def add_plain(self, micro_batches: int) -> None:
        """Add the loop without communication, over the first `micro_batches`."""
        layers = self._make(self.ranks)
        pieces = list(zip(self._x.chunk(self._chunks), self._target.chunk(self._chunks), strict=True))

        def step() -> list[Tensor]:
            losses: list[Tensor] = []
            for piece, piece_target in pieces[:micro_batches]:
                loss = functional.mse_loss(layers(piece), piece_target)
                (loss / self._chunks).backward()
                losses.append(loss.detach())
            return losses

        idle: Step = list
        self.steps["plain"] = idle if self.rank else step

    def add_pipe(self, kind: str, name: str = "") -> None:
        """Add a pipe over all ranks."""
        stages = self.ranks * KINDS[kind].per_rank
        layers = self._make(stages)
        pipe = weft.Pipe(
            layers,
            chunks=self._chunks,
            balance=[len(layers) // stages] * stages,
            schedule=KINDS[kind].schedule_of(self.ranks),
            loss=functional.mse_loss,
            checkpoint="never",
            devices=self._device,
            group=dist.group.WORLD,
        )

        def step() -> list[Tensor]:
            loss = pipe(self._x, target=self._target)
            loss.backward()
            return [loss.detach()]

        self.steps[name or f"torchweft {kind}"] = step

    def add_torch_schedule(self, kind: str) -> None:
        """Add the schedule of torch over the same stages."""
        _, schedule_name, per_rank = KINDS[kind]
        stages = self.ranks * per_rank
        layers = self._make(stages)
        size = len(layers) // stages
        folded = kind in ("zbv", "dualpipev")
        numbers = [self.rank, stages - 1 - self.rank] if folded else [*range(self.rank, stages, self.ranks)]
        stage_list = [
            pipelining.PipelineStage(
                layers[number * size : (number + 1) * size].to(self._device), number, stages, self._device
            )
            for number in numbers
        ]
        schedule_class: Any = getattr(schedules, schedule_name)
        is_multi = issubclass(schedule_class, schedules.PipelineScheduleMulti)
        schedule = schedule_class(stage_list if is_multi else stage_list[0], self._chunks, loss_fn=functional.mse_loss)
        inputs = [self._x] if 0 in numbers else []

        def step() -> list[Tensor]:
            losses: list[Tensor] = []
            arguments: Any = {"target": self._target, "losses": losses} if stages - 1 in numbers else {}
            schedule.step(*inputs, **arguments)
            return [loss.detach() for loss in losses]

        self.steps[f"torch {kind}"] = step

    def add_raw(self, kind: str) -> None:
        """Add a hand-written loop over the row of this rank. Activations must have the size of an input."""
        row = table_of(kind, self.ranks, self._chunks).workers[self.rank]
        layers = self._make(self.ranks)
        half = len(layers) // 2
        part = layers[self.rank * half : (self.rank + 1) * half]
        self.steps[f"raw {kind}"] = partial(self._run_raw, part, row)

    def _run_raw(self, part: nn.Module, row: Iterable[Any]) -> list[Tensor]:
        peer, count = 1 - self.rank, self._chunks
        inputs, targets = self._x.chunk(count), self._target.chunk(count)
        # Post all receives first: gloo delays a message that arrives before its receive by milliseconds.
        buffers = [torch.empty_like(piece) for piece in inputs]
        receives: Any = [dist.irecv(buffer, peer, tag=number) for number, buffer in enumerate(buffers)]
        sends: list[Any] = []
        graphs: dict[int, tuple[Tensor, Tensor]] = {}
        losses: list[Tensor] = []
        for _, kind, number in row:
            if kind == "F":
                x = inputs[number]
                if self.rank:
                    receives[number].wait()
                    x = buffers[number].requires_grad_()
                y = part(x)
                if self.rank:
                    losses.append(functional.mse_loss(y, targets[number]))
                    y = losses[-1] / count
                else:
                    sends.append(dist.isend(y.detach(), peer, tag=number))
                graphs[number] = x, y
            else:
                x, y = graphs.pop(number)
                if self.rank:
                    y.backward()
                    sends.append(dist.isend(x.grad, peer, tag=number))
                else:
                    receives[number].wait()
                    y.backward(buffers[number])
        for send in sends:
            send.wait()
        return [loss.detach() for loss in losses]


_prepared: dict[str, Step] = {}
"""Steps of the current comparison on this rank."""


def _keep(candidates: Candidates) -> list[str]:
    _prepared.clear()
    _prepared.update(candidates.steps)
    return list(_prepared)


def prepare_sleep(seconds: float, chunks: int, kinds: list[str]) -> list[str]:
    """Prepare sleeping stages, and return the names of the steps."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 2 * chunks, 4)
    ranks = dist.get_world_size()

    def make(stages: int) -> nn.Sequential:
        return nn.Sequential(*[SplitSleep(seconds * ranks / stages) for _ in range(stages)])

    def make_fused(stages: int) -> nn.Sequential:
        return nn.Sequential(*[FusedSleep(seconds) for _ in range(stages)])

    candidates = Candidates(make, x, target, chunks)
    candidates.add_plain(1)
    for kind in kinds:
        candidates.add_pipe(kind)
        candidates.add_torch_schedule(kind)
    fused = Candidates(make_fused, x, target, chunks)
    for kind in ("1f1b", "zero bubble x1"):
        fused.add_pipe(kind, f"fused {kind}")
    candidates.steps.update(fused.steps)
    return _keep(candidates)


def prepare_tiny(chunks: int, kinds: list[str]) -> list[str]:
    """Prepare eight layers of a few microseconds each, and return the names of the steps."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 2 * chunks, 8)

    def make(_: int) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(8)])

    candidates = Candidates(make, x, target, chunks)
    candidates.add_plain(chunks)
    for kind in kinds:
        candidates.add_pipe(kind)
        candidates.add_torch_schedule(kind)
        if KINDS[kind].per_rank == 1:
            candidates.add_raw(kind)
    return _keep(candidates)


def prepare_transformer(sequence: int, rows: int, chunks: int, kinds: list[str]) -> list[str]:
    """Prepare the encoder of `pipeline.transformer`, and return the names of the steps."""
    torch.manual_seed(1)
    x, target = torch.randn(2, rows * chunks, sequence, 256)
    candidates = Candidates(lambda _: encoder(sequence), x, target, chunks)
    candidates.add_plain(chunks)
    for kind in kinds:
        candidates.add_pipe(kind)
        candidates.add_torch_schedule(kind)
    return _keep(candidates)


def _probe() -> float:
    """Duration of fixed work with small operators, as a measure of the current speed of the machine."""
    layers, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]), torch.ones(2, 8)
    begun = time.perf_counter()
    for _ in range(12):
        layers(x).sum().backward()
    return time.perf_counter() - begun


def sample(name: str, calls: int) -> Sample:
    """Run a step `calls` times on this rank, together with the other ranks."""
    step, losses = _prepared[name], list[Tensor]()
    dist.barrier()
    probe = _probe()
    dist.barrier()
    begun, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        losses = step()
    wall, processor = time.perf_counter() - begun, time.process_time() - worked
    dist.barrier()
    loss = float(torch.stack(losses).mean()) if losses else None
    return Sample(wall / calls, processor / calls, loss, (probe + _probe()) / 2)
