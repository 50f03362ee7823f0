"""Training steps over processes, for `pipeline.processes`: each rank prepares them once and then runs them by name.

    torchweft NAME     `weft.Pipe` over the ranks
    torch NAME    the schedule of `torch.distributed.pipelining` that goes by another name
    raw NAME      a loop of isend and irecv over the same row of the table; two ranks only
    plain         the micro-batches one after another on rank 0, without any communication

All train the same layers on the same micro-batches, and return the losses of the rank that has them.
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
MakeLayers = Callable[[int], nn.Sequential]
"""The layers for a number of stages."""


class Kind(NamedTuple):
    """A schedule: ours, the class of torch, and the number of stages on each rank."""

    ours: Callable[[int], str | ScheduleFunction]
    torchs: str
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
    """Seconds and processor seconds of one step on one rank, and the mean loss where it is known.

    `probe` has the seconds of a fixed work, before and after the steps. It does not depend on any candidate.
    """

    wall: float
    processor: float
    loss: float | None
    probe: float


def table_of(kind: str, ranks: int, chunks: int) -> Schedule:
    """Our table for a schedule."""
    ours, _, per_rank = KINDS[kind]
    return build(ours(ranks), ranks * per_rank, chunks)


class SleepBack(torch.autograd.Function):
    """Sleeps in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None


class SplitSleep(nn.Module):
    """Sleeps equally long for its output, for the gradient of its input and for that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(4)), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return SleepBack.apply(x, self.seconds) + SleepBack.apply(self.weight, self.seconds)


class _Fused(torch.autograd.Function):
    """One backward for the gradients of the input and of the weight."""

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
    """The steps of one comparison on this rank, by name."""

    def __init__(self, make: MakeLayers, x: Tensor, target: Tensor, chunks: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._make, self._x, self._target, self._chunks = make, x, target, chunks
        self.steps: dict[str, Step] = {}

    def add_plain(self, micro_batches: int) -> None:
        """The loop without communication, over the first micro-batches."""
        layers = self._make(self.ranks)
        pieces = list(zip(self._x.chunk(self._chunks), self._target.chunk(self._chunks), strict=True))

        def step() -> list[Tensor]:
            losses: list[Tensor] = []
            for piece, wanted in pieces[:micro_batches]:
                loss = functional.mse_loss(layers(piece), wanted)
                (loss / self._chunks).backward()
                losses.append(loss.detach())
            return losses

        idle: Step = list
        self.steps["plain"] = idle if self.rank else step

    def add_ours(self, kind: str, name: str = "") -> None:
        """A pipe over all ranks."""
        stages = self.ranks * KINDS[kind].per_rank
        layers = self._make(stages)
        pipe = weft.Pipe(
            layers,
            chunks=self._chunks,
            balance=[len(layers) // stages] * stages,
            schedule=KINDS[kind].ours(self.ranks),
            loss=functional.mse_loss,
            checkpoint="never",
            group=dist.group.WORLD,
        )

        def step() -> list[Tensor]:
            loss = pipe(self._x, target=self._target)
            loss.backward()
            return [loss.detach()]

        self.steps[name or f"torchweft {kind}"] = step

    def add_torchs(self, kind: str) -> None:
        """The schedule of torch, over the same stages."""
        _, schedule_name, per_rank = KINDS[kind]
        stages = self.ranks * per_rank
        layers = self._make(stages)
        size = len(layers) // stages
        folded = kind in ("zbv", "dualpipev")
        numbers = [self.rank, stages - 1 - self.rank] if folded else [*range(self.rank, stages, self.ranks)]
        made = [
            pipelining.PipelineStage(layers[number * size : (number + 1) * size], number, stages, torch.device("cpu"))
            for number in numbers
        ]
        kind_of_torch: Any = getattr(schedules, schedule_name)
        is_multi = issubclass(kind_of_torch, schedules.PipelineScheduleMulti)
        schedule = kind_of_torch(made if is_multi else made[0], self._chunks, loss_fn=functional.mse_loss)
        inputs = [self._x] if 0 in numbers else []

        def step() -> list[Tensor]:
            losses: list[Tensor] = []
            given: Any = {"target": self._target, "losses": losses} if stages - 1 in numbers else {}
            schedule.step(*inputs, **given)
            return [loss.detach() for loss in losses]

        self.steps[f"torch {kind}"] = step

    def add_raw(self, kind: str) -> None:
        """A loop by hand, over the row of this rank; an activation has the size of an input."""
        row = table_of(kind, self.ranks, self._chunks).workers[self.rank]
        layers = self._make(self.ranks)
        half = len(layers) // 2
        part = layers[self.rank * half : (self.rank + 1) * half]
        self.steps[f"raw {kind}"] = partial(self._run_raw, part, row)

    def _run_raw(self, part: nn.Module, row: Iterable[Any]) -> list[Tensor]:
        peer, count = 1 - self.rank, self._chunks
        inputs, targets = self._x.chunk(count), self._target.chunk(count)
        # gloo takes milliseconds longer for a message that arrives before its receive is posted.
        rooms = [torch.empty_like(piece) for piece in inputs]
        receives: Any = [dist.irecv(room, peer, tag=number) for number, room in enumerate(rooms)]
        sends: list[Any] = []
        graphs: dict[int, tuple[Tensor, Tensor]] = {}
        losses: list[Tensor] = []
        for _, kind, number in row:
            if kind == "F":
                x = inputs[number]
                if self.rank:
                    receives[number].wait()
                    x = rooms[number].requires_grad_()
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
                    y.backward(rooms[number])
        for send in sends:
            send.wait()
        return [loss.detach() for loss in losses]


_prepared: dict[str, Step] = {}
"""On a rank: the steps of the comparison that runs."""


def _keep(candidates: Candidates) -> list[str]:
    _prepared.clear()
    _prepared.update(candidates.steps)
    return list(_prepared)


def prepare_sleep(seconds: float, chunks: int, kinds: list[str]) -> list[str]:
    """Stages that sleep; the names of the steps."""
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
        candidates.add_ours(kind)
        candidates.add_torchs(kind)
    fused = Candidates(make_fused, x, target, chunks)
    for kind in ("1f1b", "zero bubble x1"):
        fused.add_ours(kind, f"fused {kind}")
    candidates.steps.update(fused.steps)
    return _keep(candidates)


def prepare_tiny(chunks: int, kinds: list[str]) -> list[str]:
    """Eight layers of a few microseconds; the names of the steps."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 2 * chunks, 8)

    def make(_: int) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(8)])

    candidates = Candidates(make, x, target, chunks)
    candidates.add_plain(chunks)
    for kind in kinds:
        candidates.add_ours(kind)
        candidates.add_torchs(kind)
        if KINDS[kind].per_rank == 1:
            candidates.add_raw(kind)
    return _keep(candidates)


def prepare_transformer(sequence: int, rows: int, chunks: int, kinds: list[str]) -> list[str]:
    """The encoder of `pipeline.transformer`; the names of the steps."""
    torch.manual_seed(1)
    x, target = torch.randn(2, rows * chunks, sequence, 256)
    candidates = Candidates(lambda _: encoder(sequence), x, target, chunks)
    candidates.add_plain(chunks)
    for kind in kinds:
        candidates.add_ours(kind)
        candidates.add_torchs(kind)
    return _keep(candidates)


def _probe() -> float:
    """Seconds of a fixed work of small operators, as a measure of the speed that the machine gives at present."""
    layers, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]), torch.ones(2, 8)
    begun = time.perf_counter()
    for _ in range(12):
        layers(x).sum().backward()
    return time.perf_counter() - begun


def sample(name: str, calls: int) -> Sample:
    """Run a step so many times on this rank, together with the others."""
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
