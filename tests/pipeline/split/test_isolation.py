"""Runs of a model without side effects on it."""

import gc
import weakref

import torch
from torch import Tensor, nn

from torchweft.pipeline.split.isolation import moved_to_device
from torchweft.pipeline.split.record import ForwardRecorder


def test_blocks_have_copies_on_the_device_of_their_stage() -> None:
    """This includes a tied weight that another stage owns. Afterwards, the block has the original weight again."""
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    block[1].weight = block[0].weight
    before = dict(block.named_parameters(remove_duplicate=False))
    with moved_to_device([block], torch.device("meta")):
        assert all(tensor.is_meta for module in block for tensor in module._parameters.values() if tensor is not None)
    after = dict(block.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())


def test_recording_frees_its_tensors() -> None:
    """No reference cycle keeps the values of a recorded run alive until the garbage collector runs."""
    references: list[weakref.ref[Tensor]] = []

    class Referenced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            z = y + 1
            references.extend(weakref.ref(tensor) for tensor in (x, y, z))
            return self.second(z)

    recorder = ForwardRecorder(Referenced(), ["second"], [torch.device("cpu")] * 2)
    recorder.record((torch.ones(1, 2),), {})  # loads the compiler of PyTorch, which keeps frames
    references.clear()
    gc.disable()
    try:
        recording = recorder.record((torch.ones(1, 2),), {})
        assert [step.name for step in recording.steps] == ["first", "add", "second"]
        assert [tensor() for tensor in references] == [None] * 3
    finally:
        gc.enable()
