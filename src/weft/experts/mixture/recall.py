"""What a forward found that will be recomputed: the recomputation takes it from here, and calls nobody.

    checkpointing   inputs ── router ── calls ──> round: who was chosen, what they answered; kept with the inputs
    recomputing     the same inputs ──> the same round; only the router runs again

Asked again, the experts might answer otherwise, or others be alive: the gradient would be that of another forward.
A round that is never asked for (no backward came) is pushed out by newer ones.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.experts.mixture.grid import Crowd
from weft.experts.mixture.keys import Keys

_MOST = 256


@dataclass(frozen=True)
class Round:
    """``chosen`` (samples x k) of the ``crowd``, who answered (samples x k, bool), what (each samples x k x ...), and
    by which keys they were asked."""

    crowd: Crowd
    chosen: Tensor
    alive: Tensor
    answers: Sequence[Tensor]
    keys: Keys | None = None


class Recall:
    """Rounds by their inputs. Thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        self._lock = threading.Lock()
        self._known: deque[tuple[list[Tensor], Round]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._known)

    def put(self, inputs: Sequence[Tensor], found: Round) -> None:
        """Keep a round, with the inputs as they are now."""
        with self._lock:
            self._known.append(([x.detach().clone() for x in inputs], found))

    def take(self, inputs: Sequence[Tensor]) -> Round | None:
        """The oldest round with these inputs, which is then forgotten."""
        with self._lock:
            for index, (known, found) in enumerate(self._known):
                if all(_same(a, b) for a, b in zip(known, inputs, strict=True)):
                    del self._known[index]
                    return found
        return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.device == b.device and torch.equal(a, b.detach())
