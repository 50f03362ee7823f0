"""Modules whose operators yield several tensors, read by strides, check matrices or differentiate run in C."""

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
    close,
    eagerly,
    needs_compiler,
    outcome,
    planned,
    run_by,
)
from weft.core.errors import UsageError
from weft.recurrent import Recurrent
from weft.recurrent.cpp.cpp_backend import CppBackend
from weft.recurrent.plan_cache import NoPlanWarning

H = 8
Step = Callable[[Tensor, Tensor], Tensor]


class Stepping(nn.Module):
    """h = tanh(step(weights, W x + h)), with weights near the unit matrix."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        self.step, self.part, self.enter = step, part, nn.Linear(3, H)
        self.weight = nn.Parameter(torch.eye(H) + 0.1 * torch.randn(H, H))
        self.double().eval()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.step(self.part or self.weight, self.enter(x) + h))
        return h, h


def by_part(part: nn.Module) -> Callable[[], Stepping]:
    return lambda: Stepping(lambda part, h: part(h), part)


def by_weight(step: Step) -> Callable[[], Stepping]:
    return lambda: Stepping(step)


def energy(weight: Tensor, h: Tensor) -> Tensor:
    return (h @ weight).tanh().square().sum()


ROWS, COLUMNS = torch.tensor([[0], [1]]), torch.tensor([1, -1, 0])
CELLS: dict[str, Callable[[], Stepping]] = {
    "GroupNorm": by_part(nn.GroupNorm(2, H)),
    "GroupNorm of pictures": lambda: Stepping(
        lambda norm, h: norm(h.view(-1, 4, 2)).reshape(-1, H), nn.GroupNorm(2, 4, affine=False)
    ),
    "weight_norm": by_part(weight_norm(nn.Linear(H, H))),
    "BatchNorm in eval": by_part(nn.BatchNorm1d(H)),
    "inv": by_weight(lambda w, h: h @ torch.linalg.inv(w)),
    "solve": by_weight(lambda w, h: torch.linalg.solve(w, h.t()).t()),
    "solve from the right": by_weight(lambda w, h: torch.linalg.solve(w, h, left=False)),
    "solve of weights": by_weight(lambda w, h: h @ torch.linalg.solve(w, w.t())),
    "grad": by_weight(lambda w, h: h - 0.1 * torch.func.grad(energy, 1)(w, h)),
    "grad of each row": by_weight(lambda w, h: h - torch.func.vmap(torch.func.grad(energy, 1), (None, 0))(w, h)),
    "a remainder": by_weight(lambda w, h: torch.remainder(h @ w, 1.5)),
    "any": by_weight(lambda w, h: torch.where((h > 0.5).any(-1, keepdim=True), h @ w, h)),
    "two indices": by_weight(lambda w, h: torch.cat([h.view(-1, 2, 4)[:, ROWS, COLUMNS].flatten(1), h[:, :2]], 1)),
    "two indices, apart": by_weight(lambda w, h: h + h.view(2, 2, 4, 2)[ROWS, :, COLUMNS].sum((0, 1)).repeat(2, 4)),
    "written at two indices": by_weight(
        lambda w, h: h.view(-1, 2, 4).index_put((torch.tensor([0, 1]), torch.tensor([1, 1])), h[:2, :4]).flatten(1)
    ),
    "a safe softmax": by_weight(lambda w, h: torch.ops.aten._safe_softmax(h.masked_fill(h < 9, -torch.inf), -1) + h),
}


@needs_compiler
@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_modules_run_in_c(make: Callable[[], Stepping]) -> None:
    """By backend "auto" too, also under hooks of the caller; numbers and gradients are the eager loop's."""
    torch.manual_seed(0)
    cell, x, h = make(), torch.randn(5, 4, 3).double().requires_grad_(), torch.randn(4, H).double().requires_grad_()
    as_the_loop(cell, "c", x, h)
    net = Recurrent(cell)
    net(x, h)
    assert run_by(net) == {"c"}


@pytest.mark.parametrize(
    ("step", "backend"),
    [
        (lambda w, h: h @ torch.linalg.inv(w), "python"),
        pytest.param(lambda w, h: h @ torch.linalg.inv(w), "c", marks=needs_compiler),
        (lambda w, h: h + torch.linalg.inv(w * h.sum())[:1], "python"),
    ],
    ids=["python", "c", "a state in python"],
)
def test_singular_matrix_raises(step: Step, backend: str) -> None:
    """As in the eager loop, where a plan computes the inverse without looking at it."""
    cell, x = Stepping(step), torch.randn(3, 2, 3).double()
    net = planned(cell, backend)
    net(x, torch.randn(2, H).double())
    cell.weight.data.zero_()
    with pytest.raises(torch.linalg.LinAlgError):
        net(x, torch.randn(2, H).double())


@needs_compiler
def test_index_out_of_range_hits_no_other_element() -> None:
    """Two indices become one; what is out of range along one axis is NaN, not an element of the next row."""
    cell = Stepping(lambda w, h: h)
    cell.register_buffer("at", torch.tensor([0, 1]))
    cell.step = lambda w, h, cell=cell: h * h.view(-1, 2, 4)[:, cell.at, cell.at].sum(-1, keepdim=True)
    net, x, h = Recurrent(cell, backend="c"), torch.randn(3, 2, 3).double(), torch.randn(2, H).double()
    assert not net(x, h).outputs.isnan().any()
    cell.at.fill_(2)  # beyond the axis of 2, within that of 4
    assert net(x, h).outputs.isnan().all()


def test_failure_in_c_leads_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised: the next plan is tried before the eager loop."""

    def fail(self: CppBackend, captured: Any) -> None:
        raise KeyError("val")

    monkeypatch.setattr(CppBackend, "__init__", fail)
    monkeypatch.setattr("weft.recurrent.plan_cache.PlannedCall.race", lambda self, engine: (1.0, 2.0))
    net = Recurrent(nn.GRUCell(3, 4))
    net(torch.randn(3, 2, 3))
    assert run_by(net) == {"python"} and "not c: KeyError" in net.why()[0][2]


@needs_compiler
def test_explicit_c_that_cannot_be_raises() -> None:
    """With the operator, and what to do; "auto" takes another way, and a fault of the cell itself is told first."""
    cell, x, h = Stepping(lambda w, h: h.sort(-1).values @ w), torch.randn(3, 2, 3).double(), torch.zeros(2, H).double()
    net = planned(cell, "c")
    for _ in range(2):
        with pytest.raises(UsageError, match=r'backend="c" cannot run cell Stepping.*aten.sort.*backend="auto"'):
            net(x, h)
    net.backend = "auto"
    close(outcome(net, x, h), outcome(eagerly(cell), x, h), 1e-10)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        planned(lambda x, h: (x @ h,) * 2, "c")(x, h)
    with pytest.raises(UsageError, match="must match the old one"):  # a state that the first step settles
        planned(lambda x, h: (x + h,) * 2, "c")(x, torch.zeros(2, 3, dtype=torch.int64))


@by_plan
def test_cancellation_does_not_reject_a_right_plan(backend: str) -> None:
    """A norm of two elements is nearly a sign: in float32 its gradient is noise, in the eager loop as in the plan."""
    torch.manual_seed(1)
    cell = Stepping(lambda norm, h: norm(h), nn.GroupNorm(4, H)).float()
    for seed in range(5):
        torch.manual_seed(seed)
        x, h = torch.randn(6, 4, 3, requires_grad=True), torch.randn(4, H, requires_grad=True)
        net = planned(cell, backend)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoPlanWarning)
            net(x, h)
        assert run_by(net) == {backend}
