"""Dispatch of calls to experts: each call gets exactly one answer. Nothing here knows of networks.

    call ── role? ── draining? ── known? ── its owner? ── tensors ── pool.submit_task ──> RESULT, steps, receipt
      |       |          |           |          |            |             |
      '───────┴──────────┴───────────┴──────────┴────────────┴─────────────┴────────────> ERROR, to its author only

Everything that can be refused is refused before a tensor is made. A task takes its call's deadline along, and is
dropped if its turn comes later. `ObservedDispatcher` reports to an observer, see `weft.experts.telemetry`:

    dispatch ── weft.receive ──> future, and the trace it belongs to ──┐
    batch of tasks, whose waiters are such futures <───────────────────┘ ── weft.queue each ── weft.batch ── weft.step
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from weft.core.errors import UsageError
from weft.experts.errors import CommitError, InputsGoneError, reason_of
from weft.experts.expert import ExpertBackend
from weft.experts.server.auth import Access, Audit, Caller, Role
from weft.experts.server.hosted_expert import HostedExpert
from weft.experts.task import Answer, Results, Task
from weft.experts.task_pool import Process
from weft.experts.telemetry import SafeObserver, SpanObserver
from weft.experts.wire import (
    Call,
    DrainingError,
    ForbiddenError,
    Header,
    Kind,
    MalformedError,
    Received,
    UnknownExpertError,
    WireError,
    write_fault,
)
from weft.experts.wire.service import read_receipt

Reply = Callable[[Call], None]
"""Takes the one answer of a call; it may be called in any thread, and must not raise or wait."""

_ROLES = {
    Kind.INFO: Role.FORWARD,
    Kind.FORWARD: Role.FORWARD,
    Kind.BACKWARD: Role.TRAIN,
    Kind.COMMIT: Role.TRAIN,
    Kind.DISCARD: Role.TRAIN,
}


class RequestDispatcher:
    """The experts of one server, and access to them. ``longest``: seconds that a call may have at most."""

    def __init__(self, access: Access | None = None, audit: Audit | None = None, longest: float = 600.0) -> None:
        self.access = access or Access()
        self.audit = audit or Audit()
        self.incarnation = secrets.randbits(63)
        self.draining: str | None = None
        self._longest = longest
        self._experts: dict[str, HostedExpert] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def add(self, served: HostedExpert) -> None:
        """Serve one more. Raises ``UsageError`` for a name that is there."""
        self.check_new(served.backend.name)
        self._experts[served.backend.name] = served

    def check_new(self, uid: str) -> None:
        """Raise ``UsageError`` if an expert of this name is served."""
        if uid in self._experts:
            raise UsageError(f"expert {uid!r} is served already; give each expert its own name")

    def remove(self, uid: str) -> HostedExpert:
        """Serve one less. Raises ``UnknownExpertError``."""
        served = self._experts.pop(uid, None)
        if served is None:
            raise self._unknown(uid, None)
        return served

    def experts(self) -> dict[str, HostedExpert]:
        """All that are served now, by name."""
        return dict(self._experts)

    def close(self) -> None:
        for served in self._experts.values():
            served.close()

    def dispatch(self, call: Received, caller: Caller, reply: Reply) -> "Future[Results] | None":
        """Answer a call, now or later, through ``reply``. Never raises.

        The future, if there is one, may be cancelled when its client has gone; then no answer comes.
        """
        header = call.header
        self._counts[header.kind.name] += 1
        try:
            return self._dispatched(call, caller, reply)
        except Exception as error:
            self.refuse(header.call_id, error, reply)
            return None

    def check(self, caller: Caller, uid: str, wanted: Role, what: str, kind: str) -> None:
        """`Access.check`, with a note in the audit log of a refusal."""
        try:
            self.access.check(caller, uid, wanted, what)
        except ForbiddenError as error:
            self.audit.refused(caller, uid, kind, str(error))
            raise

    def refuse(self, call_id: int, error: BaseException, reply: Reply) -> None:
        """Answer with an error, and count it."""
        with self._lock:
            self._errors["wire" if isinstance(error, WireError) else reason_of(error)] += 1
        reply(fault(call_id, error))

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Calls by kind, and errors answered by reason."""
        with self._lock:
            return dict(self._counts), dict(self._errors)

    def _dispatched(self, call: Received, caller: Caller, reply: Reply) -> "Future[Results] | None":
        header = call.header
        if header.kind is Kind.PING:
            reply(Call(Header(kind=Kind.PING, call_id=header.call_id)))
            return None
        if header.kind not in _ROLES:
            wanted = ", ".join(each.name for each in _ROLES)
            text = f"a call of kind {header.kind.name} is not a request; wanted one of {wanted}"
            raise MalformedError(text, reason="kind", call_id=header.call_id)
        self.check(caller, header.uid, _ROLES[header.kind], header.kind.name.lower(), header.kind.name)
        served = self._experts.get(header.uid)
        if header.kind is not Kind.INFO and self.draining is not None:
            raise DrainingError(f"the server takes no new work: {self.draining}; ask another one, or later")
        if served is None:
            raise self._unknown(header.uid, caller.name)
        if header.kind is Kind.INFO:
            reply(Call(Header(kind=Kind.INFO, call_id=header.call_id, uid=header.uid, data=served.describe())))
            return None
        served.admit(header)
        if header.kind is Kind.DISCARD:
            client, mini_batch = _mini_batch(caller, header)
            served.backend.discard(mini_batch, client=client, principal=caller.principal)
            reply(result(header, (), served.backend.steps, served.receipt()))
            return None
        future = self._submit(call, caller, served)
        future.add_done_callback(partial(self._answer, header, caller, served, reply))
        return future

    def _submit(self, call: Received, caller: Caller, served: HostedExpert) -> "Future[Results]":
        header, backend = call.header, served.backend
        left = self._longest if header.deadline_ms is None else min(self._longest, header.deadline_ms / 1000)
        deadline = time.monotonic() + left
        if header.kind is Kind.COMMIT:
            client, name = _mini_batch(caller, header)
            if (
                header.data
                and backend.idempotency.step_of("commit", client, name) is None
                and read_receipt(header.data).incarnation != served.incarnation
            ):
                raise CommitError(
                    f"the server was started again, or another took the expert over, while mini-batch {name!r} was "
                    "open, and its gradients are gone; run its micro-batches again"
                )
            return backend.commit(name, client=client, deadline=deadline, principal=caller.principal)
        client, mini_batch = caller.owner(header.client, header.mini_batch or None)
        tensors, backward = call.tensors(), header.kind is Kind.BACKWARD
        if backward and header.keep:
            kept = backend.kept_inputs(client, header.key)
            if kept is None:
                raise InputsGoneError(
                    f"expert {backend.name!r} does not hold the inputs of this backward (any more); send it with them"
                )
            tensors = [*kept, *tensors]
        return (backend.backward_pool if backward else backend.forward_pool).submit_task(
            *tensors,
            deadline=deadline,
            client=client,
            key=header.key or None,
            mini_batch=mini_batch if backward else None,
            evaluation=header.evaluation,
            keep=header.keep,
            principal=caller.principal,
            stream=caller.stream,
        )

    def _answer(
        self, header: Header, caller: Caller, served: HostedExpert, reply: Reply, done: "Future[Results]"
    ) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self.refuse(header.call_id, error, reply)
            return
        keeps = header.kind is Kind.FORWARD and header.keep
        kept = keeps and served.backend.kept_inputs(caller.owner(header.client, None)[0], header.key) is not None
        reply(result(header, done.result(), served.backend.steps, served.receipt(), keep=kept))

    def _unknown(self, uid: str, client: str | None) -> UnknownExpertError:
        """The error names experts only that ``client`` may use; None: all."""
        known = [each for each in sorted(self._experts) if client is None or self.access.role(client, each) > Role.NONE]
        some = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
        return UnknownExpertError(f"there is no expert {uid!r} here; there are {len(known)}: {some or 'none'}")


def result(header: Header, tensors: Sequence[Tensor], step: int, receipt: bytes, keep: bool = False) -> Call:
    """The answer to a call that went well, compressed as its author would like it."""
    answer = Header(kind=Kind.RESULT, call_id=header.call_id, uid=header.uid, keep=keep, step=step, data=receipt)
    return Call(answer, tensors, [header.reply] * len(tensors))


def fault(call_id: int, error: BaseException) -> Call:
    """The answer to a call that went wrong; call 0 is the stream itself."""
    return Call(Header(kind=Kind.ERROR, call_id=call_id, data=write_fault(error)))


def _mini_batch(caller: Caller, header: Header) -> tuple[str, str]:
    """Owner and name of the mini-batch that a call is for. Raises ``UsageError`` if it names none."""
    client, mini_batch = caller.owner(header.client, header.mini_batch or None)
    if mini_batch is None:
        raise UsageError(f"{header.kind.name.lower()} requires a mini_batch id")
    return client, mini_batch


class ObservedDispatcher(RequestDispatcher):
    """A `RequestDispatcher` that opens spans, see above; until an expert is removed, or all are closed."""

    def __init__(self, observer: SpanObserver, access: Access | None, audit: Audit, longest: float) -> None:
        super().__init__(access, audit, longest)
        self._observer = SafeObserver(observer)
        self._lock_traces = threading.RLock()  # a batch waits until the traces of its tasks are known
        self._traces: dict[Future[Results], str] = {}
        self._observed: dict[str, ExitStack] = {}  # by expert: what restores it

    def add(self, served: HostedExpert) -> None:
        super().add(served)
        backend = served.backend
        restore = self._observed[backend.name] = ExitStack()
        for pool in backend.pools:
            _replace(restore, pool, "process", partial(self._batch, backend.name, pool.name.rpartition(".")[2]))
        _replace(restore, backend, "apply_gradients", partial(self._step, backend))  # which users may replace, too

    def remove(self, uid: str) -> HostedExpert:
        served = super().remove(uid)
        self._observed.pop(uid).close()
        return served

    def close(self) -> None:
        super().close()
        for restore in self._observed.values():
            restore.close()

    def dispatch(self, call: Received, caller: Caller, reply: Reply) -> "Future[Results] | None":
        attributes = {"weft.expert": call.header.uid, "weft.direction": call.header.kind.name.lower()}
        attributes["weft.client"] = caller.name or call.header.client
        parents = (caller.trace,) if caller.trace else ()
        with self._lock_traces, self._observer.span("weft.receive", attributes, parents=parents):
            future = super().dispatch(call, caller, reply)
            trace = self._observer.current()
            if future is not None and trace is not None and not future.done():
                self._traces[future] = trace
                future.add_done_callback(lambda done: self._traces.pop(done, None))
        return future

    def _step(self, backend: ExpertBackend, apply: Callable[[], None]) -> None:
        with self._observer.span("weft.step", {"weft.expert": backend.name, "weft.steps": backend.steps + 1}):
            apply()

    def _batch(self, expert: str, direction: str, process: Process, tasks: Sequence[Task]) -> Sequence[Answer]:
        attributes = {"weft.expert": expert, "weft.direction": direction}
        with self._lock_traces:
            traces = [[self._traces[each] for each in task.waiters if each in self._traces] for task in tasks]
        now = time.monotonic()
        for task, known in zip(tasks, traces, strict=True):
            rows = {**attributes, "weft.rows": task.rows}
            with self._observer.span("weft.queue", rows, parents=known[:1], waited=max(0.0, now - task.arrival)):
                pass
        size: dict[str, str | int] = {"weft.tasks": len(tasks), "weft.rows": sum(task.rows for task in tasks)}
        parents = [trace for known in traces for trace in known]
        with self._observer.span("weft.batch", {**attributes, **size}, parents=parents):
            return process(tasks)


def _replace(restore: ExitStack, owner: object, name: str, wrapper: Callable[..., object]) -> None:
    """Have a method of this object called as the first argument of ``wrapper`` until ``restore`` is closed."""
    own = vars(owner)
    if name in own:
        restore.callback(own.__setitem__, name, own[name])
    else:
        restore.callback(own.pop, name)
    own[name] = partial(wrapper, getattr(owner, name))
