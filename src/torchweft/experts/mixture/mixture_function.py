"""One call of a mixture as one autograd node, and the gradients that wait at its experts for a commit.

    inputs ──gather─> rows by expert ──calls──> answers ──write──> outputs, samples x k x ...  zeros without an answer
    their  <──sum──── gradients of the rows <──calls──  rows of the outputs' gradients         only after an answer

    backward ── A: added   B: added ────┐
    backward ── A: added   C: failed ───┼── commit: A and B step at once; C lacks rows, and is never applied
    backward ── raised ─────────────────┘── if one raised, all sums are incomplete: discard, and run it again

One node per expert would be simpler, but autograd would then call the experts one after the other. The weighted mean is
not part of the node, so that the router's gradient is PyTorch's own. An expert that did not answer in forward is not
called in backward. An expert that fails in backward adds nothing to the inputs' gradients.

The sum of each expert has its own name, and is held by its server, which is notified of discarded ones. A commit has
that name as its idempotency key, so that a retry does not step again.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, join_faults
from torchweft.experts import errors
from torchweft.experts.client.calls import run_all
from torchweft.experts.client.remote import ONLY_ONCE
from torchweft.experts.client.stub import IdempotencyKey, PendingCommit
from torchweft.experts.mixture.fanout import (
    Direction,
    ExpertPool,
    FanOut,
    FanOutCall,
    MixtureCall,
    faults_of,
    too_few_answers,
)
from torchweft.experts.mixture.routing import CombineBuffer, Dispatch, RowSpan, finite_rows

_CPU = torch.device("cpu")
# Errors after which the server does not hold the sum any more.
_GONE = (errors.CommitError, errors.GradientError, errors.StepError)


class MixtureCommit:
    """The open mini-batches of a mixture's experts. ``failure``: the error of a backward. Thread-safe."""

    def __init__(self, accumulates: bool) -> None:
        self.accumulates = accumulates
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._open: dict[str, PendingCommit] = {}

    def open_for(self, uid: str) -> PendingCommit:
        with self._lock:
            if uid not in self._open:
                self._open[uid] = PendingCommit(uid)
            return self._open[uid]

    def open_mini_batches(self) -> dict[str, PendingCommit]:
        with self._lock:
            return dict(self._open)

    def record_failure(self, error: BaseException) -> None:
        # A backward raised, so the accumulated sums are incomplete.
        with self._lock:
            if self.accumulates:
                self.failure = self.failure or error

    def close(self, ended: Mapping[str, PendingCommit]) -> None:
        with self._lock:
            for uid, mini_batch in ended.items():
                if self._open.get(uid) is mini_batch:  # a backward in another thread can have begun the next one
                    del self._open[uid]

    def discard(self) -> dict[str, PendingCommit]:
        with self._lock:
            discarded, self._open, self.failure = self._open, {}, None
            return discarded

    def prepare(self, client: ExpertPool) -> None:
        """Raise ``MixtureCommitError`` if too few experts can step. The others keep their sums for `commit`."""
        pending, complete, incomplete = self._open_sums(client)
        faults = {**incomplete, **_send_phase(client, pending, complete, prepares=True)}
        if len(pending) - len(faults) < client.options.steps_wanted(len(pending)):
            head = (
                f"commit of a mixture: {len(faults)} of {len(pending)} experts cannot step, and none has stepped. Call "
                "discard(), and run the mini-batch again."
            )
            raise _commit_error(head, faults)

    def commit(self, client: ExpertPool) -> dict[str, bool]:
        pending, complete, incomplete = self._open_sums(client)
        needed = client.options.steps_wanted(len(pending))
        faults = {**incomplete, **_send_phase(client, pending, complete)}
        stepped = {uid: mini_batch for uid, mini_batch in pending.items() if uid not in faults}
        # The failed ones stay open, so that a second commit() has the same names, and steps each at most once.
        self.close(stepped)
        if len(stepped) < needed:
            head = (
                f"commit of a mixture: {len(faults)} of {len(pending)} experts are not known to have stepped. Call "
                "discard() to continue without them, or commit() again, which steps none of the others twice."
            )
            raise _commit_error(head, faults)
        self.close(pending)
        client.discard({uid: pending[uid] for uid in faults})
        client.counters.add("left_out", len(faults))
        return {uid: uid in stepped for uid in pending}

    def _open_sums(self, client: ExpertPool) -> tuple[dict[str, PendingCommit], list[str], dict[str, BaseException]]:
        """All open sums, the experts with complete ones, and the faults of the others."""
        pending, failure = self.open_mini_batches(), self.failure
        needed = client.options.steps_wanted(len(pending))
        complete, incomplete = _separate_complete(pending)
        if failure is not None or len(complete) < needed:
            reason = "" if failure is None else f" A backward of it ended with {type(failure).__name__}."
            head = (
                f"a mini-batch of a mixture is incomplete, and no expert was asked to step.{reason} Of {len(pending)} "
                f"experts {len(incomplete)} lack a part of their gradients. Call discard(), and run it again."
            )
            raise _commit_error(head, incomplete) from failure
        return pending, complete, incomplete

    def __deepcopy__(self, memo: object) -> "MixtureCommit":
        return MixtureCommit(self.accumulates)


def commit_parts(client: ExpertPool, parts: Mapping[str, PendingCommit]) -> None:
    """One step of each expert that was called several times in a backward that does not accumulate."""
    complete, incomplete = _separate_complete(parts)
    # An expert that lacks a part does not step.
    failed = _send_phase(client, parts, complete)
    client.discard({uid: parts[uid] for uid in (*incomplete, *failed)})
    if failed:
        head = f"backward of a mixture, sent in parts: {len(failed)} experts are not known to have stepped with it:"
        raise _commit_error(head, failed)


def _send_phase(
    client: ExpertPool, pending: Mapping[str, PendingCommit], complete: Sequence[str], *, prepares: bool = False
) -> dict[str, BaseException]:
    """Commit the complete ones, or only prepare that, all at once. Returns faults by expert."""
    if not complete:
        return {}
    deadline = time.monotonic() + client.options.backward_timeout
    steps = [client.stub(uid).commit(pending[uid], deadline, prepares=prepares) for uid in complete]
    runs = run_all(steps, settle=True)
    for run in runs:
        if isinstance(run.error, errors.StepsLostWarning):  # the user's filter has turned it into an error
            run.take()
    faults = {uid: run.error for uid, run in zip(complete, runs, strict=True) if run.error is not None}
    for uid, fault in faults.items():
        if isinstance(fault, _GONE):
            pending[uid].record_failure(fault)
    if not prepares:
        client.counters.add_fan_out("commit", len(complete), faults.values())
    return faults


def _separate_complete(pending: Mapping[str, PendingCommit]) -> tuple[list[str], dict[str, BaseException]]:
    """Return the experts with complete mini-batches, and the faults of the others."""
    complete: list[str] = []
    incomplete: dict[str, BaseException] = {}
    for uid, mini_batch in pending.items():
        if fault := mini_batch.fault:
            incomplete[uid] = errors.CommitError(fault)
        elif mini_batch.has_begun:
            complete.append(uid)
        else:
            incomplete[uid] = errors.CommitError("its backward has not ended")
    return complete, incomplete


def _commit_error(head: str, faults: Mapping[str, BaseException]) -> errors.MixtureCommitError:
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in faults.items()]
    return errors.MixtureCommitError(join_faults(head, lines), faults)


class MixtureFunction:
    """A `CutFunction`. After `forward`, ``alive`` (samples x k, bool, CPU) is the mask of experts that answered."""

    # ``inputs``: flat, each samples x .... ``keys``: of the calls by span, replaced at every backward.
    def __init__(
        self,
        client: ExpertPool,
        batch: MixtureCommit,
        call: MixtureCall,
        dispatch: Dispatch,
        keys: dict[RowSpan, IdempotencyKey],
        inputs: Sequence[Tensor],
        anchor: Tensor,
    ) -> None:
        signature = call.signature
        self._client, self._batch, self._call, self._signature = client, batch, call, signature
        self._dispatch, self._keys, self._anchor, self._options = dispatch, keys, anchor, client.options
        self._uids = call.live.uids
        if self._options.detect_anomalies:
            _check_finite("inputs of a mixture", signature.inputs.names, inputs)
        self._needs_gradient = [x.requires_grad for x in inputs]
        self._like = [x.detach()[:0] for x in inputs]  # shape, dtype and device without the values
        # Copies, so that the caller can modify the inputs before backward, unlike those of `RemoteFunction`.
        self._sent: list[Tensor] | None = [dispatch.gather_rows(x.detach()) for x in inputs]
        self._outputs: list[Tensor] = []  # on the meta device, because backward needs only dtype and shape
        self.alive = torch.zeros(dispatch.samples, dispatch.k, dtype=torch.bool, device=_CPU)

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        cached, device = self._call.cached, self._like[0].device
        if cached is None:
            outputs = [x.to(device) for x in self._send_forward()]
        else:
            self.alive, outputs = cached.alive, list(cached.answers)
        self._outputs = [torch.empty_like(x, device="meta") for x in outputs]
        return outputs, [True] * len(outputs)

    @property
    def only_once(self) -> str:
        return f"each expert of a mixture {ONLY_ONCE}"

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        # Zero for the anchor, then one gradient for each flat input that requires one.
        sent = self._sent
        if sent is None:
            raise BackwardTwiceError(BACKWARD_TWICE)
        if not retain:
            self._sent = None
        zero = torch.zeros_like(self._anchor)
        if all(gradient is None for gradient in gradients):
            return [zero, *[None] * len(sent)]
        pairs = zip(gradients, self._outputs, strict=True)
        full = [torch.zeros_like(out, device=_CPU) if g is None else g for g, out in pairs]
        try:
            if self._options.detect_anomalies:
                _check_finite("gradients of outputs of a mixture", self._signature.outputs.names, full)
            row_gradients = self._send_backward(sent, [self._dispatch.gather_pairs(g) for g in full])
        except BaseException as error:
            self._batch.record_failure(error)
            raise
        return [zero, *(self._input_gradient(i, rows) for i, rows in enumerate(row_gradients))]

    def _send_forward(self) -> list[Tensor]:
        dispatch, options, sent = self._dispatch, self._options, self._sent or []
        buffer = CombineBuffer(dispatch.samples, dispatch.k, finite=options.detect_anomalies)
        floor = options.k_min if options.allow_zero_outputs else max(1, options.k_min)
        if dispatch.k < floor and not options.allow_zero_outputs:  # waiting would not help
            raise errors.TooFewAnswersError(
                f"forward of a mixture: every sample needs {floor} answers (k_min), but the directory lists only "
                f"{len(self._uids)} living experts of the grid. Start more, need fewer (k_min), or let such samples be "
                "zero (allow_zero_outputs)."
            )
        calls = [self._forward_call(span, sent, buffer) for span in dispatch.spans]
        most = dispatch.sent.sum(1)
        needed = torch.where(most < dispatch.k, most.clamp(max=floor), floor)  # fewer if a capacity dropped pairs
        self._call_experts("forward", self._call.deadline, calls, needed, buffer)
        self.alive = buffer.alive.view(dispatch.samples, dispatch.k)
        return buffer.rows() or self._zero_outputs()

    def _forward_call(self, span: RowSpan, sent: Sequence[Tensor], buffer: CombineBuffer) -> FanOutCall:
        stub, key, rows = self._client.stub(self._uids[span.expert]), self._keys[span], slice(span.start, span.stop)
        write = partial(buffer.write, self._dispatch.pairs[rows])
        remote = stub.forward_call([x[rows] for x in sent], key, self._signature, self._call.deadline, write, _CPU)
        return FanOutCall(remote, self._dispatch.rows[rows])

    def _send_backward(self, sent: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
        dispatch, options, client = self._dispatch, self._options, self._client
        buffer = CombineBuffer(dispatch.samples, dispatch.k, finite=options.detect_anomalies)
        deadline = time.monotonic() + options.backward_timeout
        spans = dispatch.restrict_spans(self.alive)
        counts = Counter(span.expert for span, _ in spans)
        # Several calls of one expert in a backward that steps: their gradients are collected, for one step.
        parts = MixtureCommit(True)
        missing: dict[RowSpan, PendingCommit] = {}  # calls whose gradients have not been added yet
        calls: dict[RowSpan, FanOutCall] = {}
        for span, remaining in spans:
            batch = self._batch if self._batch.accumulates else parts
            if batch is not parts or (self._signature.trained and counts[span.expert] > 1):
                missing[span] = batch.open_for(self._uids[span.expert])
            calls[span] = self._backward_call(span, remaining, sent, gradients, buffer, missing, deadline)
        needed = self.alive.sum(1).clamp(max=options.backward_k_min)
        try:
            self._call_experts("backward", deadline, [*calls.values()], needed, buffer)
        except BaseException:
            client.discard(parts.discard())
            raise
        finally:  # even if too few answered: a sum that lacks a part must never be committed
            for span, mini_batch in missing.items():
                if (fault := calls[span].fault) is not None:
                    mini_batch.record_failure(fault)
        commit_parts(client, parts.open_mini_batches())
        return buffer.rows() or [None] * len(sent)

    def _backward_call(
        self,
        span: RowSpan,
        remaining: Tensor | None,
        sent: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffer: CombineBuffer,
        missing: dict[RowSpan, PendingCommit],
        deadline: float,
    ) -> FanOutCall:
        stub, key = self._client.stub(self._uids[span.expert]), self._keys[span]
        self._keys[span] = key.next_backward()
        if remaining is not None:
            key.note_kept(False)  # the server holds the inputs of the whole span
        rows = slice(span.start, span.stop) if remaining is None else remaining

        def add(incarnation: int) -> None:
            if (mini_batch := missing.pop(span, None)) is not None:
                mini_batch.record_gradient(incarnation)

        name, write = missing[span].name if span in missing else "", partial(buffer.write, self._dispatch.pairs[rows])
        inputs, row_gradients = [x[rows] for x in sent], [g[rows] for g in gradients]
        remote = stub.backward_call(inputs, row_gradients, key, self._signature, deadline, name, add, write)
        return FanOutCall(remote, self._dispatch.rows[rows])

    def _call_experts(
        self, direction: Direction, deadline: float, calls: Sequence[FanOutCall], needed: Tensor, buffer: CombineBuffer
    ) -> None:
        # Afterwards the buffer has enough answers for a sample, or none.
        client, lenient, after = self._client, self._options.allow_zero_outputs, self._options.timeout_after_k_min
        counts = FanOut(calls, needed, deadline=deadline, after=after, lenient=lenient).run().counts
        faults = [call.fault for call in calls if call.fault is not None]
        client.counters.add_fan_out(direction, len(calls), faults, sum(len(call.samples) for call in calls))
        is_short = counts < needed
        number = int(is_short.sum())
        if number and not lenient:
            action, most = f"{direction} of a mixture", int(needed.max())
            raise too_few_answers(action, len(needed), number, most, faults_of(calls), client.retry)
        buffer.drop_samples(is_short)
        client.counters.add("zeroed", number if direction == "forward" else 0)

    def _zero_outputs(self) -> list[Tensor]:
        outputs, dispatch = self._signature.outputs, self._dispatch
        sizes = self._signature.output_sizes(self._like)
        unknown = [name for name, size in zip(outputs.names, sizes, strict=True) if size is None]
        if unknown:
            raise errors.NoExpertsError(
                f"no expert answered, and the size of the zeros of {', '.join(unknown)} is not known: its free axes "
                "are not those of an input"
            )
        return [
            torch.zeros(dispatch.samples, dispatch.k, *(size or ()), dtype=spec.dtype, device=_CPU)
            for spec, size in zip(outputs.specs, sizes, strict=True)
        ]

    def _input_gradient(self, index: int, rows: Tensor | None) -> Tensor | None:
        like = self._like[index]
        if not self._needs_gradient[index]:
            return None
        if rows is None:
            return like.new_zeros(self._dispatch.samples, *like.shape[1:])
        # The k experts of a sample received the same input, so their gradients add up.
        return rows.sum(1).to(like.device, like.dtype)


def _check_finite(subject: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    rows = {name: finite_rows([tensor.detach()]) for name, tensor in zip(names, tensors, strict=True)}
    faults = [f"{name}: {int((~ok).sum())} of {len(ok)} rows" for name, ok in rows.items() if ok is not None]
    if faults:
        raise errors.AnomalyError(join_faults(f"{subject} are not finite, and nothing was sent:", faults))
