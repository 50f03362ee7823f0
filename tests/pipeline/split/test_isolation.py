"""Runs of a model without side effects on it."""

import torch
from torch import nn

from torchweft.pipeline.split.isolation import moved_to_device


def test_blocks_have_copies_on_the_device_of_their_stage() -> None:
    """A tied weight that a stage on another device owns; afterwards the block has the weight itself again."""
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    block[1].weight = block[0].weight
    before = dict(block.named_parameters(remove_duplicate=False))
    with moved_to_device([block], torch.device("meta")):
        assert all(tensor.is_meta for module in block for tensor in module._parameters.values() if tensor is not None)
    after = dict(block.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
