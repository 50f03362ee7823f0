"""The keys of the calls of a passage: by the one key of forward and backward a server finds the graph that it kept.

forward            key k ──> the server keeps its graph under k, if it has a budget for that
backward           key k ──> walks that graph; where there is none, or rows are missing, the forward runs again
one more backward  a key of its own: it is one more step, not a repetition
"""

from collections.abc import Iterable

import torch

from weft.core.ambient import is_checkpointing
from weft.experts.client.key import Key
from weft.experts.mixture.dispatch import Span
from weft.experts.wire import Received


class Keys:
    """Of each call one. ``keep``: forward has keys too, and the first backward of the same call the same one."""

    def __init__(self, spans: Iterable[Span], *, keep: bool) -> None:
        self._kept = {span: Key() for span in spans} if keep else {}

    def forward(self, span: Span) -> Key | None:
        """Under which the graph is to be kept; None: not at all."""
        return self._kept.get(span)

    def heard(self, span: Span, answer: Received) -> None:
        """What the answer of its forward says of what was kept."""
        key = self._kept.get(span)
        if key is not None:
            key.heard(answer)

    def backward(self, span: Span, *, whole: bool) -> Key:
        """Of one backward: no two are the same. Unless it is of the ``whole`` span, its inputs are others."""
        key = self._kept.pop(span, None) or Key()
        key.kept = key.kept and whole
        return key


def is_walked_back() -> bool:
    """Whether autograd will walk back what is called now. A forward that will be recomputed is not what it walks."""
    return torch.is_grad_enabled() and not is_checkpointing()
