"""One step of a pipe: a mini-batch is cut, goes through the stages, and comes out joined.

    the table splits:      walk its forward half now, and the rest under loss.backward()
    it does not (1F1B):    walk all of it now, with a guess of the loss gradient (`LossScale`); loss.backward() rescales
                           the gradients that were made on the way

    F:  take the values that the stage reads  -> Segment.forward -> cut and send one leaf per reader
    B:  recompute if need be -> take the gradients of what was sent, add them up -> Tape.backward -> send back
    I:  as B, but the parameters' gradients are left for later;  W: and added up now

A `PipeStep` is the node of autograd: it holds what backward needs, and nothing that went out. Executors call its `Run`
from the worker of each stage; workers share only lists and dictionaries that each writes at keys of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

from torch import Tensor

from weft.core.autograd import quiet_hooks, without_gradient
from weft.core.context import ExecutionContext
from weft.core.errors import TWICE, BackwardTwiceError, InPlaceError, RandomnessError, advise
from weft.core.pytree import flatten
from weft.core.rng import TRIES, RngStreams, RngVote
from weft.core.segment import (
    Function,
    Gradients,
    GradientSum,
    Keep,
    MicroBatchContext,
    Segment,
    SplitBackward,
    Tape,
    added,
    cut,
    versions,
)
from weft.pipeline.batchnorm import DeferredBatchNorm
from weft.pipeline.device import Message, Place, join_walk, leave_walk
from weft.pipeline.executor import Closed, Inbox, Outboxes
from weft.pipeline.loss import LossScale, WeightedLoss
from weft.pipeline.microbatch import MiniBatch, Output
from weft.pipeline.plan import PipelinePlan
from weft.pipeline.recompute import Unchanged
from weft.pipeline.routing import OUTSIDE, Address, Wiring
from weft.pipeline.schedule import Action, Schedule
from weft.pipeline.tracing import Recorder, Watcher


class Run:
    """What one step leaves between its actions: the tapes, and the sums of parameter gradients.

    `contexts` holds one context per micro-batch; `keeps[stage][micro_batch]` says what a forward keeps; `places[stage]`
    is None where nothing has to be moved.
    """

    def __init__(
        self,
        wiring: Wiring,
        segments: Sequence[Segment],
        contexts: Sequence[MicroBatchContext],
        keeps: Sequence[Sequence[Keep]],
        places: Sequence[Place | None],
        watcher: Watcher | None = None,
        rng: RngStreams | None = None,
    ) -> None:
        self.wiring = wiring
        self.segments = segments
        self.micro_batches = micro_batches = len(contexts)
        self.places = places
        self.retain = False
        self._keeps = keeps
        self._contexts = contexts
        self._watcher = watcher.one_step() if isinstance(watcher, Recorder) else watcher
        self._rng = rng
        self._tapes: list[list[Tape | None]] = [[None] * micro_batches for _ in segments]
        self._pending: dict[tuple[int, int], SplitBackward | None] = {}
        self._plain = watcher is None and not any(places)
        self._repeats = rng is not None and not rng.quiet
        self.sums: list[GradientSum | None] = [None] * len(segments)

    def recomputing(self) -> list[int]:
        """The segments that will run again in backward."""
        return [s for s, tapes in enumerate(self._tapes) if any(tape and tape.recomputes for tape in tapes)]

    def turn_back(self, *, retain: bool) -> None:
        """Before every walk backward. With `retain` there may be another one, which needs the tapes too.

        What an earlier walk has added up and nobody has collected, because it failed, is forgotten. So are parameters
        that were frozen since the forward: autograd may not be asked about them.
        """
        self.retain = retain
        for segment in self.segments:
            segment.parameters = [each for each in segment.parameters if each.requires_grad]
        self.sums = [None] * len(self.segments)

    def perform(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        """Do one action in the calling thread, waiting at `inbox` for what it needs.

        An exception of the user's code passes through with its traceback, and a note that says where it was.
        """
        try:
            if action.kind == "F":
                self._forward(action, inbox, outboxes)
            elif action.kind == "W":
                self._do("W", action, self._segment_weights, action)
            else:
                self._backward(action, inbox, outboxes)
        except Closed:
            raise
        except BaseException as error:
            word = "forward" if action.kind == "F" else "backward"
            advise(error)
            error.add_note(f"weft: in {word} of stage {action.stage}, micro-batch {action.micro_batch} ({action})")
            raise

    def parameter_gradients(self) -> dict[int, Tensor]:
        """The sum over stages and micro-batches for every parameter, by its id(); then the sums start anew."""
        total: dict[int, Tensor] = {}
        for segment, sums in zip(self.segments, self.sums, strict=True):
            for parameter, gradient in zip(segment.parameters, sums.totals if sums else (), strict=sums is not None):
                if gradient is not None:
                    seen = total.get(id(parameter))
                    total[id(parameter)] = gradient if seen is None else added(seen, gradient.to(seen.device))
        self.sums = [None] * len(self.segments)
        return total

    def reads(self, stage: int, micro_batch: int) -> list[Address]:
        """Where a stage finds its values for a micro-batch."""
        routes = self.wiring.routes
        return [Address(route, stage, micro_batch - routes[route].delay) for route in self.wiring.inputs[stage]]

    def writes(self, route: int, micro_batch: int) -> list[Address]:
        """Where the value goes that the source of a route made of a micro-batch; reader OUTSIDE leaves the run."""
        at = self.wiring.routes[route]
        inside = not at.delay or micro_batch + at.delay < self.micro_batches
        return [Address(route, reader, micro_batch) for reader in (at.readers if inside else (OUTSIDE,))]

    def _forward(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        messages = [inbox.take(address) for address in self.reads(action.stage, action.micro_batch)]
        sent = self._do("F", action, self._segment_forward, action, messages)
        del messages  # a reader may run at once: what only this action needed is free
        for address, message in sent:
            outboxes[address.reader].put(address, message)

    def _segment_forward(self, action: Action, messages: Sequence[Message]) -> list[tuple[Address, Message]]:
        """Run the segment, keep its tape, and cut one leaf for every reader of every output."""
        stage, index = action.stage, action.micro_batch
        segment, place = self.segments[stage], self.places[stage]
        values = [message.value if place is None else place.arrive(message) for message in messages]
        keep = self._keeps[stage][index]
        outputs, tape = segment.forward(self._contexts[index], values, keep)
        self._tapes[stage][index] = tape
        if self._watcher is not None and keep == "nothing":
            self._watcher.released(action)
        tracked = False if tape is None else tape.tracks
        sent: list[tuple[Address, Message]] = []
        for route, output in zip(self.wiring.outputs[stage], outputs, strict=True):
            for address in self.writes(route, index):
                leaf = cut(output, tracked)
                if self._watcher is not None:
                    self._watcher.sent(stage, address, index + self.wiring.routes[route].delay, leaf)
                sent.append((address, Message(leaf) if place is None else place.depart(leaf)))
        return sent

    def _backward(self, action: Action, inbox: Inbox, outboxes: Outboxes) -> None:
        stage, index = action.stage, action.micro_batch
        tape = self._tapes[stage][index]
        if tape is None:
            raise BackwardTwiceError(TWICE)
        if tape.recomputes:
            self._recompute(action, tape)
        messages = [
            [inbox.take(address) for address in self.writes(route, index)] for route in self.wiring.outputs[stage]
        ]
        inputs = self._do(action.kind, action, self._segment_backward, action, tape, messages)
        del tape, messages  # as in forward
        for address, message in zip(self.reads(stage, index), inputs, strict=True):
            source = self.wiring.routes[address.route].source
            outboxes[source if address.micro_batch >= 0 else OUTSIDE].put(address, message)

    def _recompute(self, action: Action, tape: Tape) -> None:
        """Make the graph again; and again, if others were seen to have drawn random numbers meanwhile."""
        for _ in range(TRIES - 1):
            try:
                return self._do("R", action, tape.prepare)
            except RandomnessError:
                pass
        return self._do("R", action, tape.prepare)

    def _segment_backward(self, action: Action, tape: Tape, messages: Sequence[Sequence[Message]]) -> list[Message]:
        """Add up what the readers sent back, walk the tape, and add up the parameters' gradients."""
        stage, index = action.stage, action.micro_batch
        place = self.places[stage]
        gradients = [
            _total([each.value if place is None else place.arrive(each) for each in of_readers], len(edges))
            for of_readers, edges in zip(messages, tape.edges or (), strict=True)
        ]
        with self._walking_back(stage, tape):
            if action.kind == "I" and not self.retain:
                inputs, self._pending[stage, index] = tape.backward_inputs(gradients)
                self._tapes[stage][index] = None
                return [Message(each) if place is None else place.depart(each) for each in inputs]
            inputs, of_parameters = tape.backward(gradients, retain=self.retain)
        self._add(stage, of_parameters)
        if not self.retain:
            self._free(action)
        return [Message(each) if place is None else place.depart(each) for each in inputs]

    def _segment_weights(self, action: Action) -> None:
        """Add up the parameters' gradients that I has left. (Where the graph is retained, I has left none.)"""
        split = self._pending.pop((action.stage, action.micro_batch), None)
        if split is not None:
            with self._walking_back(action.stage):
                found = split.parameter_gradients()
            self._add(action.stage, found)
        if not self.retain:
            self._free(action)

    def _add(self, stage: int, gradients: Sequence[Tensor | None]) -> None:
        sums = self.sums[stage]
        if sums is None:
            sums = self.sums[stage] = GradientSum(len(gradients))
        sums.add(gradients)

    def _walking_back(self, stage: int, tape: Tape | None = None) -> AbstractContextManager[Any]:
        """For a walk back through the graph of the stage: see `RngStreams.backward`."""
        if self._rng is None or not self._repeats:
            return _FREE
        return self._rng.backward(stage, tape.roots if tape is not None else list)

    def _free(self, action: Action) -> None:
        self._tapes[action.stage][action.micro_batch] = None
        if self._watcher is not None:
            self._watcher.released(action)

    def _do(self, kind: str, action: Action, call: Callable[..., Any], *args: Any) -> Any:
        """Call it at the stage's place, and let the watcher see it."""
        if self._plain:
            return call(*args)
        place = self.places[action.stage]
        with ExitStack() as stack:
            if place is not None:
                stack.enter_context(place.here())
            if self._watcher is not None:
                stack.enter_context(self._watcher.doing(kind, action))
            return call(*args)


def _total(of_readers: Sequence[Gradients | None], width: int) -> Gradients:
    """The gradient of one value: the sum of what its readers send back, in their order."""
    present = [gradients for gradients in of_readers if gradients is not None]
    if not present:
        return [None] * width
    if len(present) == 1:
        return present[0] + [None] * (width - len(present[0]))  # of a result, the gradients that are there come first
    return [_sum([leaf for leaf in leaves if leaf is not None]) for leaves in zip(*present, strict=True)]


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    return reduce(added, gradients) if gradients else None


Result = TypeVar("Result")

_FREE = nullcontext()
_SHARED = (
    "a layer wrote into a tensor that every micro-batch gets whole (in NoChunk, or without a batch axis), so it was "
    "written to once per micro-batch; let the layer write into a clone"
)


@dataclass(frozen=True)
class StepRequest:
    """What a step is asked to do.

    `functions` are those of the plan's segments; `parameters` are those of each segment that want a gradient; `owners`
    says, by its id(), which of them is a copy of what for this step.
    """

    plan: PipelinePlan
    functions: Sequence[Function]
    schedule: Schedule
    mini_batch: MiniBatch
    output: Output
    parameters: Sequence[Sequence[Tensor]]
    tracked: bool
    keeps: Sequence[Sequence[Keep]]
    deferred: Sequence[DeferredBatchNorm]
    new_rng: Callable[[], RngStreams]
    watcher: Watcher | None
    scale: LossScale
    owners: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def fused(self) -> bool:
        """Whether gradients are made while going forward: the loss is inside, and the table does not split."""
        return self.tracked and isinstance(self.output, WeightedLoss) and not self.schedule.splits

    def trusted(self, forward: Callable[[RngStreams], Result]) -> Result:
        """Run a forward until its random numbers can be trusted: once, or twice after a surprise (`RngStreams.settle`).

        Deferred batch norms gather meanwhile, and are committed when it counts. Raises InPlaceError if a layer wrote
        into a tensor that all micro-batches share.
        """
        shared = self.mini_batch.shared and versions(self.mini_batch.shared)
        while True:
            rng = self.new_rng()
            try:
                for norm in self.deferred:
                    norm.begin(rng)
                result = forward(rng)
                if shared and versions(self.mini_batch.shared) != shared:
                    raise InPlaceError(_SHARED)
                votes = self.plan.executor.commit(rng.vote())
            except BaseException as error:
                for norm in self.deferred:
                    norm.abandon(rng)
                self.plan.executor.abort(error)
                raise
            if rng.settle(votes[0] if len(votes) == 1 else RngVote.of(votes)):
                break
        for norm in self.deferred:
            norm.commit(rng)
        return result


class PipeStep:
    """One mini-batch's way through a plan. `tensors` are all that it has gradients for, in order."""

    def __init__(self, request: StepRequest, ambient: ExecutionContext) -> None:
        self._request = request
        self._ambient = ambient
        owned = [request.owners.get(id(p), p) for group in request.parameters for p in group]
        self._parameters = list({id(p): p for p in owned}.values())
        self.tensors = [*request.mini_batch.tensors, *self._parameters]
        self._run: Run | None = None
        self._unchanged: Unchanged | None = None
        self._made: list[Tensor | None] | None = None
        self._seed = request.scale.seed() if request.fused else None

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `CutFunction.forward`."""
        request = self._request
        left, run = request.trusted(self._walk_forward)
        results = request.plan.entry_points.results(left, request.mini_batch.micro_batches)
        if request.fused:
            self._made = self._collected(left, run)
        else:
            self._run = run
            again = run.recomputing()
            self._unchanged = Unchanged([request.plan.stages[stage].replay for stage in again]) if again else None
        return request.output.gather(results)

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`. Raises BackwardTwiceError if it was freed, ChangedError if layers changed."""
        run, made = self._run, self._made
        if run is None and made is None:
            raise BackwardTwiceError(TWICE)
        if self._unchanged is not None:
            self._unchanged.check()
        if not retain:
            self._run = self._made = None
        if run is None:
            found = self._rescaled(made or [], gradients[0])
        else:
            run.turn_back(retain=retain)
            found = self._walk_backward(run, self._request.output.spread(gradients))
            if retain and self._unchanged is not None:
                self._unchanged.seal()  # what layers note of themselves while they run is their own
        without_gradient([x for x, gradient in zip(self.tensors, found, strict=True) if gradient is None])
        return found

    def _walk_forward(self, rng: RngStreams) -> tuple[dict[Address, Message], Run]:
        request, plan = self._request, self._request.plan
        segments = [Segment(f, p) for f, p in zip(request.functions, request.parameters, strict=True)]
        count = request.schedule.micro_batches
        contexts = [MicroBatchContext(i, self._ambient, rng, micro_batches=count) for i in range(count)]
        run = Run(plan.wiring, segments, contexts, request.keeps, plan.places, request.watcher, rng)
        given = plan.entry_points.enter(request.mini_batch.leaves(), streams=any(plan.places))
        if self._seed is not None and isinstance(request.output, WeightedLoss):
            device = next((place.device for place in reversed(plan.places) if place is not None), None)
            for segment, messages in plan.entry_points.seed(
                request.output.seeds(self._seed, device), streams=any(plan.places)
            ).items():
                given.setdefault(segment, {}).update(messages)
        schedule = request.schedule if request.fused else request.schedule.forward_only
        if any(plan.places):
            join_walk(plan.places)
        with quiet_hooks(self._parameters) if request.fused else _FREE:
            left = plan.executor.walk(schedule, run.perform, given, self._ambient)
        self._leave(left, run)
        return left, run

    def _walk_backward(self, run: Run, gradients: Sequence[Gradients]) -> list[Tensor | None]:
        plan = self._request.plan
        given = plan.entry_points.seed(gradients, streams=any(plan.places))
        schedule = self._request.schedule.backward_only
        if any(plan.places):
            join_walk(plan.places)
        try:
            with self._ambient.process_flags(), quiet_hooks(self._parameters):
                left = plan.executor.walk(schedule, run.perform, given, self._ambient)
            plan.executor.commit(None)
        except BaseException as error:
            plan.executor.abort(error)
            raise
        self._leave(left, run)
        return self._collected(left, run)

    def _leave(self, left: dict[Address, Message], run: Run) -> None:
        """The caller's streams may use what the walk has made, from here on."""
        if not any(self._request.plan.places):
            return
        leaves = [leaf for each in left.values() for leaf in flatten(each.value)[0]]
        sums = [total for each in run.sums if each is not None for total in each.totals]
        leave_walk(self._request.plan.places, [leaf for leaf in (*leaves, *sums) if isinstance(leaf, Tensor)])

    def _collected(self, left: dict[Address, Message], run: Run) -> list[Tensor | None]:
        """The gradients of `tensors`, out of what left the backward walk and what its run has added up."""
        by_id = run.parameter_gradients()
        for copy, owner in self._request.owners.items():
            if (gradient := by_id.pop(copy, None)) is not None:
                gradient, seen = gradient.to(owner.device), by_id.get(id(owner))
                by_id[id(owner)] = gradient if seen is None else added(seen, gradient)
        mini_batch = self._request.mini_batch
        inputs = (
            mini_batch.gradients(self._request.plan.entry_points.gradients(left, mini_batch.micro_batches))
            if mini_batch.tensors
            else []
        )
        return [*inputs, *(by_id.get(id(each)) for each in self._parameters)]

    def _rescaled(self, made: Sequence[Tensor | None], gradient: Tensor | None) -> list[Tensor | None]:
        """Gradients that were made for the seed, for the loss gradient that arrived."""
        if gradient is None or self._seed is None:
            return [None] * len(made)
        factor = self._request.scale.factor(gradient, self._seed)
        if isinstance(factor, Tensor):
            return [None if each is None else each * factor.to(each.device) for each in made]
        return list(made) if factor == 1 else [None if each is None else each * factor for each in made]
