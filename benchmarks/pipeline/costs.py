"""Bytes that each stage keeps for backward, measured without a pipe: the basis of a forecast of memory."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchweft.pipeline.skip import SkipTracker, use_skip_tracker


class StageBytes(NamedTuple):
    """Of one micro-batch on one stage."""

    saved: int
    """What the graph saves beyond the values that come in and go out."""
    output: int
    """The value for the next stage."""
    saves_output: bool
    """Whether the graph saves that value too."""


class _Shelf(SkipTracker):
    """Keeps every stashed tensor where the measurement finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def save(self, ns: object, name: str, value: Tensor | None) -> None:
        super().save(ns, name, value)
        if value is not None:
            self.values.append(value)


def measure_bytes(stages: Iterable[nn.Module], x: Tensor, target: Tensor, loss: nn.Module) -> list[StageBytes]:
    """Run one micro-batch through the stages, one after another. The last one computes the loss as well."""
    shelf = _Shelf()
    found: list[StageBytes] = []
    *_, last = stages = list(stages)
    with use_skip_tracker(shelf):
        for stage in stages:
            saved: dict[int, Tensor] = {}
            with saved_tensors_hooks(_noted_in(saved), lambda tensor: tensor):
                output = stage(x)
                ends = [loss(output, target), target] if stage is last else [output]
            known = {_address(each) for each in [*stage.parameters(), x, *ends, *shelf.values]}
            inner = sum(each.untyped_storage().nbytes() for key, each in saved.items() if key not in known)
            found.append(StageBytes(inner, output.untyped_storage().nbytes(), _address(output) in saved))
            x = output.detach().requires_grad_()
    return found


def _noted_in(saved: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    def note(tensor: Tensor) -> Tensor:
        saved[_address(tensor)] = tensor.detach()  # kept alive, so that no other gets its address
        return tensor.detach()

    return note


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
