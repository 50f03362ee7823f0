"""Runtime of a pipe over processes: how the ranks agree on a step before it begins.

    first stage's rank    split the input --> the terms of the step --> all ranks
    every other rank      the terms --> compare with its call --> split its target, if it has one
    every rank            exchange copies of shared parameters, scan its stages, run its row

The terms hold values that one rank knows and all need: the rows of the micro-batches, the seed of the random numbers,
the loss gradient that backward begins with. They also hold the facts that must be equal on all ranks. Without the
comparison, a rank that calls the pipe in another way would wait for messages that never come.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.autograd import apply_as_node
from torchweft.core.context import ExecutionContext
from torchweft.core.errors import UsageError, join_faults
from torchweft.core.rng import draw_seed, generators_of
from torchweft.core.segment import Gradients
from torchweft.core.timing import LateNumber
from torchweft.pipeline.microbatch import ELSEWHERE, JoinedOutput, MiniBatch
from torchweft.pipeline.pipe_runtime import PipeCall, PipeRuntime
from torchweft.pipeline.pipeline_plan import PipelinePlan
from torchweft.pipeline.processes.given_batch import CheckTurns, GivenBatch, describe_modes, list_entries, share_entries
from torchweft.pipeline.processes.loans import BorrowingStage
from torchweft.pipeline.processes.rank_executor import Placement, ProcessExecutor, ResultRoute
from torchweft.pipeline.stage import ModuleScan, Stage
from torchweft.pipeline.step import Agreement

_TERMS = (-2, 0, 0)


class RemoteOutput(JoinedOutput):
    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        # A zero that requires a gradient, so that every rank can call backward(). The gradient is dropped.
        self._at, self._rest = [0], [None]
        return [torch.zeros(())], [True]

    def scatter_gradients(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        return []


class ProcessRuntime(PipeRuntime):
    """The stages of this rank, and the plans by which they run together with those of other ranks."""

    def __init__(self, placement: Placement, stages: Sequence[Stage], *args: Any, **settings: Any) -> None:
        super().__init__(stages, *args, **settings)
        self._placement = placement
        pairs = zip(stages, placement.workers, strict=True)
        self._local_stages = [stage for stage, worker in pairs if worker == placement.rank]
        self._has_first = placement.workers[0] == placement.rank
        self._has_last = placement.workers[-1] == placement.rank
        self._sources = generators_of({stage.device for stage in self._local_stages})
        # Without an input that requires a gradient, a rank without parameters would have no node, and no backward.
        self._anchor = torch.zeros((), requires_grad=True)
        self._turns = CheckTurns(enabled=placement.checks_batches)
        loss = [self._loss.function] if self._loss is not None and isinstance(self._loss.function, nn.Module) else []
        self._modules = [*(layer for stage in stages for _, layer in stage.layers), *loss]
        # Steps with a forward that all ranks completed. They count alike, so that a walk has one name on all of them.
        self._steps = 0
        self._late_seed = LateNumber()
        self._rank_plans: dict[tuple[bool, bool], PipelinePlan] = {}  # by loss inside and shared results; all serial

    def plan(self, layout: str, with_loss: bool) -> PipelinePlan:
        return self._rank_plan(layout, with_loss, shared=with_loss or self._placement.shares_output)

    def _rank_plan(self, layout: str, with_loss: bool, *, shared: bool) -> PipelinePlan:
        if (with_loss, shared) not in self._rank_plans:
            plan, placement = super().plan(layout, with_loss), self._placement
            route = ResultRoute(plan.entry_points.result, plan.entry_points.source, shared=shared)
            executor = ProcessExecutor(placement, plan.wiring, route)
            self._rank_plans[with_loss, shared] = replace(plan, executor=executor)
        return self._rank_plans[with_loss, shared]

    def _is_shared(self, call: PipeCall) -> bool:
        """Whether all ranks get what the stages return. Values that enter a tail stay where the tail runs."""
        return bool(call.targets) or (self._placement.shares_output and call.joined_axes is None)

    def serve(self, call: PipeCall, *, training: bool) -> Any:
        """One step, on all ranks together. Raises the errors of `PipeRuntime.serve`, UsageError for calls that differ
        between ranks, and RankFailedError or RankLostError for events on other ranks."""
        plan = self._rank_plan("serial", bool(call.targets), shared=self._is_shared(call))
        name = f" of step {self._steps + 1}"
        plan.executor.open(f"the forward{name}")
        # From here on a fault must reach the other ranks, because they wait for messages of this walk.
        try:
            mini_batch, agreed = self._agree_on_terms(call, name)
            self._checks.check(mini_batch, "serial")
            # Before the scan, which must see the copies of this step.
            for stage in self._local_stages:
                if isinstance(stage, BorrowingStage):
                    stage.set_copies(agreed.borrowed)
            scans = self._scan(call)
            agreed = agreed._replace(anchors=[*agreed.anchors, *self._only_lent(scans.values())])
            ambient = ExecutionContext.capture(self.device_types)
            step = self._step(call, plan, mini_batch, scans, ambient, agreed)
            cut = self._cut_step(call, step, scans, agreed)
        except BaseException as error:
            plan.executor.abort(error)
            raise
        # Without a gradient on any rank there is no node. The terms make all ranks take the same of the two ways.
        if not step.tracked:
            output = cut.forward()[0]
            self._steps += 1
            return step.output.fill(output)
        results = apply_as_node(cut, cut.tensors)
        self._steps += 1
        self.plans.end_step(plan)
        return step.output.fill(results)

    def _only_lent(self, scans: Iterable[ModuleScan]) -> list[Tensor]:
        # The node of autograd must have them as inputs, so that the gradients which borrowers return reach them.
        used = {id(parameter) for scan in scans for parameter in scan.parameters}
        return [x for x in self._placement.loans.lent_parameters if x.requires_grad and id(x) not in used]

    def _scanned(self, call: PipeCall) -> list[Stage]:
        loss = self._loss if call.targets and self._has_last else None
        return self._local_stages if loss is None else [*self._local_stages, loss]

    def _agree_on_terms(self, call: PipeCall, name: str) -> tuple[MiniBatch, Agreement]:
        placement, walk = self._placement, self._placement.channel.walk
        parts = [call.main if self._has_first else ELSEWHERE]
        parts += [target if self._has_last else ELSEWHERE for target in call.targets]
        # Every rank draws, so that its generator is where that of a single process would be.
        drawn = draw_seed(self._sources)
        equal = {
            "gradients are on": torch.is_grad_enabled(),
            "there is a target": bool(call.targets),
            "pipe.batch_tag": call.batch_tag,
            "the parameters that ranks lend to each other": placement.loans.digest,
            "modules in training mode": describe_modes(self._modules),
        }
        batch = GivenBatch(call.given, call.targets)
        terms: dict[str, Any]
        if self._has_first:
            mini_batch = MiniBatch(parts, call.chunks, call.axis)
            loss_seed = self._loss_seed(call.scale.seed()) if call.targets else None
            is_due = placement.channel.links.size > 1 and self._turns.is_due(sum(mini_batch.rows))
            terms = {"rows": list(mini_batch.rows), "seed": drawn.seed, "loss_seed": loss_seed, "equal": equal}
            terms |= {"entries": list_entries(batch), "checksums": batch.checksums() if is_due else {}}
            for rank in range(placement.channel.links.size):
                if rank != placement.rank:
                    walk.send(rank, _TERMS, terms)
        else:
            terms = walk.receive(_TERMS, placement.workers[0])
            # Before the mini-batch is cut: the fault is then named, and not an effect of it.
            self._compare_calls(terms["equal"], equal)
            if terms["checksums"]:
                links = placement.channel.links
                batch.compare(terms["checksums"], links.name_of(placement.workers[0]), links.name_of(links.rank))
            mini_batch = MiniBatch(parts, call.chunks, call.axis, terms["rows"])
        owners = placement.workers[0], placement.workers[-1]
        entries = share_entries(terms["entries"], batch, owners, placement.rank)
        return mini_batch, Agreement(
            name=name,
            anchors=[self._anchor],
            rng=drawn._replace(seed=terms["seed"]),
            loss_seed=terms["loss_seed"],
            borrowed=placement.loans.exchange_copies(walk),
            entries=entries,
            entry_tensors=list(entries.tensors.values()),
        )

    def _loss_seed(self, newest: Tensor) -> float:
        # On a GPU the seed of a step before, because this rank would otherwise wait for the last step to end.
        return newest.item() if newest.is_cpu else self._late_seed.exchange(newest) or 1.0

    def _compare_calls(self, first: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        links = self._placement.channel.links
        owner, me = links.name_of(self._placement.workers[0]), links.name_of(links.rank)
        faults = [
            f"{fact}: {first[fact]!r} on {owner}, {here[fact]!r} on {me}" for fact in here if first[fact] != here[fact]
        ]
        if faults:
            raise UsageError(join_faults("all ranks must call the Pipe alike, with the same batch; but:", faults))

    def _output(self, call: PipeCall, mini_batch: MiniBatch) -> JoinedOutput:
        if not (self._is_shared(call) or self._has_last):
            return RemoteOutput()
        return super()._output(call, mini_batch)
