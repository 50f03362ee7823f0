"""The keys of the calls of a passage, one for the forward of an expert and its backward; see `IdempotencyKey`.

forward            key k    ──> the server keeps its graph under k, if that is wished and it has a budget for that
backward           key k    ──> walks that graph; where there is none, or rows are missing, the forward runs again
one more backward  key k+1  ──> it is one more step, not a repetition
"""

from collections.abc import Iterable

import torch

from weft.core.ambient import is_checkpointing
from weft.experts.client.stub import IdempotencyKey
from weft.experts.mixture.dispatch import Span
from weft.experts.wire import Received


class Keys:
    """Of each call one. ``keep``: servers are asked to keep graphs. ``evaluation``: modules run as after ``eval()``."""

    def __init__(self, spans: Iterable[Span], *, keep: bool, evaluation: bool) -> None:
        self._keys = {span: IdempotencyKey(keep, evaluation) for span in spans}

    def forward(self, span: Span) -> IdempotencyKey:
        """Of its forward."""
        return self._keys[span]

    def heard(self, span: Span, answer: Received) -> None:
        """What the answer of its forward says of what was kept."""
        self._keys[span].on_response(answer)

    def backward(self, span: Span, *, whole: bool) -> IdempotencyKey:
        """Of one backward: no two are the same. Unless it is of the ``whole`` span, its inputs are others."""
        key = self._keys[span]
        self._keys[span] = key.again()
        key.kept = key.kept and whole
        return key


def is_walked_back() -> bool:
    """Whether autograd will walk back what is called now. A forward that will be recomputed is not what it walks."""
    return torch.is_grad_enabled() and not is_checkpointing()
