"""Whole modules and published cells run in C, also with several results, strides, checks, and 16 bits."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.recurrent.recurrent_cases import (
    as_the_loop,
    by_plan,
    needs_compiler,
    planned,
    run_by,
)
from torchweft.recurrent import Recurrent
from torchweft.recurrent.cpp.cpp_backend import CppBackend
from torchweft.recurrent.plan_cache import NoPlanWarning

F = nn.functional
H = 8
Step = Callable[[Any, Tensor], Tensor]


class Stepping(nn.Module):
    """h = tanh(mean of step(self, W x + h)), with a weight near the unit matrix. Every step's result is an output."""

    def __init__(self, *steps: Step, **parts: nn.Module) -> None:
        super().__init__()
        self.steps, self.enter = steps, nn.Linear(3, H)
        self.weight = nn.Parameter(torch.eye(H) + 0.1 * torch.randn(H, H))
        for name, part in parts.items():
            self.add_module(name, part)
        self.double().eval()

    def forward(self, x: Tensor, h: Tensor) -> tuple[list[Tensor], Tensor]:
        h = self.enter(x) + h
        results = [step(self, h) for step in self.steps]
        return results, torch.tanh(sum(results) / len(results))


def energy(weight: Tensor, h: Tensor) -> Tensor:
    return (h @ weight).tanh().square().sum()


ROWS, COLUMNS = torch.tensor([[0], [1]]), torch.tensor([1, -1, 0])
GROUPS: dict[str, Callable[[], Stepping]] = {
    "modules": lambda: Stepping(
        lambda cell, h: cell.norm(h),
        lambda cell, h: cell.picture_norm(h.view(-1, 4, 2)).reshape(-1, H),
        lambda cell, h: cell.weight_norm(h),
        lambda cell, h: cell.batch_norm(h),
        norm=nn.GroupNorm(2, H),
        picture_norm=nn.GroupNorm(2, 4, affine=False),
        weight_norm=weight_norm(nn.Linear(H, H)),
        batch_norm=nn.BatchNorm1d(H),
    ),
    "linear algebra": lambda: Stepping(
        lambda cell, h: h @ torch.linalg.inv(cell.weight),
        lambda cell, h: torch.linalg.solve(cell.weight, h.t()).t(),
        lambda cell, h: torch.linalg.solve(cell.weight, h, left=False),
        lambda cell, h: h @ torch.linalg.solve(cell.weight, cell.weight.t()),
        lambda cell, h: h - 0.1 * torch.func.grad(energy, 1)(cell.weight, h),
        lambda cell, h: h - torch.func.vmap(torch.func.grad(energy, 1), (None, 0))(cell.weight, h),
    ),
    "indices and masks": lambda: Stepping(
        lambda cell, h: torch.remainder(h @ cell.weight, 1.5),
        lambda cell, h: torch.where((h > 0.5).any(-1, keepdim=True), h @ cell.weight, h),
        lambda cell, h: torch.cat([h.view(-1, 2, 4)[:, ROWS, COLUMNS].flatten(1), h[:, :2]], 1),
        lambda cell, h: h + h.view(2, 2, 4, 2)[ROWS, :, COLUMNS].sum((0, 1)).repeat(2, 4),
        lambda cell, h: h.view(-1, 2, 4).index_put((torch.tensor([0, 1]), torch.tensor([1, 1])), h[:2, :4]).flatten(1),
        lambda cell, h: torch.ops.aten._safe_softmax(h.masked_fill(h < 9, -torch.inf), -1) + h,
    ),
}


@needs_compiler
@pytest.mark.parametrize("make", GROUPS.values(), ids=GROUPS)
def test_modules_run_in_c(make: Callable[[], Stepping]) -> None:
    """Backend "auto" selects C too."""
    torch.manual_seed(0)
    cell, x, h = make(), torch.randn(5, 4, 3).double().requires_grad_(), torch.randn(4, H).double().requires_grad_()
    as_the_loop(cell, "c", x, h)
    net = Recurrent(cell)
    net(x, h)
    assert run_by(net) == {"c"}


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


class TuringHead(nn.Module):
    """The head of a neural Turing machine: addresses by content and by shifts, writes, and reads."""

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


PUBLISHED: dict[str, Callable[[], tuple[nn.Module, Tensor, Any]]] = {
    "Mamba": lambda: (Mamba(6), torch.randn(5, 3, 6), (torch.zeros(3, 6, 3), torch.zeros(3, 6, 4))),
    "neural Turing machine": lambda: (
        TuringHead(5, 7, 4),
        torch.randn(5, 3, 5),
        (0.1 * torch.randn(3, 7, 4), torch.zeros(3, 5), torch.softmax(torch.randn(3, 7), 1), torch.zeros(3, 4)),
    ),
}


@needs_compiler
@pytest.mark.parametrize("make", PUBLISHED.values(), ids=PUBLISHED)
def test_published_cells_run_in_c(make: Callable[[], tuple[nn.Module, Tensor, Any]]) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        cell, x, state = make()
    finally:
        torch.set_default_dtype(torch.float32)
    as_the_loop(cell, "c", x, state, verify="never")


REDUCED_PRECISION = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
FEW_BITS = [  # the dtype of the state, that of the model, under autocast or not, tolerance
    *((dtype, torch.float32, False, tolerance) for dtype, tolerance in REDUCED_PRECISION.items()),
    *((dtype, dtype, False, 3 * tolerance) for dtype, tolerance in REDUCED_PRECISION.items()),
    (torch.float32, torch.float32, True, 4e-2),
]


@needs_compiler
@pytest.mark.parametrize(("state", "model", "autocast", "tolerance"), FEW_BITS)
def test_states_and_models_of_16_bits_run_in_c(
    state: torch.dtype, model: torch.dtype, autocast: bool, tolerance: float
) -> None:
    torch.manual_seed(0)
    cell, x = Rounded(state).to(model), torch.randn(5, 3, 4).to(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        as_the_loop(cell, "c", x, torch.zeros(3, 6, dtype=state), tolerance, verify="never")


class Rounded(nn.Module):
    """Carries and returns its state in reduced precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell, self.dtype = nn.GRUCell(4, 6), dtype

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = self.cell(x, h.to(x.dtype)).to(self.dtype)
        return new.amax(1) + new.cumsum(1).mean(1), new


@needs_compiler
@pytest.mark.parametrize("dtype", REDUCED_PRECISION)
def test_numbers_of_16_bits_are_rounded_as_in_pytorch(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)  # every number of 16 bits
    some = torch.cat([every.float(), every.float() * 1.0005, torch.randn(1000) * 1e5, torch.randn(1000) * 1e-6])

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(dtype), h.float().to(dtype)

    x, h = torch.stack([some, some.flip(0)])[:, None], every[None]
    net = planned(step, "c", verify="never")
    result = net(x, h)
    assert run_by(net) == {"c"}
    assert torch.equal(result.outputs.nan_to_num(7), x.to(dtype).nan_to_num(7))
    assert torch.equal(result.last.nan_to_num(7), h.nan_to_num(7))


@pytest.mark.parametrize(
    ("step", "backend"),
    [
        (lambda cell, h: h @ torch.linalg.inv(cell.weight), "python"),
        pytest.param(lambda cell, h: h @ torch.linalg.inv(cell.weight), "c", marks=needs_compiler),
        (lambda cell, h: h + torch.linalg.inv(cell.weight * h.sum())[:1], "python"),
    ],
    ids=["python", "c", "a state in python"],
)
def test_singular_matrix_raises(step: Step, backend: str) -> None:
    """The error is that of the eager loop, although a plan computes the inverse without a check."""
    cell, x = Stepping(step), torch.randn(3, 2, 3).double()
    net = planned(cell, backend)
    net(x, torch.randn(2, H).double())
    cell.weight.data.zero_()
    with pytest.raises(torch.linalg.LinAlgError):
        net(x, torch.randn(2, H).double())


@needs_compiler
def test_index_out_of_range_hits_no_other_element() -> None:
    """Two indices are combined into one. An index out of range along an axis gives NaN, not the next row's element."""
    cell = Stepping(lambda cell, h: h * h.view(-1, 2, 4)[:, cell.at, cell.at].sum(-1, keepdim=True))
    cell.register_buffer("at", torch.tensor([0, 1]))
    net, x, h = Recurrent(cell, backend="c"), torch.randn(3, 2, 3).double(), torch.randn(2, H).double()
    assert not net(x, h).last.isnan().any()
    cell.at.fill_(2)  # beyond the axis of 2, within that of 4
    assert net(x, h).last.isnan().all()


def test_failure_in_c_leads_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever error is raised, the next plan is tried before the eager loop."""

    def fail(self: CppBackend, captured: Any) -> None:
        raise KeyError("val")

    monkeypatch.setattr(CppBackend, "__init__", fail)
    monkeypatch.setattr("torchweft.recurrent.plan_cache.PlannedCall.race", lambda self, engine: (1.0, 2.0))
    net = Recurrent(nn.GRUCell(3, 4))
    net(torch.randn(3, 2, 3))
    assert run_by(net) == {"python"} and "not c: KeyError" in net.why()[0][2]


@by_plan
def test_cancellation_does_not_reject_a_right_plan(backend: str) -> None:
    """A norm over two elements is nearly a sign. In float32 its gradient is noise, in the eager loop as in a plan."""
    torch.manual_seed(1)
    cell = Stepping(lambda cell, h: cell.norm(h), norm=nn.GroupNorm(4, H)).float()
    for seed in range(5):
        torch.manual_seed(seed)
        x, h = torch.randn(6, 4, 3, requires_grad=True), torch.randn(4, H, requires_grad=True)
        net = planned(cell, backend)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoPlanWarning)
            net(x, h)
        assert run_by(net) == {backend}
