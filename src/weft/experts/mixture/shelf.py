"""Where the rows that come back are laid down, each at its pair: samples x k x ..., zeros where nothing came.

All tensors of an answer are laid down, or none. With ``finite``, rows with NaN or Inf are left out.

On the CPU rows are copied by numpy, in one thread: while some experts have answered the others still work, maybe on
this machine, and torch's threads would take their cores from them, for longer than the copy takes. Zeros are written
only at the end, where nothing came.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed


class Shelf:
    """Rows by pair, on the device of the first answer. ``alive`` says for each pair whether its row came."""

    def __init__(self, samples: int, k: int, *, finite: bool) -> None:
        self._samples, self._k, self._finite = samples, k, finite
        self._flat: list[Tensor] | None = None
        self.alive = torch.zeros(samples * k, dtype=torch.bool, device="cpu")

    def put(self, pairs: Tensor, answer: Sequence[Tensor]) -> Tensor | None:
        """Lay an answer down at these pairs. Returns which of its rows are good, None for all.

        Raises ``SpecError`` that lists the tensors of another number of rows, or of rows of another shape than those
        of the answers before.
        """
        if self._flat is None:
            self._flat = [x.new_empty(self._samples * self._k, *x.shape[1:]) for x in answer]
        faults = [
            f"tensor {i} has shape {tuple(seen.shape)}, wanted {(len(pairs), *flat.shape[1:])}"
            for i, (flat, seen) in enumerate(zip(self._flat, answer, strict=True))
            if seen.shape != (len(pairs), *flat.shape[1:])
        ]
        if faults:
            raise SpecError(listed("the answer does not fit what was asked, and what the others said:", faults))
        good = finite_rows(answer) if self._finite else None
        if good is not None:
            pairs, answer = pairs[good], [x[good.to(x.device)] for x in answer]
        for flat, rows in zip(self._flat, answer, strict=True):
            _lay(flat, pairs, rows.to(flat))
        self.alive[pairs] = True
        return good

    def rows(self) -> list[Tensor] | None:
        """What lies there, samples x k x ..., or None if no answer came."""
        if self._flat is None:
            return None
        if not bool(self.alive.all()):
            for flat in self._flat:
                flat[~self.alive.to(flat.device)] = 0
        return [flat.view(self._samples, self._k, *flat.shape[1:]) for flat in self._flat]

    def forget(self, samples: Tensor) -> None:
        """Take away all rows of the samples that are True here."""
        self.alive.view(self._samples, self._k)[samples] = False


def _lay(flat: Tensor, pairs: Tensor, rows: Tensor) -> None:
    """Write these rows at these pairs."""
    if flat.device.type == "cpu":
        _bytes(flat)[pairs.numpy()] = _bytes(rows)
    else:
        flat.index_copy_(0, pairs.to(flat.device), rows)


def _bytes(tensor: Tensor) -> Any:
    """The rows as bytes, for numpy knows not all dtypes: a view, if the rows lie one after the other."""
    return tensor.reshape(len(tensor), prod(tensor.shape[1:])).contiguous().view(torch.uint8).numpy()


def finite_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Which rows are finite in all tensors (bool, CPU), None if all are. Integers are."""
    good: Tensor | None = None
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            mine = tensor.isfinite().flatten(1).all(1).cpu()
            good = mine if good is None else good & mine
    return None if good is None or bool(good.all()) else good
