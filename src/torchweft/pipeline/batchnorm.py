"""Batch normalisation whose running statistics do not notice that the mini-batch was cut.

A plain BatchNorm inside a pipeline would update its running statistics once per micro-batch, with the variance of a few
rows. A deferred one normalises with the statistics of the present micro-batch, because the others do not exist yet. It
gathers these statistics, and updates once per mini-batch with those of all rows:

    begin()   micro-batch 0      micro-batch 1      micro-batch 2    commit()
              count, mean, var   count, mean, var   count, mean, var     |
                      \\________________|__________________/             v
                        merged over all rows:  running_mean, running_var, num_batches_tracked + 1

The method is torchgpipe's (arXiv 2004.09910, section 2.3). Moments are merged pairwise (Chan, Golub and LeVeque, 1983).
Sums of squares would be simpler, but lose digits by cancellation.
"""

import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] # no public name

from torchweft.core.context import is_recomputing


class Moments(NamedTuple):
    """Statistics of one micro-batch: values per channel, and the mean and unbiased variance of each channel."""

    values: int
    mean: Tensor
    variance: Tensor


class _StepOfThread(threading.local):
    step: object = None


_current = _StepOfThread()
_committing = threading.Lock()


@contextmanager
def gathering(step: object) -> Generator[None]:
    """Inside, deferred norms in this thread gather for this step."""
    before, _current.step = _current.step, step
    try:
        yield
    finally:
        _current.step = before


class DeferredBatchNorm(_BatchNorm):
    """A BatchNorm that can update its running statistics once per mini-batch, from all micro-batches.

    Between ``begin()`` and ``commit()`` or ``abandon()`` it gathers statistics. Otherwise it is a plain BatchNorm. Its
    ``state_dict`` is that of the plain one. Raises ``ValueError``, as PyTorch's BatchNorm does, if a micro-batch has
    only one value per channel.

    Example:
        >>> norm = weft.DeferredBatchNorm(3)
        >>> norm.begin()
        >>> parts = [norm(part) for part in torch.randn(8, 3).chunk(4)]
        >>> norm.commit()  # one update, by the mean and variance of all 8 rows
        >>> norm.num_batches_tracked
        tensor(1)
    """

    # Moments of the micro-batches since `begin`, by step (None: outside of any step). In the class, because a converted
    # norm is not constructed.
    gathered: Mapping[object, list[Moments]] = MappingProxyType({})

    def begin(self, step: object = None) -> None:
        """Start a mini-batch. Drops an unfinished earlier one of this step."""
        self.__dict__.setdefault("gathered", {})[step] = []

    def abandon(self, step: object = None) -> None:
        self._pop_gathered(step)

    @torch.no_grad()
    def commit(self, step: object = None) -> None:
        """End the mini-batch and update the running statistics as the undivided batch would have."""
        gathered = self._pop_gathered(step)
        if not gathered or self.running_mean is None or self.running_var is None:
            return
        merged, factor = merge(gathered), self.momentum
        # Two steps can end at once, in two threads.
        with _committing:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if factor is None:  # cumulative average
                    factor = 1.0 / float(self.num_batches_tracked)
            for running, moment in ((self.running_mean, merged.mean), (self.running_var, merged.variance)):
                # Computed in the wider of both dtypes, so that a half-precision buffer is rounded only once.
                running.copy_(running.to(moment.dtype).lerp(moment, factor or 0.0))

    def _pop_gathered(self, step: object) -> list[Moments] | None:
        return self.__dict__.get("gathered", {}).pop(step, None)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, N x C or N x C x ..., per channel. Same shape and dtype as ``input``."""
        if not self.training or self.running_mean is None:
            return super().forward(input)
        if is_recomputing():
            # The first forward has gathered already, so the result is thrown away. The operators must be the same,
            # because autograd saves the same tensors only then.
            return self._gather(input, [], self.running_mean)
        gathered = self.gathered.get(_current.step)
        if gathered is None:
            return super().forward(input)
        self._check_input_dim(input)
        return self._gather(input, gathered, self.running_mean)

    def _gather(self, input: Tensor, gathered: list[Moments], running: Tensor) -> Tensor:
        values = input.numel() // max(1, input.size(1))
        wide = torch.promote_types(running.dtype, torch.float32)
        mean = variance = None
        if values and wide == running.dtype:
            # With new buffers and momentum 1, PyTorch's kernel returns the statistics that it computes anyway.
            mean, variance = torch.zeros_like(running), torch.zeros_like(running)
        output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if not values:
            return output
        if mean is None or variance is None:
            axes = [axis for axis in range(input.dim()) if axis != 1]
            variance, mean = torch.var_mean(input.detach().to(wide), axes)
        gathered.append(Moments(values, mean, variance))
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if type(self) is not DeferredBatchNorm:
            super()._check_input_dim(input)
        elif input.dim() < 2:
            raise ValueError(f"expected at least 2 axes, N x C, but got shape {tuple(input.shape)}")

    @staticmethod
    def convert_deferred_batch_norm(module: nn.Module) -> nn.Module:
        return convert_deferred_batch_norm(module)


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """The deferred form of ``nn.BatchNorm1d``, and a subclass of it."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """The deferred form of ``nn.BatchNorm2d``, and a subclass of it."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """The deferred form of ``nn.BatchNorm3d``, and a subclass of it."""


_DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def convert_deferred_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every ``BatchNorm1d``, ``2d`` and ``3d`` in ``module``, in place, by its deferred form.

    Returns ``module``, or its replacement if it is a BatchNorm itself. Parameters, buffers, hooks and flags are kept.
    Norms without running statistics, ``SyncBatchNorm``, lazy norms and subclasses of the user are not replaced.

    Example:
        >>> weft.pipeline.convert_deferred_batch_norm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))[1]
        DeferredBatchNorm1d(3, eps=1e-05, momentum=0.1, ...)
    """
    replaced: dict[nn.Module, DeferredBatchNorm] = {}
    every = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    for name, child in list(every):
        kind = _DEFERRED.get(type(child))
        if kind is None or getattr(child, "running_mean", None) is None:
            continue
        deferred = replaced.get(child)
        if deferred is None:
            # Not constructed, because it takes over the parameters, buffers, hooks and flags of the original.
            deferred = replaced[child] = kind.__new__(kind)
            deferred.__dict__.update(child.__dict__)
        if not name:
            return deferred
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, deferred)
    return module


def merge(moments: list[Moments]) -> Moments:
    means = torch.stack([part.mean for part in moments])
    variances = torch.stack([part.variance for part in moments])
    counts = means.new_tensor([part.values for part in moments]).unsqueeze(1)
    total = sum(part.values for part in moments)
    mean = (counts * means).sum(0) / total
    squares = ((counts - 1) * variances + counts * (means - mean).square()).sum(0)
    return Moments(total, mean, squares / (total - 1))
