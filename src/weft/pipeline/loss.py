"""The loss as one more stage: it has random numbers, modes and running statistics of its own, as layers have.

    last segment    [ stage s ]──main──[ loss ]── one number
                                target──┘

It runs in the segment of the last stage, and is recomputed with it.
"""

from collections.abc import Callable
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
        return self.run(visit, Call((output, target), {}), {})[0]

    def survey(self) -> Survey:
        """As of any stage, but where its tensors are is the user's affair."""
        return super().survey()._replace(misplaced=[])

    def _layers(self, value: Any) -> Any:
        try:
            return checked_loss(self.function(*value.args))
        except BaseException as error:
            error.add_note("weft: in the loss function")
            raise
