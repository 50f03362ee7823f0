"""Expert: a module and its optimizer, prepared to be served.

    with ExpertBackend("ffn.0", module, partial(torch.optim.Adam, lr=1e-3), args_schema=(X,)) as part of a Runtime:

    clients ──> forward_pool  ──┐                 ┌── BatchExecutor: module, guards, updates ──> results
    clients ──> backward_pool ──┼──> Runtime ───> │
    clients ──> commit_pool   ──┘   (one thread)  └── apply_gradients: clip, optimizer, schedule

The two kinds of task and the schemas are hivemind's. In addition, a fault of one client fails only that client's task.
A backward with a key steps once however often it is sent.
"""

import inspect
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator, is_number, suggest
from torchweft.experts.accumulation import AccumulationOptions, GradientAccumulators
from torchweft.experts.batch_executor import BatchExecutor, FlatModule, WeightUpdates
from torchweft.experts.errors import NotFiniteError
from torchweft.experts.gradients import Guards, OptimizerStep, WeightCheck
from torchweft.experts.graph_cache import GraphBudget, GraphCache
from torchweft.experts.hyperparameters import set_hyperparameters
from torchweft.experts.idempotency import IdempotencyOptions, IdempotencyTable
from torchweft.experts.optimizer_state import (
    OptimizerLike,
    ScheduleLike,
    check_state,
    copy_state,
    dtype_changes,
    load_parts,
    make_stepping,
)
from torchweft.experts.schema import FlatSchema, call_schema, check_ranges
from torchweft.experts.side_effects import SideEffects
from torchweft.experts.statistics import BackendStatistics
from torchweft.experts.task import CallerGroup, PoolOptions, Results
from torchweft.experts.task_pool import TaskPool
from torchweft.experts.telemetry import WorkObserver


class ExpertBackend:
    """Any ``nn.Module`` with its optimizer and its task pools.

    Args:
        module: in the mode (train or eval) and on the device in which it is to be served; hivemind's ``expert=``.
        optimizer: an optimizer, or a function that makes one of a list of all parameters (it is fused if possible), or
            None: then backward returns the gradients of the inputs and changes nothing; hivemind's ``opt=``.
        args_schema, kwargs_schema: a `TensorSpec` (or a sample) for every tensor argument: a tuple by position, a dict
            by name, nested like the arguments. Axis 0 is the batch and free (None). Tasks with other sizes of other
            free axes run in other batches. Other leaves are constants of every call. If any spec has
            ``requires_grad``, only such inputs get a gradient. Integers of an expert with embeddings on a GPU need a
            range, ``values=``.
        outputs_schema: the same for the outputs. Inferred by a dummy run on zeros, or compared with it.
        schedule: a learning-rate schedule, or a function that makes one of the optimizer; stepped after every step.
        clip_grad_norm: the L2 norm to which the gradients of all parameters are scaled down before a step.
        guards: limits beyond which gradients are rejected.
        idempotency, mini_batches: bounds of the idempotency keys, and of the sums of gradients open for `commit`.
        keep_graphs: keep graph and inputs of forwards with a key for their backward.
        prefer_configured: at a restore, hyperparameters of ``optimizer`` and ``schedule`` that differ from those of the
            checkpoint hold. By default those of the checkpoint hold.
        pool_options: the fields of `PoolOptions`.

    Raises ``UsageError`` that lists every invalid argument, and ``SpecError`` if the outputs do not fit. Exceptions of
    the module in the dummy run pass through.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows)
        >>> with weft.Server([expert]) as server, weft.RemoteExpert("ffn.0", server.address) as remote:
        ...     remote(torch.randn(4, 8)).sum().backward()
        >>> expert.steps
        1
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | None = None,
        optimizer: OptimizerLike | None = None,
        *,
        expert: nn.Module | None = None,
        opt: OptimizerLike | None = None,
        args_schema: Any = None,
        kwargs_schema: Any = None,
        outputs_schema: Any = None,
        schedule: ScheduleLike | None = None,
        clip_grad_norm: float | None = None,
        guards: Guards | None = None,
        idempotency: IdempotencyOptions | None = None,
        mini_batches: AccumulationOptions | None = None,
        keep_graphs: GraphBudget | None = None,
        prefer_configured: bool = False,
        **pool_options: Any,
    ) -> None:
        arguments = {"clip_grad_norm": clip_grad_norm, "guards": guards, "idempotency": idempotency}
        arguments |= {"mini_batches": mini_batches, "keep_graphs": keep_graphs}
        with Validator(f"invalid arguments of expert {name!r}") as check:
            for one, other, words in ((module, expert, "module= and expert="), (optimizer, opt, "optimizer= and opt=")):
                check.require(one is None or other is None, f"{words} are two names of one thing; give one")
            module = expert if module is None else module
            optimizer = opt if optimizer is None else optimizer
            _check_arguments(check, name, module, optimizer, arguments, pool_options)
            check.boolean("prefer_configured", prefer_configured)
        self.prefer_configured = prefer_configured
        self.name, self.clip_grad_norm, self.module = name, clip_grad_norm, cast("nn.Module", module)
        call, options = call_schema(name, args_schema, kwargs_schema), PoolOptions(**pool_options)
        parameters = list(self.module.parameters())
        overridden = type(self).apply_gradients is not ExpertBackend.apply_gradients
        self.optimizer, self.schedule = make_stepping(
            name, parameters, optimizer, schedule, without_arguments=not overridden
        )
        # Inputs go to the device of the first parameter. A module without parameters runs on the CPU.
        self.device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        check_ranges(name, call, self.module, self.device)
        self.idempotency = IdempotencyTable(idempotency)
        effects = SideEffects(self.module, self.device, crc32(name.encode()))
        step = None if self.optimizer is None else self._apply_observed
        self._stepper = OptimizerStep(name, step)
        self._observer: WorkObserver | None = None
        sums, graphs = GradientAccumulators(mini_batches), GraphCache(keep_graphs)
        weights = WeightCheck(name, self.module, enabled=(guards or Guards()).finite)
        updates = WeightUpdates(effects, self._stepper, self.idempotency, sums, graphs, weights)
        flat = FlatModule(name, self.module, effects, call, outputs_schema)
        executor = self.executor = BatchExecutor(name, flat, guards or Guards(), updates)
        # A client's backward must draw the mask of its forward, so tasks of a drawing module run alone. A larger
        # min_batch_size asks for shared batches all the same.
        runs_alone = effects.draws.__getitem__ if options.min_batch_size == 1 else None
        shared: dict[str, Any] = {"options": options, "callers": CallerGroup(), "runs_alone": runs_alone}
        known: dict[str, Any] = {"idempotency": self.idempotency, "by_mini_batch": self.optimizer is not None}
        self.forward_pool = TaskPool(f"{name}.forward", executor.forward, executor.forward_buffers.columns, **shared)
        columns, single = executor.backward_buffers.columns, replace(options, min_batch_size=1)
        self.backward_pool = TaskPool(f"{name}.backward", executor.backward, columns, **shared, **known)
        self.commit_pool = TaskPool(f"{name}.commit", executor.commit, FlatSchema([]), single, kind="commit", **known)

    @property
    def steps(self) -> int:
        """Optimizer steps so far, including those before a restart."""
        return self._stepper.steps

    @property
    def fault(self) -> str | None:
        """The reason why this expert answers no call, such as weights that hold NaN, or None."""
        return self.executor.updates.weights.fault

    def check_weights(self) -> None:
        """Raise `NotFiniteError` if weights hold NaN or infinity, so that they must not be saved or sent."""
        with self.executor.lock:
            self.executor.updates.weights.check("before its state was saved")
        if self.fault is not None:
            raise NotFiniteError(self.fault)

    @property
    def pools(self) -> tuple[TaskPool, TaskPool, TaskPool]:
        return (self.forward_pool, self.backward_pool, self.commit_pool)

    def get_pools(self) -> tuple[TaskPool, TaskPool]:
        """The forward and the backward pool.

        A forward task has the flat inputs (args, then kwargs) and gets the flat outputs. A backward task has these
        inputs and one gradient per flat output, and gets one gradient per flat input, zeros for an input without any.
        """
        return (self.forward_pool, self.backward_pool)

    def kept_inputs(self, client: str | None, key: str) -> list[Tensor] | None:
        """The flat inputs of the forward of this client and key, if they were kept. For any thread."""
        return self.executor.graphs.find_inputs(client, key)

    def commit(
        self, mini_batch: str, *, client: str | None = None, deadline: float | None = None, principal: str | None = None
    ) -> "Future[Results]":
        """One optimizer step with the sum of all answered backward tasks of this client and mini-batch.

        The future gets ``[steps]``, int64 of shape (1,). A repetition gets the same answer and does not step again. A
        sum that the guards reject is dropped. Raises ``UsageError`` without optimizer; else as `TaskPool.submit_task`.
        """
        if self.optimizer is None:
            raise UsageError(f"expert {self.name!r} has no optimizer, so there is nothing to commit; give it one")
        return self.commit_pool.submit_task(
            deadline=deadline, client=client, key=mini_batch, mini_batch=mini_batch, principal=principal
        )

    def prepare(
        self, mini_batch: str, *, client: str | None = None, deadline: float | None = None, principal: str | None = None
    ) -> "Future[Results]":
        """Check the sum of this mini-batch as `commit` does, and keep it for its commit. It takes no more gradients.

        The future gets the number of steps after the commit. Can be repeated. Raises as `commit`.
        """
        if self.optimizer is None:
            raise UsageError(f"expert {self.name!r} has no optimizer, so there is nothing to commit; give it one")
        # Without a key, because the key of the commit is the name of the mini-batch.
        return self.commit_pool.submit_task(
            deadline=deadline, client=client, mini_batch=mini_batch, principal=principal
        )

    def is_prepared(self, client: str | None, mini_batch: str) -> bool:
        # For any thread.
        return self.executor.mini_batches.is_prepared((client, mini_batch))

    def discard(self, mini_batch: str, *, client: str | None = None, principal: str | None = None) -> None:
        """Drop the sum of this client and mini-batch before the next batch. The name must not be used again."""
        owner, sums = (client, mini_batch), self.executor.mini_batches
        # Unknown names are ignored. Otherwise a client could fill the memory with made-up ones.
        if owner in sums or self.backward_pool.has_mini_batch(*owner):
            sums.discard(owner, client if principal is None else principal)

    def set_hyperparameters(self, values: Mapping[str, Any], *, group: int | None = None) -> None:
        """Set hyperparameters of optimizer and schedule by name, such as ``lr``, between two batches: all or none.

        They hold for all parameter groups, or for the one with the number ``group``. With a schedule, ``lr`` scales its
        base rate by the same factor. Raises ``UsageError`` that lists all names and values that cannot be set.
        """
        with self.executor.lock:
            self.executor.updates.check_permit()
            set_hyperparameters(self.name, self.optimizer, self.schedule, values, group)
            self._stepper.count_change()

    def apply_gradients(self) -> None:
        """One step, with the gradients in ``.grad``: clip, optimizer, schedule. Can be overridden."""
        # In the runtime's thread. Errors reach the clients as a `StepError`, and nothing is tried again.
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def _apply_observed(self) -> None:
        with self._observer.step_span(self.name, self.steps + 1) if self._observer else nullcontext():
            self.apply_gradients()  # looked up at every step, because users can assign it

    def observe(self, observer: WorkObserver | None) -> None:
        self._observer = observer
        for pool in self.pools:
            pool.observe(observer)

    def make_empty(self, batch: int) -> tuple[Any, Any]:
        """Zeros as arguments, ``(args, kwargs)``. Every free axis has size ``batch``."""
        call = self.executor.module.call
        return call.pack([replace(spec, requires_grad=False).empty(batch) for spec in call.specs])

    def get_info(self) -> dict[str, Any]:
        args, kwargs = self.executor.module.call.tree
        return {
            "name": self.name,
            "forward_schema": (args, kwargs),
            "outputs_schema": self.executor.module.outputs.tree,
            "keyword_names": tuple(kwargs),
            "trained": self.optimizer is not None,
            "steps": self.steps,
            "max_batch_size": self.forward_pool.options.max_batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of module, optimizer, schedule, steps and seed between two batches. `idempotency` has its own."""
        with self.executor.lock:
            return copy_state(self.module, self.optimizer, self.schedule, self.executor.saved_counts())

    def load_state_dict(self, state: dict[str, Any], *, lossy: bool = False) -> list[str]:
        """Continue from a `state_dict`, without open mini-batches and kept graphs. An error changes nothing.

        Returns notes on tensors that were converted to another dtype. Raises ``UsageError`` if that would lose digits,
        such as float32 into bfloat16, unless ``lossy``.
        """
        check_state(self.name, state, self.optimizer, self.schedule)
        changes = dtype_changes(self.module, state["module"])
        if changes[True] and not lossy:
            raise UsageError(
                f"loading the state into expert {self.name!r} would lose digits: {'; '.join(changes[True])}. Make the "
                "module with the dtype of the state, or allow the loss: ServerOptions(lossy_restore=True)"
            )
        with self.executor.lock:
            load_parts(self.module, self.optimizer, self.schedule, state)
            self.executor.load_counts(state)
        return [f"{words}: converted" for words in changes[False] + changes[True]]

    def statistics(self, *, wait: bool = True) -> BackendStatistics:
        """Counters, and memory held now. Without ``wait``, numbers can be of different moments while a batch runs."""
        executor = self.executor
        # A status page must not wait for a batch, which can take seconds.
        held = executor.lock.acquire(blocking=wait)
        try:
            if held:
                executor.updates.drop_expired_sums()
                executor.graphs.drop_expired()
            return BackendStatistics(
                name=self.name,
                steps=self.steps,
                forward_batches=executor.forward_batches,
                backward_batches=executor.backward_batches,
                retried_batches=executor.retried_batches,
                refused_gradients=dict(executor.refused),
                open_mini_batches=len(executor.mini_batches),
                open_mini_batch_bytes=executor.mini_batches.nbytes,
                kept_graphs=len(executor.graphs),
                kept_graph_bytes=executor.graphs.nbytes,
                used_graphs=executor.graphs.used,
                buffer_bytes=executor.forward_buffers.nbytes + executor.backward_buffers.nbytes,
                idempotency=self.idempotency.statistics(),
                pools={pool.name: pool.statistics() for pool in self.pools},
            )
        finally:
            if held:
                executor.lock.release()


def _check_arguments(
    check: Validator, name: Any, module: Any, optimizer: Any, options: dict[str, Any], pool_options: Iterable[str]
) -> None:
    check.require(isinstance(name, str) and name != "", f"name is {name!r}, wanted a non-empty str for clients")
    check.instance("module", module, nn.Module, "a torch.nn.Module")
    if isinstance(module, nn.Module):
        named = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
        scripted = [path or "itself" for path, layer in named if isinstance(layer, torch.jit.ScriptModule)]
        check.require(  # its tensors cannot be restored after a failed batch
            not scripted,
            f"module was made by torch.jit.script or torch.jit.trace: {', '.join(scripted[:3])}; give the original "
            "nn.Module, or one that torch.compile made",
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        check.add(f"optimizer is of type {type(optimizer).__name__}, wanted an optimizer, or a function that makes one")
    clip = options.pop("clip_grad_norm")
    if clip is not None and not (is_number(clip) and clip > 0):
        check.add(f"clip_grad_norm is {clip!r}, wanted a number above 0, or None")
    elif clip is not None and optimizer is None:
        check.add("clip_grad_norm was given, but no optimizer, whose steps it would bound")
    kinds = (Guards, IdempotencyOptions, AccumulationOptions, GraphBudget)
    for (option, value), kind in zip(options.items(), kinds, strict=True):
        check.instance(option, value, kind, f"a {kind.__name__}", optional=True)
    known = [*inspect.signature(ExpertBackend).parameters, *(option.name for option in fields(PoolOptions))]
    known.remove("pool_options")
    for option in [option for option in pool_options if option not in known]:
        hint = suggest(option, known) or f"; known are {', '.join(sorted(known))}"
        if option.startswith("optim_"):
            hint = "; bind arguments of the optimizer to it: partial(torch.optim.SGD, lr=0.1)"
        check.add(f"ExpertBackend has no argument {option!r}{hint}")
