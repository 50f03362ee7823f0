"""A layer's graph leads only to what it was given and what it has."""

import pytest
import torch

from weft.recurrent.layers.borrowed import BorrowedError, check_owned


def test_what_was_given_and_what_is_owned_is_fine() -> None:
    x, weight, frozen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    check_owned(0, {"y": (x * weight * frozen).exp(), "x": x, "n": None}, (x, None), [weight])


def test_everything_else_is_told() -> None:
    x, one = torch.ones(2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    made_outside = torch.ones(1, requires_grad=True).exp()
    with pytest.raises(BorrowedError, match=r"layer 4 .*shapes"):
        check_owned(4, x * one, x, [])
    with pytest.raises(BorrowedError, match=r"shapes \(1,\)"):
        check_owned(4, x * made_outside, x, [])
    with pytest.raises(BorrowedError, match=r"shapes \(3, 2\)"):
        check_owned(4, (x, one), x, [])
