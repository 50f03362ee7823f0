"""Dispatch of calls to experts: each call gets exactly one answer. This layer knows nothing of networks.

    call ── role? ── draining? ── known? ── its owner? ── tensors ── pool.submit_task ──> RESULT, steps, receipt
      |       |          |           |          |            |             |
      '───────┴──────────┴───────────┴──────────┴────────────┴─────────────┴────────────> ERROR, to its author only

All checks of the header come before the first tensor is made, so that a rejected call costs almost nothing. A task
carries the deadline of its call.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from torchweft.core.errors import UsageError
from torchweft.experts import errors
from torchweft.experts.server.auth import ANONYMOUS, UNPROVEN, Access, Audit, Caller, Role
from torchweft.experts.server.hosted_expert import HostedExpert
from torchweft.experts.task import Results
from torchweft.experts.telemetry import ServerSpans
from torchweft.experts.wire import Call, Header, Kind, Received, write_fault
from torchweft.experts.wire.service import read_receipt

# Receives the one answer of a call. It can be called in any thread, and must neither raise nor block.
Reply = Callable[[Call], None]

_ROLES = {
    Kind.INFO: Role.FORWARD,
    Kind.FORWARD: Role.FORWARD,
    Kind.BACKWARD: Role.TRAIN,
    Kind.PREPARE: Role.TRAIN,
    Kind.COMMIT: Role.TRAIN,
    Kind.DISCARD: Role.TRAIN,
}


class RequestDispatcher:
    """The experts of one server, and access to them. ``longest``: the largest deadline of a call, in seconds."""

    def __init__(
        self,
        access: Access | None = None,
        audit: Audit | None = None,
        longest: float = 600.0,
        spans: ServerSpans | None = None,
    ) -> None:
        self.access = access or Access()
        self.audit = audit or Audit()
        self.incarnation = secrets.randbits(63)
        self.draining: str | None = None
        self._longest, self._spans = longest, spans
        self._experts: dict[str, HostedExpert] = {}
        self._lock = threading.Lock()  # of the counters
        self._calls: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def add(self, hosted: HostedExpert) -> None:
        self.check_new(hosted.backend.name)
        self._experts[hosted.backend.name] = hosted
        self._observe(hosted, self._spans)

    def check_new(self, uid: str) -> None:
        if uid in self._experts:
            raise UsageError(f"expert {uid!r} is served already; give each expert its own name")

    def find(self, uid: str) -> HostedExpert:
        if uid not in self._experts:
            raise self._unknown_expert(uid, None)
        return self._experts[uid]

    def remove(self, uid: str) -> HostedExpert:
        hosted = self.find(uid)
        del self._experts[uid]
        self._observe(hosted, None)
        return hosted

    def experts(self) -> dict[str, HostedExpert]:
        return dict(self._experts)

    def refuse_new_work(self, why: str) -> None:
        self.draining = why

    def close(self) -> None:
        for hosted in self._experts.values():
            hosted.close()
            self._observe(hosted, None)

    def dispatch(self, call: Received, caller: Caller, reply: Reply) -> "Future[Results] | None":
        """Answer a call through ``reply``, now or later. Never raises."""
        # A returned future is to be cancelled when the client has disconnected. Then no answer comes.
        header = call.header
        self._calls[header.kind.name] += 1
        try:
            if self._spans is None:
                return self._dispatch_checked(call, caller, reply)
            attributes = {"torchweft.expert": header.uid, "torchweft.direction": header.kind.name.lower()}
            attributes["torchweft.client"] = caller.name or header.client
            dispatch = partial(self._dispatch_checked, call, caller, reply)
            return self._spans.receive(dispatch, attributes, header.trace)
        except Exception as error:
            self.answer_error(header.call_id, error, reply)
            return None

    def check_role(self, caller: Caller, uid: str, wanted: Role, what: str, kind: str) -> None:
        """Raise ``ForbiddenError``, with an entry in the audit log, if the caller's role is not enough."""
        if self.access.role(caller.name, uid) < wanted:
            error = self.access.refusal(caller, uid, wanted, what)
            self.audit.refused(caller, uid, kind, str(error))
            raise error

    def answer_error(self, call_id: int, error: BaseException, reply: Reply) -> None:
        with self._lock:
            self._errors["wire" if isinstance(error, errors.WireError) else errors.reason_of(error)] += 1
        reply(error_call(call_id, error))

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        with self._lock:
            return dict(self._calls), dict(self._errors)

    def _observe(self, hosted: HostedExpert, spans: ServerSpans | None) -> None:
        if self._spans is not None:  # otherwise an observer of the expert's own stays
            hosted.backend.observe(spans)

    def _dispatch_checked(self, call: Received, caller: Caller, reply: Reply) -> "Future[Results] | None":
        header = call.header
        if header.kind is Kind.PING:
            reply(Call(Header(kind=Kind.PING, call_id=header.call_id)))
            return None
        if header.kind not in _ROLES:
            wanted = ", ".join(kind.name for kind in _ROLES)
            text = f"a call of kind {header.kind.name} is not a request; wanted one of {wanted}"
            raise errors.MalformedError(text, reason="kind", call_id=header.call_id)
        # The role comes first, so that a client learns nothing of experts that it cannot use, not even their names.
        self.check_role(caller, header.uid, _ROLES[header.kind], header.kind.name.lower(), header.kind.name)
        hosted = self._experts.get(header.uid)
        if header.kind is not Kind.INFO and self.draining is not None and not _ends_commit(header, caller, hosted):
            raise errors.DrainingError(f"the server takes no new work: {self.draining}; ask another one, or later")
        if hosted is None:
            raise self._unknown_expert(header.uid, caller.name)
        if header.kind is Kind.INFO:
            reply(Call(Header(kind=Kind.INFO, call_id=header.call_id, uid=header.uid, data=hosted.describe())))
            return None
        hosted.admit(header)
        if header.kind is Kind.DISCARD:
            client, mini_batch = _mini_batch_of(caller, header)
            hosted.backend.discard(mini_batch, client=client, principal=caller.principal)
            reply(result_call(header, (), hosted.backend.steps, hosted.receipt()))
            return None
        future = self._submit_task(call, caller, hosted)
        future.add_done_callback(partial(self._answer_result, header, caller, hosted, reply))
        return future

    def _submit_task(self, call: Received, caller: Caller, hosted: HostedExpert) -> "Future[Results]":
        header, backend = call.header, hosted.backend
        seconds = self._longest if header.deadline_ms is None else min(self._longest, header.deadline_ms / 1000)
        deadline = time.monotonic() + seconds
        if header.kind in (Kind.PREPARE, Kind.COMMIT):
            client, name = _mini_batch_of(caller, header)
            _check_incarnation(header, hosted, client, name)
            act = backend.prepare if header.kind is Kind.PREPARE else backend.commit
            return act(name, client=client, deadline=deadline, principal=caller.principal)
        client, mini_batch = _owner_of(caller, header)
        # The tensors are views of the received message, so nothing is copied here.
        tensors, backward = call.tensors(), header.kind is Kind.BACKWARD
        if backward and header.keep:
            inputs = backend.kept_inputs(client, header.key)
            if inputs is None:
                raise errors.InputsGoneError(
                    f"expert {backend.name!r} does not hold the inputs of this backward (any more); send it with them"
                )
            tensors = [*inputs, *tensors]
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

    def _answer_result(
        self, header: Header, caller: Caller, hosted: HostedExpert, reply: Reply, future: "Future[Results]"
    ) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.answer_error(header.call_id, error, reply)
            return
        # A client may leave out the inputs of the backward only if they are still kept at this moment.
        asked = header.kind is Kind.FORWARD and header.keep
        keep = asked and hosted.backend.kept_inputs(_owner_of(caller, header)[0], header.key) is not None
        reply(result_call(header, future.result(), hosted.backend.steps, hosted.receipt(), keep=keep))

    def _unknown_expert(self, uid: str, client: str | None) -> errors.UnknownExpertError:
        # Only with experts that the client can use, so that it learns no names of others. None: all.
        known = [name for name in sorted(self._experts) if client is None or self.access.role(client, name) > Role.NONE]
        some = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
        return errors.UnknownExpertError(f"there is no expert {uid!r} here; there are {len(known)}: {some or 'none'}")


def result_call(header: Header, tensors: Sequence[Tensor], step: int, receipt: bytes, keep: bool = False) -> Call:
    answer = Header(kind=Kind.RESULT, call_id=header.call_id, uid=header.uid, keep=keep, step=step, data=receipt)
    return Call(answer, tensors, [header.reply] * len(tensors))


def error_call(call_id: int, error: BaseException) -> Call:
    """Call 0 stands for the stream itself."""
    return Call(Header(kind=Kind.ERROR, call_id=call_id, data=write_fault(error)))


def _owner_of(caller: Caller, header: Header) -> tuple[str, str | None]:
    """Owner of the keys and the mini-batch of a call. Proven and unproven names never share an owner."""
    client, mini_batch = header.client, header.mini_batch or None
    if caller.name:
        # Several processes can share a proven name. The claimed name separates their mini-batches.
        return caller.name, None if mini_batch is None else f"{client}/{mini_batch}"
    # Without the address, which can change before a client repeats a call.
    return f"{UNPROVEN}{client or ANONYMOUS}", mini_batch


def _mini_batch_of(caller: Caller, header: Header) -> tuple[str, str]:
    client, mini_batch = _owner_of(caller, header)
    if mini_batch is None:
        raise UsageError(f"{header.kind.name.lower()} requires a mini_batch id")
    return client, mini_batch


def _ends_commit(header: Header, caller: Caller, hosted: HostedExpert | None) -> bool:
    # A prepared commit is applied even while the server shuts down, because other experts can have stepped with it.
    if header.kind is not Kind.COMMIT or hosted is None:
        return False
    return hosted.backend.is_prepared(*_mini_batch_of(caller, header))


def _check_incarnation(header: Header, hosted: HostedExpert, client: str, mini_batch: str) -> None:
    """Raise ``CommitError`` if the gradients of this mini-batch were summed in an earlier incarnation."""
    if not header.data or hosted.backend.idempotency.step_of("commit", client, mini_batch) is not None:
        return  # a commit that was applied before can be repeated at any time
    if read_receipt(header.data).incarnation != hosted.incarnation:
        raise errors.CommitError(
            f"the server was started again, or another took the expert over, while mini-batch {mini_batch!r} was "
            "open, and its gradients are gone; run its micro-batches again"
        )
