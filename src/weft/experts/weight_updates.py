"""Updates of one expert: the part of a batch that counts, applied in an order in which no failure loses or repeats it.

    backward    permit ── buffers ── optimizer step, or term of a mini-batch's sum ── journal ── idempotency keys
    commit      permit ── sum closed ── optimizer step ── keys of its terms ── own key ── journal

Everything that can fail runs before an update exists: module, guards, copies of the results. So only the optimizer (and
``apply_gradients``, which users override) can raise while an update is applied. That error is final: the weights are
unknown then, the journal says so, and no key is recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.experts.errors import CommitError
from weft.experts.gradients import GradientAccumulator, GradientAccumulators, Owner
from weft.experts.graph_cache import GraphCache
from weft.experts.idempotency import IdempotencyTable, RequestKind
from weft.experts.optimizer_step import OptimizerStep
from weft.experts.side_effects import SideEffects, TensorSnapshot
from weft.experts.task import Results, Task


class WeightUpdates:
    """Owner of all state that changes when a batch counts. Guarded by the expert's lock."""

    def __init__(
        self,
        effects: SideEffects,
        stepper: OptimizerStep,
        records: IdempotencyTable,
        mini_batches: GradientAccumulators,
        graphs: GraphCache,
    ) -> None:
        self.stepper = stepper
        self.records = records
        self.mini_batches = mini_batches
        self.graphs = graphs
        self.check_permit: Callable[[], None] = lambda: None
        self._effects = effects

    def require_permit(self, check: Callable[[], None]) -> None:
        """Call ``check`` before every update. It raises if this process must not change the expert now."""
        self.check_permit = check

    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters that require a gradient now, because layers can be frozen at any time."""
        return [p for p in self._effects.parameters() if p.requires_grad] if self.stepper.trains else []

    def check_mini_batch(self, task: Task, parameters: Sequence[nn.Parameter], *, replaying: bool) -> None:
        """Raise `ExpertError` if the mini-batch of a task accepts no more gradients."""
        client, mini_batch = owner = task.owner
        # A replay repeats requests that the table can already know as committed.
        if not replaying and self.records.step_of("commit", *owner) is not None:
            raise CommitError(f"mini-batch {mini_batch!r} of client {client!r} was committed; start a new one")
        if self.records.step_of("dropped", *owner) is not None:
            raise CommitError(
                f"mini-batch {mini_batch!r} of client {client!r} was dropped: it was discarded, nothing was added to "
                "it for too long, its connection ended, or the weights were replaced. Start a new one"
            )
        self.mini_batches.check_room(owner, task.principal, parameters)

    def drop_expired_sums(self) -> None:
        """Drop mini-batches that were discarded or are too old. Their names are rejected from then on."""
        if self.mini_batches or self.mini_batches.discarded:
            for owner, principal in self.mini_batches.expired_owners().items():
                self.drop_sum(owner)
                self.records.drop_mini_batch(*owner, principal)

    def drop_sum(self, owner: Owner) -> None:
        if self.mini_batches.pop(owner, None) is not None:
            self.stepper.log("dropped", [Task((), 1, client=owner[0], mini_batch=owner[1])])

    def forget_pending(self) -> None:
        """Drop everything that was computed for the old weights, after others were loaded. The journal knows of it."""
        for owner, accumulator in self.mini_batches.items():
            self.records.drop_mini_batch(*owner, accumulator.principal)
        self.mini_batches.clear()
        self.graphs.void_graphs()

    def step(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], shared_storages: set[int]
    ) -> None:
        try:
            self.stepper.step(self._effects.parameters(), parameters, gradients, shared_storages)
        finally:  # the graphs belong to the weights before the step, and a failed step can have changed some
            if self.graphs.enabled:
                self.graphs.void_graphs()

    def commit(
        self,
        tasks: Sequence[Task],
        accumulator: GradientAccumulator,
        results: list[Results],
        copies: list[tuple[Task, Results]],
    ) -> list[Results]:
        """One optimizer step with the sum of a mini-batch, which passed the guards."""
        owner = tasks[0].owner
        self.check_permit()
        # Closed before the step: a sum must not be applied twice, even if the optimizer raises.
        self.mini_batches.pop(owner, None)
        try:
            self.step(accumulator.parameters, accumulator.total.totals, set())
        except BaseException:
            self.records.forget_mini_batch(*owner)
            self.stepper.log("commit", tasks, failed=True)
            raise
        self.records.commit_mini_batch(*owner, self.stepper.steps)
        self.store_results("commit", copies)
        self.stepper.log("commit", tasks, terms=accumulator.terms)
        return results

    def store_results(self, kind: RequestKind, copies: Sequence[tuple[Task, Results]]) -> None:
        for task, results in copies:
            self.records.record(kind, task, results, self.stepper.steps)


def copy_keyed_results(tasks: Sequence[Task], results: Sequence[Results]) -> list[tuple[Task, Results]]:
    """Copies of the results of all tasks with a key, made early, so that storing them cannot fail after the step."""
    pairs = zip(tasks, results, strict=True)
    return [(task, [tensor.clone() for tensor in tensors]) for task, tensors in pairs if task.key is not None]


@dataclass(eq=False, slots=True)
class BackwardUpdate:
    """The backward of one batch, which passed all guards and is to be applied."""

    updates: WeightUpdates
    tasks: Sequence[Task]
    results: list[Results]
    seed: int
    parameters: list[nn.Parameter]
    gradients: list[Tensor | None]
    shared_storages: set[int]  # addresses of memory that the gradients can share with the results or the module
    buffers: TensorSnapshot | None  # the module's own tensors after the batch; None if they are in place already
    copies: list[tuple[Task, Results]]

    def apply(self) -> list[Results]:
        updates, stepper = self.updates, self.updates.stepper
        updates.check_permit()
        if self.buffers is not None:
            self.buffers.restore()
        stepper.count_batch()
        if self.tasks[0].mini_batch is not None:
            # Autograd's gradients can share memory with the results, which their receiver can overwrite.
            private = [None if gradient is None else gradient.clone() for gradient in self.gradients]
            updates.mini_batches.add(self.tasks[0], self.parameters, private)
        elif stepper.trains:
            try:
                updates.step(self.parameters, self.gradients, self.shared_storages)
            except BaseException:
                stepper.log("backward", self.tasks, self.seed, failed=True)
                raise
        # Neither of these raises: the journal counts its own failures, and the results are copies already.
        stepper.log("backward", self.tasks, self.seed)
        updates.store_results("backward", self.copies)
        return self.results
