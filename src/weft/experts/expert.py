"""An expert: a module and its optimizer, made ready to be served.

    with ExpertBackend("ffn.0", module, partial(torch.optim.Adam, lr=1e-3), args_schema=(X,)) as part of a Runtime:

    clients ──> forward_pool  ──┐                 ┌── Engine: module, guards, records ──> results
    clients ──> backward_pool ──┼──> Runtime ───> │
    clients ──> commit_pool   ──┘   (one thread)  └── apply_gradients: clip, optimizer, schedule

The two kinds of task and the schemas are hivemind's. Beyond it: a client's fault is that client's alone, a backward
with a key steps once however often it is sent, and the log of the batches replays to the same bytes.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.core.errors import UsageError, listed
from weft.experts.accumulation import Sums, SumsOptions
from weft.experts.batching import Company, PoolOptions
from weft.experts.checks import is_number
from weft.experts.executor import Engine, Parts
from weft.experts.gradient_guards import Guards
from weft.experts.graph_cache import GraphBudget, KeptGraphs
from weft.experts.idempotency import IdempotencyOptions, IdempotencyTable
from weft.experts.journal import Journal
from weft.experts.optimizer_step import OptimizerLike, ScheduleLike, Stepper, make_stepping
from weft.experts.runner import Runner
from weft.experts.schema import Columns, call_nest
from weft.experts.state import check_state, load, state_of
from weft.experts.statistics import BackendStatistics
from weft.experts.task import Results
from weft.experts.task_pool import TaskPool


class ExpertBackend:
    """Any ``nn.Module`` with its optimizer, behind task pools.

    Args:
        name: what clients, errors and statistics call it.
        module: in the mode (train or eval) and on the device in which it is to be served. ``expert=`` works too.
        optimizer: an optimizer, or a function that makes one of a list of all parameters, frozen ones too (then it is
            fused where that works), or None: then backward gives the gradients of the inputs and changes nothing.
            ``opt=`` works too.
        args_schema, kwargs_schema: a `TensorSpec` (or a sample) for every tensor that the module takes: a tuple by
            position, a dict by name, each nested as the module wants it. Axis 0 is the batch and free (None);
            other free axes may differ between tasks, which then run in different batches. Other leaves are
            constants that every call gets. If any spec says ``requires_grad``, only those that do get a gradient.
        outputs_schema: the same for what the module returns. Found by a dummy run on zeros, or compared with it. Free
            axes have small sizes in it, or, if the module fails, larger and even ones, or as many rows as a sample has.
        schedule: a learning-rate schedule, or a function that makes one of the optimizer; stepped after every step.
        clip_grad_norm: the L2 norm to which the gradients of all parameters are scaled down before a step.
        guards: which gradients are refused; see `Guards`.
        records: how long idempotency keys are known; see `IdempotencyOptions`.
        mini_batches: how many sums of gradients may be open for `commit`; see `SumsOptions`.
        keep_graphs: keep graph and inputs of forwards that have a key for their backward; see `GraphBudget`.
        journal: logs every batch that counts, for `weft.experts.replay`.
        pool_options: the fields of `PoolOptions`.

    Raises ``UsageError`` that lists all that is wrong with the arguments, ``SpecError`` if the outputs do not fit, and
    what the module raises in the dummy run.
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
        records: IdempotencyOptions | None = None,
        mini_batches: SumsOptions | None = None,
        keep_graphs: GraphBudget | None = None,
        journal: Journal | None = None,
        **pool_options: Any,
    ) -> None:
        words: dict[str, Any] = {"module": module, "expert": expert, "optimizer": optimizer, "opt": opt}
        words |= {"clip_grad_norm": clip_grad_norm, "guards": guards, "journal": journal}
        words |= {"records": records, "mini_batches": mini_batches, "keep_graphs": keep_graphs}
        self.name, self.clip_grad_norm = name, clip_grad_norm
        self.module, given = one_of(name, words, pool_options)
        call, options = call_nest(name, args_schema, kwargs_schema), PoolOptions(**pool_options)
        every = list(self.module.parameters())
        self._first = [parameter for parameter in every if parameter.requires_grad]
        plainly = type(self).apply_gradients is ExpertBackend.apply_gradients
        self.optimizer, self.schedule = make_stepping(name, every, given, schedule, plainly=plainly)
        self.device = next((parameter.device for parameter in every), torch.device("cpu"))
        self.records = IdempotencyTable(records)
        runner = Runner(name, self.module, call, outputs_schema, self.device)
        step = None if self.optimizer is None else self._apply_gradients
        self._stepper = Stepper(name, runner.effects.parameters, step, journal)
        parts = Parts(guards or Guards(), self.records, Sums(mini_batches), KeptGraphs(keep_graphs), self._stepper)
        self.engine = Engine(name, runner, parts)
        self._make_pools(options)

    def _make_pools(self, options: PoolOptions) -> None:
        engine, once, company = self.engine, self.records.requests("backward"), Company()
        alone = engine.runner.effects.draws.__getitem__ if options.min_batch_size == 1 else None
        self.forward_pool = TaskPool(
            f"{self.name}.forward", engine.forward, engine.columns, options, company=company, alone=alone
        )
        self.backward_pool = TaskPool(
            f"{self.name}.backward",
            engine.backward,
            engine.backward_columns,
            options,
            ledger=once,
            splits=self.optimizer is not None,
            company=company,
            alone=alone,
        )
        commits = replace(options, min_batch_size=1)
        self.commit_pool = TaskPool(
            f"{self.name}.commit",
            engine.commit,
            Columns([]),
            commits,
            ledger=self.records.requests("commit"),
            splits=True,
        )

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

        A forward task has the flat inputs (args, then kwargs) and gets the flat outputs; no graph is kept, unless
        ``keep_graphs`` says so. A backward task has the flat inputs and one gradient per flat output; it runs the
        forward again, steps, and gets one gradient per flat input, zeros where an input got none.
        """
        return (self.forward_pool, self.backward_pool)

    def kept_inputs(self, client: str | None, key: str) -> list[Tensor] | None:
        """The flat inputs of the forward of this client and key, where ``keep_graphs`` has kept them. For any thread.

        A backward task that brings these very tensors need not have them compared with those of its graph.
        """
        return self.engine.parts.kept.inputs(client, key)

    def commit(
        self,
        mini_batch: str,
        *,
        client: str | None = None,
        deadline: float | None = None,
        principal: str | None = None,
    ) -> "Future[Results]":
        """One optimizer step with the sum of all backward tasks of this client and mini-batch.

        To be called when their answers are there. The future gets ``[steps]``, int64 of shape (1,). A repetition gets
        the same answer and does not step again. A sum that the guards refuse is dropped.

        Raises ``UsageError`` for an expert without optimizer; else as `TaskPool.submit_task`.
        """
        if self.optimizer is None:
            raise UsageError(f"expert {self.name!r} has no optimizer, so there is nothing to commit; give it one")
        self.backward_pool.flush(client, mini_batch)
        return self.commit_pool.submit_task(
            deadline=deadline, client=client, key=mini_batch, mini_batch=mini_batch, principal=principal
        )

    def discard(self, mini_batch: str, *, client: str | None = None, principal: str | None = None) -> None:
        """Drop the sum of this client and mini-batch before the next batch. The name is not to be used again.

        Waits for nothing; a name of which no gradient is here, or under way, changes nothing and leaves nothing.
        """
        owner, sums = (client, mini_batch), self.engine.parts.sums
        if owner in sums or self.backward_pool.has_mini_batch(*owner):
            sums.discard(owner, client if principal is None else principal)

    def apply_gradients(self) -> None:
        """One step, with the gradients in ``.grad``: clip, optimizer, schedule. May be overridden.

        Called in the runtime's thread, after the hooks of ``register_post_accumulate_grad_hook``; the gradients are
        nobody else's, and cleared afterwards, whatever happens. What it raises
        comes to the clients as a `StepError`, and nothing is tried again.
        """
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def _apply_gradients(self) -> None:
        self.apply_gradients()  # looked up when it is called: users may also replace it on the instance

    def make_empty(self, batch: int) -> tuple[Any, Any]:
        """A sample of the arguments, ``(args, kwargs)``, of zeros; every free axis has this size."""
        call = self.engine.runner.call
        return call.pack([replace(spec, requires_grad=False).empty(batch) for spec in call.specs])

    def get_info(self) -> dict[str, Any]:
        """What a client must know: the schemas, nested, with TensorSpec as leaves; and the names of the keywords."""
        args, kwargs = self.engine.runner.call.tree
        return {
            "name": self.name,
            "forward_schema": (args, kwargs),
            "outputs_schema": self.engine.runner.outputs.tree,
            "keyword_names": tuple(kwargs),
            "trained": self.optimizer is not None,
            "steps": self.steps,
            "max_batch_size": self.forward_pool.options.max_batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that training has made, between two batches: module, optimizer, schedule, steps, random seed.

        What is not in it: open mini-batches, and `records`, which have a ``state_dict`` of their own.
        """
        engine = self.engine
        with engine.lock:
            counts = {
                "steps": self.steps,
                "seed": engine.runner.effects.seed,
                "forward_batches": engine.forward_batches,
                "backward_batches": engine.backward_batches,
                "branch": self._stepper.branch,
            }
            return state_of(self.module, self.optimizer, self.schedule, counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. Open mini-batches and kept graphs are dropped.

        Raises ``UsageError`` if it is the state of another kind of expert, and what module and optimizer raise. Then
        nothing has changed.
        """
        check_state(self.name, state, self.optimizer, self.schedule)
        engine = self.engine
        with engine.lock:
            load(self.module, self.optimizer, self.schedule, state, self._first)
            self._stepper.steps, engine.runner.effects.seed = state["steps"], state["seed"]
            engine.forward_batches, engine.backward_batches = state["forward_batches"], state["backward_batches"]
            engine.forget_pending()
            self._stepper.restored(state["backward_batches"], state.get("branch", ""))

    def statistics(self) -> BackendStatistics:
        """What was done so far, and what is held now."""
        engine = self.engine
        parts = engine.parts
        with engine.lock:
            engine.forget_old_sums()
            parts.kept.forget_old()
            return BackendStatistics(
                name=self.name,
                steps=self.steps,
                forward_batches=engine.forward_batches,
                backward_batches=engine.backward_batches,
                retried_batches=engine.retried,
                refused_gradients=dict(engine.refused),
                open_mini_batches=len(parts.sums),
                open_mini_batch_bytes=parts.sums.nbytes,
                kept_graphs=len(parts.kept),
                kept_graph_bytes=parts.kept.nbytes,
                used_graphs=parts.kept.used,
                journal_failures=self._stepper.journal_failures,
                buffer_bytes=engine.buffer_bytes,
                records=self.records.statistics(),
                pools={pool.name: pool.statistics() for pool in self.pools},
            )


_PARTS: dict[str, type[Any]] = {
    "guards": Guards,
    "records": IdempotencyOptions,
    "mini_batches": SumsOptions,
    "keep_graphs": GraphBudget,
    "journal": Journal,
}


def one_of(name: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[nn.Module, OptimizerLike | None]:
    """The module and the optimizer, by whichever of their names they came.

    Raises ``UsageError`` that lists what is missing, twice there, of a wrong kind, or no option of a pool.
    """
    faults: list[str] = []
    if not isinstance(name, str) or not name:
        seen = "empty" if name == "" else repr(name)
        faults.append(f"name is {seen}, wanted what clients call the expert by")
    for first, second in (("module", "expert"), ("optimizer", "opt")):
        if given[first] is not None and given[second] is not None:
            faults.append(f"{first}= and {second}= are two names of one thing, and both were given; give one")
    module = given["expert"] if given["module"] is None else given["module"]
    optimizer = given["opt"] if given["optimizer"] is None else given["optimizer"]
    if not isinstance(module, nn.Module):
        faults.append(f"module is of type {type(module).__name__}, wanted a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        faults.append(f"optimizer is of type {type(optimizer).__name__}, wanted an optimizer or what makes one")
    clip = given["clip_grad_norm"]
    if clip is not None and not (is_number(clip) and clip > 0):
        faults.append(f"clip_grad_norm is {clip!r}, wanted a number above 0, or None")
    elif clip is not None and optimizer is None:
        faults.append("clip_grad_norm was given, but no optimizer whose steps it would bound")
    faults += [
        f"{part} is of type {type(given[part]).__name__}, wanted a {kind.__name__}, or None"
        for part, kind in _PARTS.items()
        if given[part] is not None and not isinstance(given[part], kind)
    ]
    known = [each.name for each in fields(PoolOptions)]
    faults += [
        f"{option} is no option; those of a pool are {', '.join(known)}" for option in options if option not in known
    ]
    if faults:
        raise UsageError(listed(f"expert {name!r} cannot be made:", faults))
    return cast("nn.Module", module), cast("OptimizerLike | None", optimizer)
