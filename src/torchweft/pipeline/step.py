"""One step of a pipe: a mini-batch is cut, goes through the stages, and comes out joined.

    external loss:          walk the forward half of the table now, and the rest under loss.backward()
    loss inside (1F1B):     walk all of the table now, with an assumed loss gradient (`LossSeed`); loss.backward()
                            rescales the gradients that were made on the way

    F:  receive the values that the stage reads -> Segment.forward -> detach and send one leaf per worker that reads it
    B:  recompute if needed -> receive the gradients of the sent values, add them -> Tape.backward -> send back
    I:  as B, without the gradients of the parameters;  W: these gradients

    PipeStep        one mini-batch and its plan; repeats a forward whose random numbers were wrong
    CutStep         the node of autograd of a step whose stages are cut out (an uncut step is a PipeStep alone)
    StepState       state between the actions of one walk, which executors call: tapes, and sums of gradients
    StepMessages    the addresses of the values that travel between the stages

Only the stages that run in this process are known here. Autograd keeps a `CutStep` until backward, so it holds none of
the values that it returned.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple, TypeVar

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
from torchweft.core.rng import MAX_RECOMPUTATIONS, RngStreams, RngVote
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
from torchweft.pipeline.loss import LossSeed, WeightedLoss
from torchweft.pipeline.microbatch import JoinedOutput, MiniBatch
from torchweft.pipeline.pipeline_plan import ALONE, Agreement, PipelinePlan
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

GradientsByWorker = dict[int, dict[int, Tensor]]  # sums of parameter gradients, by worker and by the parameter's id()


class StepMessages:
    """Addresses of the values of one step, and the values that several stages of one worker share."""

    def __init__(self, wiring: Wiring, worker_of: tuple[int, ...], micro_batches: int) -> None:
        self.wiring = wiring
        self.worker_of = worker_of
        self.reads, self.writes, self._has_shared, self._deliveries = wiring.addresses(worker_of, micro_batches)
        # All readers of an address belong to one worker, and only that worker touches its entry. So no lock is needed.
        self._shared: dict[Address, tuple[Message, int]] = {}  # values, and the number of readers that need them yet
        self._returned: dict[Address, dict[int, Message]] = {}  # gradients of shared values, by reader

    def readers(self, address: Address) -> tuple[int, ...]:
        return self._deliveries[address.route].group_of.get(address.reader, (OUTSIDE,))

    def receive(self, address: Address, inbox: Inbox) -> Message:
        if not self._has_shared[address[0]]:
            return inbox.receive(address)
        readers = len(self.readers(address))
        message, left = self._shared.pop(address, None) or (inbox.receive(address), readers)
        if left > 1:
            self._shared[address] = message, left - 1
        return message

    def add_returned(
        self, address: Address, stage: int, gradients: Gradients, place: StageDevice | None
    ) -> Gradients | None:
        """The gradients of a value, summed over the stages of this worker that read it. None until all have arrived."""
        if not self._has_shared[address[0]]:
            return gradients
        readers = self.readers(address)
        returned = self._returned.setdefault(address, {})
        returned[stage] = Message(gradients) if place is None else place.send(gradients)
        if len(returned) < len(readers):
            return None
        del self._returned[address]
        # Readers can end in any order. In the order of stages, the sum has the same bits under every table.
        in_order = [returned[reader] for reader in readers]
        return _total([m.value if place is None else place.receive(m) for m in in_order], len(gradients))


class StepState:
    """State of one step between its actions: the tapes, and the sums of parameter gradients. Workers share only
    dictionaries here, in which each worker writes at the keys of its own stages. `segments` are those of this process.
    `keeps[stage][micro_batch]` is the part of a forward that is kept. By default every stage has its own worker."""

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
        self.messages = StepMessages(wiring, worker_of or tuple(range(wiring.stages)), len(contexts))
        self.sums: dict[int, GradientSum] = {}
        self._segments = segments
        self._contexts = contexts
        self._keeps = keeps
        self._places = places
        self._retain = False
        # A recorder gets a copy for this step, so that it notices when the step is dropped without a backward.
        self._observer = observer.one_step() if isinstance(observer, Recorder) else observer
        self._plain = observer is None and not any(places)
        # None if no layer draws. A walk back then needs no lock on the generators.
        self._rng = None if rng is None or rng.quiet else rng
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._pending: dict[tuple[int, int], SplitBackward | None] = {}

    def recomputing(self) -> list[int]:
        return sorted({stage for (stage, _), tape in self._tapes.items() if tape.recomputes})

    def prepare_backward(self, *, retain: bool) -> None:
        self._retain = retain
        # Autograd raises an error if it is asked for the gradient of a parameter that was frozen since the forward.
        for segment in self._segments.values():
            segment.drop_frozen()
        self.sums = {}  # also those of an earlier walk that failed

    def perform(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        """Perform one action in the calling thread. Waits at `inbox` for messages. An exception gets a note with its
        place."""
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
        """The gradient of every parameter, by its id(). `exchange` adds the sums of workers in other processes."""
        # Summed over micro-batches, then over the stages of each worker, then over workers, each in order. So the bits
        # do not depend on the executor, nor on the number of processes.
        by_worker: GradientsByWorker = {}
        for stage in sorted(self.sums):
            of_worker = by_worker.setdefault(self.messages.worker_of[stage], {})
            for parameter, gradient in zip(self._segments[stage].parameters, self.sums[stage].totals, strict=True):
                if gradient is not None:
                    add_gradient(of_worker, id(parameter), gradient)
        self.sums = {}
        by_worker = exchange(by_worker)
        total: dict[int, Tensor] = {}
        for worker in sorted(by_worker):
            for key, gradient in by_worker[worker].items():
                add_gradient(total, key, gradient)
        return total

    def _forward(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        steps = self.messages
        messages: list[Message] = []
        for address in steps.reads[action[0]][action[2]]:
            # One element, without a call: this runs per micro-batch and stage.
            messages += (steps.receive(address, inbox),)
        if self._plain:
            sent = self._segment_forward(action, messages)
        else:
            sent = self._do("F", action, self._segment_forward, action, messages)
        # Free the inputs before a reader runs, which can start as soon as it has the value.
        del messages
        for address, message in sent:
            outboxes[address[1]].put(address, message)

    def _segment_forward(self, action: Action, messages: Sequence[Message]) -> list[tuple[Address, Message]]:
        stage, _, index = action
        place = self._places[stage]
        values: list[Any] = []
        for message in messages:
            values += (message[0] if place is None else place.receive(message),)
        outputs, tape = self._segments[stage].forward(self._contexts[index], values, self._keeps[stage][index])
        tracked = False
        if tape is not None:
            self._tapes[stage, index], tracked = tape, tape.tracks
        elif self._observer is not None:
            self._observer.released(action)
        sent: list[tuple[Address, Message]] = []
        writes = self.messages.writes
        for route, output in zip(self.messages.wiring.outputs[stage], outputs, strict=True):
            for address in writes[route][index]:
                # One leaf per worker, so that the graphs of two workers share no node.
                leaf = detach_leaves(output, tracked)
                if self._observer is not None:
                    self._note_sent(self._observer, stage, address, leaf)
                sent += ((address, Message(leaf) if place is None else place.send(leaf)),)
        return sent

    def _note_sent(self, observer: Observer, stage: int, address: Address, leaf: Any) -> None:
        arrives = address.micro_batch + self.messages.wiring.routes[address.route].delay
        for reader in self.messages.readers(address):
            observer.sent(stage, address._replace(reader=reader), arrives, leaf)

    def _backward(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        stage, index = action.stage, action.micro_batch
        tape = self._tapes.get((stage, index))
        if tape is None:
            raise BackwardTwiceError(BACKWARD_TWICE)
        if tape.recomputes:
            self._recompute(action, tape)
        wiring, writes = self.messages.wiring, self.messages.writes
        messages: list[list[Message]] = []
        for route in wiring.outputs[stage]:
            of_route: list[Message] = []
            for address in writes[route][index]:
                of_route += (inbox.receive(address),)
            messages += (of_route,)
        if self._plain:
            sent = self._segment_backward(action, tape, messages)
        else:
            sent = self._do(action.kind, action, self._segment_backward, action, tape, messages)
        # As in forward. The tape is free here, unless the graph is retained.
        del tape, messages
        for address, message in sent:
            outboxes[wiring.routes[address[0]].source if address[2] >= 0 else OUTSIDE].put(address, message)

    def _recompute(self, action: Action, tape: Tape) -> None:
        # Another thread can draw from the same generators at that time. The last attempt lets the error pass.
        if self._plain and self._rng is None:
            return tape.prepare()
        for _ in range(MAX_RECOMPUTATIONS - 1):
            try:
                return self._do("R", action, tape.prepare)
            except RandomnessError:
                pass
        return self._do("R", action, tape.prepare)

    def _segment_backward(
        self, action: Action, tape: Tape, messages: Sequence[Sequence[Message]]
    ) -> list[tuple[Address, Message]]:
        """Run the tape backward from the gradients of the readers. Returns those for the sources that are complete."""
        stage, index = action.stage, action.micro_batch
        place = self._places[stage]
        gradients: list[Gradients] = []
        for of_readers, edges in zip(messages, tape.edges or (), strict=True):
            arrived: list[Gradients] = []
            for message in of_readers:
                arrived += (message[0] if place is None else place.receive(message),)
            gradients += (_total(arrived, len(edges)),)
        if self._rng is None:
            inputs = self._walk_tape(action, tape, gradients)
        else:
            with self._rng.backward(stage, tape.roots):
                inputs = self._walk_tape(action, tape, gradients)
        sent: list[tuple[Address, Message]] = []
        for address, gradients_in in zip(self.messages.reads[stage][index], inputs, strict=True):
            total = self.messages.add_returned(address, stage, gradients_in, place)
            if total is not None:
                sent += ((address, Message(total) if place is None else place.send(total)),)
        return sent

    def _walk_tape(self, action: Action, tape: Tape, gradients: Sequence[Gradients]) -> list[Gradients]:
        # With a retained graph there is no I: its second half would free the graph, which a later backward needs.
        if action.kind == "I" and not self._retain:
            inputs, self._pending[action.stage, action.micro_batch] = tape.backward_inputs(gradients)
            del self._tapes[action.stage, action.micro_batch]
        else:
            inputs, of_parameters = tape.backward(gradients, retain=self._retain)
            self._add(action, of_parameters)
        return inputs

    def _segment_weights(self, action: Action) -> None:
        split = self._pending.pop((action.stage, action.micro_batch), None)
        with nullcontext() if self._rng is None else self._rng.backward(action.stage, list):
            self._add(action, split.parameter_gradients() if split is not None else ())

    def _add(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        if gradients:
            if action.stage not in self.sums:
                self.sums[action.stage] = GradientSum(len(gradients))
            self.sums[action.stage].add(gradients)
        if not self._retain:
            self._tapes.pop((action.stage, action.micro_batch), None)
            if self._observer is not None:
                self._observer.released(action)

    def _do(self, kind: str, action: Action, call: Callable[..., Any], *args: Any) -> Any:
        if self._plain:
            return call(*args)
        place = self._places[action.stage]
        with ExitStack() as stack:
            if place is not None:
                stack.enter_context(place.stream_context())
            if self._observer is not None:
                stack.enter_context(self._observer.action_scope(kind, action))
            return call(*args)


def _total(of_readers: Sequence[Gradients | None], width: int) -> Gradients:
    if len(of_readers) == 1 and (only := of_readers[0]) is not None and len(only) == width:
        return only  # the common case
    present = [gradients for gradients in of_readers if gradients is not None]
    if not present:
        return [None] * width
    if len(present) == 1:
        # A result can have fewer gradients than leaves. They belong to the first leaves.
        return present[0] + [None] * (width - len(present[0]))
    columns = [[leaf for leaf in leaves if leaf is not None] for leaves in zip(*present, strict=True)]
    return [reduce(add_gradients, column) if column else None for column in columns]


def add_gradient(total: dict[int, Tensor], key: int, gradient: Tensor) -> None:
    present = total.get(key)
    total[key] = gradient if present is None else add_gradients(present, gradient.to(present.device))


Result = TypeVar("Result")

_SHARED = (
    "a layer wrote to a tensor that every micro-batch gets whole (in NoChunk, or without a batch axis), so it was "
    "written to once per micro-batch; let the layer write to a clone"
)


class ForwardWalk(NamedTuple):
    """The messages that left a walk. Its state, for the backward, or the gradients of the step if they were made."""

    left: Mapping[Address, Message]
    state: StepState | None
    gradients: Sequence[Tensor | None]


class ForwardReport(NamedTuple):
    """Report of one process after its forward: its `RngVote`, and the losses' weights if it has the target."""

    drew: bool
    surprised: bool
    weights: Sequence[float]


@dataclass(eq=False)
class PipeStep:
    """One mini-batch on its way through a plan. A step that runs uncut is only this, see `run_uncut`."""

    plan: PipelinePlan
    schedule: Schedule
    mini_batch: MiniBatch
    output: JoinedOutput
    tracked: bool
    keeps: Sequence[Sequence[Keep]]
    deferred: Sequence[DeferredBatchNorm]
    new_rng: Callable[[], RngStreams]
    ambient: ExecutionContext
    name: str = ""

    def run_until_rng_settled(self, forward: Callable[[RngStreams], Result]) -> Result:
        """Run a forward until its random numbers are right: once, or twice after a surprise (see `RngStreams`). Raises
        InPlaceError if a layer wrote to a tensor that all micro-batches share."""
        shared = self.mini_batch.shared and versions(self.mini_batch.shared)
        executor = self.plan.executor
        while True:
            executor.open(f"the forward{self.name}")
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
            # The vote is over all processes: if one of them was surprised, all repeat the forward.
            if rng.commit_draws(RngVote.of([RngVote(report.drew, report.surprised) for report in reports])):
                break
        # After the last run only. A commit per run would count the rows of the mini-batch twice.
        for norm in self.deferred:
            norm.commit(rng)
        if not executor.alone:
            self.output.set_weights(next((report.weights for report in reports if report.weights), ()))
        return result


class CutStep:
    """The node of autograd of a step in which stages are cut out: a `CutFunction`. `parameters` are those that require
    a gradient, by the segments of this process. `owners` maps the id() of a copy made for this step to its original.
    `seed` is for a schedule that begins backward before the caller does."""

    def __init__(
        self,
        step: PipeStep,
        functions: Sequence[SegmentFunction],
        parameters: Mapping[int, Sequence[Tensor]],
        observer: Observer | None,
        owners: Mapping[int, Tensor],
        seed: LossSeed | None,
        agreed: Agreement = ALONE,
    ) -> None:
        self.step = step
        self._segments = {stage: Segment(functions[stage], owned) for stage, owned in parameters.items()}
        self.by_stage = parameters
        self._observer = observer
        self._owners = owners
        self._seed = seed
        self._agreed = agreed
        self._kept: tuple[StepState, ModuleVersions | None] | None = None  # from the forward, for the backward
        self.caller = CallerStreams(())

    @cached_property
    def _parameters(self) -> list[Tensor]:
        owned = [self._owners.get(id(p), p) for group in self.by_stage.values() for p in group]
        return list({id(p): p for p in owned}.values())

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors that the step has gradients for, in order."""
        agreed = self._agreed
        return [*self.step.mini_batch.tensors, *agreed.entry_tensors, *agreed.anchors, *self._parameters]

    def node_inputs(self) -> list[Tensor]:
        views = bind_parameters(self.step.plan.places, self.by_stage)
        return [views.get(id(tensor), tensor) for tensor in self.tensors] if views else self.tensors

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        step = self.step
        self.enter()
        seeds = self.seeds()
        walked = step.run_until_rng_settled(lambda rng: self.walk_forward(rng, seeds))
        return step.output.gather(self.keep(walked))

    def enter(self) -> None:
        self.caller = CallerStreams(self.step.plan.places)

    def seeds(self) -> list[Gradients] | None:
        """The gradients of the results with which an early backward starts. None without such a backward."""
        if self._seed is None:
            return None
        return self.step.output.scatter_gradients([self._seed.value.to(self.step.plan.stages[-1].device)])

    def keep(self, walked: ForwardWalk) -> list[Any]:
        """Keep the parts of this walk that its backward needs. Returns its results, one per micro-batch."""
        if self._seed is not None:
            self._seed.keep(walked.gradients)
        elif walked.state is not None:
            replays = [self.step.plan.stages[stage].replay for stage in walked.state.recomputing()]
            self._kept = walked.state, ModuleVersions(replays) if replays else None
        return self.step.plan.entry_points.results(walked.left, self.step.mini_batch.micro_batches)

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`. Raises BackwardTwiceError or ModuleChangedError."""
        # The walk is open before the first check, so that an error here is an error on all ranks.
        executor = self.step.plan.executor
        try:
            executor.open(f"the backward{self.step.name}")
            with self.caller.restored():
                result = self._gradients(gradients, retain=retain)
        except BaseException as error:
            executor.abort(error)
            raise
        if executor.alone:
            executor.commit(None)
        else:
            executor.end_backward(partial(self._commit, gradients))
        # Plain autograd would not reach these parameters, so their hooks must not be called with None.
        silence_unused_hooks([x for x, gradient in zip(self.tensors, result, strict=True) if gradient is None])
        return result

    def _commit(self, gradients: Sequence[Tensor | None]) -> None:
        executor = self.step.plan.executor
        try:
            seed = gradients[0] if isinstance(self.step.output, WeightedLoss) else None
            number = None if seed is None else executor.number_to_report(seed)
            reports = executor.commit(None if number is None else repr(number))
        except BaseException as error:
            executor.abort(error)
            raise
        if len(set(reports)) > 1:
            raise UsageError(
                f"the gradient of the loss differs between ranks: {', '.join(map(str, reports))}, by rank; scale the "
                "loss by the same number on all of them"
            )

    def _gradients(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """The gradients of `tensors`, from a backward walk or from the forward that made them early."""
        if self._seed is not None:
            return self._seed.rescale(gradients[0], retain=retain)
        if self._kept is None:
            raise BackwardTwiceError(BACKWARD_TWICE)
        state, module_versions = self._kept
        if module_versions is not None:
            module_versions.verify()
        if not retain:
            # Before the walk, so that each tape is free as soon as its backward has run.
            self._kept = None
        result = self.walk_backward(state, self.step.output.scatter_gradients(gradients), retain=retain)
        if retain and module_versions is not None:
            module_versions.snapshot()  # a layer can write to its own weights while it is recomputed
        return result

    def walk_backward(self, state: StepState, seeds: Sequence[Gradients], *, retain: bool) -> list[Tensor | None]:
        """The gradients of `tensors`, from those of the results of the forward that left this `state`."""
        state.prepare_backward(retain=retain)
        given = self.step.plan.entry_points.seed(seeds, streams=any(self.step.plan.places))
        with self.step.ambient.process_flags(), silence_hooks(self._parameters):
            left = self._walk(state, self.step.schedule.backward_only, given)
        return self._collect(left, state)

    def walk_forward(self, rng: RngStreams, seeds: Sequence[Gradients] | None) -> ForwardWalk:
        """Walk the forward half of the schedule, or with `seeds` all of it."""
        step, plan, count = self.step, self.step.plan, self.step.schedule.micro_batches
        contexts = [MicroBatchContext(i, step.ambient, rng, {}, count, self._agreed.borrowed) for i in range(count)]
        workers = step.schedule.worker_of
        state = StepState(plan.wiring, self._segments, contexts, step.keeps, plan.places, self._observer, rng, workers)
        moves = any(plan.places)
        given = plan.entry_points.enter(step.mini_batch.leaves(self.upload if moves else None), streams=moves)
        if seeds is None:
            return ForwardWalk(self._walk(state, step.schedule.forward_only, given), state, [])
        for segment, messages in plan.entry_points.seed(seeds, streams=moves).items():
            given.setdefault(segment, {}).update(messages)
        # Hooks of parameters belong to the whole step. The walk would call them once per micro-batch.
        with silence_hooks(self._parameters):
            left = self._walk(state, step.schedule, given)
        return ForwardWalk(left, None, self._collect(left, state))

    def upload(self, part: int, tensor: Tensor) -> Tensor:
        plan = self.step.plan
        place = plan.places[plan.entry_points.entries[part].segment]
        return tensor if place is None else place.upload(tensor)

    def _walk(self, state: StepState, schedule: Schedule, given: Given) -> dict[Address, Message]:
        plan, ambient = self.step.plan, self.step.ambient
        if not any(plan.places):
            return plan.executor.walk(schedule, state.perform, given, ambient)
        join_walk(plan.places)
        results: list[Any] = []
        try:
            left = plan.executor.walk(schedule, state.perform, given, ambient)
            results += [leaf for message in left.values() for leaf in flatten(message.value)[0]]
            results += [total for gradients in state.sums.values() for total in gradients.totals]
            return left
        finally:  # after a failure too, because layers can have written to buffers, which the caller reads next
            leave_walk(plan.places, [leaf for leaf in results if isinstance(leaf, Tensor)])

    def _collect(self, left: dict[Address, Message], state: StepState) -> list[Tensor | None]:
        plan, batch = self.step.plan, self.step.mini_batch
        exchange = partial(plan.executor.exchange_gradients, self._agreed.borrowed)
        by_id = state.parameter_gradients(exchange)
        # The gradient of a copy belongs to its original, which can be on another device.
        for copy, owner in self._owners.items():
            if (gradient := by_id.pop(copy, None)) is not None:
                add_gradient(by_id, id(owner), gradient.to(owner.device))
        inputs: list[Tensor | None] = []
        if batch.tensors:
            inputs = batch.gradients(plan.entry_points.gradients(left, batch.micro_batches, batch.present))
        shared = plan.executor.share_entry_gradients(self._agreed.entries, inputs)
        return [*inputs, *shared, *(by_id.get(id(tensor)) for tensor in (*self._agreed.anchors, *self._parameters))]
