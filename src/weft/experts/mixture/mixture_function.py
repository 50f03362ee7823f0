"""One call of a mixture as one node of autograd: rows out to the experts and back, and their gradients the same way.

    inputs ──take──> rows by expert ──calls──> answers ──put──> outputs, samples x k x ...     zeros where none came
    their  <──sum─── gradients of the rows <──calls──  rows of the outputs' gradients          only where one came

The weighted mean stays outside, in plain autograd: so the router's gradient is PyTorch's own. An expert that did not
answer in forward is not called in backward; one that fails in backward adds nothing to the inputs' gradients.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.core.context import is_checkpointing
from weft.core.errors import TWICE, BackwardTwiceError, listed
from weft.experts.client.autograd import ONLY_ONCE
from weft.experts.client.stub import IdempotencyKey
from weft.experts.errors import AnomalyError, NoExpertsError, TooFewAnswersError
from weft.experts.mixture.dispatch import CombineBuffer, Dispatch, RowSpan, finite_rows
from weft.experts.mixture.fanout import (
    Accept,
    CachedCall,
    Direction,
    FanOut,
    GridClient,
    MixtureSignature,
    too_few_answers,
)
from weft.experts.mixture.grid import LiveExperts
from weft.experts.mixture.mini_batch import Contribution, MixtureMiniBatch, commit_parts
from weft.experts.wire import Call, Received

_CPU = torch.device("cpu")


class MixtureFunction:
    """A `CutFunction`. After `forward`, ``alive`` (samples x k, bool, CPU) says which experts answered.

    ``live``: the experts as the dispatch numbers them. ``inputs``: flat, each samples x .... ``deadline``: of forward.
    ``cached``: the forward, if this is its recomputation. ``keep``, ``evaluation``: see `IdempotencyKey`.
    """

    def __init__(
        self,
        client: GridClient,
        signature: MixtureSignature,
        batch: MixtureMiniBatch,
        live: LiveExperts,
        dispatch: Dispatch,
        inputs: Sequence[Tensor],
        anchor: Tensor,
        deadline: float,
        cached: CachedCall | None,
        keep: bool,
        evaluation: bool,
    ) -> None:
        self._client, self._signature, self._batch, self._options = client, signature, batch, client.options
        self._uids, self._dispatch, self._cached, self._anchor = live.uids, dispatch, cached, anchor
        self._deadline = deadline
        # A forward that will be recomputed is not the one that autograd walks back.
        keep = keep and torch.is_grad_enabled() and not is_checkpointing()
        if cached is None:
            self.keys = {span: IdempotencyKey(keep, evaluation) for span in dispatch.spans}
        else:
            self.keys = cached.keys
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
        cached, device = self._cached, self._like[0].device
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
        with Contribution(self._batch) as contribution:
            if self._options.detect_anomalies:
                _check_finite("gradients of outputs of a mixture", self._signature.outputs.names, full)
            found = self._send_backward(sent, [self._dispatch.take_pairs(g) for g in full], contribution)
        return [zero, *(self._input_gradient(i, rows) for i, rows in enumerate(found))]

    def _send_forward(self) -> list[Tensor]:
        signature, dispatch, options, sent = self._signature, self._dispatch, self._options, self._sent or []
        buffer = CombineBuffer(dispatch.samples, dispatch.k, finite=options.detect_anomalies)
        floor = options.k_min if options.allow_zero_outputs else max(1, options.k_min)
        if dispatch.k < floor and not options.allow_zero_outputs:  # no expert has failed, and no wait would help
            raise TooFewAnswersError(
                f"forward of a mixture: every sample needs {floor} answers (k_min), but the directory lists only "
                f"{len(self._uids)} living experts of the grid. Start more, need fewer (k_min), or let such samples be "
                "zero (allow_zero_outputs)."
            )
        build = self._client.requests.forward
        calls = [build(self._uids[span.expert], _rows(sent, span, None), self.keys[span]) for span in dispatch.spans]
        places = [torch.arange(span.start, span.stop, device=_CPU) for span in dispatch.spans]

        def accept(index: int, answer: Received) -> Tensor | None:
            self._client.accept(calls[index].header.uid, answer)
            self.keys[dispatch.spans[index]].kept = answer.header.keep
            return buffer.put(dispatch.pairs[places[index]], signature.results(answer, _CPU))

        most = dispatch.sent.sum(1)
        needed = torch.where(most < dispatch.k, most.clamp(max=floor), floor)  # fewer where a capacity has cut
        self._exchange("forward", self._deadline, calls, {}, places, needed, buffer, accept)
        self.alive = buffer.alive.view(dispatch.samples, dispatch.k)
        return buffer.rows() or self._zeros()

    def _send_backward(
        self, sent: Sequence[Tensor], rows: Sequence[Tensor], contribution: Contribution
    ) -> Sequence[Tensor | None]:
        signature, dispatch, options, client = self._signature, self._dispatch, self._options, self._client
        buffer = CombineBuffer(dispatch.samples, dispatch.k, finite=options.detect_anomalies)
        deadline = time.monotonic() + options.backward_timeout
        calls: list[Call] = []
        wholes: dict[int, Call] = {}
        places: list[Tensor] = []
        inputs: list[Sequence[Tensor]] = []
        spans = dispatch.restricted(self.alive)
        counts = Counter(span.expert for span, _ in spans)
        for index, (span, left) in enumerate(spans):
            uid, key = self._uids[span.expert], self.keys[span]
            self.keys[span] = key.again()
            key.kept = key.kept and left is None  # else the inputs are not those that the server keeps
            mini_batch = contribution.begin(uid, split=signature.trained and counts[span.expert] > 1)
            inputs.append(_rows(sent, span, left))
            call, wholes[index] = client.requests.backward(
                uid, inputs[-1], _rows(rows, span, left), key, mini_batch, client.resolver(uid).token()
            )
            calls.append(call)
            places.append(torch.arange(span.start, span.stop, device=_CPU) if left is None else left)

        def accept(index: int, answer: Received) -> Tensor | None:
            contribution.added(index, client.accept(calls[index].header.uid, answer).incarnation)
            return buffer.put(dispatch.pairs[places[index]], signature.input_gradients(answer, inputs[index]))

        needed = self.alive.sum(1).clamp(max=options.backward_k_min)
        try:
            self._exchange("backward", deadline, calls, wholes, places, needed, buffer, accept, contribution)
        except BaseException:
            client.discard(contribution.parts)
            raise
        if contribution.parts:
            commit_parts(self._client, contribution.parts)
        return buffer.rows() or [None] * len(sent)

    def _exchange(
        self,
        direction: Direction,
        deadline: float,
        calls: Sequence[Call],
        wholes: Mapping[int, Call],
        places: Sequence[Tensor],
        needed: Tensor,
        buffer: CombineBuffer,
        accept: Accept,
        contribution: Contribution | None = None,
    ) -> None:
        """All calls of one direction. Afterwards the buffer holds, for each sample, enough answers or none."""
        client, options = self._client, self._options
        samples = [self._dispatch.rows[place] for place in places]
        lenient, after = options.allow_zero_outputs, options.timeout_after_k_min
        fan_out = FanOut(
            client, calls, wholes, samples, needed, accept, deadline=deadline, after=after, lenient=lenient
        )
        faults = fan_out.run().faults
        if contribution is not None:
            contribution.failed(faults)
        client.counters.fanned_out(direction, len(calls), sum(map(len, places)), faults.values())
        short = fan_out.counts < needed
        many = int(short.sum())
        if many and not lenient:
            by_uid = {calls[index].header.uid: fault for index, fault in faults.items()}
            what, most = f"{direction} of a mixture", int(needed.max())
            raise too_few_answers(what, len(needed), many, most, by_uid, client.retry)
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


def _rows(tensors: Sequence[Tensor], span: RowSpan, left: Tensor | None) -> list[Tensor]:
    """The rows of one call: views, unless some of them are left out."""
    if left is None:
        return [tensor[span.start : span.stop] for tensor in tensors]
    return [tensor.index_select(0, left.to(tensor.device)) for tensor in tensors]


def _check_finite(what: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    rows = {name: finite_rows([tensor.detach()]) for name, tensor in zip(names, tensors, strict=True)}
    faults = [f"{name}: {int((~good).sum())} of {len(good)} rows" for name, good in rows.items() if good is not None]
    if faults:
        raise AnomalyError(listed(f"{what} are not finite, and nothing was sent:", faults))
