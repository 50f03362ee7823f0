"""One call of a mixture as one node of autograd, and the gradients that wait at its experts for a commit.

    inputs ──take──> rows by expert ──calls──> answers ──put──> outputs, samples x k x ...     zeros where none came
    their  <──sum─── gradients of the rows <──calls──  rows of the outputs' gradients          only where one came

    backward ── A: added   B: added ────┐
    backward ── A: added   C: failed ───┼── commit: A and B step at once; C lacks rows, and is never applied
    backward ── raised ─────────────────┘── then none of it is whole: discard, and run it again

The weighted mean stays outside, in plain autograd: so the router's gradient is PyTorch's own. An expert that did not
answer in forward is not called in backward; one that fails in backward adds nothing to the inputs' gradients.

The sum of each expert has a name of its own, and lives at its server, which is told of those that are given up. A
commit bears that name as its idempotency key: sent again, it steps no second time.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.core.errors import TWICE, BackwardTwiceError, listed
from weft.experts.client.remote_function import ONLY_ONCE
from weft.experts.client.stub import IdempotencyKey, PendingCommit
from weft.experts.errors import (
    AnomalyError,
    CommitError,
    GradientError,
    MixtureCommitError,
    NoExpertsError,
    StepError,
    TooFewAnswersError,
)
from weft.experts.mixture.fanout import (
    Direction,
    ExpertCall,
    ExpertPool,
    FanOut,
    MixtureCall,
    faults_of,
    too_few_answers,
)
from weft.experts.mixture.routing import CombineBuffer, Dispatch, RowSpan, finite_rows
from weft.experts.wire import Received

_CPU = torch.device("cpu")


_GONE = (CommitError, GradientError, StepError)
"""After these the server has the sum no more."""


class MixtureCommit:
    """The open mini-batches of a mixture's experts. ``broken``: what a backward raised. Thread-safe."""

    def __init__(self, accumulates: bool) -> None:
        self.accumulates = accumulates
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._open: dict[str, PendingCommit] = {}

    def open(self, uid: str) -> PendingCommit:
        """The mini-batch of an expert, which from now on is touched."""
        with self._lock:
            if uid not in self._open:
                self._open[uid] = PendingCommit(uid)
            return self._open[uid]

    def touched(self) -> dict[str, PendingCommit]:
        """The mini-batches that a commit would apply, by expert."""
        with self._lock:
            return dict(self._open)

    def fail(self, error: BaseException) -> None:
        """A backward raised: what accumulates is broken."""
        with self._lock:
            if self.accumulates:
                self.broken = self.broken or error

    def end(self, ended: Mapping[str, PendingCommit]) -> None:
        """These were committed, or are given up."""
        with self._lock:
            for uid, each in ended.items():
                if self._open.get(uid) is each:
                    del self._open[uid]

    def discard(self) -> dict[str, PendingCommit]:
        """Give all up, and return them."""
        with self._lock:
            given_up, self._open, self.broken = self._open, {}, None
            return given_up

    def commit(self, client: ExpertPool) -> dict[str, bool]:
        """See `RemoteMixtureOfExperts.commit`."""
        touched, broken = self.touched(), self.broken
        wanted = client.options.steps_wanted(len(touched))
        whole, incomplete = _parted(touched)
        if broken is not None or len(whole) < wanted:
            why = "" if broken is None else f" A backward of it ended with {type(broken).__name__}."
            head = (
                f"a mini-batch of a mixture is not whole, and no expert was told to step.{why} Of {len(touched)} "
                f"experts {len(incomplete)} lack a part of their gradients. Call discard(), and run it again."
            )
            raise _error(head, incomplete) from broken
        failed = _send(client, touched, whole)
        for uid, fault in failed.items():
            if isinstance(fault, _GONE):
                touched[uid].failed(fault)
        faults = {**incomplete, **failed}
        stepped = {uid: each for uid, each in touched.items() if uid not in faults}
        self.end(stepped)
        if len(stepped) < wanted:
            head = (
                f"commit of a mixture: {len(faults)} of {len(touched)} experts are not known to have stepped. Call "
                "discard(), to go on without them; or commit() again, which steps none of the others twice."
            )
            raise _error(head, faults)
        self.end(touched)
        client.discard({uid: touched[uid] for uid in faults})
        client.counters.count("left_out", len(faults))
        return {uid: uid in stepped for uid in touched}

    def __deepcopy__(self, memo: object) -> "MixtureCommit":
        return MixtureCommit(self.accumulates)


def commit_parts(client: ExpertPool, parts: Mapping[str, PendingCommit]) -> None:
    """One step of each expert that was called several times in a backward which does not accumulate.

    One that lacks a part does not step. Raises ``MixtureCommitError`` for one that has all, and does not step either.
    """
    whole, incomplete = _parted(parts)
    failed = _send(client, parts, whole)
    client.discard({uid: parts[uid] for uid in (*incomplete, *failed)})
    if failed:
        head = f"backward of a mixture, sent in parts: {len(failed)} experts are not known to have stepped with it:"
        raise _error(head, failed)


def _send(
    client: ExpertPool, touched: Mapping[str, PendingCommit], whole: Mapping[str, int]
) -> dict[str, BaseException]:
    """Commit those that are whole, at these incarnations, all at once. Returns faults by expert."""
    if not whole:
        return {}

    def called(number: int, uid: str) -> ExpertCall:
        token = client.resolver(uid).token()
        call = client.requests.commit(uid, touched[uid].name, whole[uid], token)

        def accept(answer: Received) -> None:
            client.accept(uid, answer)

        return ExpertCall(call, torch.tensor([number], device="cpu"), accept)  # each call has its own sample

    calls = [called(number, uid) for number, uid in enumerate(whole)]
    needed = torch.ones(len(calls), dtype=torch.int64, device="cpu")
    FanOut(client, calls, needed, deadline=time.monotonic() + client.options.backward_timeout).run()
    client.counters.fanned_out("commit", calls)
    return faults_of(calls)


def _parted(touched: Mapping[str, PendingCommit]) -> tuple[dict[str, int], dict[str, BaseException]]:
    """The incarnations of the mini-batches that are whole, and what is wrong with the others."""
    whole: dict[str, int] = {}
    incomplete: dict[str, BaseException] = {}
    for uid, each in touched.items():
        if why := each.fault:
            incomplete[uid] = CommitError(why)
        elif (incarnation := each.ready()) is not None:
            whole[uid] = incarnation
        else:
            incomplete[uid] = CommitError("its backward has not come to an end")
    return whole, incomplete


def _error(head: str, faults: Mapping[str, BaseException]) -> MixtureCommitError:
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in faults.items()]
    return MixtureCommitError(listed(head, lines), faults)


class MixtureFunction:
    """A `CutFunction`. After `forward`, ``alive`` (samples x k, bool, CPU) says which experts answered.

    ``inputs``: flat, each samples x .... ``keys``: of the calls by span, renewed at every backward.
    """

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
        self._wanted = [x.requires_grad for x in inputs]
        self._like = [x.detach()[:0] for x in inputs]
        self._sent: list[Tensor] | None = [dispatch.take(x.detach()) for x in inputs]
        self._outputs: list[Tensor] = []  # on the meta device: dtype and shape are all that backward wants
        self.alive = torch.zeros(dispatch.samples, dispatch.k, dtype=torch.bool, device=_CPU)

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """One tensor per flat output: samples x k x ..., on the device of the first input."""
        cached, device = self._call.cached, self._like[0].device
        if cached is None:
            outputs = [x.to(device) for x in self._send_forward()]
        else:
            self.alive, outputs = cached.alive, list(cached.answers)
        self._outputs = [torch.empty_like(x, device="meta") for x in outputs]
        return outputs, [True] * len(outputs)

    @property
    def only_once(self) -> str:
        """See `weft.core.autograd.OnceDifferentiable`."""
        return f"each expert of a mixture {ONLY_ONCE}"

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """Zero for the anchor, then one gradient per flat input that wants one."""
        sent = self._sent
        if sent is None:
            raise BackwardTwiceError(TWICE)
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
            found = self._send_backward(sent, [self._dispatch.take_pairs(g) for g in full])
        except BaseException as error:
            self._batch.fail(error)
            raise
        return [zero, *(self._input_gradient(i, rows) for i, rows in enumerate(found))]

    def _send_forward(self) -> list[Tensor]:
        dispatch, options, sent = self._dispatch, self._options, self._sent or []
        buffer = CombineBuffer(dispatch.samples, dispatch.k, finite=options.detect_anomalies)
        floor = options.k_min if options.allow_zero_outputs else max(1, options.k_min)
        if dispatch.k < floor and not options.allow_zero_outputs:  # no expert has failed, and no wait would help
            raise TooFewAnswersError(
                f"forward of a mixture: every sample needs {floor} answers (k_min), but the directory lists only "
                f"{len(self._uids)} living experts of the grid. Start more, need fewer (k_min), or let such samples be "
                "zero (allow_zero_outputs)."
            )
        calls = [self._forward_call(span, sent, buffer) for span in dispatch.spans]
        most = dispatch.sent.sum(1)
        needed = torch.where(most < dispatch.k, most.clamp(max=floor), floor)  # fewer where a capacity has cut
        self._exchange("forward", self._call.deadline, calls, needed, buffer)
        self.alive = buffer.alive.view(dispatch.samples, dispatch.k)
        return buffer.rows() or self._zeros()

    def _forward_call(self, span: RowSpan, sent: Sequence[Tensor], buffer: CombineBuffer) -> ExpertCall:
        uid, key, rows = self._uids[span.expert], self._keys[span], slice(span.start, span.stop)

        def accept(answer: Received) -> Tensor | None:
            self._client.accept(uid, answer)
            key.kept = answer.header.keep
            return buffer.put(self._dispatch.pairs[rows], self._signature.results(answer, _CPU))

        call = self._client.requests.forward(uid, [x[rows] for x in sent], key)
        return ExpertCall(call, self._dispatch.rows[rows], accept)

    def _send_backward(self, sent: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
        dispatch, options, client = self._dispatch, self._options, self._client
        buffer = CombineBuffer(dispatch.samples, dispatch.k, finite=options.detect_anomalies)
        deadline = time.monotonic() + options.backward_timeout
        spans = dispatch.restricted(self.alive)
        counts = Counter(span.expert for span, _ in spans)
        parts = MixtureCommit(True)  # of experts that are called several times, where the backward is to step
        missing: dict[RowSpan, PendingCommit] = {}  # calls whose gradients were not added so far
        calls: dict[RowSpan, ExpertCall] = {}
        for span, left in spans:
            batch = self._batch if self._batch.accumulates else parts
            if batch is not parts or (self._signature.trained and counts[span.expert] > 1):
                missing[span] = batch.open(self._uids[span.expert])
            calls[span] = self._backward_call(span, left, sent, gradients, buffer, missing)
        needed = self.alive.sum(1).clamp(max=options.backward_k_min)
        try:
            self._exchange("backward", deadline, [*calls.values()], needed, buffer)
        except BaseException:
            client.discard(parts.discard())
            raise
        finally:
            for span, mini_batch in missing.items():
                if (fault := calls[span].fault) is not None:
                    mini_batch.failed(fault)
        commit_parts(client, parts.touched())
        return buffer.rows() or [None] * len(sent)

    def _backward_call(
        self,
        span: RowSpan,
        left: Tensor | None,
        sent: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffer: CombineBuffer,
        missing: dict[RowSpan, PendingCommit],
    ) -> ExpertCall:
        """The call of a span, or of those of its rows that are ``left``."""
        client, uid, key = self._client, self._uids[span.expert], self._keys[span]
        self._keys[span] = key.again()
        key.kept = key.kept and left is None  # else the inputs are not those that the server keeps
        rows = slice(span.start, span.stop) if left is None else left
        inputs = [x[rows] for x in sent]
        name = missing[span].name if span in missing else ""

        def accept(answer: Received) -> Tensor | None:
            incarnation = client.accept(uid, answer).incarnation
            mini_batch = missing.pop(span, None)
            if mini_batch is not None:
                mini_batch.added(incarnation)
            return buffer.put(self._dispatch.pairs[rows], self._signature.input_gradients(answer, inputs))

        token = client.resolver(uid).token()
        call, whole = client.requests.backward(uid, inputs, [g[rows] for g in gradients], key, name, token)
        return ExpertCall(call, self._dispatch.rows[rows], accept, whole)

    def _exchange(
        self, direction: Direction, deadline: float, calls: Sequence[ExpertCall], needed: Tensor, buffer: CombineBuffer
    ) -> None:
        """All calls of one direction. Afterwards the buffer holds, for each sample, enough answers or none."""
        client, lenient, after = self._client, self._options.allow_zero_outputs, self._options.timeout_after_k_min
        counts = FanOut(client, calls, needed, deadline=deadline, after=after, lenient=lenient).run().counts
        client.counters.fanned_out(direction, calls)
        short = counts < needed
        many = int(short.sum())
        if many and not lenient:
            what, most = f"{direction} of a mixture", int(needed.max())
            raise too_few_answers(what, len(needed), many, most, faults_of(calls), client.retry)
        buffer.clear(short)
        client.counters.count("zeroed", many if direction == "forward" else 0)

    def _zeros(self) -> list[Tensor]:
        """Zeros for all outputs, when no expert answered and that is no error."""
        outputs, dispatch = self._signature.outputs, self._dispatch
        sizes = self._signature.output_sizes(self._like)
        unknown = [name for name, size in zip(outputs.names, sizes, strict=True) if size is None]
        if unknown:
            raise NoExpertsError(
                f"no expert answered, and the size of the zeros of {', '.join(unknown)} is not known: its free axes "
                "are not those of an input"
            )
        return [
            torch.zeros(dispatch.samples, dispatch.k, *(size or ()), dtype=spec.dtype, device=_CPU)
            for spec, size in zip(outputs.specs, sizes, strict=True)
        ]

    def _input_gradient(self, index: int, rows: Tensor | None) -> Tensor | None:
        """The gradient of one input: the sum over those from the k experts of a sample (samples x k x ...)."""
        like = self._like[index]
        if not self._wanted[index]:
            return None
        if rows is None:
            return like.new_zeros(self._dispatch.samples, *like.shape[1:])
        return rows.sum(1).to(like.device, like.dtype)


def _check_finite(what: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    rows = {name: finite_rows([tensor.detach()]) for name, tensor in zip(names, tensors, strict=True)}
    faults = [f"{name}: {int((~good).sum())} of {len(good)} rows" for name, good in rows.items() if good is not None]
    if faults:
        raise AnomalyError(listed(f"{what} are not finite, and nothing was sent:", faults))
