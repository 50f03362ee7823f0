"""An expert: a module and its optimizer, made ready to be served.

    with ExpertBackend("ffn.0", module, partial(torch.optim.Adam, lr=1e-3), args_schema=(X,)) as part of a Runtime:

    clients ──> forward_pool  ──┐                 ┌── BatchExecutor: module, guards, records ──> results
    clients ──> backward_pool ──┼──> Runtime ───> │
    clients ──> commit_pool   ──┘   (one thread)  └── apply_gradients: clip, optimizer, schedule

The two kinds of task and the schemas are hivemind's. Beyond it: a client's fault is that client's alone, a backward
with a key steps once however often it is sent, and the log of the batches replays to the same bytes.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.core.errors import UsageError
from weft.core.validation import Validator, is_number
from weft.experts.batch_executor import BatchExecutor
from weft.experts.gradients import AccumulationOptions, GradientAccumulators, Guards
from weft.experts.graph_cache import GraphBudget, GraphCache
from weft.experts.idempotency import IdempotencyOptions, IdempotencyTable
from weft.experts.journal import Journal
from weft.experts.optimizer_step import (
    OptimizerLike,
    OptimizerStep,
    ScheduleLike,
    check_state,
    load,
    make_stepping,
    state_of,
)
from weft.experts.schema import FlatSchema, call_schema, check_ranges
from weft.experts.side_effects import SideEffects
from weft.experts.task import Results
from weft.experts.task_pool import CallerGroup, PoolOptions, TaskPool
from weft.experts.telemetry import BackendStatistics, WorkObserver


class ExpertBackend:
    """Any ``nn.Module`` with its optimizer, behind task pools.

    Args:
        name: what clients, errors and statistics call it.
        module: in the mode (train or eval) and on the device in which it is to be served; hivemind's ``expert=``.
        optimizer: an optimizer, or a function that makes one of a list of all parameters (then it is fused where that
            works), or None: then backward gives the gradients of the inputs and changes nothing; hivemind's ``opt=``.
        args_schema, kwargs_schema: a `TensorSpec` (or a sample) for every tensor that the module takes: a tuple by
            position, a dict by name, nested as the module wants it. Axis 0 is the batch and free (None); tasks with
            other sizes of other free axes run in other batches. Other leaves are constants that every call gets. If
            any spec says ``requires_grad``, only those that do get a gradient. Integers of an expert with embeddings on
            a GPU need a range, ``values=``.
        outputs_schema: the same for what the module returns. Found by a dummy run on zeros, or compared with it.
        schedule: a learning-rate schedule, or a function that makes one of the optimizer; stepped after every step.
        clip_grad_norm: the L2 norm to which the gradients of all parameters are scaled down before a step.
        guards: which gradients are refused; see `Guards`.
        idempotency: how long idempotency keys are remembered; see `IdempotencyOptions`.
        mini_batches: how many sums of gradients may be open for `commit`; see `AccumulationOptions`.
        keep_graphs: keep graph and inputs of forwards that have a key for their backward; see `GraphBudget`.
        journal: logs every batch that counts, for `weft.experts.journal`.
        pool_options: the fields of `PoolOptions`.

    Raises ``UsageError`` that lists all that is wrong with the arguments, ``SpecError`` if the outputs do not fit, and
    what the module raises in the dummy run.

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
        journal: Journal | None = None,
        **pool_options: Any,
    ) -> None:
        arguments = {"clip_grad_norm": clip_grad_norm, "guards": guards, "idempotency": idempotency}
        arguments |= {"mini_batches": mini_batches, "keep_graphs": keep_graphs, "journal": journal}
        with Validator(f"invalid arguments of expert {name!r}") as check:
            for one, other, words in ((module, expert, "module= and expert="), (optimizer, opt, "optimizer= and opt=")):
                check.that(one is None or other is None, f"{words} are two names of one thing; give one")
            module = expert if module is None else module
            optimizer = opt if optimizer is None else optimizer
            _check_arguments(check, name, module, optimizer, arguments, pool_options)
        self.name, self.clip_grad_norm, self.module = name, clip_grad_norm, cast("nn.Module", module)
        call, options = call_schema(name, args_schema, kwargs_schema), PoolOptions(**pool_options)
        every = list(self.module.parameters())
        overridden = type(self).apply_gradients is not ExpertBackend.apply_gradients
        self.optimizer, self.schedule = make_stepping(name, every, optimizer, schedule, plainly=not overridden)
        self.device = next((parameter.device for parameter in every), torch.device("cpu"))
        check_ranges(name, call, self.module, self.device)
        self.idempotency = IdempotencyTable(idempotency)
        effects = SideEffects(self.module, self.device, crc32(name.encode()))
        step = None if self.optimizer is None else self._apply_observed
        self._stepper = OptimizerStep(name, step, journal)
        self._observer: WorkObserver | None = None
        parts = (guards or Guards(), GradientAccumulators(mini_batches), GraphCache(keep_graphs))
        executor = self.executor = BatchExecutor(
            name, self.module, effects, call, outputs_schema, self._stepper, self.idempotency, *parts
        )
        alone = effects.draws.__getitem__ if options.min_batch_size == 1 else None
        shared: dict[str, Any] = {"options": options, "callers": CallerGroup(), "alone": alone}
        known: dict[str, Any] = {"idempotency": self.idempotency, "splits": self.optimizer is not None}
        self.forward_pool = TaskPool(f"{name}.forward", executor.forward, executor.columns, **shared)
        columns, single = executor.backward_columns, replace(options, min_batch_size=1)
        self.backward_pool = TaskPool(f"{name}.backward", executor.backward, columns, **shared, **known)
        self.commit_pool = TaskPool(f"{name}.commit", executor.commit, FlatSchema([]), single, kind="commit", **known)

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far, also before a restart."""
        return self._stepper.steps

    @property
    def journal(self) -> Journal | None:
        """The log of its batches, if there is one."""
        return self._stepper.journal

    @property
    def pools(self) -> tuple[TaskPool, TaskPool, TaskPool]:
        """Forward, backward and commit: what a runtime works on."""
        return (self.forward_pool, self.backward_pool, self.commit_pool)

    def get_pools(self) -> tuple[TaskPool, TaskPool]:
        """The forward and the backward pool.

        A forward task has the flat inputs (args, then kwargs) and gets the flat outputs. A backward task has these
        inputs and one gradient per flat output, steps, and gets one gradient per flat input, zeros where an input got
        none.
        """
        return (self.forward_pool, self.backward_pool)

    def kept_inputs(self, client: str | None, key: str) -> list[Tensor] | None:
        """The flat inputs of the forward of this client and key, if ``keep_graphs`` kept them. For any thread."""
        return self.executor.graphs.inputs(client, key)

    def commit(
        self,
        mini_batch: str,
        *,
        client: str | None = None,
        deadline: float | None = None,
        principal: str | None = None,
    ) -> "Future[Results]":
        """One optimizer step with the sum of all backward tasks of this client and mini-batch, once they are answered.

        The future gets ``[steps]``, int64 of shape (1,). A repetition gets the same answer and does not step again. A
        sum that the guards refuse is dropped. Raises ``UsageError`` without optimizer; else as `TaskPool.submit_task`.
        """
        if self.optimizer is None:
            raise UsageError(f"expert {self.name!r} has no optimizer, so there is nothing to commit; give it one")
        return self.commit_pool.submit_task(
            deadline=deadline, client=client, key=mini_batch, mini_batch=mini_batch, principal=principal
        )

    def discard(self, mini_batch: str, *, client: str | None = None, principal: str | None = None) -> None:
        """Drop the sum of this client and mini-batch before the next batch. The name is not to be used again."""
        owner, sums = (client, mini_batch), self.executor.mini_batches
        if owner in sums or self.backward_pool.has_mini_batch(*owner):
            sums.discarded[owner] = client if principal is None else principal

    def apply_gradients(self) -> None:
        """One step, with the gradients in ``.grad``: clip, optimizer, schedule. May be overridden.

        Called in the runtime's thread, after the parameters' post-accumulate hooks. What it raises comes to the clients
        as a `StepError`, and nothing is tried again.
        """
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def _apply_observed(self) -> None:
        with self._observer.step_span(self.name, self.steps + 1) if self._observer else nullcontext():
            self.apply_gradients()  # looked up at every step, because users may replace it

    def observe(self, observer: WorkObserver | None) -> None:
        """Report every batch and every optimizer step to this observer, or to none."""
        self._observer = observer
        for pool in self.pools:
            pool.observe(observer)

    def make_empty(self, batch: int) -> tuple[Any, Any]:
        """A sample of the arguments, ``(args, kwargs)``, of zeros; every free axis has this size."""
        call = self.executor.call
        return call.pack([replace(spec, requires_grad=False).empty(batch) for spec in call.specs])

    def get_info(self) -> dict[str, Any]:
        """What a client must know: the schemas, nested, with TensorSpec as leaves; and the names of the keywords."""
        args, kwargs = self.executor.call.tree
        return {
            "name": self.name,
            "forward_schema": (args, kwargs),
            "outputs_schema": self.executor.outputs.tree,
            "keyword_names": tuple(kwargs),
            "trained": self.optimizer is not None,
            "steps": self.steps,
            "max_batch_size": self.forward_pool.options.max_batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of module, optimizer, schedule, steps and seed between two batches; `idempotency` has its own."""
        executor = self.executor
        with executor.lock:
            counts = {
                "steps": self.steps,
                "seed": executor.effects.seed,
                "forward_batches": executor.forward_batches,
                "backward_batches": executor.backward_batches,
                "branch": self._stepper.branch,
            }
            return state_of(self.module, self.optimizer, self.schedule, counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. Open mini-batches and kept graphs are dropped.

        Raises ``UsageError`` if it is that of another kind of expert, and what module and optimizer raise; nothing
        changed.
        """
        check_state(self.name, state, self.optimizer, self.schedule)
        executor = self.executor
        with executor.lock:
            load(self.module, self.optimizer, self.schedule, state)
            self._stepper.steps, executor.effects.seed = state["steps"], state["seed"]
            executor.forward_batches, executor.backward_batches = state["forward_batches"], state["backward_batches"]
            executor.forget_pending()
            self._stepper.restored(state["backward_batches"], state["branch"])

    def statistics(self, *, wait: bool = True) -> BackendStatistics:
        """What was done so far, and what is held now.

        Without ``wait``, and while a batch runs, each number is true by itself and may be of another moment than its
        neighbour.
        """
        executor = self.executor
        held = executor.lock.acquire(blocking=wait)
        try:
            if held:
                executor.forget_old_sums()
                executor.graphs.forget_old()
            return BackendStatistics(
                name=self.name,
                steps=self.steps,
                forward_batches=executor.forward_batches,
                backward_batches=executor.backward_batches,
                retried_batches=executor.retried,
                refused_gradients=dict(executor.refused),
                open_mini_batches=len(executor.mini_batches),
                open_mini_batch_bytes=executor.mini_batches.nbytes,
                kept_graphs=len(executor.graphs),
                kept_graph_bytes=executor.graphs.nbytes,
                used_graphs=executor.graphs.used,
                journal_failures=self._stepper.journal_failures,
                buffer_bytes=executor.buffer_bytes,
                idempotency=self.idempotency.statistics(),
                pools={pool.name: pool.statistics() for pool in self.pools},
            )
        finally:
            if held:
                executor.lock.release()


def _check_arguments(
    check: Validator, name: Any, module: Any, optimizer: Any, options: dict[str, Any], pool_options: Iterable[str]
) -> None:
    """Note what is missing, of a wrong kind, or no option of a pool."""
    check.that(isinstance(name, str) and name != "", f"name is {name!r}, wanted a non-empty str: clients call it so")
    check.instance("module", module, nn.Module, "a torch.nn.Module")
    if isinstance(module, nn.Module):
        named = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
        scripted = [path or "itself" for path, each in named if isinstance(each, torch.jit.ScriptModule)]
        check.that(  # the tensors that a failed batch changed could not be restored
            not scripted,
            f"module was made by torch.jit.script or torch.jit.trace: {', '.join(scripted[:3])}; give the nn.Module "
            "that it was made of, or one that torch.compile made",
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        check.add(f"optimizer is of type {type(optimizer).__name__}, wanted an optimizer, or a function that makes one")
    clip = options.pop("clip_grad_norm")
    if clip is not None and not (is_number(clip) and clip > 0):
        check.add(f"clip_grad_norm is {clip!r}, wanted a number above 0, or None")
    elif clip is not None and optimizer is None:
        check.add("clip_grad_norm was given, but no optimizer whose steps it would bound")
    kinds = (Guards, IdempotencyOptions, AccumulationOptions, GraphBudget, Journal)
    for (option, value), kind in zip(options.items(), kinds, strict=True):
        check.instance(option, value, kind, f"a {kind.__name__}", optional=True)
    check.known(pool_options, [each.name for each in fields(PoolOptions)], "ExpertBackend")
