"""One call of a mixture as one node of autograd: rows out to the experts and back, and their gradients the same way.

    inputs ──take──> rows by expert ──calls──> answers ──put──> outputs, samples x k x ...     zeros where none came
    their  <──sum─── gradients of the rows <──calls──  rows of the outputs' gradients          not asked again

The weighted mean stays outside, in plain autograd: so the router's gradient is PyTorch's own. An expert that did not
answer in forward is not called in backward; one that fails in backward adds nothing to the inputs' gradients.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import TWICE, BackwardTwiceError, listed
from weft.experts.client.autograd import ONLY_ONCE
from weft.experts.errors import AnomalyError, NoExpertsError
from weft.experts.mixture.calls import Calls, Request
from weft.experts.mixture.commit import Committer
from weft.experts.mixture.dispatch import Dispatch, Span
from weft.experts.mixture.gathering import Accept, Patience, few_live, gather, too_few
from weft.experts.mixture.keys import Keys, is_walked_back
from weft.experts.mixture.layout import Layout
from weft.experts.mixture.minibatch import Addition, MiniBatch
from weft.experts.mixture.recall import Round
from weft.experts.mixture.shelf import Shelf, finite_rows
from weft.experts.mixture.tally import Direction, Tally
from weft.experts.mixture.terms import Terms
from weft.experts.wire import Received

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Means:
    """What every passage of a mixture works with.

    ``anchor`` goes into the node before the inputs. ``keep_graph``: servers are asked to keep graphs for backward;
    ``evaluation``: the experts run as after ``eval()``.
    """

    calls: Calls
    layout: Layout
    terms: Terms
    tally: Tally
    batch: MiniBatch
    anchor: Tensor
    keep_graph: bool
    evaluation: bool


class Passage:
    """A `weft.core.boundary.Journey`. After `forward`, ``alive`` (samples x k, bool, CPU) says who answered, and
    ``keys`` are what its backwards go by.

    Args:
        uids: the experts as the dispatch numbers them.
        inputs: flat, each samples x ....
        deadline: of forward, time of `time.monotonic`; backward has one of its own when it begins.
        recalled: of the same call before, if this is its recomputation. Then forward calls nobody.

    Raises ``AnomalyError`` if the inputs are not finite and ``detect_anomalies`` is set.
    """

    def __init__(
        self,
        means: Means,
        uids: Sequence[str],
        dispatch: Dispatch,
        inputs: Sequence[Tensor],
        deadline: float,
        recalled: Round | None = None,
    ) -> None:
        self._means, self._uids, self._dispatch, self._recalled = means, uids, dispatch, recalled
        self._deadline = deadline
        known = None if recalled is None else recalled.keys
        keep = means.keep_graph and is_walked_back()
        self.keys = known or Keys(dispatch.spans, keep=keep, evaluation=means.evaluation)
        if means.terms.detect_anomalies:
            _refuse("a mixture was given inputs", means.layout.inputs.names, inputs)
        self._wanted = [x.requires_grad for x in inputs]
        self._like = [x.detach()[:0] for x in inputs]
        self._sizes = means.layout.sizes(inputs)
        self._sent: list[Tensor] | None = [dispatch.take(x.detach()) for x in inputs]
        self._outputs: list[Tensor] = []  # on the meta device: dtype and shape are all that backward wants
        self.alive = torch.zeros(dispatch.samples, dispatch.k, dtype=torch.bool, device=_CPU)

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """One tensor per flat output: samples x k x ..., on the device of the first input.

        Raises ``TooFewAnswersError`` if some sample has fewer answers than it needs, before anybody is asked if so few
        experts live.
        """
        recalled, device = self._recalled, self._like[0].device
        if recalled is None:
            outputs = [x.to(device) for x in self._ask_forward()]
        else:
            self.alive, outputs = recalled.alive, list(recalled.answers)
        self._outputs = [torch.empty_like(x, device="meta") for x in outputs]
        return outputs, [True] * len(outputs)

    @property
    def only_once(self) -> str:
        """See `weft.core.boundary.OnceDifferentiable`."""
        return f"each expert of a mixture {ONLY_ONCE}"

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """Zero for the anchor, then one gradient per flat input that wants one. Each call is a backward of the experts.

        Raises ``TooFewAnswersError`` as forward does, ``AnomalyError`` for gradients that are not finite.
        """
        sent = self._sent
        if sent is None:
            raise BackwardTwiceError(TWICE)
        if not retain:
            self._sent = None
        zero = torch.zeros_like(self._means.anchor)
        if all(gradient is None for gradient in gradients):
            return [zero, *[None] * len(sent)]
        pairs = zip(gradients, self._outputs, strict=True)
        full = [torch.zeros_like(out, device=_CPU) if g is None else g for g, out in pairs]
        with self._means.batch.addition() as addition:
            if self._means.terms.detect_anomalies:
                _refuse("a mixture was given gradients of outputs", self._means.layout.outputs.names, full)
            found = self._ask_backward(sent, [self._dispatch.take_pairs(g) for g in full], addition)
        return [zero, *(self._gradient(i, rows) for i, rows in enumerate(found))]

    def _ask_forward(self) -> list[Tensor]:
        means, dispatch, terms = self._means, self._dispatch, self._means.terms
        sent, signature = self._sent or [], means.layout.signature
        shelf = Shelf(dispatch.samples, dispatch.k, finite=terms.detect_anomalies)
        floor = terms.k_min if terms.allow_zero_outputs else max(1, terms.k_min)
        if dispatch.k < floor and not terms.allow_zero_outputs:  # nobody has failed, and no wait would help
            raise few_live(len(self._uids), floor)
        requests = [
            Request(
                means.calls.requests.forward(self._uids[span.expert], _part(sent, span, None), self.keys.forward(span)),
                self._deadline,
            )
            for span in dispatch.spans
        ]
        places = [torch.arange(span.start, span.stop, device=_CPU) for span in dispatch.spans]

        def accept(index: int, answer: Received) -> Tensor | None:
            self.keys.heard(dispatch.spans[index], answer)
            return shelf.put(dispatch.pairs[places[index]], signature.results(answer, _CPU))

        most = dispatch.sent.sum(1)
        needed = torch.where(most < dispatch.k, most.clamp(max=floor), floor)  # fewer for whom a capacity cut
        self._exchange(
            "forward",
            self._deadline,
            requests,
            places,
            needed,
            shelf,
            accept,
        )
        self.alive = shelf.alive.view(dispatch.samples, dispatch.k)
        return shelf.rows() or self._nothing()

    def _ask_backward(
        self, sent: Sequence[Tensor], rows: Sequence[Tensor], addition: Addition
    ) -> Sequence[Tensor | None]:
        means, dispatch, terms = self._means, self._dispatch, self._means.terms
        signature = means.layout.signature
        shelf = Shelf(dispatch.samples, dispatch.k, finite=terms.detect_anomalies)
        deadline = time.monotonic() + terms.backward_timeout
        requests: list[Request] = []
        places: list[Tensor] = []
        inputs: list[Sequence[Tensor]] = []
        calls = list(dispatch.without(self.alive))
        counts = Counter(span.expert for span, _ in calls)
        for span, left in calls:
            uid, key = self._uids[span.expert], self.keys.backward(span, whole=left is None)
            inputs.append(_part(sent, span, left))
            mini_batch = addition.begin(uid, split=signature.trained and counts[span.expert] > 1)
            call, whole = means.calls.requests.backward(
                uid, inputs[-1], _part(rows, span, left), key, mini_batch, means.calls.token(uid)
            )
            requests.append(Request(call, deadline, whole))
            places.append(torch.arange(span.start, span.stop, device=_CPU) if left is None else left)
        try:
            self._exchange(
                "backward",
                deadline,
                requests,
                places,
                self.alive.sum(1).clamp(max=terms.backward_k_min),
                shelf,
                lambda i, answer: shelf.put(dispatch.pairs[places[i]], signature.input_gradients(answer, inputs[i])),
                addition,
            )
        except BaseException:
            means.calls.discard(addition.parts)
            raise
        if addition.parts:
            Committer(means.calls, terms, means.tally, means.batch).commit_parts(addition.parts)
        return shelf.rows() or [None] * len(sent)

    def _exchange(
        self,
        direction: Direction,
        deadline: float,
        requests: Sequence[Request],
        places: Sequence[Tensor],
        needed: Tensor,
        shelf: Shelf,
        accept: Accept,
        addition: Addition | None = None,
    ) -> None:
        """All calls of one direction. What comes back lies on the shelf, for each sample enough or none."""
        means, terms = self._means, self._means.terms
        patience = Patience(deadline, terms.timeout_after_k_min, terms.allow_zero_outputs)
        samples = [self._dispatch.rows[place] for place in places]

        def heard(index: int, answer: Received) -> Tensor | None:
            receipt = means.calls.accept(requests[index].uid, answer)
            if addition is not None:
                addition.added(index, receipt.incarnation)
            return accept(index, answer)

        gathered = gather(means.calls, requests, samples, needed, patience, heard)
        if addition is not None:
            addition.failed(gathered.faults)
        means.tally.passed(direction, len(requests), sum(map(len, places)), gathered.faults.values())
        short = gathered.counts < needed
        many = int(short.sum())
        if not many:
            return
        if not terms.allow_zero_outputs:
            faults = {requests[index].uid: fault for index, fault in gathered.faults.items()}
            what = f"{direction} of a mixture"
            raise too_few(what, len(needed), many, int(needed.max()), faults, means.calls.retry)
        shelf.forget(short)
        means.tally.count("zeroed", many if direction == "forward" else 0)

    def _nothing(self) -> list[Tensor]:
        """Zeros for all outputs, when nobody answered and that is no error."""
        outputs, dispatch = self._means.layout.outputs, self._dispatch
        unknown = [name for name, size in zip(outputs.names, self._sizes, strict=True) if size is None]
        if unknown:
            raise NoExpertsError(
                f"no expert answered, and how large the zeros of {', '.join(unknown)} would be is not known: its free "
                "axes are not those of an input"
            )
        return [
            torch.zeros(dispatch.samples, dispatch.k, *(size or ()), dtype=spec.dtype, device=_CPU)
            for spec, size in zip(outputs.specs, self._sizes, strict=True)
        ]

    def _gradient(self, index: int, rows: Tensor | None) -> Tensor | None:
        """The gradient of one input: the sum over what the k experts of a sample sent (samples x k x ...)."""
        like = self._like[index]
        if not self._wanted[index]:
            return None
        if rows is None:
            return like.new_zeros(self._dispatch.samples, *like.shape[1:])
        return rows.sum(1).to(like.device, like.dtype)


def _part(tensors: Sequence[Tensor], span: Span, left: Tensor | None) -> list[Tensor]:
    """The rows of one call: views, unless some of them are left out."""
    if left is None:
        return [tensor[span.start : span.stop] for tensor in tensors]
    return [tensor.index_select(0, left.to(tensor.device)) for tensor in tensors]


def _refuse(what: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise if these are not finite."""
    rows = {name: finite_rows([tensor.detach()]) for name, tensor in zip(names, tensors, strict=True)}
    faults = [
        f"{name}: {int((~good).sum())} of {len(good)} rows are not" for name, good in rows.items() if good is not None
    ]
    if faults:
        raise AnomalyError(listed(f"{what} that are not finite, and nothing was sent:", faults))
