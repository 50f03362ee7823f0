"""Executor of one expert: gathers tasks into a batch, runs the module, isolates faults, and applies the rest.

    task a [2 rows] ──┐
    task b [1 row ] ──┼─ buffers ─ guards ─ module ─ guards ──> apply ──> step or sum, keys, journal
    task c [3 rows] ──┘ '-------- attempt: can fail --------'      '-- only the optimizer can fail --'

An attempt has no consequences (`weft.experts.side_effects`). It returns a function, and only calling that changes the
expert. A failed batch can therefore be split, and only the tasks that cause the fault fail:

    a b X c  ── attempt ──> error
    a | b | X | c           each alone: X fails again, and gets that error
    a b c    ── attempt ──> apply ──> results, bit for bit as if X had never been submitted

Running every task alone would also isolate faults, but an optimizer step costs more than most batches. Everything runs
under the expert's lock.
"""

import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.context import on_device
from weft.core.errors import WeftError
from weft.experts.errors import DeviceLostError, GradientError, ModuleExitError
from weft.experts.flat_module import FlatModule
from weft.experts.gradients import Guards
from weft.experts.graph_cache import ForwardGraph, SavedTensors
from weft.experts.idempotency import RequestKind
from weft.experts.schema import FlatSchema
from weft.experts.task import Answer, Results, Task, split_rows
from weft.experts.weight_updates import BackwardUpdate, WeightUpdates, copy_keyed_results


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class BatchBuffers:
    """Input buffers of one kind of task: one per column. Used by one thread at a time.

    Fresh memory costs page faults: joining eight tensors of 4 MB takes 21 ms there, 2.9 ms in memory that was used.
    """

    def __init__(self, columns: FlatSchema, device: torch.device) -> None:
        self.columns = columns
        self._specs = [column.spec for column in columns.columns]
        self._device, self._pinned = device, device.type == "cuda"
        self._buffers = [self._allocate(spec.dtype, 0) for spec in self._specs]
        self._last_copy: Any = None  # on CUDA, the event after which the device has read the buffers

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def join_rows(self, tasks: Sequence[Task], *, first: int = 0, fresh: bool = False) -> list[Tensor]:
        """One tensor on the device per column, from column ``first`` on, with the rows of all tasks in order.

        Always a copy, and valid until the next call. With ``fresh`` it has memory of its own and stays valid.
        """
        # Transfers from pinned memory are asynchronous. The next batch must not overwrite rows that are still read.
        if self._last_copy is not None:
            self._last_copy.synchronize()
        rows = sum(task.rows for task in tasks)
        joined: list[Tensor] = []
        for column, spec in list(enumerate(self._specs))[first:]:
            shape = (rows, *tasks[0].tensors[column].shape[1:])
            size = math.prod(shape)
            if fresh:
                into = torch.empty(shape, dtype=spec.dtype, device="cpu")
            else:
                if size > self._buffers[column].numel():
                    # Sizes are powers of two, so that batches that grow row by row do not reallocate each time.
                    self._buffers[column] = self._allocate(spec.dtype, 1 << (size - 1).bit_length())
                into = self._buffers[column][:size].view(shape)
            torch.cat([task.tensors[column] for task in tasks], out=into)
            joined.append(into if self._device.type == "cpu" else into.to(self._device, non_blocking=self._pinned))
        if self._pinned:
            self._last_copy = torch.cuda.current_stream(self._device).record_event()
        return joined

    def storage_addresses(self) -> set[int]:
        return storage_addresses(self._buffers)

    def _allocate(self, dtype: torch.dtype, size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._pinned)


def split_outputs(batch: Iterable[Tensor], tasks: Sequence[Task], reused: set[int]) -> list[Results]:
    """The rows of each task on the CPU, without a graph. Views of storages at the addresses ``reused`` are copied."""
    plain = [tensor.detach() for tensor in batch]
    # The receiver keeps its results, but these storages are overwritten by the next batch or step.
    private = [x.clone() if x.is_cpu and x.untyped_storage().data_ptr() in reused else x.cpu() for x in plain]
    return split_rows(private, [task.rows for task in tasks])


def _is_device_lost(error: BaseException, device: torch.device) -> bool:
    """Whether an error left the CUDA context unusable, so that every later use fails."""
    if "CUDA error" not in str(error) or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device if device.type == "cuda" else None)
    except Exception:
        return True
    return False


_DEEPEST = 8  # frames of an error in its note


Apply = Callable[[], list[Results]]
"""Applies a batch and returns its results. Its exceptions are final: nothing is tried again."""
Attempt = Callable[[Sequence[Task]], Apply]
"""Runs a batch without consequences. Raises `TaskFault` where it knows which tasks are at fault."""


class TaskFault(Exception):
    """Some tasks of a batch are known to be at fault, and the others can run without them. Stays in this package."""

    def __init__(self, errors: Mapping[Task, BaseException]) -> None:
        super().__init__(f"{len(errors)} tasks are at fault")
        self.errors = errors


def isolate_faults(tasks: Sequence[Task], attempt: Attempt, name: str) -> tuple[list[Answer], int]:
    """An answer for every task, in order, and the number of failed attempts. Raises nothing.

    The tasks that did not fail are re-run as *one* batch, so that rounding and the optimizer step are as if the failed
    tasks had never been there. If none fails alone (too little memory for all, an overflowing sum), each runs alone.
    """
    answers: dict[Task, Answer] = {}
    batches, failures = [list(tasks)], 0
    while batches:
        batch = batches.pop()
        outcome = _run_attempt(batch, attempt)
        if callable(outcome):
            try:
                answers.update(zip(batch, outcome(), strict=True))
            except BaseException as error:
                answers.update(dict.fromkeys(batch, error))
            continue
        failures += 1
        if not outcome:
            # Find out which tasks fail alone. The results are dropped, because nothing was applied.
            alone = [_run_attempt([task], attempt) for task in batch]
            outcome = {task: error for faults in alone if not callable(faults) for task, error in faults.items()}
        answers |= outcome
        rest = [task for task in batch if task not in outcome]
        # Reversed, because batches are taken from the end: tasks step in the order in which they came.
        batches += [rest] if outcome and rest else [[task] for task in reversed(rest)]
    return [_annotate_error(answers[task], task, name) for task in tasks], failures


def _run_attempt(batch: Sequence[Task], attempt: Attempt) -> Apply | dict[Task, BaseException]:
    """The attempt's result, or else the tasks that are certainly at fault, with their errors."""
    try:
        return attempt(batch)
    except TaskFault as fault:
        return dict(fault.errors)
    except BaseException as error:
        return {batch[0]: error} if len(batch) == 1 else {}


def _annotate_error(result: Answer, task: Task, name: str) -> Answer:
    """The answer. An error gets notes of its task and its origin, and loses its frames."""
    if not isinstance(result, BaseException):
        return result
    frames = "" if isinstance(result, WeftError) else "".join(traceback.format_tb(result.__traceback__)[-_DEEPEST:])
    if not isinstance(result, Exception):
        result = ModuleExitError(f"the module of expert {name!r} raised {result!r}; a module must not end its process")
    sender = "a client without a name" if task.client is None else f"client {task.client!r}"
    notes = [f"in expert {name!r}, a task of {task.rows} rows from {sender}"]
    for note in [*notes, f"it was raised there (innermost last):\n{frames}"] if frames else notes:
        if note not in getattr(result, "__notes__", []):
            result.add_note(note)
    # Frames hold local variables, and so all tensors of the batch, for as long as a client keeps the error.
    error: BaseException | None = result
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return result


class BatchExecutor:
    """Forward, backward and commit of one expert, under its lock."""

    def __init__(self, name: str, module: FlatModule, guards: Guards, updates: WeightUpdates) -> None:
        self.name = name
        self.module = module
        self.updates = updates
        self.stepper, self.graphs, self.mini_batches = updates.stepper, updates.graphs, updates.mini_batches
        # Held for a whole batch, and before the locks of idempotency table and journal. Reentrant, because `backward`
        # holds it around `_answer_tasks`, and an overridden ``apply_gradients`` can ask for the expert's state.
        self.lock = threading.RLock()
        self.forward_batches = self.retried_batches = 0
        self.refused: Counter[str] = Counter()
        self._guards = guards
        self._replay_seed: int | None = None
        inputs, device = module.call.columns(), module.effects.device
        gradients = module.outputs.columns(casts=True, prefix="gradient of ")
        self.forward_buffers = BatchBuffers(FlatSchema(inputs), device)
        self.backward_buffers = BatchBuffers(FlatSchema([*inputs, *gradients]), device)

    @property
    def backward_batches(self) -> int:
        return self.stepper.backward_batches

    def forward(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer per task: the flat outputs."""
        return self._answer_tasks(tasks, self._try_forward)

    def backward(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer per task: the gradients of its flat inputs. One optimizer step, or one more term of a sum."""
        with self.lock:
            self.updates.drop_expired_sums()
            answers = self._answer_tasks(tasks, self._try_backward)
            self.refused.update("gradient" for answer in answers if isinstance(answer, GradientError))
            return answers

    def commit(self, tasks: Sequence[Task]) -> list[Answer]:
        """One optimizer step with the sum of a mini-batch. The answer is the number of steps, int64 of shape (1,)."""
        with self.lock:
            self.updates.drop_expired_sums()
            answers = self._answer_tasks(tasks, self._try_commit)
            for task, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, GradientError):
                    self.refused["gradient"] += 1
                    self.updates.drop_sum(task.owner)
                    # The caller gets this error, so the name can be used again: the sum cannot be continued by mistake.
                    self.updates.records.forget_mini_batch(*task.owner)
            return answers

    def redo(self, kind: RequestKind, tasks: Sequence[Task], seed: int, branch: str = "") -> None:
        """Run a batch again as it was logged, in one attempt. Its exceptions pass through."""
        with self.lock, self.stepper.replaying(branch):
            self._replay_seed = seed
            try:
                with on_device(self.module.effects.device), self._module_mode(tasks):
                    (self._try_backward if kind == "backward" else self._try_commit)(tasks)()
            except TaskFault as fault:
                raise next(iter(fault.errors.values())) from fault
            finally:
                self._replay_seed = None

    def saved_counts(self) -> dict[str, int | str]:
        """The part of a state that is neither module, optimizer nor schedule. Under the lock."""
        return {
            "steps": self.stepper.steps,
            "seed": self.module.effects.seed,
            "forward_batches": self.forward_batches,
            "backward_batches": self.backward_batches,
            "branch": self.stepper.branch,
        }

    def load_counts(self, counts: Mapping[str, Any]) -> None:
        """Continue from `saved_counts`, after other weights were loaded. Under the lock."""
        self.forward_batches = counts["forward_batches"]
        self.module.effects.change_seed(counts["seed"])
        self.updates.forget_pending()
        self.stepper.resume_from(counts["steps"], counts["backward_batches"], counts["branch"])

    def _answer_tasks(self, tasks: Sequence[Task], attempt: Attempt) -> list[Answer]:
        device = self.module.effects.device
        with self.lock, on_device(device), self._module_mode(tasks):
            answers, failures = isolate_faults(tasks, attempt, self.name)
            self.retried_batches += failures
            for task, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, BaseException) and _is_device_lost(answer, device):
                    raise DeviceLostError(
                        f"a GPU failed in expert {self.name!r}, in a task of client {task.client!r} or an earlier one: "
                        f"{str(answer).partition(chr(10))[0]}. This process cannot use that GPU again: restart it, and "
                        "experts continue from their checkpoints. If an index can be out of range, declare its range: "
                        "TensorSpec(values=range(...))"
                    ) from answer
            return answers

    def _module_mode(self, tasks: Sequence[Task]) -> AbstractContextManager[None]:
        return self.module.effects.evaluation_mode() if tasks[0].evaluation else nullcontext()

    # Attempts: if one raises, the expert is as before.

    def _try_forward(self, tasks: Sequence[Task]) -> Apply:
        effects, graphs = self.module.effects, self.graphs
        keeps_graph = graphs.enabled and graphs.is_wanted(tasks) and not effects.stateful
        inputs = self.forward_buffers.join_rows(tasks, fresh=keeps_graph)
        seed = effects.batch_seed(0, self.forward_batches, tasks)
        # The snapshot is of the module's own tensors, and the versions show whether the module wrote into its inputs.
        before, versions = effects.take_snapshot(), [x._version for x in inputs]
        graph: ForwardGraph | None = None
        saved: SavedTensors | None = None
        try:
            if keeps_graph:
                saved = SavedTensors(effects.storage_addresses() | storage_addresses(inputs))
                with saved.count_tensors():
                    graph, outputs = self.module.make_graph(inputs, seed, self.updates.trained_parameters())
                # The receiver can write into its results, but must not change the tensors that backward reads.
                outputs = [output.clone() for output in outputs]
            else:
                outputs = self.module.run_forward(inputs, seed)
        finally:
            if before is not None:
                before.restore()
        reused = self.forward_buffers.storage_addresses() | effects.storage_addresses()
        results = split_outputs(outputs, tasks, reused)
        # A module that wrote into its inputs leaves a graph that does not match the inputs of the backward.
        untouched = versions == [x._version for x in inputs]

        def apply() -> list[Results]:
            self.forward_batches += 1
            if graph is not None and saved is not None and untouched and not effects.stateful:
                graphs.keep_forward(tasks, graph, saved)
            return results

        return apply

    def _try_backward(self, tasks: Sequence[Task]) -> Apply:
        effects, updates = self.module.effects, self.updates
        parameters, replaying = updates.trained_parameters(), self._replay_seed is not None
        if tasks[0].mini_batch is not None:  # a batch never mixes mini-batches
            updates.check_mini_batch(tasks[0], parameters, replaying=replaying)
        graph, inputs, gradients = self._backward_inputs(tasks, parameters)
        if not self._guards.accept_outputs(gradients):
            self._raise_output_faults(tasks)
        before = effects.take_snapshot()
        try:
            if graph is None:
                batches = self.backward_batches
                seed = effects.batch_seed(1, batches, tasks) if self._replay_seed is None else self._replay_seed
                graph = self.module.make_graph(inputs, seed, parameters)[0]
            input_gradients, totals = self.module.walk_back(graph, gradients)
            # Everything below can fail, and so belongs to the attempt: guards, results, their copies.
            self._guards.check_parameters([total for total in totals if total is not None])
            own = effects.storage_addresses()
            reused = self.backward_buffers.storage_addresses() | own
            results = split_outputs(input_gradients, tasks, reused)
            shared = own | storage_addresses([*input_gradients, *graph.leaves, *gradients]) if totals else own
            copies = copy_keyed_results(tasks, results)
            # Without a snapshot to restore, the module's tensors are already as they must be afterwards.
            after = effects.take_snapshot() if before is not None and self.stepper.trains else None
            if before is not None and after is not None:
                self._guards.check_buffers(before, after)
        finally:  # also after success: `BackwardUpdate` puts the new values in place if the batch counts
            if before is not None:
                before.restore()
        trained = [p for p in graph.tape.segment.parameters if isinstance(p, nn.Parameter)]
        return BackwardUpdate(updates, tasks, results, graph.seed, trained, totals, shared, after, copies).apply

    def _try_commit(self, tasks: Sequence[Task]) -> Apply:
        accumulator = self.mini_batches[tasks[0].owner]
        self._guards.check_parameters([total for total in accumulator.total.totals if total is not None])
        results = [[torch.tensor([self.stepper.steps + 1], device="cpu")] for _ in tasks]
        return partial(self.updates.commit, tasks, accumulator, results, copy_keyed_results(tasks, results))

    def _raise_output_faults(self, tasks: Sequence[Task]) -> None:
        """Raise `TaskFault` for tasks with output gradients that fail the guards, if any. A sum can overflow alone."""
        first = len(self.module.call.specs)
        faults = {task: self._guards.output_fault(task.tensors[first:]) for task in tasks}
        text = "a task for expert {!r} was rejected: {}; nothing was changed"
        errors = {t: GradientError(text.format(self.name, fault)) for t, fault in faults.items() if fault}
        if errors:
            raise TaskFault(errors)

    def _backward_inputs(
        self, tasks: Sequence[Task], trained: list[nn.Parameter]
    ) -> tuple[ForwardGraph | None, Results, Results]:
        """The kept graph of these tasks if it has the same inputs, the inputs, and the gradients of the outputs."""
        graphs, buffers, first = self.graphs, self.backward_buffers, len(self.module.call.specs)
        graph, same_inputs = graphs.pop_graph(tasks, trained) if graphs.enabled else (None, False)
        if graph is not None and same_inputs:
            graphs.count_use()
            return graph, graph.leaves, buffers.join_rows(tasks, first=first)
        joined = buffers.join_rows(tasks)
        inputs = joined[:first]
        if graph is not None and all(map(torch.equal, graph.leaves, inputs)):
            graphs.count_use()
        else:
            graph = None
        return graph, inputs, joined[first:]
