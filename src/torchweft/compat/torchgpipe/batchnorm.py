"""Replacement for ``torchgpipe.batchnorm``: a batch norm that counts the micro-batches of a mini-batch itself."""

from torch import Tensor, nn

from torchweft.core.context import is_recomputing
from torchweft.core.errors import UsageError
from torchweft.core.validation import is_whole
from torchweft.pipeline import batchnorm

__all__ = ["DeferredBatchNorm"]

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class CountingBatchNorm(batchnorm.DeferredBatchNorm):
    """`weft.DeferredBatchNorm` with torchgpipe's arguments.

    Outside a pipe, in training, it updates its running statistics after every `chunks` calls. Raises UsageError if
    `chunks` is not a positive int.

    Example:
        >>> from torchweft.compat.torchgpipe.batchnorm import DeferredBatchNorm
        >>> norm = DeferredBatchNorm(3, chunks=4)
        >>> for part in torch.randn(8, 3).chunk(4):
        ...     part = norm(part)
        >>> norm.num_batches_tracked
        tensor(1)
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, chunks: int = 1
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.chunks = _checked_chunks(chunks)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize like `weft.DeferredBatchNorm`."""
        alone = self.training and batchnorm._current.step is None and not is_recomputing()
        if alone and None not in self.gathered:
            self.begin()
        output = super().forward(input)
        if alone and len(self.gathered[None]) >= self.chunks:
            self.commit()
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 axes, N x C, but got shape {tuple(input.shape)}")

    @staticmethod
    def convert_deferred_batch_norm(module: nn.Module, chunks: int = 1) -> nn.Module:
        """Replace every ``BatchNorm1d``, ``2d`` and ``3d`` in `module` that tracks running statistics, in place.

        Returns `module`, or its replacement if it is a batch norm itself. Parameters and buffers are kept, not copied.
        """
        count = _checked_chunks(chunks)
        if isinstance(module, CountingBatchNorm):
            module.chunks = count
        elif type(module) in _PLAIN and getattr(module, "running_mean", None) is not None:
            # Not by the constructor, which would make new parameters and lose hooks.
            converted = CountingBatchNorm.__new__(CountingBatchNorm)
            converted.__dict__.update(module.__dict__)
            converted.chunks = count
            return converted
        for name, child in module.named_children():
            module._modules[name] = CountingBatchNorm.convert_deferred_batch_norm(child, count)
        return module


DeferredBatchNorm = CountingBatchNorm


def _checked_chunks(chunks: object) -> int:
    if not is_whole(chunks) or chunks < 1:
        raise UsageError(f"chunks is {chunks!r}, wanted a whole number of micro-batches from 1 up")
    return chunks
