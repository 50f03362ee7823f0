"""Bytes that each stage keeps for backward, measured without a pipe: the basis of a forecast of memory."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchweft.pipeline.skip import SkipTracker, use_skip_tracker


class StageBytes(NamedTuple):
    """Bytes of one micro-batch on one stage."""

    saved: int
    """Saved by the graph, without the input and output values of the stage."""
    output: int
    """The value for the next stage."""
    saves_output: bool
    """Whether the graph also saves the output."""


class _RecordingTracker(SkipTracker):
    """Also keeps a list of all stashed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def save(self, ns: object, name: str, value: Tensor | None) -> None:
        super().save(ns, name, value)
        if value is not None:
            self.values.append(value)


def measure_bytes(stages: Iterable[nn.Module], x: Tensor, target: Tensor, loss: nn.Module) -> list[StageBytes]:
    """Run one micro-batch through the stages, one after another. The last one computes the loss as well."""
    tracker = _RecordingTracker()
    costs: list[StageBytes] = []
    *_, last = stages = list(stages)
    with use_skip_tracker(tracker):
        for stage in stages:
            saved: dict[int, Tensor] = {}
            with saved_tensors_hooks(_recorded_in(saved), lambda tensor: tensor):
                output = stage(x)
                ends = [loss(output, target), target] if stage is last else [output]
            known = {_address(tensor) for tensor in [*stage.parameters(), x, *ends, *tracker.values]}
            inner = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in known)
            costs.append(StageBytes(inner, output.untyped_storage().nbytes(), _address(output) in saved))
            x = output.detach().requires_grad_()
    return costs


def _recorded_in(saved: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    def record(tensor: Tensor) -> Tensor:
        saved[_address(tensor)] = tensor.detach()  # kept alive, so that its address is not reused
        return tensor.detach()

    return record


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
