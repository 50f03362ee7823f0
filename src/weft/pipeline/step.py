"""One step of a pipe: a mini-batch is cut, travels through the stages, and comes out joined.

    the table splits:      walk its forward half now, and the rest under loss.backward()
    it does not (1F1B):    walk all of it now, with a guess of the loss gradient (`LossScale`); loss.backward() rescales
                           the gradients that were made on the way

A step is the `Journey` that the boundary takes. It holds what backward needs, and nothing that went out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from weft.core.ambient import Ambient
from weft.core.boundary import quiet_hooks, without_gradient
from weft.core.errors import TWICE, BackwardTwiceError, InPlaceError
from weft.core.gradient_sum import added
from weft.core.place import Parcel, join_walk, leave_walk
from weft.core.rng import Dice
from weft.core.route import Address
from weft.core.run import Run, Watcher
from weft.core.schedule import Schedule
from weft.core.segment import Gradients, Keep, Segment, Visit, versions
from weft.core.transforms import outside_transforms
from weft.core.tree import flatten
from weft.pipeline.batchnorm import DeferredBatchNorm
from weft.pipeline.cargo import Cargo, Outcome, WeightedLoss
from weft.pipeline.loss import LossScale
from weft.pipeline.plan import Plan
from weft.pipeline.unchanged import Unchanged, refuse_cached_weights

Result = TypeVar("Result")

_SHARED = (
    "a layer wrote into a tensor that every micro-batch gets whole (in NoChunk, or without a batch axis), so it was "
    "written to once per micro-batch; let the layer write into a clone"
)


@dataclass(frozen=True)
class Order:
    """What a step is asked to do. `parameters` are those of each segment that want a gradient; `owners` says, by its
    id(), which of them is a copy of what for this step."""

    plan: Plan
    schedule: Schedule
    cargo: Cargo
    outcome: Outcome
    parameters: Sequence[Sequence[Tensor]]
    tracked: bool
    keeps: Callable[[int, int], Keep]
    deferred: Sequence[DeferredBatchNorm]
    dice: Callable[[], Dice]
    watcher: Watcher | None
    scale: LossScale
    owners: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def fused(self) -> bool:
        """Whether gradients are made while going forward: the loss is inside, and the table does not split."""
        return self.tracked and isinstance(self.outcome, WeightedLoss) and not self.schedule.splits

    def trusted(self, forward: Callable[[Dice], Result]) -> Result:
        """Run a forward until its random numbers can be trusted: once, or twice after a surprise (`Dice.settle`).

        Deferred batch norms gather meanwhile, and are committed when it counts. Raises InPlaceError if a layer wrote
        into a tensor that all micro-batches share.
        """
        shared = versions(self.cargo.shared)
        while True:
            with outside_transforms():
                dice = self.dice()
            try:
                for norm in self.deferred:
                    norm.begin(dice)
                result = forward(dice)
                if versions(self.cargo.shared) != shared:
                    raise InPlaceError(_SHARED)
            except BaseException:
                for norm in self.deferred:
                    norm.abandon(dice)
                raise
            if dice.settle():
                break
        for norm in self.deferred:
            norm.commit(dice)
        return result


class Step:
    """One mini-batch's journey through a plan. `tensors` are all that it has gradients for, in order."""

    def __init__(self, order: Order, ambient: Ambient) -> None:
        self._order = order
        self._ambient = ambient
        owned = [order.owners.get(id(p), p) for group in order.parameters for p in group]
        self._parameters = list({id(p): p for p in owned}.values())
        self.tensors = [*order.cargo.tensors, *self._parameters]
        self._run: Run | None = None
        self._unchanged: Unchanged | None = None
        self._made: list[Tensor | None] | None = None
        self._seed = order.scale.seed() if order.fused else None

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `Journey.forward`. Raises UsageError under a cache of weights that micro-batches cannot share."""
        order = self._order
        if order.tracked:
            refuse_cached_weights(order.plan.stages)
        left, run = order.trusted(self._walk_forward)
        results = order.plan.gate.results(left, order.cargo.micro_batches)
        if order.fused:
            self._made = self._collected(left, run)
        else:
            self._run = run
            again = run.recomputing()
            self._unchanged = Unchanged([order.plan.stages[stage] for stage in again]) if again else None
        return order.outcome.gather(results)

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `Journey.backward`. Raises BackwardTwiceError when the step was freed, ChangedError if layers changed."""
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
            found = self._walk_backward(run, self._order.outcome.spread(gradients))
            if retain and self._unchanged is not None:
                self._unchanged.seal()  # what layers note of themselves while they run is their own
        without_gradient(x for x, gradient in zip(self.tensors, found, strict=True) if gradient is None)
        return found

    def _walk_forward(self, dice: Dice) -> tuple[dict[Address, Parcel], Run]:
        order, plan = self._order, self._order.plan
        segments = [Segment(f, p) for f, p in zip(plan.functions, order.parameters, strict=True)]
        count = order.schedule.micro_batches
        visits = [Visit(i, self._ambient, dice, micro_batches=count) for i in range(count)]
        run = Run(plan.wiring, segments, visits, order.keeps, plan.places, order.watcher, dice)
        given = plan.gate.enter(order.cargo.leaves())
        if self._seed is not None and isinstance(order.outcome, WeightedLoss):
            device = next((place.device for place in reversed(plan.places) if place is not None), None)
            for segment, parcels in plan.gate.seed(order.outcome.seeds(self._seed, device)).items():
                given.setdefault(segment, {}).update(parcels)
        schedule = order.schedule if order.fused else order.schedule.forward_only()
        join_walk(plan.places)
        with quiet_hooks(self._parameters if order.fused else ()):
            left = plan.executor.walk(schedule, run.perform, given, self._ambient)
        self._leave(left, run)
        return left, run

    def _walk_backward(self, run: Run, gradients: Sequence[Gradients]) -> list[Tensor | None]:
        plan = self._order.plan
        given = plan.gate.seed(gradients)
        schedule = self._order.schedule.backward_only()
        join_walk(plan.places)
        with self._ambient.process_flags(), quiet_hooks(self._parameters):
            left = plan.executor.walk(schedule, run.perform, given, self._ambient)
        self._leave(left, run)
        return self._collected(left, run)

    def _leave(self, left: dict[Address, Parcel], run: Run) -> None:
        """The caller's streams may use what the walk has made, from here on."""
        if not any(self._order.plan.places):
            return
        leaves = [leaf for each in left.values() for leaf in flatten(each.value)[0]]
        sums = [total for each in run.sums for total in each.totals]
        leave_walk(self._order.plan.places, [leaf for leaf in (*leaves, *sums) if isinstance(leaf, Tensor)])

    def _collected(self, left: dict[Address, Parcel], run: Run) -> list[Tensor | None]:
        """The gradients of `tensors`, out of what left the backward walk and what its run has added up."""
        by_id = run.parameter_gradients()
        for copy, owner in self._order.owners.items():
            if (gradient := by_id.pop(copy, None)) is not None:
                gradient, seen = gradient.to(owner.device), by_id.get(id(owner))
                by_id[id(owner)] = gradient if seen is None else added(seen, gradient)
        cargo = self._order.cargo
        inputs = cargo.gradients(self._order.plan.gate.gradients(left, cargo.micro_batches)) if cargo.tensors else []
        return [*inputs, *(by_id.get(id(each)) for each in self._parameters)]

    def _rescaled(self, made: Sequence[Tensor | None], gradient: Tensor | None) -> list[Tensor | None]:
        """Gradients that were made for the seed, for the loss gradient that arrived."""
        if gradient is None or self._seed is None:
            return [None] * len(made)
        factor = self._order.scale.factor(gradient, self._seed)
        if isinstance(factor, Tensor):
            return [None if each is None else each * factor.to(each.device) for each in made]
        return list(made) if factor == 1 else [None if each is None else each * factor for each in made]
