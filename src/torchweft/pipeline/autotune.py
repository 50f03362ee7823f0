"""The choice of how the next step of a pipe runs, for ``executor="auto"``, by measuring the user's own steps.

    serial        every stage a segment, in the caller's thread; on several GPUs, with streams of its own
    threads       every stage a segment, in a thread of its own
    uncut         plain autograd over all micro-batches, in the caller's thread
    cuda_graph    as serial, recorded and replayed, if all stages are on CUDA devices

Threads pay when the operators are long and cost when they are short: under the interpreter lock, two threads that both
launch operators of 10 us run slower than one. No property of a model tells which it is, so the first steps of each kind
try the candidates in turn, and the fastest is kept:

    step      1        2        3        4        ...      11       12       13     ...
    runs      serial   threads  serial   threads  ...      serial   threads  the faster one
              warm-up  warm-up  '------------ measured -------------'

All candidates give the same numbers. Afterwards one step of eight is timed. When five of these in a row took half as
long again as the winner did, all are measured again. "uncut" costs least where operators are small. It needs one device
and no recomputation. Where it would not do the same, it is left out:

    the schedule begins backward early     it would hold all micro-batches at once
    anomaly detection; autograd functions  an error in backward could not be told with its stage and micro-batch
    written in Python
    DistributedDataParallel                must find the same graph at every step and in every process
"""

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as checkpointing

from torchweft.core.autograd import CutFunction, backward_number, is_graph_retained, reject_batched, reject_double
from torchweft.core.context import ExecutionContext, Phase, on_device, set_phase
from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, add_advice
from torchweft.core.pytree import Structure, flatten, unflatten
from torchweft.core.rng import RngProbe, RngStreams
from torchweft.core.segment import Keep, MicroBatchContext, SegmentFunction
from torchweft.core.torch_internals import queue_callback
from torchweft.pipeline.microbatch import JoinedOutput, MiniBatch
from torchweft.pipeline.pipeline_plan import PipelinePlan
from torchweft.pipeline.step import PipeStep

_WARM_UP = 1
_SAMPLES = 5
# A candidate must take less than this share of the time of an earlier one. A wrong choice for threads costs more than a
# wrong choice against them.
_WORTH = 0.95
_EVERY = 8
_SLOWER = 1.5

Report = Callable[[float], None]  # gets the seconds of a step that measures a candidate
Clock = Callable[[], float]  # waits until the devices of all stages have finished their work


class TimedCall:
    """A `CutFunction` that reports the time of its forward and first backward."""

    def __init__(self, function: CutFunction, report: Report, clock: Clock, *, with_backward: bool) -> None:
        self._function, self._clock, self._with_backward = function, clock, with_backward
        self._report: Report | None = report
        self._seconds = 0.0

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        start = self._clock()
        result = self._function.forward()
        self._seconds = self._clock() - start
        if not self._with_backward:
            self._done()
        return result

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        start = self._clock()
        result = self._function.backward(gradients, retain=retain)
        self._seconds += self._clock() - start
        self._done()
        return result

    def _done(self) -> None:
        # Only once, because a retained graph can run backward again.
        if self._report is not None:
            self._report(self._seconds)
        self._report = None


def time_graph(outputs: Sequence[Tensor], begun: float, report: Report, clock: Clock) -> None:
    """Report the time of a step that leaves its backward to autograd. Its forward started at `begun`."""
    nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    seconds = clock() - begun
    starts: list[float] = []

    def begins(_: object) -> None:
        if not starts:
            # To the end of the whole backward call. If the graph of the caller has more than this step, it is included.
            starts.append(clock())
            queue_callback(ends)

    def ends() -> None:
        report(seconds + clock() - starts[0])

    if not nodes:
        report(seconds)
    for node in nodes:
        node.register_prehook(begins)


@dataclass
class _Trial:
    seconds: dict[str, list[float]]  # by candidate, of whole steps (forward, and backward if there is one)
    best: str | None = None
    expected: float = 0.0  # seconds of the best candidate when it was chosen
    steps: int = 0  # steps since the choice
    slow: int = 0  # timed steps in a row that took clearly longer than expected


class LayoutTuner:
    """Chooses the layout of each step by measuring. Steps of one `kind` take about the same time."""

    def __init__(self, executor: str, stages: int, *, serial: bool, uncut: bool, graphs: bool = False) -> None:
        self._executor = executor
        rows = {"serial": serial, "uncut": uncut, "cuda_graph": graphs, "threads": stages > 1}
        self.candidates = [layout for layout, possible in rows.items() if possible]  # the simplest comes first
        self.fixed: str | None = None
        self._trials: dict[Hashable, _Trial] = {}

    def pick(
        self, kind: Hashable, *, must_cut: bool = False, watched: bool = False, local: bool = False
    ) -> tuple[str, Report | None]:
        """The layout for the next step of this kind, and the callback for its time if it is measured."""
        if self._executor != "auto":
            return self._executor, None
        # An observer shows each stage in its own thread. Modes and hooks of the calling thread would see other
        # operators in each layout. So both always get the same layout.
        if watched or local:
            return self.candidates[-1 if watched and "threads" in self.candidates else 0], None
        if self.fixed is not None:
            return self.fixed, None
        trial = self._trial(kind)
        if trial.best is not None:
            trial.steps += 1
            return trial.best, partial(self.report, kind, trial.best) if trial.steps % _EVERY == 0 else None
        if must_cut and "uncut" in trial.seconds:
            trial.seconds["uncut"] = [math.inf] * (_WARM_UP + _SAMPLES)
        layout = min(trial.seconds, key=lambda candidate: len(trial.seconds[candidate]))
        return layout, partial(self.report, kind, layout)

    def exclude(self, kind: Hashable, layout: str) -> None:
        """Choose another layout than this one for steps of this kind."""
        trial = self._trial(kind)
        if trial.best == layout:
            trial = self._trials[kind] = _Trial({candidate: [] for candidate in self.candidates})
        if layout in trial.seconds:
            trial.seconds[layout] = [math.inf] * (_WARM_UP + _SAMPLES)

    def report(self, kind: Hashable, layout: str, seconds: float) -> None:
        trial = self._trial(kind)
        if trial.best is None:
            trial.seconds[layout].append(seconds)
            if all(len(times) >= _WARM_UP + _SAMPLES for times in trial.seconds.values()):
                # The minimum, because other programs on the machine can only add to a time.
                least = {candidate: min(times[_WARM_UP:]) for candidate, times in trial.seconds.items()}
                trial.best = self.candidates[0]
                for other in self.candidates[1:]:
                    if least[other] < _WORTH * least[trial.best]:
                        trial.best = other
                trial.expected = least[trial.best]
        elif layout == trial.best:
            trial.slow = trial.slow + 1 if seconds > _SLOWER * trial.expected else 0
            if trial.slow == _SAMPLES:
                del self._trials[kind]

    def chosen(self) -> dict[str, str]:
        return {str(kind): trial.best for kind, trial in self._trials.items() if trial.best is not None}

    def _trial(self, kind: Hashable) -> _Trial:
        return self._trials.setdefault(kind, _Trial({candidate: [] for candidate in self.candidates}))


def needs_cuts() -> bool:
    return torch.is_anomaly_enabled() or getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


_checkpoint = cast("Callable[..., tuple[Any, ...]]", checkpointing.checkpoint)
Keeps = Sequence[Sequence[Keep]] | None  # None: all forwards keep their graph


def run_uncut(step: PipeStep, *, enter: bool = True) -> Any:
    """The output of a mini-batch with its graph, in the surroundings of the step with `enter`, else of the caller."""

    def forward(rng: RngStreams) -> list[Any]:
        with ExitStack() as stack:
            if enter:
                stack.enter_context(step.ambient.here())
                stack.enter_context(step.ambient.casting())
            return _micro_batches(step.plan, step.mini_batch, step.keeps, step.ambient, rng)

    return step.output.visible(step.run_until_rng_settled(forward))


def run_uncut_unobserved(
    plan: PipelinePlan, mini_batch: MiniBatch, output: JoinedOutput, ambient: ExecutionContext, probe: RngProbe
) -> tuple[Any] | None:
    """Run like `run_uncut`, with all graphs kept, without a `PipeStep`. None if the step drew random numbers."""
    results = _micro_batches(plan, mini_batch, None, ambient, probe)
    return None if probe.has_drawn() else (output.visible(results),)


def _micro_batches(
    plan: PipelinePlan, mini_batch: MiniBatch, keeps: Keeps, ambient: ExecutionContext, random: RngStreams | RngProbe
) -> list[Any]:
    count = mini_batch.micro_batches
    contexts = [MicroBatchContext(i, ambient, random, micro_batches=count) for i in range(count)]
    return [
        _micro_batch(plan, keeps, context, parts) for context, parts in zip(contexts, mini_batch.pieces(), strict=True)
    ]


def _micro_batch(plan: PipelinePlan, keeps: Keeps, context: MicroBatchContext, parts: Sequence[Any]) -> Any:
    values: dict[int, Any] = {entry.route: part for entry, part in zip(plan.entry_points.entries, parts, strict=True)}
    for stage, function in enumerate(plan.functions):
        inputs = [values[route] for route in plan.wiring.inputs[stage]]
        if (place := plan.places[stage]) is not None:
            leaves, structure = flatten(inputs)
            inputs = unflatten(structure, [x.to(place.device) if isinstance(x, Tensor) else x for x in leaves])
        try:
            repeated = keeps is not None and keeps[stage][context.micro_batch] == "inputs"
            with nullcontext() if place is None else on_device(place.device):
                outputs = _checkpointed(function, context, inputs) if repeated else function(context, *inputs)
        except BaseException as error:
            add_advice(error)
            error.add_note(f"torchweft: in forward of stage {stage}, micro-batch {context.micro_batch}")
            raise
        values.update(zip(plan.wiring.outputs[stage], outputs, strict=True))
    return values[plan.entry_points.result]


def _checkpointed(function: SegmentFunction, context: MicroBatchContext, inputs: list[Any]) -> tuple[Any, ...]:
    leaves, structure = flatten(inputs)
    repeated = _Repeated(function, context, structure)
    outputs = _checkpoint(repeated, *leaves, use_reentrant=False, preserve_rng_state=False)
    if repeated.failed:
        raise repeated.failed.pop()
    return outputs


class _Repeated:
    """A function over leaves that sets the phase: its first call will be recomputed, and later calls recompute it."""

    def __init__(self, function: Callable[..., Any], context: MicroBatchContext, structure: Structure) -> None:
        self.failed: list[BaseException] = []
        self._function, self._context, self._structure = function, context, structure
        self._called = False

    def __call__(self, *leaves: Any) -> Any:
        if self._called:
            return self._run("recomputing", leaves)
        self._called = True
        try:
            return self._run("checkpointing", leaves)
        except BaseException as error:
            # Kept for the caller. Raised through `torch.utils.checkpoint`, hooks would stay in place for all graphs of
            # the thread as long as the error is referenced (PyTorch 2.11), and StopIteration would change its type.
            self.failed.append(error)
            return ()

    def _run(self, what: Phase, leaves: Sequence[Any]) -> Any:
        with set_phase(what), self._context.ambient.process_flags():
            # Each call gets its own lists and dicts, because a layer can change them.
            return self._function(self._context, *unflatten(self._structure, leaves))


def timed_result(result: Any, report: Report | None, begun: float, clock: Clock) -> Any:
    """The result of an uncut step that started at `begun`. Its backward obeys the rules of a step that is cut."""
    outputs = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    freed_by: list[int] = []

    # Without these rules the same program would be rejected or accepted depending on which layout measured faster.
    def before_backward(gradients: Sequence[Tensor | None]) -> None:
        reject_batched(gradients)
        reject_double()
        task = backward_number()
        if freed_by and task not in freed_by:
            raise BackwardTwiceError(BACKWARD_TWICE)
        if not is_graph_retained():
            freed_by.append(task)

    for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
        node.register_prehook(before_backward)
    if report is not None:
        time_graph(outputs, begun, report, clock)
    return result
