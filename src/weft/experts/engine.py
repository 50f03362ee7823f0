"""What one expert does with a batch: attempts that leave no trace, and drafts that make them count.

    tasks ── gather ── guards ── run ── guards ──> draft ── apply ──> step or sum, records, journal, results
             '--------- attempt: may fail ------'           '------- nothing here fails but the step -------'

`weft.experts.isolation` decides which tasks go into an attempt. All of it happens under the expert's lock: a state
that is read from outside is always that between two batches.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.experts.batch import BatchBuffers, deal, released, storages
from weft.experts.draft import Drafted, copied
from weft.experts.effects import NOTHING, Snapshot
from weft.experts.errors import CommitError, ExpertError, GradientError
from weft.experts.guards import Guards
from weft.experts.idempotency import IdempotencyTable
from weft.experts.isolation import Offence, settle
from weft.experts.kept import KeptGraphs, Saved, Walk
from weft.experts.runner import Graph, Passed, Runner
from weft.experts.schema import Columns, gradient_columns
from weft.experts.stepping import Kind, Stepper
from weft.experts.sums import Owner, Sums
from weft.experts.task import Answer, Results, Task


@dataclass
class Parts:
    """What an engine works with, besides the module."""

    guards: Guards
    records: IdempotencyTable
    sums: Sums
    kept: KeptGraphs
    stepper: Stepper


class Engine:
    """Forward, backward and commit of one expert. See `weft.experts.backend.ExpertBackend`."""

    def __init__(self, name: str, runner: Runner, parts: Parts) -> None:
        self.name = name
        self.runner = runner
        self.parts = parts
        self.lock = threading.RLock()
        self.forward_batches = self.backward_batches = self.retried = 0
        self.refused: Counter[str] = Counter()
        inputs = runner.call.columns()
        self.columns = Columns(inputs)
        self.backward_columns = Columns([*inputs, *gradient_columns(runner.outputs)])
        self._forward_buffers = BatchBuffers(self.columns, runner.device)
        self._backward_buffers = BatchBuffers(self.backward_columns, runner.device)
        self._inputs = len(inputs)
        self._seed: int | None = None
        self.permit: Callable[[], None] = _granted  # raises where nothing may change now; asked before every change

    @property
    def buffer_bytes(self) -> int:
        """The memory of the batch buffers."""
        return self._forward_buffers.nbytes + self._backward_buffers.nbytes

    def forward(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer per task: the flat outputs."""
        return self._settled(tasks, self._try_forward)

    def backward(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer per task: the gradients of its flat inputs. One optimizer step, or one more term of a sum."""
        with self.lock:
            self.forget_old_sums()
            answers = self._settled(tasks, self._try_backward)
            self.refused.update("gradient" for found in answers if isinstance(found, GradientError))
            return answers

    def commit(self, tasks: Sequence[Task]) -> list[Answer]:
        """One optimizer step with the sum of a mini-batch; the answer is the number of steps, int64 of shape (1,)."""
        with self.lock:
            self.forget_old_sums()
            answers = self._settled(tasks, self._try_commit)
            for task, found in zip(tasks, answers, strict=True):
                if isinstance(found, GradientError):
                    self.refused["gradient"] += 1
                    self._refuse((task.client, task.mini_batch or ""))
            return answers

    def redo(self, kind: Kind, tasks: Sequence[Task], seed: int, branch: str = "") -> None:
        """Run a batch again as it was logged. Raises what it raises."""
        with self.lock, self.parts.stepper.replaying(branch):
            self._seed = seed
            try:
                with self.runner.effects.mode(tasks[0].evaluation):
                    (self._try_backward if kind == "backward" else self._try_commit)(tasks).apply()
            finally:
                self._seed = None

    def forget_old_sums(self) -> None:
        """Drop mini-batches that nobody commits."""
        self._lose(self.parts.sums.old())

    def forget_pending(self) -> None:
        """The weights were replaced: nothing that was computed for the old ones is of use."""
        self._lose(self.parts.sums.all(), log=False)  # the journal says that a state was loaded
        self.parts.kept.void()

    def _settled(self, tasks: Sequence[Task], attempt: "Callable[[Sequence[Task]], Drafted]") -> list[Answer]:
        with self.lock, self.runner.effects.mode(tasks[0].evaluation):
            answers, failures = settle(tasks, attempt, self.name)
            self.retried += failures
            return answers

    def _lose(self, owners: Mapping[Owner, str | None], *, log: bool = True) -> None:
        """Drop these sums, with their principals; their authors may not know."""
        for owner, principal in owners.items():
            self._remove(owner, log=log)
            self.parts.records.drop_mini_batch(*owner, principal)

    def _refuse(self, owner: Owner) -> None:
        """A commit fails, and its author hears of it: the sum is gone, and may be built again."""
        self._remove(owner)
        self.parts.records.forget_mini_batch(*owner)

    def _remove(self, owner: Owner, *, log: bool = True) -> None:
        """Remove a sum that was not applied, if there is one."""
        if log and owner in self.parts.sums:
            self.parts.stepper.log_dropped(*owner)
        self.parts.sums.remove(owner)

    # Attempts: whatever happens in them, the expert is as before.

    def _try_forward(self, tasks: Sequence[Task]) -> "Drafted":
        effects, kept = self.runner.effects, self.parts.kept
        keeps = kept.keeps(tasks) and not effects.stateful
        inputs = self._forward_buffers.gather(tasks, fresh=keeps)
        seed = effects.seed_for(0, self.forward_batches, tasks)
        before, graph, versions = effects.snapshot(), None, [x._version for x in inputs]
        saved = Saved(effects.storages() | storages(inputs) if keeps else set())
        try:
            if keeps:
                with saved.counting():
                    graph, outputs = self.runner.graph(inputs, seed, self._trained())
            else:
                outputs = self.runner.forward(inputs, seed)
        finally:
            before.restore()
        results = self._dealt(outputs, tasks, self._forward_buffers, graph)
        untouched = versions == [x._version for x in inputs]  # else they are not what backward begins with

        def apply() -> None:
            self.forward_batches += 1
            if graph is not None and untouched and not effects.stateful:
                kept.keep(tasks, graph, seed, saved)

        return Drafted(apply, results)

    def _try_backward(self, tasks: Sequence[Task]) -> "Drafted":
        effects, parameters = self.runner.effects, self._trained()
        self._check_mini_batch(tasks, parameters)
        walk, inputs, gradients = self._taken(tasks, parameters)
        self.parts.kept.used += walk is not None
        self._check_outputs(tasks, gradients)
        before = effects.snapshot()
        try:
            seed = effects.seed_for(1, self.backward_batches, tasks) if walk is None else walk.seed
            seed = seed if self._seed is None else self._seed
            graph = self.runner.graph(inputs, seed, parameters)[0] if walk is None else walk.graph
            passed = self.runner.backward(graph, gradients, seed)
            self.parts.guards.check_parameters([g for g in passed.parameters if g is not None])
            results = self._dealt(passed.inputs, tasks, self._backward_buffers)
            copies = copied(tasks, results)
            after = effects.snapshot() if self.parts.stepper.trains else NOTHING
            self.parts.guards.check_own(before, after)
        finally:
            before.restore()
        trained = [p for p in graph.tape.segment.parameters if isinstance(p, nn.Parameter)]

        def apply() -> None:
            self._count_backward(tasks, trained, passed, after, seed)
            for task, copy in zip(tasks, copies, strict=True):
                if copy is not None:
                    self.parts.records.requests("backward").record(task, copy, self.parts.stepper.steps)

        return Drafted(apply, results)

    def _try_commit(self, tasks: Sequence[Task]) -> "Drafted":
        owner = (tasks[0].client, tasks[0].mini_batch or "")
        total = self.parts.sums.get(owner)
        self.parts.guards.check_parameters([g for g in total.total.totals if g is not None])
        results = [[torch.tensor([self.parts.stepper.steps + 1], device="cpu")] for _ in tasks]
        copies = copied(tasks, results)

        def apply() -> None:
            self.permit()
            self.parts.sums.remove(owner)
            try:
                self._step(total.parameters, Passed([], total.total.totals, set()))
            except BaseException:
                self._refuse(owner)
                self.parts.stepper.log("commit", tasks, 0, failed=True)
                raise
            self.parts.records.commit_mini_batch(*owner, self.parts.stepper.steps)
            for task, copy in zip(tasks, copies, strict=True):
                if copy is not None:
                    self.parts.records.requests("commit").record(task, copy, self.parts.stepper.steps)
            self.parts.stepper.log("commit", tasks, 0, terms=total.terms)

        return Drafted(apply, results)

    def _taken(self, tasks: Sequence[Task], trained: list[nn.Parameter]) -> tuple[Walk | None, Results, Results]:
        """The graph of these tasks, if it is there and made of equal inputs; the inputs; the gradients of outputs."""
        walk, many = self.parts.kept.take(tasks, trained), self._inputs
        if walk is not None and walk.known:
            return walk, walk.graph.leaves, self._backward_buffers.gather(tasks, first=many)
        joined = self._backward_buffers.gather(tasks)
        inputs, gradients = joined[:many], joined[many:]
        equal = walk is not None and all(map(torch.equal, walk.graph.leaves, inputs))
        return walk if equal else None, inputs, gradients

    def _trained(self) -> list[nn.Parameter]:
        return self.runner.parameters() if self.parts.stepper.trains else []

    def _check_mini_batch(self, tasks: Sequence[Task], parameters: Sequence[nn.Parameter]) -> None:
        """All tasks of a batch have the same mini-batch, or none."""
        owner = (tasks[0].client, tasks[0].mini_batch or "")
        if tasks[0].mini_batch is None:
            return
        try:
            if self._seed is None and self.parts.records.step_of("commit", *owner) is not None:  # a redo did count
                raise CommitError(f"mini-batch {owner[1]!r} of client {owner[0]!r} was committed; start a new one")
            if self.parts.records.is_dropped(*owner):
                raise CommitError(
                    f"mini-batch {owner[1]!r} of client {owner[0]!r} was dropped: it was discarded, nothing came for "
                    "too long, the client's connection had ended, or the weights were replaced. Start a new one, and "
                    "run its micro-batches again"
                )
            self.parts.sums.check(owner, tasks[0].principal, parameters)
        except ExpertError as error:
            raise Offence(dict.fromkeys(tasks, error)) from None

    def _check_outputs(self, tasks: Sequence[Task], gradients: Sequence[Tensor]) -> None:
        if self.parts.guards.sound_outputs(gradients):
            return
        faults = {task: self.parts.guards.output_fault(task.tensors[self._inputs :]) for task in tasks}
        errors = {
            task: GradientError(f"a task for expert {self.name!r} was refused: {fault}; nothing was changed")
            for task, fault in faults.items()
            if fault is not None
        }
        if errors:
            raise Offence(errors)

    def _dealt(
        self, batch: Sequence[Tensor], tasks: Sequence[Task], buffers: BatchBuffers, graph: Graph | None = None
    ) -> list[Results]:
        """Every task's rows, in memory that neither the next batch nor a step writes to."""
        if graph is not None:  # whoever gets the results may write into them, but not into what backward will read
            batch = [tensor.clone() for tensor in batch]
        return deal(released(batch, buffers.owners() | self.runner.effects.storages()), [task.rows for task in tasks])

    # What counts.

    def _count_backward(
        self,
        tasks: Sequence[Task],
        parameters: Sequence[nn.Parameter],
        passed: Passed,
        after: Snapshot,
        seed: int,
    ) -> None:
        self.permit()
        after.restore()
        self.backward_batches = self.parts.stepper.batches = self.backward_batches + 1
        if tasks[0].mini_batch is not None:
            copies = [None if gradient is None else gradient.clone() for gradient in passed.parameters]
            self.parts.sums.add(tasks[0], parameters, copies)
        elif self.parts.stepper.trains:
            try:
                self._step(parameters, passed)
            except BaseException:
                self.parts.stepper.log("backward", tasks, seed, failed=True)
                raise
        self.parts.stepper.log("backward", tasks, seed)

    def _step(self, parameters: Sequence[nn.Parameter], passed: Passed) -> None:
        try:
            self.parts.stepper.step(parameters, passed.parameters, passed.held)
        finally:
            self.parts.kept.void()


def _granted() -> None:
    """Everything may change."""
