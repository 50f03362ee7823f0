"""Leaves: what nothing may accumulate into, and what hides tensors."""

from collections import UserDict
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weft.core.errors import UsageError
from weft.core.segment import hidden_tensors, leaf_of

INSIDE = torch.ones(2)


class Several(list[Any]):
    pass


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        SimpleNamespace(x=INSIDE),
        SimpleNamespace(x={"deep": (INSIDE,)}),
        UserDict(x=INSIDE),
        Several([INSIDE]),
        {INSIDE},
        torch.distributions.Normal(INSIDE, 1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_found_inside_unknown_containers(value: Any) -> None:
    assert any(each is INSIDE or torch.equal(each, INSIDE) for each in hidden_tensors(value))


@pytest.mark.parametrize(
    "value", [None, 1, 2.5, "text", b"", torch.float32, Colour.RED, nn.Linear(2, 2), len, range(3)]
)
def test_plain_values_and_modules_hide_nothing(value: Any) -> None:
    assert hidden_tensors(value) == []


def test_leaf_has_a_gradient_but_rejects_accumulation() -> None:
    leaf = leaf_of(torch.ones(3, requires_grad=True), True)
    result = (2 * leaf).sum()
    assert torch.autograd.grad(result, leaf, retain_graph=True)[0].tolist() == [2, 2, 2]
    with pytest.raises(UsageError, match=r"shape \(3,\)"):
        result.backward()
    assert not leaf_of(leaf, False).requires_grad
