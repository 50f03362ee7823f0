"""Cells as people write them today, and numbers of 16 bits, in loops in C."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, needs_compiler, planned, run_by

pytestmark = needs_compiler
F = nn.functional


class Mamba(nn.Module):
    """The step of a selective state space model: a short convolution, then a diagonal recurrence."""

    def __init__(self, width: int, kernel: int = 3, states: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.sizes = [rank, states, states]
        self.inwards, self.outwards = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.kernel, self.skip = nn.Parameter(0.3 * torch.randn(width, kernel)), nn.Parameter(torch.ones(width))
        self.selected, self.rate = nn.Linear(width, sum(self.sizes), bias=False), nn.Linear(rank, width)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        window, memory = state
        x, gate = self.inwards(x).chunk(2, -1)
        window = torch.roll(window, shifts=-1, dims=-1)
        window[:, :, -1] = x
        x = F.silu((window * self.kernel).sum(-1))
        rate, b, c = self.selected(x).split(self.sizes, -1)
        rate = F.softplus(self.rate(rate))
        kept = torch.exp(torch.einsum("bd,dn->bdn", rate, -self.decay.exp()))
        memory = memory * kept + torch.einsum("bd,bn->bdn", rate * x, b)
        y = torch.einsum("bdn,bn->bd", memory, c) + self.skip * x
        return self.outwards(y * F.silu(gate)), (window, memory)


class Memory(nn.Module):
    """A head of a neural Turing machine: it addresses by content and by shifts, writes, and reads."""

    def __init__(self, width: int, rows: int, size: int) -> None:
        super().__init__()
        self.sizes = [size, size, size, 3, 1, 1, 1]
        self.cell, self.head = nn.GRUCell(width + size, width), nn.Linear(width, sum(self.sizes))
        self.register_buffer("around", (torch.arange(rows)[:, None] + torch.arange(-1, 2)) % rows)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        memory, h, weight, seen = state
        h = self.cell(torch.cat([x, seen], 1), h)
        key, erase, write, shift, strength, gate, sharp = self.head(h).split(self.sizes, 1)
        found = F.softplus(strength) * F.cosine_similarity(memory + 1e-8, key[:, None], dim=-1)
        weight = gate.sigmoid() * found.softmax(1) + (1 - gate.sigmoid()) * weight
        weight = (weight[:, self.around] * shift.softmax(1)[:, None]).sum(-1)
        weight = weight ** (1 + F.softplus(sharp))
        weight = weight / weight.sum(1, keepdim=True)
        memory = memory * (1 - weight[..., None] * erase.sigmoid()[:, None]) + weight[..., None] * write[:, None]
        seen = torch.einsum("bn,bnm->bm", weight, memory)
        return torch.cat([h, seen], 1), (memory, h, weight, seen)


def memory() -> Any:
    return (0.1 * torch.randn(3, 7, 4), torch.zeros(3, 5), torch.softmax(torch.randn(3, 7), 1), torch.zeros(3, 4))


CELLS: dict[str, Callable[[], tuple[nn.Module, Tensor, Any]]] = {
    "Mamba": lambda: (Mamba(6), torch.randn(5, 3, 6), (torch.zeros(3, 6, 3), torch.zeros(3, 6, 4))),
    "a neural Turing machine": lambda: (Memory(5, 7, 4), torch.randn(5, 3, 5), memory()),
}


@pytest.mark.parametrize("name", CELLS)
def test_their_loops_run_in_c(name: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        cell, x, state = CELLS[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    as_the_loop(cell, "c", x, state, verify="never")


REDUCED_PRECISION = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
FEW_BITS = [  # the dtype of the state, that of the model, under autocast or not, tolerance
    *((dtype, torch.float32, False, tolerance) for dtype, tolerance in REDUCED_PRECISION.items()),
    *((dtype, dtype, False, 3 * tolerance) for dtype, tolerance in REDUCED_PRECISION.items()),
    (torch.float32, torch.float32, True, 4e-2),
]


@pytest.mark.parametrize(("state", "model", "autocast", "tolerance"), FEW_BITS)
def test_states_and_models_of_16_bits_run_in_c(
    state: torch.dtype, model: torch.dtype, autocast: bool, tolerance: float
) -> None:
    torch.manual_seed(0)
    cell, x = Rounded(state).to(model), torch.randn(5, 3, 4).to(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        as_the_loop(cell, "c", x, torch.zeros(3, 6, dtype=state), tolerance, verify="never")


class Rounded(nn.Module):
    """Carries its state, and gives it out, in few bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell, self.dtype = nn.GRUCell(4, 6), dtype

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = self.cell(x, h.to(x.dtype)).to(self.dtype)
        return new.amax(1) + new.cumsum(1).mean(1), new


@pytest.mark.parametrize("dtype", REDUCED_PRECISION)
def test_numbers_of_16_bits_are_rounded_as_in_pytorch(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)  # one of each
    some = torch.cat([every.float(), every.float() * 1.0005, torch.randn(1000) * 1e5, torch.randn(1000) * 1e-6])

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(dtype), h.float().to(dtype)

    x, h = torch.stack([some, some.flip(0)])[:, None], every[None]
    net = planned(step, "c", verify="never")
    result = net(x, h)
    assert run_by(net) == {"c"}
    assert torch.equal(result.outputs.nan_to_num(7), x.to(dtype).nan_to_num(7))
    assert torch.equal(result.last.nan_to_num(7), h.nan_to_num(7))
