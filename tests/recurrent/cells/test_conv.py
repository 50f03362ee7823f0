"""The ConvLSTM by its formula: a sum over the places around each place."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recurrent.cells.references import follows, scattered
from weft.recurrent import cells


def convolved(conv: nn.Conv2d, image: Tensor) -> Tensor:
    """Every shift of the zero-padded image, times its weights."""
    size = conv.kernel_size[0]
    padded = F.pad(image, [size // 2] * 4)
    height, width = image.shape[-2:]
    total: Any = 0 if conv.bias is None else conv.bias.view(1, -1, 1, 1)
    for down in range(size):
        for right in range(size):
            shifted = padded[..., down : down + height, right : right + width]
            total = total + torch.einsum("oc,nchw->nohw", conv.weight[:, :, down, right], shifted)
    return total


@pytest.mark.parametrize("kernel", [1, 3])
def test_the_conv_lstm_follows_its_formula(kernel: int) -> None:
    cell = scattered(cells.ConvLSTMCell(2, 3, kernel))

    def step(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = (convolved(cell.conv_ih, x) + convolved(cell.conv_hh, h)).split(3, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)

    follows(cell, step, (2, 4, 3))
