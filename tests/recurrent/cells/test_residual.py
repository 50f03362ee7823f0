"""Residual adds its input to the output, and nothing to the state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import equal
from weft.core.errors import SpecError
from weft.recurrent import cells


class Same(nn.Module):
    """A cell that returns what it is told to."""

    def __init__(self, y: Any) -> None:
        super().__init__()
        self.y = y

    def forward(self, x: Any, state: Tensor) -> tuple[Any, Tensor]:
        return self.y, state + 1


def test_nested_values_are_added_leaf_by_leaf() -> None:
    x = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    y, state = cells.Residual(Same({"a": torch.full((2, 3), 5.0), "b": torch.zeros(2)}))(x, torch.zeros(2))
    assert equal(y, {"a": torch.full((2, 3), 6.0), "b": torch.ones(2)})
    assert equal(state, torch.ones(2))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.ones(2, 1), r"the output is \(2, 1\), the input \(2, 3\)"),
        (None, r"the output is NoneType, the input \(2, 3\)"),
        ((torch.ones(2, 3),), "is not nested as"),
    ],
)
def test_what_cannot_be_added_is_an_error_and_never_broadcast(y: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        cells.Residual(Same(y))(torch.ones(2, 3), torch.zeros(2))
