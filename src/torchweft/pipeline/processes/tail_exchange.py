"""The end of forward() over ranks: it runs on the rank of the last stage, and the others get its result.

last stage's rank      the tail --> result, which hangs on the stages' node by the tail's own graph
every other rank       forward() stops where the tail begins; receives the result, which hangs on this rank's node
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from torchweft.core.errors import BatchError
from torchweft.core.pytree import flatten, register_dataclasses, unflatten
from torchweft.pipeline.processes.packing import pack, unpack
from torchweft.pipeline.processes.rank_executor import Channel
from torchweft.pipeline.split.expected import TailNeedsMore

_RESULT = (-8, 0, 0)  # an address; routes of values are numbered from 0
_END = "the end of forward()"


class StopForward(BaseException):
    """forward() has come to its end on a rank that does not run it.

    Not an Exception, so that the user's code does not catch it.
    """


class TailExchange:
    """The end of one step's forward(). `rank` is this rank, and `last` that of the last stage."""

    def __init__(self, channel: Channel, rank: int, last: int, device: torch.device, *, shares_output: bool) -> None:
        self._channel, self._rank, self._last, self._device = channel, rank, last, device
        self._shares_output = shares_output
        self._anchor: Any = None
        self._begun = False

    @property
    def has_tail(self) -> bool:
        return self._rank == self._last

    def begin(self, served: Any) -> None:
        """Note that the stages have run. On a rank without the tail, `served` is a zero that backward begins with."""
        self._begun, self._anchor = True, served

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that the tail failed. Before it begins, the walk of the stages tells them."""
        if self._begun:
            self._channel.open(_END)
            if (walk := self._channel.end()) is not None:
                walk.fail(error)

    def share(self, result: Any, keep_more: Callable[[TailNeedsMore], None]) -> Any:
        """The result of the tail, on every rank that gets the output. `result` can also be a TailNeedsMore.

        Raises BatchError on all ranks then, after `keep_more`.
        """
        self._channel.open(_END)
        try:
            walk = self._channel.walk
            if self._rank == self._last:
                place = result.place if isinstance(result, TailNeedsMore) else None
                register_dataclasses(result)
                packed = pack(result) if place is None and self._shares_output else None
                for rank in range(self._channel.links.size):
                    if rank != self._rank:
                        walk.send(rank, _RESULT, [place, packed])
            else:
                place, packed = walk.receive(_RESULT, self._last)
                result = self._anchor if packed is None else self._attached(unpack(packed, self._device))
        except BaseException as error:
            if (walk := self._channel.end()) is not None:
                walk.fail(error)
            raise
        finally:
            self._channel.end()
        if place is not None:
            keep_more(TailNeedsMore(*place))
            raise BatchError(
                f"the end of forward() uses a result of step {place[0]} of its recording, which it did not use when it "
                "was recorded. The stages have run without keeping it, so this step gives no result. Nothing else has "
                "changed: later steps will keep it"
            )
        return result

    def _attached(self, result: Any) -> Any:
        """The result with a graph, so that ``backward()`` of any part of it begins this rank's part of the step."""
        leaves, structure = flatten(result)
        tracked = isinstance(self._anchor, Tensor) and self._anchor.requires_grad
        attach = cast(Any, _Attached).apply
        attached: list[Any] = [
            attach(self._anchor, x.detach()) if tracked and isinstance(x, Tensor) and x.requires_grad else x
            for x in leaves
        ]
        return unflatten(structure, attached)


class _Attached(torch.autograd.Function):
    """A value of another rank. Its gradient is dropped: the rank of the last stage has the same one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        ctx.anchor = anchor.detach()
        return value.clone()  # not a view, which could not be written to in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.zeros_like(ctx.anchor), None
