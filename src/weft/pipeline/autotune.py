"""The choice of how the next step of a pipe runs, for ``executor="auto"``, by measuring the user's own steps.

    serial    every stage a segment, in the caller's thread
    threads   every stage a segment, in a thread of its own
    uncut     plain autograd over all micro-batches, in the caller's thread

Threads pay when the operators are long and cost when they are short: under the interpreter lock, two threads that both
launch operators of 10 us run slower than one. No property of a model tells which it is, so the first steps of each kind
try the candidates in turn, and the fastest is kept:

    step      1        2        3        4        ...      11       12       13     ...
    runs      serial   threads  serial   threads  ...      serial   threads  the faster one
              warm-up  warm-up  '------------ measured -------------'

All candidates give the same numbers. Afterwards one step of eight is timed. When five of these in a row took half as
long again as the winner did when it was chosen, all is measured anew.

"uncut" costs least where operators are small. It leaves the whole graph visible to autograd, is serial, and ignores the
schedule. It needs one device and no recomputation, and is left out where it would not do the same:

    the schedule begins backward early     it would hold all micro-batches at once
    anomaly detection; autograd functions  an error in backward could not be told with its stage and micro-batch
    written in Python
    DistributedDataParallel                must find the same graph at every step and in every process: a parameter that
                                           got no gradient is in that of a step that was cut, and not in this

``executor="graph"`` runs uncut too, and has gradients of gradients.
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

from weft.core.autograd import CutFunction, current_task, forbid_batched, forbid_double, keeps_graph
from weft.core.context import ExecutionContext, Phase, on_device, phase
from weft.core.errors import TWICE, BackwardTwiceError, advise
from weft.core.pytree import Structure, flatten, unflatten
from weft.core.rng import RngProbe, RngStreams
from weft.core.segment import Function, Keep, MicroBatchContext
from weft.core.torch_internals import queue_callback
from weft.pipeline.microbatch import JoinedOutput, MiniBatch
from weft.pipeline.pipeline_plan import PipelinePlan
from weft.pipeline.step import PipeStep

_WARM_UP = 1
_SAMPLES = 5
_WORTH = 0.95
"""A candidate must be that much faster than one before it: a wrong choice for threads costs more than one against
them."""
_EVERY = 8
_SLOWER = 1.5


Report = Callable[[float], None]
"""What is told the seconds of a step that measures a candidate."""
Clock = Callable[[], float]
"""Seconds at which the devices of all stages have done what they were given."""


class TimedCall:
    """A `CutFunction` that reports what its forward and first backward took together, or its forward if that is all."""

    def __init__(self, function: CutFunction, report: Report, clock: Clock, *, with_backward: bool) -> None:
        self._function = function
        self._clock = clock
        self._report: Report | None = report
        self._with_backward = with_backward
        self._seconds = 0.0

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `CutFunction.forward`."""
        start = self._clock()
        result = self._function.forward()
        self._seconds = self._clock() - start
        if not self._with_backward:
            self._done()
        return result

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`."""
        start = self._clock()
        result = self._function.backward(gradients, retain=retain)
        self._seconds += self._clock() - start
        self._done()
        return result

    def _done(self) -> None:
        if self._report is not None:  # a retained graph may go back again
            self._report(self._seconds)
        self._report = None


def time_graph(outputs: Sequence[Tensor], begun: float, report: Report, clock: Clock) -> None:
    """Report a step whose backward is left to autograd: its forward has `begun` then, its first backward is timed here.

    That goes from the first of its outputs to the end of all that autograd does then, which may be more than the step.
    """
    nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    seconds = clock() - begun
    starts: list[float] = []

    def begins(_: object) -> None:
        if not starts:
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
    """What is known of one kind of step."""

    seconds: dict[str, list[float]]  # by candidate, of whole steps (forward, and backward if any)
    best: str | None = None
    expected: float = 0.0  # seconds of the best one when it was chosen
    steps: int = 0  # since then
    slow: int = 0  # of those that were timed, how many in a row took clearly longer


class LayoutTuner:
    """The layout of each step. `kind` stands for steps that take about the same time."""

    def __init__(self, executor: str, stages: int, *, one_device: bool, uncut: bool) -> None:
        self._executor = executor
        rows = {"serial": one_device, "uncut": uncut, "threads": stages > 1}
        self.candidates = [row for row, can in rows.items() if can]  # the simplest comes first
        self.fixed: str | None = None
        self.with_cuts: set[Hashable] = set()
        """Kinds of steps that are never run uncut."""
        self._trials: dict[Hashable, _Trial] = {}

    def pick(self, kind: Hashable, *, watched: bool = False, local: bool = False) -> tuple[str, Report | None]:
        """The layout for the next step of this kind (that which is `fixed`, if any), and what is told its time, if it
        is measured: every step until the decision, then one of eight.

        Who watches wants to see the stages, each in its thread. Modes and hooks of the calling thread (`local`) would
        see other operators in each layout. So both always get the same one.
        """
        if self._executor != "auto":
            return self._executor, None
        if watched or local:
            return self.candidates[-1 if watched and "threads" in self.candidates else 0], None
        if self.fixed is not None:
            return self.fixed, None
        trial = self._trial(kind)
        if trial.best is not None:
            trial.steps += 1
            return trial.best, partial(self.report, kind, trial.best) if trial.steps % _EVERY == 0 else None
        if kind in self.with_cuts and "uncut" in trial.seconds:
            trial.seconds["uncut"] = [math.inf] * (_WARM_UP + _SAMPLES)
        layout = min(trial.seconds, key=lambda each: len(trial.seconds[each]))
        return layout, partial(self.report, kind, layout)

    def report(self, kind: Hashable, layout: str, seconds: float) -> None:
        """A step of this kind took so long with that layout."""
        trial = self._trial(kind)
        if trial.best is None:
            trial.seconds[layout].append(seconds)
            if all(len(times) >= _WARM_UP + _SAMPLES for times in trial.seconds.values()):
                # The least time of each: what else the machine does can only add to it.
                least = {each: min(times[_WARM_UP:]) for each, times in trial.seconds.items()}
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
        """For every kind of step that was measured to the end, how it is run."""
        return {str(kind): trial.best for kind, trial in self._trials.items() if trial.best is not None}

    def _trial(self, kind: Hashable) -> _Trial:
        return self._trials.setdefault(kind, _Trial({each: [] for each in self.candidates}))


def needs_cuts() -> bool:
    """Whether what surrounds this call wants every stage cut out."""
    return torch.is_anomaly_enabled() or getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


_checkpoint = cast("Callable[..., tuple[Any, ...]]", checkpointing.checkpoint)

Keeps = Sequence[Sequence[Keep]] | None
"""What every forward keeps, by stage and micro-batch; None: all their graphs."""


def run_uncut(step: PipeStep, *, enter: bool = True) -> Any:
    """The output, or where the loss is inside the loss, of a mini-batch, with its graph.

    Without `enter` it runs in the surroundings that it is called in.
    """

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
    """As `run_uncut` with all graphs kept, for a step of which nothing is to be known; None if it drew numbers."""
    results = _micro_batches(plan, mini_batch, None, ambient, probe)
    return None if probe.broken() else (output.visible(results),)


def _micro_batches(
    plan: PipelinePlan, mini_batch: MiniBatch, keeps: Keeps, ambient: ExecutionContext, random: RngStreams | RngProbe
) -> list[Any]:
    count = mini_batch.micro_batches
    contexts = [MicroBatchContext(i, ambient, random, micro_batches=count) for i in range(count)]
    return [
        _micro_batch(plan, keeps, context, parts) for context, parts in zip(contexts, mini_batch.pieces(), strict=True)
    ]


def _micro_batch(plan: PipelinePlan, keeps: Keeps, context: MicroBatchContext, parts: Sequence[Any]) -> Any:
    """One micro-batch through all stages; what crosses from one to another keeps its graph."""
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
            advise(error)
            error.add_note(f"weft: in forward of stage {stage}, micro-batch {context.micro_batch}")
            raise
        values.update(zip(plan.wiring.outputs[stage], outputs, strict=True))
    return values[plan.entry_points.result]


def _checkpointed(function: Function, context: MicroBatchContext, inputs: list[Any]) -> tuple[Any, ...]:
    """One segment, with only its inputs kept."""
    leaves, structure = flatten(inputs)
    repeated = _Repeated(function, context, structure)
    outputs = _checkpoint(repeated, *leaves, use_reentrant=False, preserve_rng_state=False)
    if repeated.failed:
        raise repeated.failed.pop()
    return outputs


class _Repeated:
    """The function over leaves, told that its first call will be repeated, and that the later ones repeat it.

    Each call gets lists and dicts of its own: a layer may change them. An error of the first call is put into
    ``failed``. Raised through `torch.utils.checkpoint`, it would leave hooks in place for all graphs of the thread
    until nobody holds the error any more (PyTorch 2.11), or become another one if it is a ``StopIteration``.
    """

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
            self.failed.append(error)
            return ()

    def _run(self, what: Phase, leaves: Sequence[Any]) -> Any:
        with phase(what), self._context.ambient.process_flags():
            return self._function(self._context, *unflatten(self._structure, leaves))


def timed_result(result: Any, report: Report | None, begun: float, clock: Clock) -> Any:
    """The result of an uncut step that has `begun` then, whose backward keeps to the rules of one that was cut out.

    Else the same program would be refused or not, by what was measured to be faster.
    """
    outputs = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    freed_by: list[int] = []

    def before_backward(gradients: Sequence[Tensor | None]) -> None:
        forbid_batched(gradients)
        forbid_double()
        task = current_task()
        if freed_by and task not in freed_by:
            raise BackwardTwiceError(TWICE)
        if not keeps_graph():
            freed_by.append(task)

    for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
        node.register_prehook(before_backward)
    if report is not None:
        time_graph(outputs, begun, report, clock)
    return result
