"""Clipping of gradients by their norm over all stages, in one process or several.

PyTorch's `clip_grad_norm_` on each rank would clip by the norm of that rank, so stages would be scaled differently.
"""

from collections.abc import Iterable
from functools import partial
from typing import cast

from torch import Tensor, nn

from torchweft.core.errors import UsageError
from torchweft.pipeline.pipe import Pipe
from torchweft.pipeline.processes.norm import norm_over_ranks
from torchweft.pipeline.weights import unwrap_module


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip like `torch.nn.utils.clip_grad_norm_`. The norm of a `Pipe` over processes is that over all ranks.

    Give the pipe itself, or the DistributedDataParallel around it, on all its ranks together: parameters of one rank do
    not show that others have more. Returns the norm before clipping.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), chunks=2, devices=["cpu", "cpu"])
        >>> pipe(torch.ones(4, 4)).sum().backward()
        >>> norm = weft.clip_grad_norm_(pipe, max_norm=1.0)
        >>> round(float(torch.nn.utils.get_total_norm([p.grad for p in pipe.parameters()])), 3)
        1.0
    """
    if not isinstance(parameters, nn.Module):
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    module = unwrap_module(parameters)
    local = list(module.parameters())
    if not (isinstance(module, Pipe) and module.group is not None):
        modules = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
        inner = [name for name, child in modules if isinstance(child, Pipe) and child.group is not None]
        if inner:
            raise UsageError(
                f"the Pipe {inner[0]!r} in this {type(module).__name__} has its parameters in several processes, but "
                "not those around it; clip the Pipe and the other parameters in calls of their own"
            )
        return nn.utils.clip_grad_norm_(local, max_norm, norm_type, error_if_nonfinite, foreach)
    if norm_type <= 0:
        raise UsageError(f"norm_type is {norm_type:g}, but norms of several ranks combine only if it is above 0")
    with module._telling():
        exchange = partial(module._exchange_reports, "clip_grad_norm_")
        total = norm_over_ranks(local, exchange, module.devices[0], float(norm_type), foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} over the gradients of all ranks is {float(total)}, so they cannot be "
            "clipped; set error_if_nonfinite=False to scale them by it anyway"
        )
    nn.utils.clip_grads_with_norm_(local, max_norm, total, foreach)
    return total
