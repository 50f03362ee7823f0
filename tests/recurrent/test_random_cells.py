"""Small random cells of common operators: every plan has the results of the eager loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, by_plan

WIDTH, ROWS, STEPS = 3, 2, 4

UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.relu,
    lambda x: torch.softmax(x, 1),
    lambda x: torch.log_softmax(x, 1),
    lambda x: nn.functional.layer_norm(x, (WIDTH,)),
    lambda x: (-x.abs()).exp(),
    lambda x: (x * x + 1).log(),
    lambda x: (x * x + 0.5).sqrt(),
    lambda x: x.clamp(-0.7, 0.9),
    lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: x.sum(0, keepdim=True).expand(ROWS, WIDTH) - x,
    lambda x: x.amax(1, keepdim=True) * 0.5 + x,
    nn.functional.gelu,
    lambda x: nn.functional.elu(x) + nn.functional.softplus(x),
    lambda x: x.detach() * 0.3 + x,
    lambda x: x.var(1, keepdim=True) + x,
    lambda x: x / (1 + x.norm(dim=1, keepdim=True)),
    lambda x: torch.stack(x.unbind(1), 1) * 2,
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    lambda a, b: a / (b * b + 1),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: torch.where((a > b) & (a != 0) | ~(b <= 0.1), a, 0.5 * b),
    lambda a, b: a * (b > a) + b * (a >= b).to(b.dtype),
    torch.maximum,
    torch.minimum,
    lambda a, b: torch.cat([a, b], 1).chunk(2, 1)[1] + torch.stack([a, b]).sum(0),
    lambda a, b: torch.cat([a[:, :1], b[:, 1:]], 1),
    lambda a, b: torch.softmax(a, 1) * b.mean(1, keepdim=True),
    lambda a, b: (a @ b.t()) @ a,
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: a.masked_fill(b > 0.2, 0.1),
    lambda a, b: torch.bmm(a.view(ROWS, 1, WIDTH), b.view(ROWS, WIDTH, 1)).view(ROWS, 1) + a,
    lambda a, b: torch.einsum("ni,nj->nj", a, b) * 0.5,
    torch.logaddexp,
)


class Mixed(nn.Module):
    """A chain of operators over all previous values. Its states are two of floats, one of integers, one of booleans."""

    def __init__(self, steps: tuple[tuple[int, int, int, int], ...], ends: tuple[int, int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2 for _ in range(2)])
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.steps, self.ends = steps, ends

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Any, Any]:
        h, c, count, seen = state
        values = [x, h, c, h * ((count > 0) & (count < 5))[:, None]]
        for kind, which, a, b in self.steps:
            one, other = values[a % len(values)], values[b % len(values)]
            if kind == 0:
                values.append(UNARY[which % len(UNARY)](one))
            elif kind == 1:
                values.append(BINARY[which % len(BINARY)](one, other))
            else:
                values.append(nn.functional.linear(one, self.weights[which % 2], self.bias) + other)
        y, h, c = (values[end % len(values)] for end in self.ends)
        seen = seen ^ ((h + 1.1 * x).sum(1) > 0)  # avoids sums that are zero up to rounding
        count = torch.where(seen, count + 1, count - 2)
        return {"y": y, "sum": y + h, "count": count}, (0.7 * h, c * 0.5, count, seen)


numbers = st.integers(0, 60)
chains = st.lists(st.tuples(st.integers(0, 2), numbers, numbers, numbers), min_size=1, max_size=7).map(tuple)


@by_plan
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a smaller example costs minutes
@given(steps=chains, ends=st.tuples(numbers, numbers, numbers), lengths=st.none() | st.just([3, 1]))
@example(steps=((2, 0, 0, 1), (0, 0, 4, 0), (1, 2, 5, 2)), ends=(6, 5, 6), lengths=[4, 2])
def test_random_cells_equal_the_eager_loop(
    steps: tuple[tuple[int, int, int, int], ...], ends: tuple[int, int, int], lengths: Any, backend: str
) -> None:
    check(Mixed(steps, ends), backend, lengths)


class All(nn.Module):
    """Every operator of a table over the same two values, one of which is a state."""

    def __init__(self, table: tuple[Callable[..., Tensor], ...], arguments: int) -> None:
        super().__init__()
        self.table, self.arguments = table, arguments

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Any, Any]:
        h, c, *rest = state
        given = (0.3 * h + x, c - 0.2 * x)[: self.arguments]
        results = [operator(*given) for operator in self.table]
        total = torch.stack(results).sum(0)
        return torch.cat(results, 1), (0.5 * torch.tanh(total + h), torch.sin(c + h), *rest)


@pytest.mark.long
@by_plan
def test_every_operator_equals_the_eager_loop(backend: str) -> None:
    for table, arguments in ((UNARY, 1), (BINARY, 2)):
        check(All(table, arguments), backend, None)


def check(cell: nn.Module, backend: str, lengths: Any) -> None:
    """Compare a sequence, forward and backward, with the eager loop."""
    draw = torch.Generator().manual_seed(1)
    leaves = [torch.randn(*shape, generator=draw).double() for shape in ((STEPS, ROWS, WIDTH), *[(ROWS, WIDTH)] * 2)]
    x, h, c = (leaf.requires_grad_() for leaf in leaves)
    state = (h, c, torch.tensor([4, -3]), torch.tensor([True, False]))
    as_the_loop(cell, backend, x, state, 1e-9, verify="never", lengths=lengths)
