"""The loss as one more stage: it has random numbers, modes and running statistics of its own, as layers have.

    last segment    [ stage s ]──main──[ loss ]── one number
                                target──┘

It runs in the segment of the last stage, and is recomputed with it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.core.segment import Visit
from weft.pipeline.cargo import checked_loss
from weft.pipeline.stage import Call, Stage, Survey

LossFunction = Callable[[Any, Any], torch.Tensor]


class LossStage(Stage):
    """``function(output, target)`` of one micro-batch. Its modules, if it is one, may be on any device."""

    def __init__(self, index: int, function: LossFunction, device: torch.device) -> None:
        layers = [("loss", function)] if isinstance(function, nn.Module) else []
        super().__init__(index, layers, device, (), ())
        self.function = function

    def of(self, visit: Visit, output: Any, target: Any) -> torch.Tensor:
        """The loss. Raises SpecError when it is not one real number."""
        loss = self.run(visit, Call((output, target), {}), {})[0]
        mesh = getattr(loss, "device_mesh", None)  # of a DTensor
        if mesh is not None and loss.requires_grad:
            loss.register_hook(partial(_everywhere, mesh))
        return loss

    def survey(self) -> Survey:
        """As of any stage, but where its tensors are is the user's affair."""
        return super().survey()._replace(misplaced=[])

    def _layers(self, value: Any) -> Any:
        try:
            return checked_loss(self.function(*value.args))
        except BaseException as error:
            error.add_note("weft: in the loss function")
            raise


def _everywhere(mesh: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss that is a DTensor, as one: where backward begins early, it begins with a plain number."""
    if hasattr(gradient, "device_mesh"):
        return gradient
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - only whose loss it is has it loaded

    return DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
