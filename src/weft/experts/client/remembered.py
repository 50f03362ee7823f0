"""What a forward answered that will be recomputed: the recomputation takes the answer from here.

    checkpointing   inputs ──> server ──> outputs, remembered with the inputs
    recomputing     the same inputs ──> the remembered outputs; nothing is sent

A pipe recomputes a stage in backward to save memory. A remote expert has nothing to save: it keeps no graph here.
And asked again it might answer otherwise, if others have trained it meanwhile: the gradient would be that of another
forward. What is never asked for (no backward came) is pushed out by newer ones.
"""

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.experts.client.key import Key

_MOST = 256


class Remembered:
    """Thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        self._lock = threading.Lock()
        self._known: deque[tuple[list[Tensor], list[Tensor], Key]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._known)

    def put(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], key: Key) -> None:
        """Remember an answer, the inputs as they are now, and the key that backward is to have."""
        copies = ([tensor.detach().clone() for tensor in inputs], [tensor.detach().clone() for tensor in outputs])
        with self._lock:
            self._known.append((*copies, key))

    def take(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Key] | None:
        """The oldest answer to these inputs, with its key; it is then forgotten."""
        with self._lock:
            for place, (known, outputs, key) in enumerate(self._known):
                if _equal(known, inputs):
                    del self._known[place]
                    return outputs, key
        return None


def _equal(known: Sequence[Tensor], seen: Sequence[Tensor]) -> bool:
    pairs = zip(known, seen, strict=True)
    return all(a.shape == b.shape and a.device == b.device and torch.equal(a, b.detach()) for a, b in pairs)
