"""The Elman cell; that it is PyTorch's stands in test_like_torch.py."""

import torch

from weft.recurrent import cells


def test_without_a_bias_nothing_comes_of_nothing() -> None:
    y, state = cells.ElmanCell(3, 4, bias=False)(torch.zeros(2, 3), torch.zeros(2, 4))
    assert y is state and not y.any()
