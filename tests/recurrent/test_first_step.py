"""Cells whose first step settles the dtype or shape of a state: a plan runs the steps after it."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, equal, grid, outcome, planned, run_by
from torchweft.core.errors import SpecError
from torchweft.recurrent import Recurrent

D, H, T, N = 3, 8, 6, 4


class Joined(nn.Module):
    """The ordinary cell: under autocast its state becomes bfloat16 in step 0."""

    def __init__(self) -> None:
        super().__init__()
        self.of_all = nn.Linear(D + H, H)

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], H)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.of_all(torch.cat([x, h], -1)).tanh()
        return h, h


class Late(Joined):
    """Returns the state before the step: the dtype of the output settles one step later."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, super().forward(x, h)[1]


class Counted(Joined):
    """An integer state that becomes a float, and one that gets its rows in step 0. The step draws."""

    def initial_state(self, x: Tensor) -> Any:
        return {"h": x.new_zeros(x.shape[0], 1), "n": torch.zeros(x.shape[0], 1, dtype=torch.int64)}

    def forward(self, x: Tensor, state: Any) -> Any:
        h = nn.functional.dropout(super().forward(x, state["h"].expand(-1, H))[0], 0.3)
        return {"h": h, "none": None}, {"h": h, "n": state["n"] + h.mean(-1, keepdim=True)}


CELLS = {"joined": Joined, "late": Late, "counted": Counted}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"lengths": [6, 0, 1, 3]},
    "reset, mask": {"reset": torch.arange(T * N).view(T, N) % 3 == 1, "mask": torch.arange(T * N).view(T, N) % 5 > 0},
    "truncated": {"truncate": 2},
    "bytes": {"memory": 1 << 20},
}


@grid(make=CELLS, call=CALLS, backend=["python", "c"])
def test_later_steps_run_by_a_plan_as_the_loop(make: Any, call: dict[str, Any], backend: str) -> None:
    torch.manual_seed(0)
    options = {name: value for name, value in call.items() if name in ("truncate", "memory")}
    call = {name: value for name, value in call.items() if name not in options}
    net = planned(make(), backend, **options)
    x = torch.randn(T, N, D).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=make is not Counted), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = outcome(eagerly(net.cell, truncate=net.truncate), x, **call)
        for _ in range(2):
            close(outcome(net, x, **call), expected, 8e-2)
        assert flatten_dtypes(net(x, **call)) == flatten_dtypes(eagerly(net.cell)(x, **call))
    assert run_by(net) == {"eager", backend}, net.why()
    assert [kind.startswith("step 0 of") for kind, _, _ in net.why()] == [True, False]


def flatten_dtypes(result: Any) -> list[Any]:
    return [value.dtype for value in torch.utils._pytree.tree_leaves(tuple(result)) if value is not None]


@pytest.mark.parametrize("backend", ["eager", "python"])
def test_output_that_settles_late_equals_a_plain_loop(backend: str) -> None:
    net, x = planned(Late(), backend), torch.randn(T, N, D)
    with torch.autocast("cpu", torch.bfloat16):
        h, outputs = x.new_zeros(N, H), []
        for step in x:
            y, h = net.cell(step, h)
            outputs.append(y)
        close(net(x).outputs, torch.stack(outputs), 4e-2)
        assert net(x).outputs.dtype == torch.stack(outputs).dtype


@pytest.mark.parametrize("backend", ["eager", "python"])
def test_form_that_settles_twice_is_rejected(backend: str) -> None:
    def step(x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        return x, (state[1], state[1] + x)  # the first state is an integer for one step more

    zeros = torch.zeros(N, D, dtype=torch.int64)
    with pytest.raises(SpecError, match="that step 1 returned"):
        planned(step, backend)(torch.randn(T, N, D), (zeros, zeros))


def test_one_step_and_its_forecast() -> None:
    net, x = Recurrent(Joined(), backend="python"), torch.randn(T, N, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(net(x[:1]), eagerly(net.cell)(x[:1]))
        peaks = net.forecast(100, x[:1])
        assert peaks["full"] > 2 * 100 * N * H * 2  # outputs are joined by a copy
    assert run_by(net) == {"eager", "python"}


@pytest.mark.parametrize("cell", [Joined(), nn.GRUCell(D, H)])
@pytest.mark.parametrize("rows", [1, N])
def test_state_with_an_axis_of_layers_is_rejected(cell: nn.Module, rows: int) -> None:
    net = Recurrent(cell, backend="eager")
    with pytest.raises(SpecError, match=r"give h0\[0\]"):
        net(torch.randn(T, rows, D), torch.zeros(1, rows, H))
    with pytest.raises(SpecError, match=r"give h0\[0\]"):
        net.step(torch.randn(rows, D), torch.zeros(1, rows, H))


def test_matrix_state_for_one_row_is_still_expanded() -> None:
    net = Recurrent(lambda x, h: (x, h + x[..., None]), initial=lambda x: x.new_zeros(len(x), D, D), backend="eager")
    assert net(torch.randn(T, D, D), torch.zeros(1, D, D)).last.shape == (D, D, D)
