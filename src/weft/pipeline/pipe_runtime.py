"""What a pipe needs to run and does not save: stages, plans, executors. Made anew after a copy or a load."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import Context
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from weft.core.autograd import CutFunction, StepsInBackward, apply, forbid_transforms, outside_transforms
from weft.core.context import ExecutionContext, has_local_modes
from weft.core.errors import DeviceError, UsageError, listed
from weft.core.rng import DrawnSeed, RandomUse, RngProbe, RngStreams, generators
from weft.core.segment import Function, Keep
from weft.core.timing import time_after
from weft.pipeline.autotune import LayoutTuner, TimedCall, needs_cuts, run_uncut, run_uncut_unobserved, timed_result
from weft.pipeline.checks import (
    ForeignParameterCheck,
    collective_layers,
    forbid_steps,
    forbid_workers,
    refuse_cached_weights,
)
from weft.pipeline.config import BatchDims, CheckpointRule, checkpoint_rules, never_recomputes
from weft.pipeline.executor import SerialExecutor, ThreadExecutor
from weft.pipeline.loss import LossFunction, LossScale, LossStage, LossWeight, LossWeights, WeightedLoss
from weft.pipeline.microbatch import JoinedOutput, MiniBatch
from weft.pipeline.pipeline_plan import Crossing, PipelinePlan, staged_plan
from weft.pipeline.schedule import Schedule, build
from weft.pipeline.stage import ModuleScan, Stage, serialize_shared
from weft.pipeline.step import ALONE, Agreement, PipeStep
from weft.pipeline.tracing import Observer

_numbers = count()
_NO_OWNERS: Mapping[int, torch.Tensor] = {}
_NO_VARIABLES = Context()
MISPLACED = (
    "parameters or buffers are not on the device of their stage; a pipe places its layers when it is made, so do not "
    "move it as a whole, and move layers yourself after setting pipe.balance or pipe.devices (layers on the meta "
    "device: call pipe.materialize() first):"
)
_CAPTURING = (
    "a pipe was called while a CUDA graph is captured, which cannot hold a step: it reads the states of random "
    "generators; call the pipe outside of torch.cuda.graph, and capture single layers inside of it"
)


class PipeRuntime:
    """Stages, plans and executors of one pipe. Holds no tensor between steps but the parameters of its layers."""

    def __init__(
        self,
        stages: Sequence[Stage],
        crossing: Crossing,
        checkpoint: Any,
        executor: str,
        loss: LossFunction | None,
        reduction: str,
        loss_weight: LossWeight | None,
        dims: BatchDims,
        *,
        splits: bool,
    ) -> None:
        self.stages, self._crossing = list(stages), crossing
        serialize_shared(self.stages)
        devices = [stage.device for stage in self.stages]
        self.uses = [RandomUse(generators([device])) for device in (*devices, devices[-1])]
        self.rules: list[CheckpointRule] = checkpoint_rules(checkpoint, len(self.stages))
        self.device_types = sorted({device.type for device in devices})
        self._threads = ThreadExecutor(f"pipe{next(_numbers)}")  # so that a trace of two pipes tells them apart
        self._serial = SerialExecutor()
        self._plans: dict[tuple[str, bool], PipelinePlan] = {}
        self._searched: list[ForeignParameterCheck] = []
        self._weights = LossWeights(loss, reduction, loss_weight)
        self._loss = (
            None if loss is None else LossStage(len(self.stages), loss, devices[-1], guessed=self._weights.guessed)
        )
        self._dims = dims
        self._cuts = executor != "graph"
        self._surroundings: ExecutionContext | None = None
        self._silent: set[Hashable] = set()
        self._steppers = [
            (f"layer {name!r} of stage {stage.index}", module)
            for stage in self.stages
            for name, layer in stage.layers
            for module in layer.modules()
            if isinstance(module, StepsInBackward)
        ]
        self._collectives = collective_layers(stage.layers for stage in self.stages)
        if executor == "auto" and self._collectives:
            executor = "serial"
        self._clock = partial(time_after, frozenset(devices))
        one_device = len(set(devices)) == 1
        self._never = never_recomputes(checkpoint)
        uncut = one_device and splits and self._never
        self.layouts = LayoutTuner(executor, len(devices), one_device=one_device, uncut=uncut)

    def plan(self, layout: str, loss: bool) -> PipelinePlan:
        """The plan for a layout; made when it is first needed."""
        key = (layout, loss)
        if key not in self._plans:
            function = self._loss if loss else None
            executor = self._threads if layout == "threads" else self._serial
            streams, cut = layout == "threads", layout in ("serial", "threads")
            plan = staged_plan(self.stages, self._crossing, executor, function, streams=streams, cut=cut)
            self._plans[key] = plan
            self._searched += plan.searched
        return self._plans[key]

    @property
    def threads(self) -> int:
        """How many worker threads there are now."""
        return self._threads.workers

    def serve(self, call: "PipeCall", *, training: bool) -> Any:
        """One step. Only `executor="auto"` asks whether the pipe is `training`, as such steps take other times.

        Raises DeviceError when a layer is not where its stage runs, UsageError when stages may not have threads or
        would take optimizer steps elsewhere per micro-batch, or while a CUDA graph is captured.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError(_CAPTURING)
        mini_batch = MiniBatch([call.main, *call.targets], call.chunks, call.axis)
        kind = StepKind(
            torch.is_grad_enabled(),
            training,
            bool(call.targets),
            mini_batch.micro_batches,
            mini_batch.rows[0].bit_length(),
            sum(tensor.numel() for tensor in mini_batch.given).bit_length(),
            needs_cuts(),
        )
        if kind.cuts or any(each.has_python_functions for each in self._searched):
            self.layouts.with_cuts.add(kind)
        layout, report = self.layouts.pick(kind, watched=call.watcher is not None, local=has_local_modes())
        self._forbid(mini_batch, layout)
        begun = 0.0 if report is None else self._clock()
        if layout == "uncut" and kind in self._silent and (found := self._silently(call, mini_batch, kind)):
            return timed_result(found[0], report, begun, self._clock)
        scans = {stage.index: stage.scan() for stage in self._scanned(call)}
        if any(scan.misplaced for scan in scans.values()):
            raise DeviceError(listed(MISPLACED, [fault for scan in scans.values() for fault in scan.misplaced]))
        casts = self._casts()
        ambient = self._surroundings
        if layout != "uncut" or casts or ambient is None:
            ambient = ExecutionContext.capture(self.device_types)
        step = self._step(call, self.plan(layout, bool(call.targets)), mini_batch, scans, ambient)
        if layout == "uncut":
            # They outlive the step, so they must not hold the caller's context variables, which no such step needs.
            self._surroundings = replace(ambient, context=_NO_VARIABLES)
            # It is neither moved to another thread nor repeated later, so it runs in the surroundings of the call; but
            # the cache of autocast would make sums of gradients in a lower precision.
            result = timed_result(run_uncut(step, enter=casts), report, begun, self._clock)
            drew = [self.uses[number].draws.get(scan.configuration) for number, scan in scans.items()]
            if not step.deferred and all(each is False for each in drew):
                self._silent.add(kind)
            return result
        if layout == "graph":
            return run_uncut(step)
        function: CutFunction = step
        if report is not None:
            function = TimedCall(step, report, self._clock, with_backward=step.tracked)
        return step.output.filled(apply(function, step.node_inputs()) if step.tracked else function.forward()[0])

    def _scanned(self, call: "PipeCall") -> list[Stage]:
        """The stages of a step, and its loss."""
        return [*self.stages, self._loss] if call.targets and self._loss is not None else self.stages

    def _forbid(self, mini_batch: MiniBatch, layout: str) -> None:
        """Raise UsageError for a call that would go wrong in this layout, or in these surroundings."""
        if self._steppers and torch.is_grad_enabled() and mini_batch.micro_batches > 1:
            forbid_steps(self._steppers)
        if self._cuts:
            forbid_transforms(lambda: chain(mini_batch.given, self._parameters()))
        if layout == "threads" and self._collectives:
            forbid_workers(self._collectives)
        if layout in ("serial", "threads") and torch.is_grad_enabled() and getattr(parametrize, "_cache_enabled", 0):
            refuse_cached_weights(self.stages)

    def _silently(self, call: "PipeCall", mini_batch: MiniBatch, kind: Hashable) -> tuple[Any] | None:
        """An uncut step that needs no scan, since the last one of its kind drew nothing; None if this one did.

        Its few lines are for models of small operators: what a step touches is in no cache when it begins.
        """
        if self._surroundings is None or self._casts():
            return None
        for stage in self.stages:
            stage.find_hooks()
        plan, output = self.plan("uncut", bool(call.targets)), self._output(call, mini_batch)
        found = run_uncut_unobserved(plan, mini_batch, output, self._surroundings, RngProbe(self.uses))
        if found is None:
            self._silent.discard(kind)
            for use in self.uses:
                use.draws.clear()  # to be observed anew
        return found

    def _casts(self) -> bool:
        return any(torch.is_autocast_enabled(kind) for kind in ("cpu", *self.device_types))

    def _output(self, call: "PipeCall", mini_batch: MiniBatch) -> JoinedOutput:
        if call.targets:
            # Of processes, only the one with the target can know the weights.
            weights = self._weights.of(mini_batch, call.targets[0]) if 1 in mini_batch.present else []
            return WeightedLoss(weights, mini_batch.given, self._dims.extras, mini_batch.rows)
        whole = sum(mini_batch.rows) if call.scalars == "mean" else 1
        weights = [(rows if call.scalars == "mean" else 1) / max(whole, 1) for rows in mini_batch.rows]
        return JoinedOutput(mini_batch.given, self._dims.outputs, mini_batch.rows, weights if call.scalars else None)

    def _step(
        self,
        call: "PipeCall",
        plan: PipelinePlan,
        mini_batch: MiniBatch,
        scans: Mapping[int, ModuleScan],
        ambient: ExecutionContext,
        agreed: Agreement = ALONE,
    ) -> PipeStep:
        tracked = torch.is_grad_enabled() and bool(
            mini_batch.tensors or agreed.anchors or any(scan.parameters for scan in scans.values())
        )
        count, last = mini_batch.micro_batches, len(plan.functions) - 1
        schedule = build(call.schedule, last + 1, count)
        owned: dict[int, dict[int, torch.Tensor]] = {}
        for number, scan in scans.items():  # those of the loss are the last stage's
            owned.setdefault(min(number, last), {}).update({id(p): p for p in scan.parameters})
        return PipeStep(
            plan=plan,
            functions=self._functions(plan, tracked=tracked),
            schedule=schedule,
            mini_batch=mini_batch,
            output=self._output(call, mini_batch),
            parameters={number: list(each.values()) for number, each in owned.items()},
            tracked=tracked,
            keeps=self._keeps(schedule, count, tracked=tracked, loss=bool(call.targets)),
            deferred=[norm for scan in scans.values() for norm in scan.deferred],
            new_rng=partial(self._streams, {number: scan.configuration for number, scan in scans.items()}, agreed.rng),
            ambient=ambient,
            watcher=call.watcher,
            scale=call.scale,
            owners=call.owners,
            agreed=agreed,
        )

    def _streams(self, configurations: Mapping[int, Hashable], agreed: DrawnSeed | None) -> RngStreams:
        with nullcontext() if self._cuts else outside_transforms():  # a step that is cut is not run inside of one
            return RngStreams({stage: self.uses[stage] for stage in configurations}, configurations, agreed)

    def _functions(self, plan: PipelinePlan, *, tracked: bool) -> Sequence[Function]:
        """What the segments run: where a search for foreign parameters is due, with it."""
        if not tracked or not plan.searched:
            return plan.functions
        for each in plan.searched:
            each.steps += 1
        pairs = zip(plan.functions, plan.searched, strict=True)
        return [check if check.steps >= check.next else function for function, check in pairs]

    def _keeps(self, schedule: Schedule, count: int, *, tracked: bool, loss: bool) -> list[list[Keep]]:
        """What every forward keeps, by stage and micro-batch; its graph where backward follows at once."""
        if not tracked or self._never:
            return [["graph" if tracked else "nothing"] * count] * len(self.stages)
        at_once = schedule.backward_at_once if loss else frozenset[tuple[int, int]]()
        return [
            ["inputs" if rule(stage, i, count) and (stage, i) not in at_once else "graph" for i in range(count)]
            for stage, rule in enumerate(self.rules)
        ]

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (each for stage in self.stages for _, layer in stage.layers for each in layer.parameters())


class StepKind(NamedTuple):
    """Steps that take about the same time. Sizes are powers of two: else every new batch size would be measured anew.

    `bits` are those of the rows of a micro-batch, `total_bits` those of all numbers of the mini-batch; `cuts` says that
    every stage must be cut out. ``str()`` says it in words: "gradients, train(), output, 4 micro-batches of 2 to 3
    rows, 64 to 127 numbers in all".
    """

    tracked: bool
    training: bool
    with_loss: bool
    micro_batches: int
    bits: int
    total_bits: int
    cuts: bool

    def __str__(self) -> str:
        words = (
            "gradients" if self.tracked else "no gradients",
            "train()" if self.training else "eval()",
            "loss" if self.with_loss else "output",
        )
        least, most = (1 << self.bits) >> 1, (1 << self.bits) - 1
        sizes = f"{most} row{'s' * (most != 1)}" if least >= most else f"{least} to {most} rows"
        many = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}"
        numbers = f"{(1 << self.total_bits) >> 1} to {(1 << self.total_bits) - 1} numbers in all"
        return f"{', '.join(words)}, {many} of {sizes}, {numbers}{', cut' if self.cuts else ''}"


class PipeCall(NamedTuple):
    """One call of a pipe: `targets` is empty, or holds the target. `scalars` says how numbers of micro-batches in the
    output are combined ("mean" or "sum"; None: not at all); `owners`, by the id() of a parameter's copy, whose it is.
    """

    main: Any
    targets: tuple[Any, ...]
    axis: Any
    chunks: int
    schedule: str | Schedule
    watcher: Observer | None
    scale: LossScale
    scalars: str | None = None
    owners: Mapping[int, torch.Tensor] = _NO_OWNERS
    batch_tag: Any = None


def on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer has no storage yet."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
