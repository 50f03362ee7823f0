"""Networks that run a module's weights, kept beside the module and not inside of it.

    nn.LSTM      weight_ih_l0, weight_hh_l0, ...            the only owner; keys and copies as torch has them
       |              ^ the very same parameters
       +-- Beside:  Recurrent(LSTMStep(weights)), ...       no child: no keys, not copied, not pickled, made anew

A network is good for the very parameters that it was made of. When they have been replaced (``assign=True``, a swap by
``torch.func.functional_call``), the next call makes another one. Only an export, which puts tensors of its own in their
place, gets the network of the parameters, and hands it those tensors: the exported graph refers to it when it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Net = TypeVar("Net")


def exporting() -> bool:
    """Whether a graph is made of values that are not there yet; not by Dynamo, which sees the real parameters."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def call(net: nn.Module, weights: Mapping[str, Tensor], *arguments: Any, **options: Any) -> Any:
    """Call a network; in an export, with these weights, by their names in it."""
    if exporting():
        return torch.func.functional_call(net, dict(weights), arguments, options)
    return net(*arguments, **options)


class Beside(Generic[Net]):
    """Keeps what was last made, and the tensors that it was made of."""

    def __init__(self) -> None:
        self._kept: tuple[list[Tensor], Net] | None = None

    def get(self, weights: Sequence[Tensor], make: Callable[[], Net]) -> Net:
        """What was made of these very tensors, or else what `make` makes of them now; in an export, what is there."""
        kept = self._kept
        if kept is None or (list(map(id, kept[0])) != list(map(id, weights)) and not exporting()):
            self._kept = kept = (list(weights), make())
        return kept[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Beside, ())  # a copy has other weights
