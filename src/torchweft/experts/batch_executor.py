"""Executor of one expert: gathers tasks into a batch, runs the module, isolates faults, and applies the rest.

    task a [2 rows] ──┐
    task b [1 row ] ──┼─ buffers ─ guards ─ module ─ guards ──> apply ──> step or sum, keys
    task c [3 rows] ──┘ '-------- attempt: can fail --------'      '-- only the optimizer can fail --'

An attempt has no consequences (`weft.experts.side_effects`). It returns a function, and only calling that changes the
expert. A failed batch can therefore be split, and only the tasks that cause the fault fail:

    a b X c  ── attempt ──> error
    a | b | X | c           each alone: X fails again, and gets that error
    a b c    ── attempt ──> apply ──> results, bit for bit as if X had never been submitted

Running every task alone would also isolate faults, but a step costs more than most batches. The order of an update:

    backward    permit ── buffers ── optimizer step, or term of a mini-batch's sum ── idempotency keys
    prepare     permit ── sum kept for its commit
    commit      permit ── sum closed ── optimizer step ── keys of its terms ── own key
"""

import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.context import ExecutionContext, on_device
from torchweft.core.errors import SpecError, WeftError, join_faults
from torchweft.core.segment import MicroBatchContext, Segment
from torchweft.experts import errors
from torchweft.experts.accumulation import GradientAccumulator, GradientAccumulators, Owner
from torchweft.experts.gradients import Guards, OptimizerStep, WeightCheck
from torchweft.experts.graph_cache import ForwardGraph, GraphCache, SavedTensors
from torchweft.experts.idempotency import IdempotencyTable, RequestKind
from torchweft.experts.schema import FlatSchema, NestedSchema, infer_outputs
from torchweft.experts.side_effects import SideEffects, TensorSnapshot
from torchweft.experts.task import Answer, Results, Task, split_rows

_LARGE = 1 << 20  # bytes: the allocator keeps smaller blocks by itself
_DEEPEST = 8  # frames of an error in its note


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class BatchBuffers:
    """Input buffers of one kind of task: one per column. Used by one thread at a time."""

    # Fresh memory costs page faults: joining eight tensors of 4 MB takes 21 ms there, 2.9 ms in memory that was used.
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
        """One tensor on the device per column, from column ``first`` on, with the rows of all tasks in order."""
        # Always a copy. It is valid until the next call, unless ``fresh`` gives it memory of its own.
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


def _blame_weights(answer: Answer, fault: str) -> Answer:
    return errors.NotFiniteError(fault) if isinstance(answer, errors.GradientError) else answer


def _is_device_lost(error: BaseException, device: torch.device) -> bool:
    if "CUDA error" not in str(error) or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device if device.type == "cuda" else None)
    except Exception:
        return True
    return False


KeyedResults = list[tuple[Task, Results]]
# Applies a batch and returns its results. Its exceptions are final: nothing is tried again.
Apply = Callable[[], list[Results]]
# Runs a batch without consequences. Raises `TaskFault` where it knows which tasks are at fault.
Attempt = Callable[[Sequence[Task]], Apply]


class TaskFault(Exception):
    """Some tasks of a batch are known to be at fault. Stays in this package."""

    def __init__(self, by_task: Mapping[Task, BaseException]) -> None:
        super().__init__(f"{len(by_task)} tasks are at fault")
        self.by_task = by_task


def isolate_faults(tasks: Sequence[Task], attempt: Attempt, name: str) -> tuple[list[Answer], int]:
    """Return an answer for every task, in order, and the number of failed attempts. Raises nothing."""
    # The tasks that did not fail are re-run as *one* batch, so that rounding and the optimizer step are as if the
    # failed tasks had never been there. If none fails alone (e.g. too little memory for all), each runs alone.
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
    try:
        return attempt(batch)
    except TaskFault as fault:
        return dict(fault.by_task)
    except BaseException as error:
        return {batch[0]: error} if len(batch) == 1 else {}


def _annotate_error(result: Answer, task: Task, name: str) -> Answer:
    """The answer. An error gets notes of its task and its origin, and loses its frames."""
    if not isinstance(result, BaseException):
        return result
    frames = "" if isinstance(result, WeftError) else "".join(traceback.format_tb(result.__traceback__)[-_DEEPEST:])
    if not isinstance(result, Exception):
        text = f"the module of expert {name!r} raised {result!r}; a module must not end its process"
        result = errors.ModuleExitError(text)
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


class FlatModule:
    """The user's module as a function of flat tensors. Its gradients are values, and not in ``.grad``."""

    def __init__(self, name: str, module: nn.Module, effects: SideEffects, call: NestedSchema, outputs: Any) -> None:
        self.effects, self.call, self._module = effects, call, module
        self._ambient = ExecutionContext.capture([effects.device.type])
        self._segment = Segment(self._flat_outputs)
        self._large_gradients: list[Tensor] = []
        self.outputs = infer_outputs(name, call, outputs, effects.device, self._rehearse)

    def run_forward(self, inputs: Sequence[Tensor], seed: int) -> Sequence[Tensor]:
        return self._call_guarded(self._segment.forward, self._context(seed, inputs), inputs, "nothing")[0]

    def make_graph(
        self, inputs: Sequence[Tensor], seed: int, parameters: Sequence[Tensor]
    ) -> tuple[ForwardGraph, list[Tensor]]:
        pairs = zip(inputs, self.call.specs, strict=True)
        leaves = [tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in pairs]
        segment = Segment(self._flat_outputs, parameters)
        outputs, tape = self._call_guarded(segment.forward, self._context(seed, leaves), leaves, "graph")
        flat = [output.detach() for output in outputs]
        return ForwardGraph(tape, leaves, [output.shape for output in flat], seed), flat

    def walk_back(self, graph: ForwardGraph, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of inputs and parameters. Those of the parameters can share memory with other tensors."""
        faults = [  # of the free axes only: the pool has checked the fixed ones
            f"the gradient of {name} has shape {tuple(gradient.shape)}, wanted {tuple(shape)}"
            for name, shape, gradient in zip(self.outputs.names, graph.shapes, gradients, strict=True)
            if shape != gradient.shape
        ]
        if faults:
            raise SpecError(join_faults("the gradients do not fit the outputs:", faults))
        seeds = [[gradient] for gradient in gradients]
        of_inputs, of_parameters = self._call_guarded(self.effects.run_backward, graph.seed, graph.tape.backward, seeds)
        if self.effects.device.type == "cpu":
            # Hold large gradients until the next batch has its own. Otherwise the allocator returns their pages to the
            # system between two batches, and every batch pays the page faults again.
            dense = [g for g in of_parameters if g is not None and g.layout is torch.strided]
            self._large_gradients = [gradient for gradient in dense if gradient.nbytes >= _LARGE]
        pairs = zip(of_inputs, graph.leaves, strict=True)
        filled = [torch.zeros_like(leaf) if gradient is None else gradient for (gradient,), leaf in pairs]
        return filled, of_parameters

    def _call_guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except (errors.ExpertError, errors.WireError) as error:
            # Of other experts that the module calls. Clients retry some errors of an expert, and must not retry these.
            raise RuntimeError(f"{type(error).__qualname__}: {error}") from error

    def _context(self, seed: int, inputs: Sequence[Tensor]) -> MicroBatchContext:
        return MicroBatchContext(0, self._ambient, (seed, inputs[0].shape[0]))

    def _flat_outputs(self, context: MicroBatchContext, *inputs: Tensor) -> tuple[Tensor, ...]:
        seed, rows = context.random
        return tuple(self.outputs.flatten_outputs(self.effects.run_forward(seed, self._call_module, inputs), rows))

    def _call_module(self, inputs: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled() and self.effects.writes:
            # Autograd forbids in-place writes to a leaf that requires a gradient, so the module gets copies.
            inputs = [x.clone() if i in self.effects.writes else x for i, x in enumerate(inputs)]
        args, kwargs = self.call.pack(inputs)
        return self._module(*args, **kwargs)

    def _rehearse(self, inputs: list[Tensor]) -> Any:

        def forward() -> Any:
            with torch.no_grad(), on_device(self.effects.device), self._ambient.casting():
                return self._call_module(inputs)

        return self.effects.rehearse(inputs, forward)


class WeightUpdates:
    """Owner of all state that changes when a batch counts. Only the optimizer can fail here, and that is final."""

    def __init__(
        self,
        effects: SideEffects,
        stepper: OptimizerStep,
        idempotency: IdempotencyTable,
        mini_batches: GradientAccumulators,
        graphs: GraphCache,
        weights: WeightCheck,
    ) -> None:
        self.stepper, self.idempotency, self.mini_batches = stepper, idempotency, mini_batches
        self.graphs, self.weights = graphs, weights
        self.check_permit: Callable[[], None] = lambda: None
        self._effects = effects

    def require_permit(self, check: Callable[[], None]) -> None:
        """Call ``check`` before every update. It raises if this process must not change the expert now."""
        self.check_permit = check

    def trained_parameters(self) -> list[nn.Parameter]:
        # Read for every batch, because layers can be frozen at any time.
        return [p for p in self._effects.parameters() if p.requires_grad] if self.stepper.trains else []

    def check_mini_batch(self, task: Task, parameters: Sequence[nn.Parameter]) -> None:
        client, mini_batch = owner = task.owner
        if self.idempotency.step_of("commit", *owner) is not None:
            raise errors.CommitError(f"mini-batch {mini_batch!r} of client {client!r} was committed; start a new one")
        if self.idempotency.step_of("dropped", *owner) is not None:
            raise errors.CommitError(
                f"mini-batch {mini_batch!r} of client {client!r} was dropped: it was discarded, nothing was added to "
                "it for too long, its connection ended, or the weights were replaced. Start a new one"
            )
        self.mini_batches.check_room(owner, task.principal, parameters)

    def drop_expired_sums(self) -> None:
        """Drop mini-batches that were discarded or are too old. Their names are rejected from then on."""
        if self.mini_batches or self.mini_batches.discarded:
            for owner, principal in self.mini_batches.expired_owners().items():
                self.mini_batches.pop(owner, None)
                self.idempotency.drop_mini_batch(*owner, principal)

    def forget_pending(self) -> None:
        # All of it was computed for the old weights.
        for owner, accumulator in self.mini_batches.items():
            self.idempotency.drop_mini_batch(*owner, accumulator.principal)
        self.mini_batches.clear()
        self.graphs.void_graphs()

    def step(
        self,
        parameters: list[nn.Parameter],
        gradients: list[Tensor | None],
        shared_storages: set[int],
        *,
        backward: bool = False,
    ) -> None:
        every = self._effects.parameters()
        try:
            self.stepper.step(every, parameters, gradients, shared_storages, backward=backward)
        finally:  # the graphs belong to the weights before the step, and a failed step can have changed some
            if self.graphs.enabled:
                self.graphs.void_graphs()
        self.weights.after_step(self.stepper.steps)

    def prepare(self, owner: Owner, results: list[Results]) -> list[Results]:
        self.check_permit()
        self.mini_batches.prepare(owner)
        return results

    def commit(
        self, tasks: Sequence[Task], accumulator: GradientAccumulator, results: list[Results], copies: KeyedResults
    ) -> list[Results]:
        owner = tasks[0].owner
        self.check_permit()
        # Closed before the step: a sum must not be applied twice, even if the optimizer raises.
        self.mini_batches.pop(owner, None)
        try:
            self.step(accumulator.parameters, accumulator.total.totals, set())
        except BaseException:
            self.idempotency.forget_mini_batch(*owner)
            raise
        self.idempotency.commit_mini_batch(*owner, self.stepper.steps)
        self.store_results("commit", copies)
        return results

    def store_results(self, kind: RequestKind, copies: KeyedResults) -> None:
        for task, results in copies:
            self.idempotency.record(kind, task, results, self.stepper.steps)


def copy_keyed_results(tasks: Sequence[Task], results: Sequence[Results]) -> KeyedResults:
    # Copied before the step, so that storing the results cannot fail after it.
    pairs = zip(tasks, results, strict=True)
    return [(task, [tensor.clone() for tensor in tensors]) for task, tensors in pairs if task.key is not None]


@dataclass(eq=False, slots=True)
class BackwardUpdate:
    """The backward of one batch, which passed all guards and is to be applied."""

    updates: WeightUpdates
    tasks: Sequence[Task]
    results: list[Results]
    parameters: list[nn.Parameter]
    gradients: list[Tensor | None]
    shared_storages: set[int]  # addresses of memory that the gradients can share with the results or the module
    buffers: TensorSnapshot | None  # the module's own tensors after the batch; None if they are in place already
    copies: KeyedResults

    def apply(self) -> list[Results]:
        updates, stepper = self.updates, self.updates.stepper
        updates.check_permit()
        if self.buffers is not None:
            self.buffers.restore()
        if self.tasks[0].mini_batch is not None:
            # Autograd's gradients can share memory with the results, which their receiver can overwrite.
            private = [None if gradient is None else gradient.clone() for gradient in self.gradients]
            updates.mini_batches.add(self.tasks[0], self.parameters, private)
            stepper.count_backward()
        elif stepper.trains:
            updates.step(self.parameters, self.gradients, self.shared_storages, backward=True)
        else:
            stepper.count_backward()
        # This cannot raise: the results are copies already.
        updates.store_results("backward", self.copies)
        return self.results


class BatchExecutor:
    """Forward, backward and commit of one expert, each under the expert's lock."""

    def __init__(self, name: str, module: FlatModule, guards: Guards, updates: WeightUpdates) -> None:
        self.name, self.module, self.updates = name, module, updates
        self.stepper, self.graphs, self.mini_batches = updates.stepper, updates.graphs, updates.mini_batches
        # Held for a whole batch, and before the lock of the idempotency table. Reentrant, because `backward`
        # holds it around `_answer_tasks`, and an overridden ``apply_gradients`` can ask for the expert's state.
        self.lock = threading.RLock()
        self.forward_batches = self.retried_batches = 0
        self.refused: Counter[str] = Counter()
        self._guards = guards
        inputs, device = module.call.columns(), module.effects.device
        gradients = module.outputs.columns(casts=True, prefix="gradient of ")
        self.forward_buffers = BatchBuffers(FlatSchema(inputs), device)
        self.backward_buffers = BatchBuffers(FlatSchema([*inputs, *gradients]), device)

    @property
    def backward_batches(self) -> int:
        return self.stepper.backward_batches

    def forward(self, tasks: Sequence[Task]) -> list[Answer]:
        return self._answer_tasks(tasks, self._try_forward)

    def backward(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer per task: the gradients of its flat inputs. One optimizer step, or one more term of a sum."""
        with self.lock:
            self.updates.drop_expired_sums()
            answers = self._answer_tasks(tasks, self._try_backward)
            self.refused.update("gradient" for answer in answers if isinstance(answer, errors.GradientError))
            return answers

    def commit(self, tasks: Sequence[Task]) -> list[Answer]:
        """One optimizer step with the sum of a mini-batch. The answer is the number of steps, int64 of shape (1,).

        Tasks without a key only prepare it: the sum is checked, and kept for its commit.
        """
        with self.lock:
            self.updates.drop_expired_sums()
            answers = self._answer_tasks(tasks, self._try_commit)
            for task, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, errors.GradientError):
                    self.refused["gradient"] += 1
                    self.mini_batches.pop(task.owner, None)
                    # The caller gets this error, so the name can be used again: the sum cannot be continued by mistake.
                    self.updates.idempotency.forget_mini_batch(*task.owner)
            return answers

    def saved_counts(self) -> dict[str, int]:
        return {
            "steps": self.stepper.steps,
            "seed": self.module.effects.seed,
            "forward_batches": self.forward_batches,
            "backward_batches": self.backward_batches,
            "changes": self.stepper.changes,
        }

    def load_counts(self, counts: Mapping[str, Any]) -> None:
        self.forward_batches = counts["forward_batches"]
        self.module.effects.change_seed(counts["seed"])
        self.updates.forget_pending()
        self.updates.weights.after_load()
        self.stepper.resume_from(counts["steps"], counts["backward_batches"], counts.get("changes", 0))

    def _answer_tasks(self, tasks: Sequence[Task], attempt: Attempt) -> list[Answer]:
        device, weights = self.module.effects.device, self.updates.weights
        with self.lock, on_device(device), self._module_mode(tasks):
            if weights.fault is not None:
                return [errors.NotFiniteError(weights.fault) for _ in tasks]
            answers, failures = isolate_faults(tasks, attempt, self.name)
            if any(isinstance(answer, errors.GradientError) for answer in answers):
                # NaN in the gradients can come from NaN in the weights, and then no client is at fault.
                weights.check("when gradients were refused")
                if weights.fault is not None:
                    answers = [_blame_weights(answer, weights.fault) for answer in answers]
            self.retried_batches += failures
            for task, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, BaseException) and _is_device_lost(answer, device):
                    raise errors.DeviceLostError(
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
        parameters = updates.trained_parameters()
        if tasks[0].mini_batch is not None:  # a batch never mixes mini-batches
            updates.check_mini_batch(tasks[0], parameters)
        graph, inputs, gradients = self._backward_inputs(tasks, parameters)
        if not self._guards.accept_outputs(gradients):
            self._raise_output_faults(tasks)
        before = effects.take_snapshot()
        try:
            if graph is None:
                seed = effects.batch_seed(1, self.backward_batches, tasks)
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
        return BackwardUpdate(updates, tasks, results, trained, totals, shared, after, copies).apply

    def _try_commit(self, tasks: Sequence[Task]) -> Apply:
        owner = tasks[0].owner
        prepares = all(task.key is None for task in tasks)
        applied = self.updates.idempotency.step_of("commit", *owner) if prepares else None
        if applied is not None:  # a repetition after the commit
            return lambda: [[torch.tensor([applied], device="cpu")] for _ in tasks]
        accumulator = self.mini_batches[owner]
        self._guards.check_parameters([total for total in accumulator.total.totals if total is not None])
        results = [[torch.tensor([self.stepper.steps + 1], device="cpu")] for _ in tasks]
        if prepares:
            return partial(self.updates.prepare, owner, results)
        return partial(self.updates.commit, tasks, accumulator, results, copy_keyed_results(tasks, results))

    def _raise_output_faults(self, tasks: Sequence[Task]) -> None:
        # Checked task by task only after the sum over all failed, because a sum can also overflow alone.
        first = len(self.module.call.specs)
        faults = {task: self._guards.output_fault(task.tensors[first:]) for task in tasks}
        text = "a task for expert {!r} was rejected: {}; nothing was changed"
        rejected = {t: errors.GradientError(text.format(self.name, fault)) for t, fault in faults.items() if fault}
        if rejected:
            raise TaskFault(rejected)

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
