"""The interface of torchgpipe, implemented on `weft.Pipe`: a program that uses torchgpipe changes one import.

    from torchgpipe import GPipe                     from torchweft.compat.torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time   from torchweft.compat.torchgpipe.balance import balance_by_time
    from torchgpipe.skip import skippable, ...       from torchweft.compat.torchgpipe.skip import skippable, ...

torchgpipe (Kim et al., arXiv 2004.09910) is the source of the design. docs/torchgpipe.md lists the differences.
"""

from collections.abc import Iterable
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn

from torchweft.compat.torchgpipe.batchnorm import DeferredBatchNorm
from torchweft.core.context import is_checkpointing, is_recomputing
from torchweft.core.errors import PartitionError, UsageError
from torchweft.core.torch_internals import parse_to
from torchweft.pipeline.config import sizes_of
from torchweft.pipeline.devices import places_of
from torchweft.pipeline.partition import balance_by_size, balance_by_time
from torchweft.pipeline.pipe import Pipe
from torchweft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = [
    "DeferredBatchNorm", "GPipe", "Namespace", "balance_by_size", "balance_by_time", "is_checkpointing",
    "is_recomputing", "pop", "skippable", "stash", "verify_skippables",
]  # fmt: skip

Device = torch.device | int | str
_MOVED = (
    "a GPipe cannot be moved to another device, because it places its layers itself; give it devices= when it is made, "
    "and move its input instead"
)


class GPipe(Pipe):
    """`weft.Pipe` with the arguments and behaviour of ``torchgpipe.GPipe``.

    `balance` is required. `balance_by_time` and `balance_by_size` compute one. `devices` are all CUDA devices by
    default, and surplus devices are ignored. `chunks` can be a whole float. Put the target on ``devices[-1]``, where
    the output is.

    Raises TypeError if the module is not an `nn.Sequential` or its skips do not match, IndexError if there are fewer
    devices than partitions, and ValueError for other invalid arguments.

    Example:
        >>> from torchweft.compat.torchgpipe import GPipe
        >>> model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), balance=[1, 1], devices=["cpu", "cpu"], chunks=2)
        >>> model(torch.randn(8, 4)).sum().backward()
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | Device | None = None,
        chunks: int | float = 1,
        checkpoint: Literal["always", "except_last", "never"] = "except_last",
        deferred_batch_norm: bool = False,
        batch_dim: int | None = None,
    ) -> None:
        if balance is None:
            raise UsageError(
                "GPipe needs a balance, the number of layers in each partition; measure one with "
                "balance_by_time(partitions, module, sample), or use weft.Pipe, which balances by itself"
            )
        sizes = sizes_of(balance)
        try:
            super().__init__(
                module,
                chunks=int(chunks) if isinstance(chunks, float) and chunks.is_integer() else cast(int, chunks),
                devices=None if devices is None else places_of(devices)[: len(sizes) or 1],
                balance=sizes,
                checkpoint=checkpoint,
                deferred_batch_norm=deferred_batch_norm,
                batch_dim=batch_dim,
            )
        except PartitionError as error:
            # The balance is valid, so the fault is too few devices, for which torchgpipe raises an IndexError.
            if sum(sizes) == len(module) and min(sizes) > 0:
                raise IndexError(str(error)) from error
            raise
        self.register_load_state_dict_pre_hook(_with_plain_keys)

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Raise TypeError, as `to` does for a device."""
        raise TypeError(_MOVED)

    def cpu(self) -> NoReturn:
        """Raise TypeError, as `to` does for a device."""
        raise TypeError(_MOVED)

    def to(self, *args: Any, **kwargs: Any) -> "GPipe":
        """Change dtypes like `nn.Module.to`. Raises TypeError for a device, because GPipe places its layers itself."""
        if parse_to(*args, **kwargs)[0] is not None:
            raise TypeError(_MOVED)
        return super().to(*args, **kwargs)


def _with_plain_keys(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename, in place, torchgpipe's keys ``partitions.<number>.<key>`` to ``<key>``, if the module has that layer."""
    for key in [key for key in state if key.startswith(f"{prefix}partitions.")]:
        number, _dot, rest = key.removeprefix(f"{prefix}partitions.").partition(".")
        if number.isdigit() and rest.split(".")[0] in module._modules:
            state[prefix + rest] = state.pop(key)
