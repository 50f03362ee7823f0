"""One step of a pipe: a mini-batch is cut, goes through the stages, and comes out joined.

    external loss:          walk the forward half of the table now, and the rest under loss.backward()
    loss inside (1F1B):     walk all of the table now, with an assumed loss gradient (`LossScale`); loss.backward()
                            rescales the gradients that were made on the way

    F:  receive the values that the stage reads -> Segment.forward -> detach and send one leaf per worker that reads it
    B:  recompute if needed -> receive the gradients of the sent values, add them -> Tape.backward -> send back
    I:  as B, without the gradients of the parameters;  W: these gradients

A `PipeStep` is the node of autograd. It holds the state for backward, and none of the values that it returned.
Executors call its `StepState` from the worker of each stage. Workers share only dictionaries, in which each worker
writes at its own keys. Both classes know only the stages that run in this process.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core.autograd import silence_hooks, silence_unused_hooks
from torchweft.core.context import ExecutionContext
from torchweft.core.errors import (
    BACKWARD_TWICE,
    BackwardTwiceError,
    InPlaceError,
    RandomnessError,
    UsageError,
    add_advice,
)
from torchweft.core.pytree import flatten
from torchweft.core.rng import MAX_RECOMPUTATIONS, DrawnSeed, RngStreams, RngVote
from torchweft.core.segment import (
    Gradients,
    GradientSum,
    Keep,
    MicroBatchContext,
    Segment,
    SegmentFunction,
    SplitBackward,
    Tape,
    add_gradients,
    detach_leaves,
    versions,
)
from torchweft.pipeline.batchnorm import DeferredBatchNorm
from torchweft.pipeline.executor import Inbox, Outboxes, WalkAborted
from torchweft.pipeline.loss import LossScale, WeightedLoss
from torchweft.pipeline.microbatch import JoinedOutput, MiniBatch
from torchweft.pipeline.pipeline_plan import PipelinePlan
from torchweft.pipeline.recompute import ModuleVersions
from torchweft.pipeline.routing import (
    OUTSIDE,
    Address,
    CallerStreams,
    Given,
    Message,
    StageDevice,
    Wiring,
    bind_parameters,
    join_walk,
    leave_walk,
)
from torchweft.pipeline.schedule import Action, Schedule
from torchweft.pipeline.tracing import Observer, Recorder

GradientsByWorker = dict[int, dict[int, Tensor]]
"""Sums of parameter gradients, by worker and by the parameter's id()."""


class StepState:
    """State of one step between its actions: the tapes, and the sums of parameter gradients.

    `segments` are the segments of this process, by stage. `contexts` holds one context per micro-batch.
    `keeps[stage][micro_batch]` is the part of a forward that is kept. `places[stage]` is None if its values need not be
    moved. `worker_of` gives the worker of each stage. By default every stage has its own worker.
    """

    def __init__(
        self,
        wiring: Wiring,
        segments: Mapping[int, Segment],
        contexts: Sequence[MicroBatchContext],
        keeps: Sequence[Sequence[Keep]],
        places: Sequence[StageDevice | None],
        observer: Observer | None = None,
        rng: RngStreams | None = None,
        worker_of: tuple[int, ...] | None = None,
    ) -> None:
        self.wiring = wiring
        self._worker_of = worker_of or tuple(range(wiring.stages))
        self._deliveries = wiring.deliveries(self._worker_of)
        self.segments = segments
        self.micro_batches = len(contexts)
        self.places = places
        self.retain = False
        self._keeps = keeps
        self._contexts = contexts
        self._observer = observer.one_step() if isinstance(observer, Recorder) else observer
        self._rng = rng
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._pending: dict[tuple[int, int], SplitBackward | None] = {}
        # All readers of an address belong to one worker, and only that worker touches its entry. So no lock is needed.
        self._shared: dict[Address, tuple[Message, int]] = {}  # values, and the number of readers that need them yet
        self._returned: dict[Address, dict[int, Message]] = {}  # gradients of shared values, by reader
        self._plain = observer is None and not any(places)
        self._repeats = rng is not None and not rng.quiet
        self.sums: dict[int, GradientSum] = {}

    def recomputing(self) -> list[int]:
        """The segments that will run again in backward."""
        return sorted({stage for (stage, _), tape in self._tapes.items() if tape.recomputes})

    def prepare_backward(self, *, retain: bool) -> None:
        """Prepare a backward walk. With `retain` another one can follow, which needs the tapes too.

        Drops the sums of an earlier walk that failed, and parameters that were frozen since the forward. Autograd
        raises an error if it is asked for the gradient of a frozen parameter.
        """
        self.retain = retain
        for segment in self.segments.values():
            segment.drop_frozen()
        self.sums = {}

    def perform(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        """Perform one action in the calling thread. Waits at `inbox` for the messages that it needs.

        An exception of the user's code passes through with its traceback, and a note with its stage and micro-batch.
        """
        try:
            if action.kind == "F":
                self._forward(action, inbox, outboxes)
            elif action.kind == "W":
                self._do("W", action, self._segment_weights, action)
            else:
                self._backward(action, inbox, outboxes)
        except WalkAborted:
            raise
        except BaseException as error:
            word = "forward" if action.kind == "F" else "backward"
            add_advice(error)
            error.add_note(f"torchweft: in {word} of stage {action.stage}, micro-batch {action.micro_batch} ({action})")
            raise

    def parameter_gradients(
        self, exchange: Callable[[GradientsByWorker], GradientsByWorker] = lambda by_worker: by_worker
    ) -> dict[int, Tensor]:
        """The gradient of every parameter, by its id(): summed over micro-batches, then over the stages of each worker,
        then over workers, each in order. `exchange` adds the sums of workers in other processes before the last sum."""
        by_worker: GradientsByWorker = {}
        for stage in sorted(self.sums):
            of_worker = by_worker.setdefault(self._worker_of[stage], {})
            for parameter, gradient in zip(self.segments[stage].parameters, self.sums[stage].totals, strict=True):
                if gradient is not None:
                    add_gradient(of_worker, id(parameter), gradient)
        self.sums = {}
        by_worker = exchange(by_worker)
        total: dict[int, Tensor] = {}
        for worker in sorted(by_worker):
            for key, gradient in by_worker[worker].items():
                add_gradient(total, key, gradient)
        return total

    def reads(self, stage: int, micro_batch: int) -> list[Address]:
        """The addresses of the values that a stage reads for a micro-batch."""
        routes = self.wiring.routes
        return [
            Address(route, self._deliveries[route].group_of[stage][0], micro_batch - routes[route].delay)
            for route in self.wiring.inputs[stage]
        ]

    def writes(self, route: int, micro_batch: int) -> list[Address]:
        """The addresses to which the value of a route is sent, one per worker. Reader OUTSIDE: it leaves the run."""
        at = self.wiring.routes[route]
        inside = not at.delay or micro_batch + at.delay < self.micro_batches
        firsts = [group[0] for group in self._deliveries[route].groups] if inside else [OUTSIDE]
        return [Address(route, reader, micro_batch) for reader in firsts]

    def _group(self, address: Address) -> tuple[int, ...]:
        """The stages of one worker that read the value at the address."""
        return self._deliveries[address.route].group_of.get(address.reader, (OUTSIDE,))

    def _receive(self, address: Address, inbox: Inbox) -> Message:
        """Receive a value, and keep it until the last stage of this worker that reads it has received it."""
        readers = len(self._group(address))
        if readers == 1:
            return inbox.receive(address)
        message, left = self._shared.pop(address, None) or (inbox.receive(address), readers)
        if left > 1:
            self._shared[address] = message, left - 1
        return message

    def _forward(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        messages = [self._receive(address, inbox) for address in self.reads(action.stage, action.micro_batch)]
        sent = self._do("F", action, self._segment_forward, action, messages)
        del messages  # free the inputs before a reader runs, which can start as soon as it has the value
        for address, message in sent:
            outboxes[address.reader].put(address, message)

    def _segment_forward(self, action: Action, messages: Sequence[Message]) -> list[tuple[Address, Message]]:
        """Run the segment, keep its tape, and detach one leaf for every worker that reads an output."""
        stage, index = action.stage, action.micro_batch
        place = self.places[stage]
        values = [message.value if place is None else place.receive(message) for message in messages]
        outputs, tape = self.segments[stage].forward(self._contexts[index], values, self._keeps[stage][index])
        tracked = False
        if tape is not None:
            self._tapes[stage, index], tracked = tape, tape.tracks
        elif self._observer is not None:
            self._observer.released(action)
        sent: list[tuple[Address, Message]] = []
        for route, output in zip(self.wiring.outputs[stage], outputs, strict=True):
            for address in self.writes(route, index):
                leaf = detach_leaves(output, tracked)
                if self._observer is not None:
                    arrives = index + self.wiring.routes[route].delay
                    for reader in self._group(address):
                        self._observer.sent(stage, address._replace(reader=reader), arrives, leaf)
                sent.append((address, Message(leaf) if place is None else place.send(leaf)))
        return sent

    def _backward(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        stage, index = action.stage, action.micro_batch
        tape = self._tapes.get((stage, index))
        if tape is None:
            raise BackwardTwiceError(BACKWARD_TWICE)
        if tape.recomputes:
            self._recompute(action, tape)
        messages = [
            [inbox.receive(address) for address in self.writes(route, index)] for route in self.wiring.outputs[stage]
        ]
        sent: list[tuple[Address, Message]] = self._do(
            action.kind, action, self._segment_backward, action, tape, messages
        )
        del tape, messages  # as in forward
        for address, message in sent:
            source = self.wiring.routes[address.route].source
            outboxes[source if address.micro_batch >= 0 else OUTSIDE].put(address, message)

    def _recompute(self, action: Action, tape: Tape) -> None:
        """Make the graph again. Repeat it if another thread was seen to draw random numbers in between."""
        for _ in range(MAX_RECOMPUTATIONS - 1):
            try:
                return self._do("R", action, tape.prepare)
            except RandomnessError:
                pass
        return self._do("R", action, tape.prepare)

    def _segment_backward(
        self, action: Action, tape: Tape, messages: Sequence[Sequence[Message]]
    ) -> list[tuple[Address, Message]]:
        """Add up the gradients from the readers, run the tape backward, and add up the parameters' gradients. Returns
        the gradients that are complete for this worker, with their addresses."""
        stage, index = action.stage, action.micro_batch
        place = self.places[stage]
        gradients = [
            _total([m.value if place is None else place.receive(m) for m in of_readers], len(edges))
            for of_readers, edges in zip(messages, tape.edges or (), strict=True)
        ]
        with self._walking_back(stage, tape.roots):
            if action.kind == "I" and not self.retain:
                inputs, self._pending[stage, index] = tape.backward_inputs(gradients)
                del self._tapes[stage, index]
            else:
                inputs, of_parameters = tape.backward(gradients, retain=self.retain)
                self._add(action, of_parameters)
        sent: list[tuple[Address, Message]] = []
        for address, gradients_in in zip(self.reads(stage, index), inputs, strict=True):
            total = self._returned_total(address, stage, gradients_in, place)
            if total is not None:
                sent.append((address, Message(total) if place is None else place.send(total)))
        return sent

    def _returned_total(
        self, address: Address, stage: int, gradients: Gradients, place: StageDevice | None
    ) -> Gradients | None:
        """The gradients of a value, summed over the stages of this worker that read it. None until all have arrived."""
        readers = self._group(address)
        if len(readers) == 1:
            return gradients
        returned = self._returned.setdefault(address, {})
        returned[stage] = Message(gradients) if place is None else place.send(gradients)
        if len(returned) < len(readers):
            return None
        del self._returned[address]
        # Readers can end in any order. The sum is in the order of stages, so that it has the same bits under every
        # table.
        in_order = [returned[reader] for reader in readers]
        return _total([m.value if place is None else place.receive(m) for m in in_order], len(gradients))

    def _segment_weights(self, action: Action) -> None:
        """Add up the parameters' gradients after I. (If the graph is retained, I has added them already.)"""
        split = self._pending.pop((action.stage, action.micro_batch), None)
        with self._walking_back(action.stage, list):
            self._add(action, split.parameter_gradients() if split is not None else ())

    def _add(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        """Add up gradients of a stage's parameters. Frees the tape of the action, unless the graph is retained."""
        if gradients:
            if action.stage not in self.sums:
                self.sums[action.stage] = GradientSum(len(gradients))
            self.sums[action.stage].add(gradients)
        if not self.retain:
            self._tapes.pop((action.stage, action.micro_batch), None)
            if self._observer is not None:
                self._observer.released(action)

    def _walking_back(self, stage: int, roots: Callable[[], Sequence[Any]]) -> AbstractContextManager[Any]:
        """Context for running the graph of the stage backward. See `RngStreams.backward`."""
        return self._rng.backward(stage, roots) if self._rng is not None and self._repeats else _FREE

    def _do(self, kind: str, action: Action, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the device of the stage, and report it to the observer."""
        if self._plain:
            return call(*args)
        place = self.places[action.stage]
        with ExitStack() as stack:
            if place is not None:
                stack.enter_context(place.stream_context())
            if self._observer is not None:
                stack.enter_context(self._observer.action_scope(kind, action))
            return call(*args)


def _total(of_readers: Sequence[Gradients | None], width: int) -> Gradients:
    """The gradient of one value: the sum of the gradients from its readers, in their order."""
    present = [gradients for gradients in of_readers if gradients is not None]
    if not present:
        return [None] * width
    if len(present) == 1:
        # A result can have fewer gradients than leaves. They belong to the first leaves.
        return present[0] + [None] * (width - len(present[0]))
    columns = [[leaf for leaf in leaves if leaf is not None] for leaves in zip(*present, strict=True)]
    return [reduce(add_gradients, column) if column else None for column in columns]


def add_gradient(total: dict[int, Tensor], key: int, gradient: Tensor) -> None:
    """Add to the gradient of a tensor in `total`, which is keyed by the tensor's id()."""
    present = total.get(key)
    total[key] = gradient if present is None else add_gradients(present, gradient.to(present.device))


Result = TypeVar("Result")

_FREE = nullcontext()
_SHARED = (
    "a layer wrote to a tensor that every micro-batch gets whole (in NoChunk, or without a batch axis), so it was "
    "written to once per micro-batch; let the layer write to a clone"
)


class Agreement(NamedTuple):
    """Terms that all processes of a step agree on before it starts. The defaults are those of a single process.

    `name` is the name of the step in messages. `anchors` are inputs of the node without a gradient, so that a process
    without parameters has a node too. `loss_seed` is the loss gradient of an early backward. `borrowed` are copies of
    parameters of other processes for this step, by the number of the loan.
    """

    name: str = ""
    anchors: Sequence[Tensor] = ()
    rng: DrawnSeed | None = None
    loss_seed: float | None = None
    borrowed: Mapping[int, Tensor] = MappingProxyType({})


ALONE = Agreement()


class ForwardReport(NamedTuple):
    """Report of one process after its forward: its `RngVote`, and the weights of the micro-batches' losses, which only
    the process with the target knows."""

    drew: bool
    surprised: bool
    weights: Sequence[float]


@dataclass(eq=False)
class PipeStep:
    """One mini-batch on its way through a plan. A `CutFunction`, unless it runs uncut (`run_uncut`).

    `functions` are the functions of the plan's segments. `parameters` are those that require a gradient, by the
    segments of this process. `owners` maps the id() of a copy made for this step to its original.
    """

    plan: PipelinePlan
    functions: Sequence[SegmentFunction]
    schedule: Schedule
    mini_batch: MiniBatch
    output: JoinedOutput
    parameters: Mapping[int, Sequence[Tensor]]
    tracked: bool
    keeps: Sequence[Sequence[Keep]]
    deferred: Sequence[DeferredBatchNorm]
    new_rng: Callable[[], RngStreams]
    ambient: ExecutionContext
    observer: Observer | None
    scale: LossScale
    owners: Mapping[int, Tensor]
    agreed: Agreement = ALONE
    _run: StepState | None = None
    _versions: ModuleVersions | None = None
    _early_gradients: list[Tensor | None] | None = None
    _seed: Tensor | None = None
    _caller: CallerStreams = field(default_factory=lambda: CallerStreams(()))

    @cached_property
    def _parameters(self) -> list[Tensor]:
        owned = [self.owners.get(id(p), p) for group in self.parameters.values() for p in group]
        return list({id(p): p for p in owned}.values())

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors that the step has gradients for, in order."""
        return [*self.mini_batch.tensors, *self.agreed.anchors, *self._parameters]

    def node_inputs(self) -> list[Tensor]:
        """`tensors` for the node of autograd: see `bind_parameters`."""
        views = bind_parameters(self.plan.places, self.parameters)
        return [views.get(id(tensor), tensor) for tensor in self.tensors] if views else self.tensors

    def run_until_rng_settled(self, forward: Callable[[RngStreams], Result]) -> Result:
        """Run a forward until its random numbers are right: once, or twice after a surprise (see `RngStreams`).

        Deferred batch norms gather statistics in every run, and commit those of the last. Raises InPlaceError if a
        layer wrote to a tensor that all micro-batches share.
        """
        shared = self.mini_batch.shared and versions(self.mini_batch.shared)
        executor = self.plan.executor
        while True:
            executor.open(f"the forward{self.agreed.name}")
            rng = self.new_rng()
            try:
                for norm in self.deferred:
                    norm.begin(rng)
                result = forward(rng)
                if shared and versions(self.mini_batch.shared) != shared:
                    raise InPlaceError(_SHARED)
                reports = executor.commit(ForwardReport(*rng.vote(), self.output.weights))
            except BaseException as error:
                for norm in self.deferred:
                    norm.abandon(rng)
                executor.abort(error)
                raise
            if rng.commit_draws(RngVote.of([RngVote(report.drew, report.surprised) for report in reports])):
                break
        for norm in self.deferred:
            norm.commit(rng)
        if not executor.alone:
            self.output.set_weights(next((report.weights for report in reports if report.weights), ()))
        return result

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `CutFunction.forward`."""
        self._caller = CallerStreams(self.plan.places)
        if self.tracked and isinstance(self.output, WeightedLoss) and not self.schedule.allows_external_loss:
            # The walk makes gradients too, so it needs a loss gradient before loss.backward() is called.
            agreed = self.agreed.loss_seed
            self._seed = self.scale.seed() if agreed is None else torch.tensor(agreed, dtype=torch.float64)
        left, run, self._early_gradients = self.run_until_rng_settled(self._walk_forward)
        results = self.plan.entry_points.results(left, self.mini_batch.micro_batches)
        if self._seed is None:
            self._run = run
            again = run.recomputing()
            self._versions = ModuleVersions([self.plan.stages[stage].replay for stage in again]) if again else None
        return self.output.gather(results)

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`. Raises BackwardTwiceError if it was freed, ModuleChangedError if layers
        changed.
        """
        executor = self.plan.executor
        try:
            executor.open(f"the backward{self.agreed.name}")
            with self._caller.restored():
                found = self._gradients(gradients, retain=retain)
            reports = executor.commit(None if executor.alone else self._loss_gradient(gradients))
        except BaseException as error:
            executor.abort(error)
            raise
        if len(set(reports)) > 1:
            raise UsageError(
                f"the gradient of the loss differs between ranks: {', '.join(map(str, reports))}, by rank; scale the "
                "loss by the same number on all of them"
            )
        silence_unused_hooks([x for x, gradient in zip(self.tensors, found, strict=True) if gradient is None])
        return found

    def _gradients(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """The gradients of `tensors`, from a backward walk or from the forward that made them early."""
        run, early = self._run, self._early_gradients
        if run is None and early is None:
            raise BackwardTwiceError(BACKWARD_TWICE)
        if self._versions is not None:
            self._versions.verify()
        if not retain:
            self._run = self._early_gradients = None
        if run is None:
            return self._rescaled(early or [], gradients[0])
        result = self._walk_backward(run, self.output.scatter_gradients(gradients), retain=retain)
        if retain and self._versions is not None:
            self._versions.snapshot()  # a layer can write to its own weights while it is recomputed
        return result

    def _loss_gradient(self, gradients: Sequence[Tensor | None]) -> str | None:
        """The gradient of a loss that is inside, as text that is equal for equal numbers."""
        seed = gradients[0] if isinstance(self.output, WeightedLoss) else None
        return None if seed is None else repr(float(seed))

    def _walk_forward(self, rng: RngStreams) -> tuple[dict[Address, Message], StepState, list[Tensor | None] | None]:
        """The messages that left the walk, its state, and the gradients of `tensors` if they are made early."""
        plan, count = self.plan, self.schedule.micro_batches
        segments = {stage: Segment(self.functions[stage], owned) for stage, owned in self.parameters.items()}
        borrowed = self.agreed.borrowed
        contexts = [MicroBatchContext(i, self.ambient, rng, {}, count, borrowed) for i in range(count)]
        workers = self.schedule.worker_of
        run = StepState(plan.wiring, segments, contexts, self.keeps, plan.places, self.observer, rng, workers)
        given = plan.entry_points.enter(self.mini_batch.leaves(), streams=any(plan.places))
        if self._seed is None:
            return self._walk(run, self.schedule.forward_only, given), run, None
        seeds = self.output.scatter_gradients([self._seed.to(plan.stages[-1].device)])
        for segment, messages in plan.entry_points.seed(seeds, streams=any(plan.places)).items():
            given.setdefault(segment, {}).update(messages)
        with silence_hooks(self._parameters):
            left = self._walk(run, self.schedule, given)
        return left, run, self._collected(left, run)

    def _walk_backward(self, run: StepState, gradients: Sequence[Gradients], *, retain: bool) -> list[Tensor | None]:
        run.prepare_backward(retain=retain)
        given = self.plan.entry_points.seed(gradients, streams=any(self.plan.places))
        with self.ambient.process_flags(), silence_hooks(self._parameters):
            left = self._walk(run, self.schedule.backward_only, given)
        return self._collected(left, run)

    def _walk(self, run: StepState, schedule: Schedule, given: Given) -> dict[Address, Message]:
        """Let the executor walk. Afterwards the caller's streams can use the results."""
        places = self.plan.places
        if not any(places):
            return self.plan.executor.walk(schedule, run.perform, given, self.ambient)
        join_walk(places)
        results: list[Any] = []
        try:
            left = self.plan.executor.walk(schedule, run.perform, given, self.ambient)
            results += [leaf for message in left.values() for leaf in flatten(message.value)[0]]
            results += [total for gradients in run.sums.values() for total in gradients.totals]
            return left
        finally:  # after a failure too, because layers can have written to buffers, which the caller reads next
            leave_walk(places, [leaf for leaf in results if isinstance(leaf, Tensor)])

    def _collected(self, left: dict[Address, Message], run: StepState) -> list[Tensor | None]:
        """The gradients of `tensors`, from the messages that left the backward walk and from the sums in its state."""
        exchange = partial(self.plan.executor.exchange_gradients, self.agreed.borrowed)
        by_id = run.parameter_gradients(exchange)
        for copy, owner in self.owners.items():
            if (gradient := by_id.pop(copy, None)) is not None:
                add_gradient(by_id, id(owner), gradient.to(owner.device))
        inputs: list[Tensor | None] = []
        if self.mini_batch.tensors:
            batch = self.mini_batch
            pieces = self.plan.entry_points.gradients(left, batch.micro_batches, batch.present)
            inputs = self.mini_batch.gradients(pieces)
        return [*inputs, *(by_id.get(id(tensor)) for tensor in (*self.agreed.anchors, *self._parameters))]

    def _rescaled(self, early: Sequence[Tensor | None], gradient: Tensor | None) -> list[Tensor | None]:
        """Gradients that were made with the seed, rescaled for the loss gradient that arrived."""
        if gradient is None or self._seed is None:
            return [None] * len(early)
        factor = self.scale.factor(gradient, self._seed)
        if isinstance(factor, Tensor):
            return [None if x is None else x * factor.to(x.device) for x in early]
        return list(early) if factor == 1 else [None if x is None else x * factor for x in early]
