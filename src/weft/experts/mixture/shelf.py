"""Where the rows that come back are laid down, each at its pair: samples x k x ..., zeros where nothing came.

All tensors of an answer are laid down, or none. With ``finite``, rows with NaN or Inf are left out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed


class Shelf:
    """Rows by pair, on the device of the first answer. ``alive`` says for each pair whether its row came."""

    def __init__(self, samples: int, k: int, *, finite: bool) -> None:
        self._samples, self._k, self._finite = samples, k, finite
        self._flat: list[Tensor] | None = None
        self.alive = torch.zeros(samples * k, dtype=torch.bool)

    def put(self, pairs: Tensor, answer: Sequence[Tensor]) -> Tensor | None:
        """Lay an answer down at these pairs. Returns which of its rows are good, None for all.

        Raises ``SpecError`` that lists the tensors of another number of rows, or of rows of another shape than those
        of the answers before.
        """
        if self._flat is None:
            self._flat = [x.new_zeros(self._samples * self._k, *x.shape[1:]) for x in answer]
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
            flat.index_copy_(0, pairs.to(flat.device), rows.to(flat.device))
        self.alive[pairs] = True
        return good

    def rows(self) -> list[Tensor] | None:
        """What lies there, samples x k x ..., or None if no answer came."""
        if self._flat is None:
            return None
        return [flat.view(self._samples, self._k, *flat.shape[1:]) for flat in self._flat]

    def forget(self, samples: Tensor) -> None:
        """Take away all rows of the samples that are True here."""
        self.alive.view(self._samples, self._k)[samples] = False
        for rows in self.rows() or ():
            rows[samples.to(rows.device)] = 0


def finite_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Which rows are finite in all tensors (bool, CPU), None if all are. Integers are."""
    good: Tensor | None = None
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            mine = tensor.isfinite().flatten(1).all(1).cpu()
            good = mine if good is None else good & mine
    return None if good is None or bool(good.all()) else good
