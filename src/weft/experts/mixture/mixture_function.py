"""One call of a mixture as one node of autograd: rows out to the experts and back, and their gradients the same way.

    inputs ──take──> rows by expert ──calls──> answers ──put──> outputs, samples x k x ...     zeros where none came
    their  <──sum─── gradients of the rows <──calls──  rows of the outputs' gradients          only where one came

The weighted mean stays outside, in plain autograd: so the router's gradient is PyTorch's own. An expert that did not
answer in forward is not called in backward; one that fails in backward adds nothing to the inputs' gradients.
"""

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.errors import TWICE, BackwardTwiceError, listed
from weft.experts.client.autograd import ONLY_ONCE
from weft.experts.client.stub import IdempotencyKey, OpenMiniBatch
from weft.experts.errors import AnomalyError, NoExpertsError, TooFewAnswersError
from weft.experts.mixture.dispatch import CombineBuffer, Dispatch, RowSpan, finite_rows
from weft.experts.mixture.fanout import (
    Direction,
    ExpertCall,
    FanOut,
    GridClient,
    MixtureCall,
    faults_of,
    too_few_answers,
)
from weft.experts.mixture.mini_batch import MixtureMiniBatch, commit_parts
from weft.experts.wire import Received

_CPU = torch.device("cpu")


class MixtureFunction:
    """A `CutFunction`. After `forward`, ``alive`` (samples x k, bool, CPU) says which experts answered.

    ``inputs``: flat, each samples x .... ``keys``: of the calls by span, renewed at every backward.
    """

    def __init__(
        self,
        client: GridClient,
        batch: MixtureMiniBatch,
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
        self._sizes = signature.output_sizes(inputs)
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
        with self._batch.backward():
            if self._options.detect_anomalies:
                _check_finite("gradients of outputs of a mixture", self._signature.outputs.names, full)
            found = self._send_backward(sent, [self._dispatch.take_pairs(g) for g in full])
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
        parts = MixtureMiniBatch(True)  # of experts that are called several times, where the backward is to step
        missing: dict[RowSpan, OpenMiniBatch] = {}  # calls whose gradients were not added so far
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
        missing: dict[RowSpan, OpenMiniBatch],
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
        faults = [each.fault for each in calls if each.fault is not None]
        client.counters.fanned_out(direction, len(calls), sum(len(each.samples) for each in calls), faults)
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
        unknown = [name for name, size in zip(outputs.names, self._sizes, strict=True) if size is None]
        if unknown:
            raise NoExpertsError(
                f"no expert answered, and the size of the zeros of {', '.join(unknown)} is not known: its free axes "
                "are not those of an input"
            )
        return [
            torch.zeros(dispatch.samples, dispatch.k, *(size or ()), dtype=spec.dtype, device=_CPU)
            for spec, size in zip(outputs.specs, self._sizes, strict=True)
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
