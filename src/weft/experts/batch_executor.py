"""Executor of one expert: gathers tasks into a batch, runs the module, isolates faults, and makes the batch count.

    task a [2 rows] ──┐
    task b [1 row ] ──┼─ buffers ─ guards ─ module ─ guards ──> apply ──> step or sum, keys, journal
    task c [3 rows] ──┘ '-------- attempt: may fail --------'      '-- nothing fails here but the step --'

An attempt leaves no trace (`weft.experts.side_effects`); only what it returns does, ``apply``. So a batch that fails
is taken apart, and only those tasks fail that cause the fault:

    a b X c  ── attempt ──> error
    a | b | X | c           each alone: X fails again, and gets that error
    a b c    ── attempt ──> apply ──> results, bit for bit as if X had never come

The module runs as a segment: gradients are values, of the parameters too, and never in ``.grad``. Everything happens
under the expert's lock.
"""

import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.context import ExecutionContext, on_device
from weft.core.errors import SpecError, WeftError, listed
from weft.core.segment import MicroBatchContext, Segment
from weft.experts.errors import CommitError, DeviceLostError, ExpertError, GradientError, ModuleExitError, WireError
from weft.experts.gradients import GradientAccumulators, Guards, Owner
from weft.experts.graph_cache import ForwardGraph, GraphCache, SavedTensors
from weft.experts.idempotency import IdempotencyTable, RequestKind
from weft.experts.optimizer_step import OptimizerStep
from weft.experts.schema import FlatSchema, NestedSchema, infer_outputs
from weft.experts.side_effects import SideEffects
from weft.experts.task import Answer, Results, Task, split_rows

_LARGE = 1 << 20  # bytes; what is smaller, the allocator does not give back


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of their storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class BatchBuffers:
    """The input buffers of one kind of task: one per column. Belongs to one thread.

    Fresh memory costs page faults: joining eight tensors of 4 MB takes 21 ms there, 2.9 ms in memory that was used.
    """

    def __init__(self, columns: FlatSchema, device: torch.device) -> None:
        self._specs = [column.spec for column in columns.columns]
        self._device, self._pinned = device, device.type == "cuda"
        self._flat = [self._room(spec.dtype, 0) for spec in self._specs]
        self._read: Any = None  # on CUDA the event after which the device has read the buffers

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat)

    def gather(self, tasks: Sequence[Task], *, first: int = 0, fresh: bool = False) -> list[Tensor]:
        """One tensor per column, from column ``first`` on, with the rows of all tasks, in order, on the device.

        Always a copy. It is valid until the next call, unless ``fresh``: then it has memory of its own.
        """
        if self._read is not None:
            self._read.synchronize()
        rows = sum(task.rows for task in tasks)
        joined: list[Tensor] = []
        for place, spec in list(enumerate(self._specs))[first:]:
            shape = (rows, *tasks[0].tensors[place].shape[1:])
            size = math.prod(shape)
            if fresh:
                into = torch.empty(shape, dtype=spec.dtype, device="cpu")
            else:
                if size > self._flat[place].numel():
                    self._flat[place] = self._room(spec.dtype, 1 << (size - 1).bit_length())
                into = self._flat[place][:size].view(shape)
            torch.cat([task.tensors[place] for task in tasks], out=into)
            joined.append(into if self._device.type == "cpu" else into.to(self._device, non_blocking=self._pinned))
        if self._pinned:
            self._read = torch.cuda.current_stream(self._device).record_event()
        return joined

    def owners(self) -> set[int]:
        return _storages(self._flat)

    def _room(self, dtype: torch.dtype, size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._pinned)


def _split(batch: Iterable[Tensor], tasks: Sequence[Task], owners: set[int]) -> list[Results]:
    """Every task's rows on the CPU, without a graph; what looks into one of these storages is copied out of it."""
    plain = [tensor.detach() for tensor in batch]
    found = [x.clone() if x.is_cpu and x.untyped_storage().data_ptr() in owners else x.cpu() for x in plain]
    return split_rows(found, [task.rows for task in tasks])


def _is_device_lost(error: BaseException, device: torch.device) -> bool:
    """Whether an error left the CUDA context dead, so that every later use of it fails."""
    if "CUDA error" not in str(error) or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device if device.type == "cuda" else None)
    except Exception:
        return True
    return False


_DEEPEST = 8  # frames of an error in its note


Apply = Callable[[], list[Results]]
"""Makes a batch count, and returns its results. What this raises is final: nothing is tried again."""
Attempt = Callable[[Sequence[Task]], Apply]
"""Runs a batch without consequences. It raises `TaskFault` where it knows which tasks are at fault."""


class TaskFault(Exception):
    """Some tasks of a batch are known to be at fault; the others may go on. It never leaves this package."""

    def __init__(self, errors: Mapping[Task, BaseException]) -> None:
        super().__init__(f"{len(errors)} tasks are at fault")
        self.errors = errors


def isolate_faults(tasks: Sequence[Task], attempt: Attempt, name: str) -> tuple[list[Answer], int]:
    """An answer for every task, in order, and how many attempts failed on the way. Raises nothing.

    Who is not at fault runs again as *one* batch, as without the others: the same rounding, one optimizer step. If no
    task fails alone (too little memory for all of them, a sum that overflows), each becomes a batch of its own.
    """
    answers: dict[Task, Answer] = {}
    batches, failures = [list(tasks)], 0
    while batches:
        batch = batches.pop()
        found = _attempted(batch, attempt)
        if not callable(found):
            failures += 1
            if not found:  # who fails alone? Results are dropped, since nothing was applied
                alone = [_attempted([task], attempt) for task in batch]
                found = {task: error for each in alone if not callable(each) for task, error in each.items()}
            answers |= found
            rest = [task for task in batch if task not in found]
            batches += [rest] if found and rest else [[task] for task in reversed(rest)]
            continue
        try:
            answers.update(zip(batch, found(), strict=True))
        except BaseException as error:
            answers.update(dict.fromkeys(batch, error))
    return [_noted(answers[task], task, name) for task in tasks], failures


def _attempted(batch: Sequence[Task], attempt: Attempt) -> Apply | dict[Task, BaseException]:
    """What an attempt gives, or else the tasks that are surely at fault, with their errors."""
    try:
        return attempt(batch)
    except TaskFault as fault:
        return dict(fault.errors)
    except BaseException as error:
        return {batch[0]: error} if len(batch) == 1 else {}


def _noted(found: Answer, task: Task, name: str) -> Answer:
    """The answer. An error gets notes of its task and its origin, and loses its frames, which hold tensors."""
    if not isinstance(found, BaseException):
        return found
    where = "" if isinstance(found, WeftError) else "".join(traceback.format_tb(found.__traceback__)[-_DEEPEST:])
    if not isinstance(found, Exception):
        found = ModuleExitError(f"the module of expert {name!r} raised {found!r}; a module must not end its process")
    whose = "a client without a name" if task.client is None else f"client {task.client!r}"
    notes = [f"in expert {name!r}, a task of {task.rows} rows from {whose}"]
    for note in [*notes, f"it was raised there (innermost last):\n{where}"] if where else notes:
        if note not in getattr(found, "__notes__", []):
            found.add_note(note)
    error: BaseException | None = found
    while error is not None and error.__traceback__ is not None:  # through its frames it holds the whole batch
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return found


@dataclass(eq=False, repr=False)
class BatchExecutor:
    """Forward, backward and commit of one expert. ``given``: what the user said of the module's outputs, or None."""

    name: str
    module: nn.Module
    effects: SideEffects
    call: NestedSchema
    given: InitVar[Any]
    stepper: OptimizerStep
    records: IdempotencyTable
    guards: Guards
    mini_batches: GradientAccumulators
    graphs: GraphCache

    def __post_init__(self, given: Any) -> None:
        self.lock = threading.RLock()
        self.forward_batches = self.backward_batches = self.retried = 0
        self.refused: Counter[str] = Counter()
        self.permit: Callable[[], None] = lambda: None  # raises where nothing may change now; asked before every change
        device = self.effects.device
        self._ambient = ExecutionContext.capture([device.type])
        self._segment = Segment(self._outputs_of)
        self._large: list[Tensor] = []  # gradients of the last backward: their memory is used again
        self._seed: int | None = None
        self.outputs = infer_outputs(self.name, self.call, given, device, self._rehearse)
        inputs = self.call.columns()
        self.columns = FlatSchema(inputs)
        self.backward_columns = FlatSchema([*inputs, *self.outputs.columns(casts=True, prefix="gradient of ")])
        self._forward_buffers = BatchBuffers(self.columns, device)
        self._backward_buffers = BatchBuffers(self.backward_columns, device)
        self._inputs = len(inputs)

    @property
    def buffer_bytes(self) -> int:
        return self._forward_buffers.nbytes + self._backward_buffers.nbytes

    def forward(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer per task: the flat outputs."""
        return self._answers(tasks, self._try_forward)

    def backward(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer per task: the gradients of its flat inputs. One optimizer step, or one more term of a sum."""
        with self.lock:
            self.forget_old_sums()
            answers = self._answers(tasks, self._try_backward)
            self.refused.update("gradient" for found in answers if isinstance(found, GradientError))
            return answers

    def commit(self, tasks: Sequence[Task]) -> list[Answer]:
        """One optimizer step with the sum of a mini-batch; the answer is the number of steps, int64 of shape (1,)."""
        with self.lock:
            self.forget_old_sums()
            answers = self._answers(tasks, self._try_commit)
            for task, found in zip(tasks, answers, strict=True):
                if isinstance(found, GradientError):
                    self.refused["gradient"] += 1
                    self._drop_sum(task.owner)
                    self.records.forget_mini_batch(*task.owner)  # its caller learns of it: the name is free again
            return answers

    def redo(self, kind: RequestKind, tasks: Sequence[Task], seed: int, branch: str = "") -> None:
        """Run a batch again as it was logged. Raises what it raises."""
        with self.lock, self.stepper.replaying(branch):
            self._seed = seed
            try:
                with on_device(self.effects.device), self._mode(tasks):
                    (self._try_backward if kind == "backward" else self._try_commit)(tasks)()
            except TaskFault as fault:
                raise next(iter(fault.errors.values())) from fault
            finally:
                self._seed = None

    def forget_old_sums(self) -> None:
        """Drop mini-batches that were discarded, or are too old. Callers may not learn of it: the names are refused."""
        if self.mini_batches or self.mini_batches.discarded:
            for owner, principal in self.mini_batches.old().items():
                self._drop_sum(owner)
                self.records.drop_mini_batch(*owner, principal)

    def forget_pending(self) -> None:
        """The weights were replaced, as the journal says: nothing that was computed for the old ones is of use."""
        for owner, one in self.mini_batches.items():
            self.records.drop_mini_batch(*owner, one.principal)
        self.mini_batches.clear()
        self.graphs.void()

    def _drop_sum(self, owner: Owner) -> None:
        if self.mini_batches.pop(owner, None) is not None:
            self.stepper.log("dropped", [Task((), 1, client=owner[0], mini_batch=owner[1])])

    def _answers(self, tasks: Sequence[Task], attempt: Attempt) -> list[Answer]:
        with self.lock, on_device(self.effects.device), self._mode(tasks):
            answers, failures = isolate_faults(tasks, attempt, self.name)
            self.retried += failures
            for task, found in zip(tasks, answers, strict=True):
                if isinstance(found, BaseException) and _is_device_lost(found, self.effects.device):
                    raise DeviceLostError(
                        f"a GPU failed in expert {self.name!r}, at a task of client {task.client!r} or one before: "
                        f"{str(found).partition(chr(10))[0]}. This process cannot use that GPU again: restart it, and "
                        "experts go on from their checkpoints. If an index can be out of range, declare its range: "
                        "TensorSpec(values=range(...))"
                    ) from found
            return answers

    def _mode(self, tasks: Sequence[Task]) -> AbstractContextManager[None]:
        return self.effects.evaluation() if tasks[0].evaluation else nullcontext()

    # The module. It may call other experts, whose errors must not look like this expert's: clients retry some of them.

    def _call_module(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except (ExpertError, WireError) as error:
            raise RuntimeError(f"{type(error).__qualname__}: {error}") from error

    def _context(self, seed: int, inputs: Sequence[Tensor]) -> MicroBatchContext:
        return MicroBatchContext(0, self._ambient, (seed, inputs[0].shape[0]))

    def _outputs_of(self, context: MicroBatchContext, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Flat inputs to flat outputs: each is a value of the segment by itself, and nothing is nested but here."""
        seed, rows = context.random
        return tuple(self.outputs.tensors(self.effects.run(seed, self._apply_module, inputs), rows))

    def _apply_module(self, inputs: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled() and self.effects.writes:
            # A module that writes into its input may not do so to a leaf that wants a gradient.
            inputs = [x.clone() if i in self.effects.writes else x for i, x in enumerate(inputs)]
        args, kwargs = self.call.pack(inputs)
        return self.module(*args, **kwargs)

    def _rehearse(self, inputs: list[Tensor]) -> Any:
        """What the module returns, of a run that leaves no trace but what is known of its side effects."""

        def forward() -> Any:
            with torch.no_grad(), on_device(self.effects.device), self._ambient.casting():
                return self._apply_module(inputs)

        return self.effects.rehearse(inputs, forward)

    def _make_graph(
        self, inputs: Sequence[Tensor], seed: int, parameters: Sequence[Tensor]
    ) -> tuple[ForwardGraph, list[Tensor]]:
        """The graph that leads back to inputs and parameters, and the flat outputs without it."""
        pairs = zip(inputs, self.call.specs, strict=True)
        leaves = [tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in pairs]
        segment = Segment(self._outputs_of, parameters)
        outputs, tape = self._call_module(segment.forward, self._context(seed, leaves), leaves, "graph")
        flat = [output.detach() for output in outputs]
        return ForwardGraph(tape, leaves, [output.shape for output in flat], seed), flat

    def _walk_back(self, graph: ForwardGraph, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of inputs and parameters; the latter are autograd's own, and may look into others' memory."""
        faults = [  # of the free axes alone: the fixed ones were checked when the task came
            f"the gradient of {name} has shape {tuple(gradient.shape)}, wanted {tuple(shape)}"
            for name, shape, gradient in zip(self.outputs.names, graph.shapes, gradients, strict=True)
            if shape != gradient.shape
        ]
        if faults:
            raise SpecError(listed("the gradients do not fit the outputs:", faults))
        seeds = [[gradient] for gradient in gradients]
        found, parameters = self._call_module(self.effects.walk, graph.seed, graph.tape.backward, seeds)
        if self.effects.device.type == "cpu":
            dense = [g for g in parameters if g is not None and g.layout is torch.strided]
            self._large = [each for each in dense if each.nbytes >= _LARGE]
        pairs = zip(found, graph.leaves, strict=True)
        return [torch.zeros_like(leaf) if gradient is None else gradient for (gradient,), leaf in pairs], parameters

    # Attempts: whatever they raise, the expert is as before.

    def _try_forward(self, tasks: Sequence[Task]) -> Apply:
        effects, graphs = self.effects, self.graphs
        keeps = graphs.enabled and graphs.keeps(tasks) and not effects.stateful
        inputs = self._forward_buffers.gather(tasks, fresh=keeps)
        seed = effects.seed_for(0, self.forward_batches, tasks)
        before, graph, versions = effects.snapshot(), None, [x._version for x in inputs]
        saved: SavedTensors | None = None
        try:
            if keeps:
                saved = SavedTensors(effects.storages() | _storages(inputs))
                with saved.counting():
                    graph, outputs = self._make_graph(inputs, seed, self._trained())
                # Whoever gets the results may write into them, but not into what backward will read.
                outputs = [output.clone() for output in outputs]
            else:
                context = self._context(seed, inputs)
                outputs = self._call_module(self._segment.forward, context, inputs, "nothing")[0]
        finally:
            if before is not None:
                before.restore()
        results = _split(outputs, tasks, self._forward_buffers.owners() | effects.storages())
        untouched = versions == [x._version for x in inputs]  # else they are not what backward begins with

        def apply() -> list[Results]:
            self.forward_batches += 1
            if graph is not None and saved is not None and untouched and not effects.stateful:
                graphs.keep(tasks, graph, saved)
            return results

        return apply

    def _try_backward(self, tasks: Sequence[Task]) -> Apply:
        effects, parameters = self.effects, self._trained()
        if tasks[0].mini_batch is not None:
            self._check_mini_batch(tasks[0], parameters)  # it is that of all of them
        graph, inputs, gradients = self._inputs_of(tasks, parameters)
        self.graphs.used += graph is not None
        if not self.guards.sound_outputs(gradients):
            faults = {task: self.guards.output_fault(task.tensors[self._inputs :]) for task in tasks}
            text = "a task for expert {!r} was refused: {}; nothing was changed"
            errors = {t: GradientError(text.format(self.name, fault)) for t, fault in faults.items() if fault}
            if errors:
                raise TaskFault(errors)
        before = effects.snapshot()
        try:
            if graph is None:
                seed = effects.seed_for(1, self.backward_batches, tasks) if self._seed is None else self._seed
                graph = self._make_graph(inputs, seed, parameters)[0]
            found, totals = self._walk_back(graph, gradients)
            self.guards.check_parameters([g for g in totals if g is not None])
            own = effects.storages()
            results = _split(found, tasks, self._backward_buffers.owners() | own)
            held = own | _storages([*found, *graph.leaves, *gradients]) if totals else own
            record = self._recorder("backward", tasks, results)
            # Where nothing is restored, the module is already as it will be.
            after = effects.snapshot() if before is not None and self.stepper.trains else None
            if before is not None and after is not None:
                self.guards.check_own(before, after)
        finally:
            if before is not None:
                before.restore()
        trained = [p for p in graph.tape.segment.parameters if isinstance(p, nn.Parameter)]

        def apply() -> list[Results]:
            self.permit()
            if after is not None:
                after.restore()
            self.backward_batches = self.stepper.batches = self.backward_batches + 1
            if tasks[0].mini_batch is not None:
                own = [None if gradient is None else gradient.clone() for gradient in totals]
                self.mini_batches.add(tasks[0], trained, own)
            elif self.stepper.trains:
                try:
                    self._step(trained, totals, held)
                except BaseException:
                    self.stepper.log("backward", tasks, graph.seed, failed=True)
                    raise
            self.stepper.log("backward", tasks, graph.seed)
            record()
            return results

        return apply

    def _try_commit(self, tasks: Sequence[Task]) -> Apply:
        owner = tasks[0].owner
        total = self.mini_batches[owner]
        self.guards.check_parameters([g for g in total.total.totals if g is not None])
        results = [[torch.tensor([self.stepper.steps + 1], device="cpu")] for _ in tasks]
        record = self._recorder("commit", tasks, results)

        def apply() -> list[Results]:
            self.permit()
            self.mini_batches.pop(owner, None)
            try:
                self._step(total.parameters, total.total.totals, set())
            except BaseException:
                self.records.forget_mini_batch(*owner)
                self.stepper.log("commit", tasks, failed=True)
                raise
            self.records.commit_mini_batch(*owner, self.stepper.steps)
            record()
            self.stepper.log("commit", tasks, terms=total.terms)
            return results

        return apply

    def _inputs_of(
        self, tasks: Sequence[Task], trained: list[nn.Parameter]
    ) -> tuple[ForwardGraph | None, Results, Results]:
        """The graph of these tasks, if it is there and made of equal inputs; the inputs; the gradients of outputs."""
        graph, known = self.graphs.take(tasks, trained) if self.graphs.enabled else (None, False)
        if graph is not None and known:
            return graph, graph.leaves, self._backward_buffers.gather(tasks, first=self._inputs)
        joined = self._backward_buffers.gather(tasks)
        inputs = joined[: self._inputs]
        equal = graph is not None and all(map(torch.equal, graph.leaves, inputs))
        return graph if equal else None, inputs, joined[self._inputs :]

    def _trained(self) -> list[nn.Parameter]:
        """The parameters that are trained now: layers may be frozen at any time."""
        return [each for each in self.effects.parameters() if each.requires_grad] if self.stepper.trains else []

    def _check_mini_batch(self, task: Task, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `ExpertError` if nothing can be added to the mini-batch of a task."""
        client, mini_batch = owner = task.owner
        if self._seed is None and self.records.step_of("commit", *owner) is not None:  # a redo did count
            raise CommitError(f"mini-batch {mini_batch!r} of client {client!r} was committed; start a new one")
        if self.records.step_of("dropped", *owner) is not None:
            raise CommitError(
                f"mini-batch {mini_batch!r} of client {client!r} was dropped: it was discarded, nothing came for too "
                "long, the connection had ended, or the weights were replaced. Begin a new one"
            )
        self.mini_batches.check(owner, task.principal, parameters)

    def _recorder(self, kind: RequestKind, tasks: Sequence[Task], results: Sequence[Results]) -> Callable[[], None]:
        """What records the results of the tasks with a key; it has copies, and so cannot fail any more."""
        pairs = zip(tasks, results, strict=True)
        copies = [(task, [tensor.clone() for tensor in found]) for task, found in pairs if task.key is not None]

        def record() -> None:
            for task, copy in copies:
                self.records.record(kind, task, copy, self.stepper.steps)

        return record

    def _step(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], held: set[int]) -> None:
        try:
            self.stepper.step(self.effects.parameters(), parameters, gradients, held)
        finally:
            if self.graphs.enabled:
                self.graphs.void()
