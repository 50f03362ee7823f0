"""The peak of bytes counts what is alive, once, and not what was there before."""

import torch
from torch import nn

from weft.demo.peak import peak_bytes

MIB = 1 << 20


def test_what_is_freed_makes_room_for_what_comes() -> None:
    def run() -> None:
        for _ in range(3):
            torch.ones(MIB // 4)

    assert peak_bytes(run, []) == MIB


def test_what_lives_together_adds_up_and_views_count_once() -> None:
    def run() -> None:
        one = torch.ones(MIB // 4)
        view = one[: MIB // 8].view(2, -1)
        two = view.clone()
        one.add_(1)
        del one, view, two

    assert peak_bytes(run, []) == MIB * 3 // 2


def test_given_tensors_and_their_views_do_not_count() -> None:
    given = torch.ones(MIB)
    assert peak_bytes(lambda: given[1:].view(-1), [given]) == 0


def test_backward_is_seen_with_its_gradients() -> None:
    layer, x = nn.Linear(256, 256, bias=False), torch.ones(1024, 256, requires_grad=True)
    peak = peak_bytes(lambda: layer(x).backward(torch.ones(1024, 256)), [x, *layer.parameters()])
    assert x.grad is not None
    large, small = x.numel() * 4, layer.weight.numel() * 4
    assert peak == 3 * large + small, "output, its gradient, x's and the weight's"
