"""What the experts of a mixture take and return. All of a grid are alike: that of the first to tell is taken, once."""

from collections.abc import Sequence

from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.experts.client.signature import Signature
from weft.experts.wire.service import Description


class Layout:
    """A signature whose outputs can be averaged. Raises ``UsageError`` that lists those that cannot."""

    def __init__(self, description: Description) -> None:
        self.signature = Signature(description)
        self.inputs, self.outputs = self.signature.inputs, self.signature.outputs
        self.most_rows = description.max_batch_size
        pairs = zip(self.outputs.names, self.outputs.specs, strict=True)
        faults = [
            f"{name} is of {spec.dtype}, wanted floating-point or complex numbers, which have a weighted mean"
            for name, spec in pairs
            if not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        ]
        if faults:
            raise UsageError(listed(f"expert {description.name!r} cannot be part of a mixture:", faults))

    def sizes(self, inputs: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
        """The sizes of each output beyond the batch axis, as far as they are known without an answer.

        A free axis is known from the first input whose spec has the same shape; otherwise it is not (None).
        """
        shapes = {spec.shape: tuple(x.shape) for spec, x in reversed([*zip(self.inputs.specs, inputs, strict=True)])}
        found: list[tuple[int, ...] | None] = []
        for spec in self.outputs.specs:
            inner = [size for size in spec.shape[1:] if size is not None]
            like = shapes.get(spec.shape)
            known = tuple(inner) if len(inner) == len(spec.shape) - 1 else None
            found.append(known if like is None else like[1:])
        return found
