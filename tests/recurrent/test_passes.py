"""Passes: no in-place writes, forms that hold for all steps at once, and fewer operators in Python loops."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, at_once, equal, planned, run_by
from torchweft.recurrent import NoPlanWarning
from torchweft.recurrent.capture import capture
from torchweft.recurrent.cells import LSTMCell
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.step_plan import partition


class Weights(nn.Module):
    """A cell whose recurrent weight is computed in every step from its parameter and its buffer."""

    def __init__(self, made: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = made
        self.weight = nn.Parameter(torch.randn(4, 4).double())
        self.buffer: Tensor
        self.register_buffer("buffer", torch.randn(4, 4).double())

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ self.made(self.weight, self.buffer))
        return h, h


def _copied(weight: Tensor, buffer: Tensor) -> Tensor:
    made = buffer.clone()
    made[0] = weight[1]
    return made + buffer


def _filled(weight: Tensor, buffer: Tensor) -> Tensor:
    mask = buffer.tril(-1)
    mask.diagonal().fill_(1.0)
    return weight * mask


def _orthogonal(weight: Tensor, buffer: Tensor) -> Tensor:
    return torch.linalg.householder_product(weight.tril(-1), buffer[0])


@pytest.mark.parametrize("made", [_copied, _filled, _orthogonal])
def test_writes_into_values_of_weights(made: Callable[[Tensor, Tensor], Tensor]) -> None:
    cell = Weights(made)
    before = [tensor.clone() for tensor in (cell.weight, cell.buffer)]
    as_the_loop(cell, "python", *sequence(), verify="never")
    assert equal(before, [cell.weight, cell.buffer])


def sequence() -> list[Tensor]:
    """Inputs and a state, both positive, with gradients."""
    torch.manual_seed(0)
    return [(torch.rand(*shape).double() * 0.9 + 0.01).requires_grad_() for shape in ((5, 3, 4), (3, 4))]


def _strided(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x * 2, torch.zeros_like(h)
    a[:, ::2] *= h[:, ::2]
    b[:, 1::2].copy_(h[:, 1::2])
    return a, b + a.cos()


def _empty(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(h)
    made[:, ::2], made[:, 1::2] = x[:, ::2], h[:, 1::2]
    return made.cos(), made * 0.5


def _selected(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a, b = h * 1, x * 1
    a.select(1, 0).fill_(0.5)
    b.t()[-2:].mul_(a.t()[1:3])
    return a * b, b


def _masked(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = x * 1, x * h, h + x
    a[x > 0] = 0.5
    b[h[:, 0] > 0] = 0.0
    c[c > 0] = torch.tensor(0.25).double()
    return a * b, c


@pytest.mark.parametrize("cell", [_strided, _empty, _selected, _masked])
def test_writes_into_views_of_intermediates(cell: Callable[..., tuple[Tensor, Tensor]]) -> None:
    x, h = (tensor.detach() - 0.5 for tensor in sequence())
    as_the_loop(cell, "python", x.requires_grad_(), h.requires_grad_(), verify="never")


@pytest.mark.parametrize("backend", ["python", "auto"])
def test_read_by_strides_is_rejected(backend: str) -> None:
    net = planned(lambda x, h: ((x + h).as_strided((3, 2), (4, 2), 1), h), backend)
    with pytest.warns(NoPlanWarning, match="by strides"):
        net(torch.randn(5, 3, 4), torch.randn(3, 4))
    assert run_by(net) == {"eager"}


def _channels(a: Tensor) -> Tensor:
    return torch.stack([a, 2 * a, a * a, a.sin()], 1).view(-1, 4, 2, 2)


NORMED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "expanded gradient": lambda norm, a: norm(_channels(a)).sum(1).view_as(a),
    "permuted": lambda norm, a: norm(_channels(a).permute(0, 1, 3, 2))[..., 0].reshape(-1, 8)[:, ::2],
    "channels last": lambda norm, a: norm(_channels(a).to(memory_format=torch.channels_last)).sum(1).reshape(a.shape),
}


@pytest.mark.parametrize("form", NORMED.values(), ids=NORMED)
def test_group_norm_of_any_memory_layout(form: Callable[[nn.Module, Tensor], Tensor]) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 4).double()

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return (form(self.norm, x + h).tanh(),) * 2

    as_the_loop(Cell(), "python", *sequence())


FILLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atanh": lambda x, h: torch.atanh(x * h),
    "addcdiv": lambda x, h: torch.addcdiv(h, x, x + 1),
    "lerp": lambda x, h: torch.lerp(h, x, 0.3 * x),
}


@pytest.mark.parametrize("step", FILLED.values(), ids=FILLED)
def test_no_vmap_warning_of_pytorch_is_shown(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_the_loop(lambda x, h: (step(x, h),) * 2, "python", *sequence())


STATE = (torch.zeros(2, 4), torch.zeros(2, 4))


def names(nodes: list[Any]) -> list[str]:
    """The operators, without views."""
    results = [str(getattr(node.target, "__name__", node.target)) for node in nodes]
    return [name for name in results if not name.startswith(("split", "getitem"))]


def lstm(composed: Any = None) -> StepGraph:
    cell = LSTMCell(3, 4)
    return capture(cell, torch.zeros(2, 3), STATE, [*cell.parameters()], composed=composed)


def test_loops_of_an_lstm_are_minimal() -> None:
    parts = partition(lstm())
    gates, pointwise = ["addmm.default"], ["sigmoid.default"] * 3 + ["tanh.default"] * 2
    assert sorted(names(parts.loop)) == sorted([*gates, *pointwise, *["mul.Tensor"] * 2, "addcmul.default"])
    back = ["add.Tensor", "addcmul.default", *["mul.Tensor"] * 5, "cat.default", "mm.default"]
    assert sorted(names(parts.loop_back)) == sorted(back)


def test_graph_for_c_is_not_fused() -> None:
    results = names(lstm(composed={}).nodes)
    assert "sigmoid_backward.default" in results and "addcmul.default" not in results


Step = Callable[[Tensor, Tensor, Tensor], Tensor]
W = torch.randn(4, 4, dtype=torch.float64)
SUMS: dict[str, tuple[Step, str, bool]] = {
    "a sum with a product": (lambda x, h, w: x + h * torch.tanh(h), "addcmul", True),
    "a sum with a matrix product": (lambda x, h, w: x + h @ w, "addmm", True),
    "a product is read twice": (lambda x, h, w: (p := h * torch.tanh(h)) * (x + p), "addcmul", False),
    "a summand is stretched": (lambda x, h, w: x[:1] + h * torch.tanh(h), "addcmul", False),
    "a factor is stretched": (lambda x, h, w: x + h * h[:, :1], "addcmul", False),
    "the sum has a factor": (lambda x, h, w: torch.add(x, h * torch.tanh(h), alpha=2), "addcmul", False),
    "a number is added": (lambda x, h, w: h * torch.tanh(h) + 1, "addcmul", False),
    "a sum of two matrix products": (lambda x, h, w: h @ w + torch.sin(h) @ w, "addmm", True),
    "a product that is known before": (lambda x, h, w: torch.sin(x) * x + h, "addcmul", False),
    "the same twice": (lambda x, h, w: (p := h * x) + p, "addcmul", False),
}


@at_once(("step", "operator", "merged"), SUMS.values(), ids=SUMS)
def test_sums_are_fused_only_where_exact(step: Step, operator: str, merged: bool) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(W.clone())

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return (torch.tanh(step(x, h, self.w)),) * 2

    loop = partition(capture(Cell(), *(torch.zeros(3, 4).double() for _ in range(2)))).loop
    assert any(name.startswith(operator) for name in names(loop)) == merged
    as_the_loop(Cell(), "python", *sequence(), 1e-12)
