"""The part of a pipe that is not saved: stages, plans and executors. It is built again after a copy or a load.

    pipe(x) --> MiniBatch, StepKind --> LayoutTuner.pick: serial, threads, uncut, graph, cuda_graph --> CallChecks
            --> the StepRoute --> scan the layers --> PipeStep --> run it, as one node of autograd if it is cut

A pipe without this object would have to pickle threads and locks, and would keep plans that fit the layers of an
earlier time.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import Context
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from torchweft.core.autograd import CutFunction, StepsInBackward, apply_as_node, outside_transforms, reject_transforms
from torchweft.core.context import ExecutionContext, has_local_modes
from torchweft.core.errors import DeviceError, UsageError, join_faults
from torchweft.core.rng import DrawnSeed, RandomUse, RngProbe, RngStreams, generators_of
from torchweft.core.segment import Keep, SegmentFunction
from torchweft.core.timing import time_after
from torchweft.pipeline.autotune import (
    LayoutTuner,
    TimedCall,
    needs_cuts,
    run_uncut,
    run_uncut_unobserved,
    timed_result,
)
from torchweft.pipeline.checks import collective_layers, reject_cached_weights, reject_steps, reject_workers
from torchweft.pipeline.config import BatchDims, CheckpointRule, checkpoint_rules, never_recomputes
from torchweft.pipeline.executor import SerialExecutor, ThreadExecutor
from torchweft.pipeline.loss import LossFunction, LossScale, LossSeed, LossStage, LossWeight, LossWeights, WeightedLoss
from torchweft.pipeline.microbatch import JoinedOutput, MiniBatch
from torchweft.pipeline.pipeline_plan import Crossing, PipelinePlan, staged_plan
from torchweft.pipeline.recorded_step import RecordedSteps
from torchweft.pipeline.schedule import Schedule, ScheduleFunction, build
from torchweft.pipeline.stage import ModuleScan, Stage, serialize_shared
from torchweft.pipeline.step import ALONE, Agreement, CutStep, PipeStep
from torchweft.pipeline.tracing import Observer

_numbers = count()
_NO_OWNERS: Mapping[int, torch.Tensor] = {}
_NO_VARIABLES = Context()
MISPLACED = (
    "parameters or buffers are not on the device of their stage; a pipe places its layers when it is made, so do not "
    "move it as a whole, and move layers yourself after setting pipe.balance or pipe.devices (layers on the meta "
    "device: call pipe.materialize() first):"
)
NO_TARGET = (
    "the pipe has a loss, but no target= was given, so this call in training returned the output and not the loss; "
    "call pipe(x, target=y), or predict after pipe.eval() or under torch.no_grad()"
)
NO_LOSS = (
    "target= was given, but the pipe has no loss to give it to; give it one, Pipe(..., loss=fn), or compute the loss "
    "from what the pipe returns"
)
_CAPTURING = (
    "a pipe was called while a CUDA graph is captured, which cannot hold a step: it reads the states of random "
    "generators; call the pipe outside of torch.cuda.graph, and capture single layers inside of it"
)


class StepRoute(Enum):
    """The way in which one step runs. `PipeRuntime.serve` chooses it once, and then does as it says."""

    UNCUT = auto()  # all stages in one graph of autograd
    UNCUT_UNSCANNED = auto()  # as uncut, and the layers are not even scanned, see `UnscannedSteps`
    GRAPH = auto()  # as uncut, for executor="graph": stages can recompute, and gradients of gradients are allowed
    CUT = auto()  # every stage is cut out of autograd, and the step is one node, unless nothing requires a gradient


class Plans:
    def __init__(self, stages: Sequence[Stage], crossing: Crossing, loss: LossStage | None) -> None:
        self._stages, self._crossing, self._loss = stages, crossing, loss
        # A number, so that traces tell two pipes apart. The threads start at the first walk.
        self._threads = ThreadExecutor(f"pipe{next(_numbers)}")
        self._several_gpus = several_gpus([stage.device for stage in stages])
        self._serial, self._launcher = SerialExecutor(), SerialExecutor(by_time=True)
        self._plans: dict[tuple[str, bool], PipelinePlan] = {}
        self._search_turns: dict[int, SearchTurns] = {}

    def plan(self, layout: str, *, with_loss: bool) -> PipelinePlan:
        key = (layout, with_loss)
        if key not in self._plans:
            loss = self._loss if with_loss else None
            # On one GPU, one thread runs all stages on the stream of the caller. On several, each stage has streams of
            # its own, or a copy between two GPUs would hold up both.
            launches = layout == "serial" and self._several_gpus
            executor = self._threads if layout == "threads" else self._launcher if launches else self._serial
            streams, cut = layout == "threads" or launches, layout in ("serial", "threads")
            self._plans[key] = staged_plan(self._stages, self._crossing, executor, loss, streams=streams, cut=cut)
        return self._plans[key]

    def functions(self, plan: PipelinePlan, *, tracked: bool) -> Sequence[SegmentFunction]:
        if not tracked or not plan.searched:
            return plan.functions
        return plan.searched if self._search_turns.setdefault(id(plan), SearchTurns()).begin_step() else plan.functions

    def end_step(self, plan: PipelinePlan) -> None:
        if plan.searched:
            self._search_turns[id(plan)].end_step()

    @property
    def threads(self) -> int:
        return self._threads.workers

    @property
    def have_python_functions(self) -> bool:
        return any(check.has_python_functions for plan in self._plans.values() for check in plan.searched)


class SearchTurns:
    """The steps in which graphs are searched for foreign parameters: 1, 2, 4, 8 and so on. A search costs as much as a
    step of small layers. After a step that failed, the next one is searched again."""

    def __init__(self) -> None:
        self._steps, self._next = 0, 1

    def begin_step(self) -> bool:
        self._steps += 1
        return self._steps >= self._next

    def end_step(self) -> None:
        # Only after the step ended well. A failed step has not shown that its graph is clean.
        if self._steps >= self._next:
            self._next = 2 * self._steps


class UnscannedSteps:
    """Kinds of uncut steps whose last step drew no random numbers. The next step of the kind needs no scan, which costs
    more than a step of small layers, because it touches every module while nothing is in a cache."""

    def __init__(self, uses: Sequence[RandomUse]) -> None:
        self._uses = uses
        self._kinds: set[Hashable] = set()
        self.surroundings: ExecutionContext | None = None  # those of the last uncut step

    def include(self, kind: Hashable) -> bool:
        return kind in self._kinds and self.surroundings is not None

    def keep_surroundings(self, surroundings: ExecutionContext) -> None:
        # They outlive the step, so they must not hold the caller's context variables. No uncut step needs those.
        self.surroundings = replace(surroundings, context=_NO_VARIABLES)

    def note(self, kind: Hashable, step: PipeStep, scans: Mapping[int, ModuleScan]) -> None:
        drew = [self._uses[number].draws.get(scan.configuration) for number, scan in scans.items()]
        if not step.deferred and all(draws is False for draws in drew):
            self._kinds.add(kind)

    def run(self, kind: Hashable, plan: PipelinePlan, mini_batch: MiniBatch, output: JoinedOutput) -> tuple[Any] | None:
        """The result of a step of an included kind. None if it drew after all: the caller repeats it with a scan."""
        assert self.surroundings is not None
        result = run_uncut_unobserved(plan, mini_batch, output, self.surroundings, RngProbe(self._uses))
        if result is None:
            self._kinds.discard(kind)
            for use in self._uses:
                use.draws.clear()  # they are no longer true, so the repeated step observes them again
        return result


class PipeRuntime:
    """Stages, plans and executors of one pipe. Holds no tensor between steps except the parameters of its layers."""

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
        allows_external_loss: bool,
    ) -> None:
        self.stages = list(stages)
        serialize_shared(self.stages)
        devices = [stage.device for stage in self.stages]
        # One for each stage, and one for the loss, which runs where the last stage does.
        self.uses = [RandomUse(generators_of([device])) for device in (*devices, devices[-1])]
        self.device_types = sorted({device.type for device in devices})
        self._keep_rules = KeepRules(checkpoint, len(self.stages))
        self._weights = LossWeights(loss, reduction, loss_weight)
        self._loss = (
            None if loss is None else LossStage(len(self.stages), loss, devices[-1], guessed=self._weights.guessed)
        )
        self.plans = Plans(self.stages, crossing, self._loss)
        self._dims = dims
        self._checks = CallChecks(self.stages, cuts=executor != "graph")
        self._unscanned = UnscannedSteps(self.uses)
        # The choice depends on time, so processes would choose differently, and their collectives would not match.
        if executor == "auto" and self._checks.has_collectives:
            executor = "serial"
        self.graphs = RecordedSteps(self.stages, self._loss, self.uses, strict=executor == "cuda_graph")
        self._clock = partial(time_after, frozenset(devices))
        one_device = len(set(devices)) == 1
        uncut = one_device and allows_external_loss and self._keep_rules.never_recomputes
        serial = one_device or several_gpus(devices)
        graphs = self.graphs.make is not None and all(type(stage) is Stage for stage in self.stages)
        self.layouts = LayoutTuner(executor, len(devices), serial=serial, uncut=uncut, graphs=graphs)

    def plan(self, layout: str, with_loss: bool) -> PipelinePlan:
        return self.plans.plan(layout, with_loss=with_loss)

    def serve(self, call: "PipeCall", *, training: bool) -> Any:
        """Run one step. Only `executor="auto"` depends on `training`, because such steps take other times. Raises
        DeviceError when a layer is not where its stage runs, and UsageError for calls that `CallChecks` rejects."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError(_CAPTURING)
        # Cut first: a wrong argument must not count as a step that measures a layout.
        mini_batch = MiniBatch([call.main, *call.targets], call.chunks, call.axis)
        kind = StepKind.of(call, mini_batch, training=training, cuts=needs_cuts())
        picked, report = self.layouts.pick(
            kind,
            must_cut=kind.cuts or self.plans.have_python_functions,
            watched=call.observer is not None,
            local=has_local_modes(),
        )
        layout = "serial" if picked == "cuda_graph" else picked
        self._checks.check(mini_batch, layout)
        begun = 0.0 if report is None else self._clock()
        route, scans = self._choose_route(layout, kind, call)
        if route is StepRoute.UNCUT_UNSCANNED:
            if (result := self._run_unscanned(call, mini_batch, kind)) is not None:
                return timed_result(result[0], report, begun, self._clock)
            # The step drew random numbers after all, so it is repeated.
            route, scans = StepRoute.UNCUT, self._scan(call)
        casts = route is StepRoute.UNCUT and self._casts()
        surroundings = self._unscanned.surroundings if route is StepRoute.UNCUT and not casts else None
        surroundings = surroundings or ExecutionContext.capture(self.device_types)
        step = self._step(call, self.plan(layout, bool(call.targets)), mini_batch, scans, surroundings)
        if route is StepRoute.UNCUT:
            self._unscanned.keep_surroundings(surroundings)
            # The step is neither moved to another thread nor repeated later, so it runs in the surroundings of the
            # call. With autocast it enters them, because its cache would sum gradients in a lower precision.
            output = timed_result(run_uncut(step, enter=casts), report, begun, self._clock)
            self._unscanned.note(kind, step, scans)
            return output
        if route is StepRoute.GRAPH:
            return run_uncut(step)
        cut = self._cut_step(call, step, scans)
        function: CutFunction = cut
        if picked == "cuda_graph":
            function, possible = self.graphs.choose(cut, scans, observed=call.observer is not None)
            if not possible:
                self.layouts.exclude(kind, picked)
                report = None
        if report is not None:
            function = TimedCall(cut, report, self._clock, with_backward=step.tracked)
        if not step.tracked:
            return step.output.fill(function.forward()[0])
        results = apply_as_node(function, cut.node_inputs())
        self.plans.end_step(step.plan)
        return step.output.fill(results)

    def _choose_route(
        self, layout: str, kind: "StepKind", call: "PipeCall"
    ) -> tuple[StepRoute, Mapping[int, ModuleScan]]:
        # Autocast knows few types of devices, so it is asked about devices only after a scan has accepted them.
        if layout == "uncut" and self._unscanned.include(kind) and not self._casts():
            return StepRoute.UNCUT_UNSCANNED, {}
        scans = self._scan(call)
        return {"uncut": StepRoute.UNCUT, "graph": StepRoute.GRAPH}.get(layout, StepRoute.CUT), scans

    def _run_unscanned(self, call: "PipeCall", mini_batch: MiniBatch, kind: "StepKind") -> tuple[Any] | None:
        # The scan that looks for hooks of a partition is left out.
        for stage in self.stages:
            stage.find_hooks()
        plan, output = self.plan("uncut", bool(call.targets)), self._output(call, mini_batch)
        return self._unscanned.run(kind, plan, mini_batch, output)

    def _scan(self, call: "PipeCall") -> dict[int, ModuleScan]:
        scans = {stage.index: stage.scan() for stage in self._scanned(call)}
        if any(scan.misplaced for scan in scans.values()):
            raise DeviceError(join_faults(MISPLACED, [fault for scan in scans.values() for fault in scan.misplaced]))
        return scans

    def _scanned(self, call: "PipeCall") -> list[Stage]:
        return [*self.stages, self._loss] if call.targets and self._loss is not None else self.stages

    def _casts(self) -> bool:
        return any(torch.is_autocast_enabled(kind) for kind in ("cpu", *self.device_types))

    def _output(self, call: "PipeCall", mini_batch: MiniBatch) -> JoinedOutput:
        if call.targets:
            # Of several processes, only the one with the target knows the weights.
            weights = self._weights.of(mini_batch, call.targets[0]) if 1 in mini_batch.present else []
            return WeightedLoss(weights, mini_batch.given, self._dims.extras, mini_batch.rows)
        all_rows = sum(mini_batch.rows) if call.scalars == "mean" else 1
        weights = [(rows if call.scalars == "mean" else 1) / max(all_rows, 1) for rows in mini_batch.rows]
        if call.joined_axes is not None:
            return JoinedOutput(mini_batch.given, call.joined_axes, mini_batch.rows, several=True)
        # With a stated rule for numbers, tensors can have several rows for each that came in, such as one per token.
        weights = weights if call.scalars else None
        return JoinedOutput(mini_batch.given, self._dims.outputs, mini_batch.rows, weights, several=bool(weights))

    def _step(
        self,
        call: "PipeCall",
        plan: PipelinePlan,
        mini_batch: MiniBatch,
        scans: Mapping[int, ModuleScan],
        ambient: ExecutionContext,
        agreed: Agreement = ALONE,
    ) -> PipeStep:
        # Autograd records the step if gradients are on, and something requires one.
        tracked = torch.is_grad_enabled() and bool(
            mini_batch.tensors or agreed.anchors or any(scan.parameters for scan in scans.values())
        )
        count = mini_batch.micro_batches
        schedule = build(call.schedule, len(plan.functions), count)
        return PipeStep(
            plan=plan,
            schedule=schedule,
            mini_batch=mini_batch,
            output=self._output(call, mini_batch),
            tracked=tracked,
            keeps=self._keep_rules.keeps(schedule, count, tracked=tracked, loss=bool(call.targets)),
            deferred=[norm for scan in scans.values() for norm in scan.deferred],
            new_rng=partial(self._streams, {number: scan.configuration for number, scan in scans.items()}, agreed.rng),
            ambient=ambient,
            name=agreed.name,
        )

    def _cut_step(
        self, call: "PipeCall", step: PipeStep, scans: Mapping[int, ModuleScan], agreed: Agreement = ALONE
    ) -> CutStep:
        last = len(step.plan.functions) - 1
        owned: dict[int, dict[int, torch.Tensor]] = {}
        for number, scan in scans.items():  # the parameters of the loss belong to the last stage
            owned.setdefault(min(number, last), {}).update({id(p): p for p in scan.parameters})
        parameters = {number: list(by_id.values()) for number, by_id in owned.items()}
        seed = None
        if step.tracked and call.targets and not step.schedule.allows_external_loss:
            seed = LossSeed(call.scale, agreed.loss_seed)
        functions = self.plans.functions(step.plan, tracked=step.tracked)
        return CutStep(step, functions, parameters, call.observer, call.owners, seed, agreed)

    def _streams(self, configurations: Mapping[int, Hashable], agreed: DrawnSeed | None) -> RngStreams:
        # Only executor="graph" can run inside of a function transform, where no seed can be drawn.
        with nullcontext() if self._checks.cuts else outside_transforms():
            return RngStreams({stage: self.uses[stage] for stage in configurations}, configurations, agreed)


class KeepRules:
    def __init__(self, checkpoint: Any, stages: int) -> None:
        self._rules: list[CheckpointRule] = checkpoint_rules(checkpoint, stages)
        self.never_recomputes = never_recomputes(checkpoint)

    def keeps(self, schedule: Schedule, count: int, *, tracked: bool, loss: bool) -> list[list[Keep]]:
        if not tracked or self.never_recomputes:
            return [["graph" if tracked else "nothing"] * count] * len(self._rules)
        at_once = schedule.backward_at_once if loss else frozenset[tuple[int, int]]()
        return [
            ["inputs" if rule(stage, i, count) and (stage, i) not in at_once else "graph" for i in range(count)]
            for stage, rule in enumerate(self._rules)
        ]


class CallChecks:
    """Rejects calls that would go wrong without notice in some layout, or in some surroundings."""

    def __init__(self, stages: Sequence[Stage], *, cuts: bool) -> None:
        self._stages = stages
        self.cuts = cuts  # whether stages are cut out of autograd
        self._collectives = collective_layers(stage.layers for stage in stages)
        self._modules_with_steps = [
            (f"layer {name!r} of stage {stage.index}", module)
            for stage in stages
            for name, layer in stage.layers
            for module in layer.modules()
            if isinstance(module, StepsInBackward)
        ]

    @property
    def has_collectives(self) -> bool:
        return bool(self._collectives)

    def check(self, mini_batch: MiniBatch, layout: str) -> None:
        if self._modules_with_steps and torch.is_grad_enabled() and mini_batch.micro_batches > 1:
            reject_steps(self._modules_with_steps)
        if self.cuts:
            reject_transforms(lambda: chain(mini_batch.given, self._parameters()))
        if layout == "threads" and self._collectives:
            reject_workers(self._collectives)
        if layout in ("serial", "threads") and torch.is_grad_enabled() and getattr(parametrize, "_cache_enabled", 0):
            reject_cached_weights(self._stages)

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for stage in self._stages for _, layer in stage.layers for parameter in layer.parameters())


class StepKind(NamedTuple):
    """Steps that take about the same time. With `cuts`, every stage must be cut out. `bits` is the number of bits of
    the rows of a micro-batch, `total_bits` that of all numbers of the mini-batch. ``str()`` describes it: "gradients,
    train(), output, 4 micro-batches of 2 to 3 rows, 64 to 127 numbers in all"."""

    tracked: bool
    training: bool
    with_loss: bool
    micro_batches: int
    # Rounded to powers of two. Otherwise every new size of a batch would be measured.
    bits: int
    total_bits: int
    cuts: bool

    @classmethod
    def of(cls, call: "PipeCall", mini_batch: MiniBatch, *, training: bool, cuts: bool) -> "StepKind":
        return cls(
            torch.is_grad_enabled(),
            training,
            bool(call.targets),
            mini_batch.micro_batches,
            mini_batch.rows[0].bit_length(),
            sum(tensor.numel() for tensor in mini_batch.given).bit_length(),
            cuts,
        )

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
    """One call of a pipe. `targets` is empty, or holds the target. `scalars` is the reduction for numbers of
    micro-batches in the output. `owners` maps the id() of a parameter's copy to the parameter. `given` are the
    positional arguments and the keywords of the caller. `joined_axes` are the axes of an output that is not the
    caller's, but what enters the tail of a split model. None: those of the pipe."""

    main: Any
    targets: tuple[Any, ...]
    axis: Any
    chunks: int
    schedule: str | Schedule | ScheduleFunction
    observer: Observer | None
    scale: LossScale
    scalars: str | None = None
    owners: Mapping[int, torch.Tensor] = _NO_OWNERS
    batch_tag: Any = None
    given: Any = None
    joined_axes: Any = None


def several_gpus(devices: Sequence[torch.device]) -> bool:
    return len(set(devices)) > 1 and all(device.type == "cuda" for device in devices)


def on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
