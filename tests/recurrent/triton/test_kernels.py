"""Generated kernels compute what the exact loop computes: cells, dtypes, rows that do not count, memory modes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.recurrent.cells.zoo_cases import ZOO, ZooCase
from tests.recurrent.recurrent_cases import (
    as_the_loop,
    close,
    eagerly,
    equal,
    learned,
    outcome,
    planned,
    run_by,
    spoiled,
)
from tests.recurrent.triton.triton_cases import TIERS, backend_of, choose, needs_triton
from torchweft.core.pytree import map_leaves
from torchweft.recurrent.plan_cache import PlannedCall
from torchweft.recurrent.triton.loops import Tier

pytestmark = needs_triton
SAMPLE = ("layer norm LSTM", "RHN", "ConvLSTM")
# Cells that flatten rows and another axis into one, so that rows cannot be divided.
FLATTENING = ("ConvLSTM", "additive attention")


@pytest.mark.parametrize(
    ("case", "tier"),
    [
        pytest.param(case, tier, id=f"{case.name}-{tier}", marks=[] if case.name in SAMPLE else pytest.mark.long)
        for i, case in enumerate(ZOO)
        for tier in ["segments" if case.name in FLATTENING else TIERS[i % 2]]
    ],
)
def test_zoo_by_kernels(case: ZooCase, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, tier)
    cell, x = case.cell(), case.inputs(3, 5)
    state = map_leaves(lambda leaf: None if leaf is None else learned(leaf.detach()), case.state(cell, x))
    as_the_loop(cell, "triton", x, state, verify="never")


def greedy(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    best = h.argmax(1, keepdim=True)
    picked = h.gather(1, best)
    h = torch.tanh(h.scatter_add(1, best, x[:, :1]) + picked + x)
    return h, h


def sums(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h.cumsum(1) + x[:, [2, 0, 0]] * h.amax(1, keepdim=True)) - h.amin(1, keepdim=True)
    return h.flip(1), h


def matrices(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    key = functional.normalize(x, dim=1)
    read = torch.bmm(state, key[..., None])
    state = 0.9 * state + (x[..., None] - read) @ key[:, None]
    return (state @ x[..., None])[..., 0], state


def columns(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = (torch.eye(3, dtype=x.dtype) * 0.5 + 0.1) @ h.t()
    h = torch.cat([h.t()[:, 1:], x[:, :1]], 1).sin()
    return h, h


def logic(x: Tensor, state: tuple[Tensor, ...]) -> Any:
    h, count, seen = state
    inside = (h > -0.5) & ~(h.abs() >= 2.0) | torch.isnan(x)
    h = torch.where(inside, torch.atan2(x, h + 3) + h % 0.7, h.round() + x.sign()).clamp(-3, 1.5)
    seen = seen ^ (h.sum(1) > 0)
    return {"h": h.relu(), "seen": seen, "count": count * 2}, (h, (count + seen) % 5, seen)


def mixing(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h - h.mean(0) + x)
    return torch.fft.fft(h).real, h


OPERATIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "argmax, gather, scatter_add": (greedy, torch.randn(5, 3).double()),
    "cumsum, index, extremes": (sums, torch.randn(5, 3).double()),
    "matrix state": (matrices, torch.randn(5, 3, 3).double()),
    "rows as columns": (columns, torch.randn(5, 3).double()),
    "logic": (logic, (torch.randn(5, 3).double(), torch.arange(5), torch.arange(5) > 2)),
    "rows that meet, PyTorch outside": (mixing, torch.randn(5, 3).double()),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_by_kernels(name: str, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "rows that meet, PyTorch outside" and tier == "rows":
        pytest.skip("rows meet")
    choose(monkeypatch, tier)
    torch.manual_seed(1)
    cell, state = OPERATIONS[name]
    as_the_loop(cell, "triton", torch.randn(3, 5, 3).double().requires_grad_(), state, verify="never")


class Step(nn.Module):
    """Two states, one carried by a product alone, so that its gradient is a product too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.slow = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        h, s = state
        return (h + s), (torch.tanh(self.mix(h) + x), self.slow(s) + h)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.2)], ids=str
)
def test_dtypes_by_kernels(dtype: torch.dtype, tolerance: float, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, tier)
    torch.manual_seed(2)
    x, state = (torch.randn(4, 5, 3) * 0.5).to(dtype), (torch.zeros(5, 3, dtype=dtype), torch.ones(5, 3, dtype=dtype))
    as_the_loop(Step().to(dtype), "triton", x.requires_grad_(), state, tolerance)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (2, 1), (17, 70), (40, 3)])
def test_sizes_beside_those_of_tiles(rows: int, width: int, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, tier)
    torch.manual_seed(3)
    cell = nn.GRUCell(2, width).double()
    as_the_loop(cell, "triton", torch.randn(2, rows, 2).double().requires_grad_(), verify="never")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("call", ["lengths", "mask", "reset", "truncate"])
def test_rows_that_do_not_count(call: str, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, tier)
    torch.manual_seed(4)
    cell, x = nn.LSTMCell(3, 4).double(), torch.randn(4, 3, 3).double().requires_grad_()
    valid = torch.arange(4)[:, None] < torch.tensor([4, 1, 3])
    options: dict[str, Any] = {
        "lengths": {"lengths": torch.tensor([4, 1, 3])},
        "mask": {"mask": torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [1, 0, 0]]).bool()},
        "reset": {"reset": torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [1, 0, 0]]).bool()},
        "truncate": {"truncate": 2},
    }[call]
    inputs = spoiled(x, valid) if call == "lengths" else x
    as_the_loop(cell, "triton", inputs, verify="never", **options)


@pytest.mark.parametrize("tier", TIERS)
def test_memory_modes_have_the_same_bits(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks, the last of which is shorter."""
    choose(monkeypatch, tier)
    monkeypatch.setattr("torchweft.recurrent.triton.triton_backend.CHUNK_STEPS", 2)
    monkeypatch.setattr("torchweft.recurrent.triton.triton_backend.CHUNK_BYTES", 1)
    torch.manual_seed(5)
    cell, x = nn.GRUCell(3, 4).double(), torch.randn(5, 3, 3).double().requires_grad_()
    modes: tuple[Any, ...] = ("full", "states", "sqrt")
    nets, results = [planned(cell, "triton", memory=memory, verify="never") for memory in modes], []
    for net in (*nets, eagerly(cell)):
        outputs = net(x).outputs
        results.append([outputs, *torch.autograd.grad(outputs.square().sum(), [x, *cell.parameters()])])
    close(results[0], results[-1], 1e-11)
    assert all(equal(results[0], other) for other in results[1:-1])
    assert all(run_by(net) == {"triton"} for net in nets)


def test_plan_is_verified_and_explained() -> None:
    net = planned(nn.LSTMCell(3, 4), "triton")
    net(torch.randn(3, 5, 3))
    assert run_by(net) == {"triton"} and "tier " in net.explain()


@pytest.mark.parametrize(("cell", "states"), [(nn.LSTMCell(3, 4), 2), (nn.GRUCell(3, 4), 1)], ids=["LSTM", "GRU"])
def test_step_of_a_gated_cell_is_one_launch_each_way(cell: nn.Module, states: int) -> None:
    first = [torch.zeros(5, 4) for _ in range(states)]

    def step(x: Tensor, state: Any) -> Any:
        after = cell(x, state)
        return (after[0] if states == 2 else after), after

    plan = backend_of(step, torch.randn(5, 3), tuple(first) if states == 2 else first[0], "segments")
    launches = [len(kernels) for loops in (plan.forward_loops, plan.backward_loops) for kernels in loops.main]
    assert launches == [1, 0, 1, 1], "in each step, and after the last one"


def test_third_batch_size_needs_no_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows is a variable of the kernels."""
    choose(monkeypatch, "segments")
    torch.manual_seed(6)
    net, made = planned(nn.GRUCell(3, 4).double(), "triton", verify="never"), list[str]()
    make = PlannedCall.make

    def counting(call: PlannedCall, name: str) -> Any:
        made.append(name)
        return make(call, name)

    monkeypatch.setattr(PlannedCall, "make", counting)
    for rows in (5, 3, 18, 1):
        x = torch.randn(3, rows, 3).double().requires_grad_()
        results = [outcome(each, x) for each in (net, eagerly(net.cell))]
        close(*results, 1e-11)
    assert made == ["triton", "triton"] and run_by(net) == {"triton"}
