"""Runtime of a pipe over processes: how the ranks agree on a step before it begins.

    first stage's rank    cut the input --> the word of the step --> all ranks
    every other rank      the word --> compare with the own call --> cut the own part, if there is one
    every rank            lend parameters, scan the own stages, run the own row

The word holds what one rank knows and all need: the rows of the micro-batches, the seed of the random numbers, the loss
gradient that backward begins with. It also holds what all ranks must do alike: whether gradients are on, whether there
is a target, and the tag of the batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.autograd import apply
from weft.core.context import ExecutionContext
from weft.core.errors import UsageError, listed
from weft.core.rng import draw_seed, generators
from weft.core.segment import Gradients
from weft.pipeline.microbatch import ELSEWHERE, JoinedOutput, MiniBatch
from weft.pipeline.pipe_runtime import PipeCall, PipeRuntime
from weft.pipeline.pipeline_plan import PipelinePlan
from weft.pipeline.processes.loans import BorrowingStage, Loans
from weft.pipeline.processes.rank_executor import Channel, ProcessExecutor, ResultRoute
from weft.pipeline.stage import ModuleScan, Stage
from weft.pipeline.step import Agreement

_WORD = (-2, 0, 0)


class Placement(NamedTuple):
    """Where stages run: the channel of this rank, the rank of each stage, and whether all ranks get the output."""

    channel: Channel
    workers: Sequence[int]
    loans: Loans
    shares_output: bool

    @property
    def rank(self) -> int:
        return self.channel.links.rank


class StandIn(JoinedOutput):
    """In the place of an output that only the last stage's rank has: a zero, so that backward can be called."""

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        """A zero with a gradient."""
        self._at, self._rest = [0], [None]
        return [torch.zeros(())], [True]

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """Nothing: the gradients of the output are on the last stage's rank."""
        return []


class ProcessRuntime(PipeRuntime):
    """The stages of this rank, and the plans by which they run beside those of other ranks."""

    def __init__(self, placement: Placement, stages: Sequence[Stage], *args: Any, **settings: Any) -> None:
        super().__init__(stages, *args, **settings)
        self._placement = placement
        self._mine = [
            stage for stage, worker in zip(stages, placement.workers, strict=True) if worker == placement.rank
        ]
        self._has_first = placement.workers[0] == placement.rank
        self._has_last = placement.workers[-1] == placement.rank
        self._sources = generators({stage.device for stage in self._mine})
        # Without an input that requires a gradient, a rank without parameters would have no node, and no backward.
        self._anchor = torch.zeros((), requires_grad=True)
        self._steps = count(1)
        self._rank_plans: dict[bool, PipelinePlan] = {}  # by whether the loss is inside; all are serial

    def plan(self, layout: str, with_loss: bool) -> PipelinePlan:
        """The plan for steps with or without a loss; made when it is first needed."""
        if with_loss not in self._rank_plans:
            plan, placement = super().plan(layout, with_loss), self._placement
            points = plan.entry_points
            route = ResultRoute(points.result, points.source, shared=with_loss or placement.shares_output)
            executor = ProcessExecutor(placement.channel, plan.wiring, route, placement.loans)
            self._rank_plans[with_loss] = replace(plan, executor=executor)
        return self._rank_plans[with_loss]

    def serve(self, call: PipeCall, *, training: bool) -> Any:
        """One step, on all ranks together. Raises what `PipeRuntime.serve` raises, UsageError for calls that differ
        between ranks, RankFailedError and RankLostError for what happened on others."""
        plan = self.plan("serial", bool(call.targets))
        name = f" of step {next(self._steps)}"
        plan.executor.open(f"the forward{name}")
        try:
            mini_batch, agreed = self._agree(call, name)
            self._checks.check(mini_batch, "serial")
            for stage in self._mine:
                if isinstance(stage, BorrowingStage):
                    stage.borrow(agreed.borrowed)
            scans = self._scan(call)
            agreed = agreed._replace(anchors=[*agreed.anchors, *self._only_lent(scans.values())])
            ambient = ExecutionContext.capture(self.device_types)
            step = self._step(call, plan, mini_batch, scans, ambient, agreed)
        except BaseException as error:
            plan.executor.abort(error)
            raise
        if not step.tracked:
            return step.output.filled(step.forward()[0])
        results = apply(step, step.tensors)
        self.plans.end_step(plan)
        return step.output.filled(results)

    def _only_lent(self, scans: Iterable[ModuleScan]) -> list[Tensor]:
        """Parameters that live here but that no stage of this rank uses: the node of autograd must have them as inputs,
        so that the gradients which borrowers return reach them."""
        used = {id(parameter) for scan in scans for parameter in scan.parameters}
        return [each for each in self._placement.loans.lent if each.requires_grad and id(each) not in used]

    def _scanned(self, call: PipeCall) -> list[Stage]:
        return [*self._mine, self._loss] if call.targets and self._loss is not None and self._has_last else self._mine

    def _agree(self, call: PipeCall, name: str) -> tuple[MiniBatch, Agreement]:
        """What of the mini-batch is here, and what all ranks agree on."""
        walk = self._placement.channel.walk
        parts = [call.main if self._has_first else ELSEWHERE]
        parts += [each if self._has_last else ELSEWHERE for each in call.targets]
        drawn = draw_seed(self._sources)
        alike = {"gradients": torch.is_grad_enabled(), "target": bool(call.targets), "batch_tag": call.batch_tag}
        if self._has_first:
            mini_batch = MiniBatch(parts, call.chunks, call.axis)
            seed = float(call.scale.seed()) if call.targets else None
            word: dict[str, Any] = {
                "rows": list(mini_batch.rows),
                "seed": drawn.seed,
                "loss_seed": seed,
                "alike": alike,
            }
            for rank in range(self._placement.channel.links.size):
                if rank != self._placement.rank:
                    walk.send(rank, _WORD, word)
        else:
            word = walk.receive(_WORD, self._placement.workers[0])
            self._compare(word["alike"], alike)
            mini_batch = MiniBatch(parts, call.chunks, call.axis, word["rows"])
        return mini_batch, Agreement(
            name=name,
            anchors=[self._anchor],
            rng=drawn._replace(seed=word["seed"]),
            loss_seed=word["loss_seed"],
            borrowed=self._placement.loans.lend(walk),
        )

    def _compare(self, first: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Raise UsageError for what this call does otherwise than that of the first stage's rank."""
        words = {
            "gradients": "gradients are on",
            "target": "there is a target",
            "batch_tag": "pipe.batch_tag",
        }
        names = self._placement.channel.links
        owner, me = names.name_of(self._placement.workers[0]), names.name_of(names.rank)
        faults = [
            f"{words[key]}: {first[key]!r} on {owner}, {here[key]!r} on {me}"
            for key in words
            if first[key] != here[key]
        ]
        if faults:
            raise UsageError(listed("all ranks must call the Pipe alike, with the same batch; but:", faults))

    def _output(self, call: PipeCall, mini_batch: MiniBatch) -> JoinedOutput:
        if not (call.targets or self._placement.shares_output or self._has_last):
            return StandIn()
        return super()._output(call, mini_batch)
