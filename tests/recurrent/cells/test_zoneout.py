"""Zoneout keeps entries of the state at its rate in training, and mixes as much in eval mode."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, equal
from weft.core.errors import SpecError
from weft.recurrent import Recurrent, cells


class Ones(nn.Module):
    """A cell whose new states are all ones; it counts steps, and passes a constant on."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        h = torch.ones_like(state["h"])
        new = {"h": h, "c": torch.ones_like(state["c"]), "count": state["count"] + 1, "constant": state["constant"]}
        return (h, 2 * h, None), new


def begun(rows: int = 100) -> dict[str, Tensor]:
    return {
        "h": torch.zeros(rows, 50),
        "c": torch.zeros(rows, 50),
        "count": torch.zeros(rows, dtype=torch.int64),
        "constant": torch.rand(rows, 3),
    }


def test_in_training_an_entry_is_old_or_new_at_the_rate_of_its_state() -> None:
    torch.manual_seed(0)
    cell = cells.Zoneout(Ones(), {"h": 0.5, "c": 0.1, "count": 0, "constant": 0})
    _, new = cell(torch.zeros(100, 1), begun())
    for name, rate in {"h": 0.5, "c": 0.1}.items():
        assert set(new[name].unique().tolist()) == {0.0, 1.0}
        assert abs((new[name] == 0).double().mean() - rate) < 0.03
    assert not torch.equal(new["h"], cell(torch.zeros(100, 1), begun())[1]["h"])


def test_in_eval_mode_it_is_the_mean_of_training() -> None:
    cell = cells.Zoneout(cells.GRUCell(3, 4), 0.3).double()
    x, h = torch.randn(1, 3).double(), torch.randn(1, 4).double()
    wanted = 0.3 * h + 0.7 * cell.cell(x, h)[0]
    seen, _ = cell.eval()(x, h)
    close(seen, wanted)
    torch.manual_seed(0)
    many = 20000
    drawn, _ = cell.train()(x.expand(many, 3), h.expand(many, 4))
    close(drawn.mean(0, keepdim=True), wanted, 0.02)


def test_an_output_that_is_a_state_is_zoned_out_with_it() -> None:
    (h, double, nothing), new = cells.Zoneout(Ones(), 0.5)(torch.zeros(100, 1), begun())
    assert h is new["h"] and not h.all()
    assert (double == 2).all() and nothing is None


def test_counters_go_on_and_what_is_untouched_stays_untouched() -> None:
    state = begun()
    for cell in (cells.Zoneout(Ones(), 0.5), cells.Zoneout(Ones(), 0.5).eval()):
        _, new = cell(torch.zeros(100, 1), state)
        assert (new["count"] == 1).all() and new["constant"] is state["constant"]


@pytest.mark.parametrize(("rate", "level"), [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("training", [True, False])
def test_the_ends_of_the_scale(rate: float, level: float, training: bool) -> None:
    _, new = cells.Zoneout(Ones(), rate).train(training)(torch.zeros(100, 1), begun())
    assert (new["h"] == level).all()


def test_a_rate_of_zero_draws_no_numbers() -> None:
    state = begun()
    before = torch.random.get_rng_state()
    cells.Zoneout(Ones(), 0.0)(torch.zeros(100, 1), state)
    assert torch.equal(before, torch.random.get_rng_state())


def test_gradients_go_where_the_values_came_from() -> None:
    torch.manual_seed(0)
    old = torch.rand(3, 4, requires_grad=True)
    cell = cells.Zoneout(cells.ElmanCell(2, 4), 0.5)
    with torch.no_grad():
        cell.cell.weight_hh.zero_()
    y, _ = cell(torch.randn(3, 2), old)
    (gradient,) = torch.autograd.grad(y.sum(), old)
    assert equal(gradient, (y == old).float())


def test_a_state_that_changes_its_nesting_is_named() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return x, (state, state)

    with pytest.raises(SpecError, match="state should be a leaf, but is a tuple of 2"):
        cells.Zoneout(Changes(), 0.5)(torch.zeros(2, 1), torch.zeros(2, 1))


def test_rates_are_nested_as_the_state() -> None:
    with pytest.raises(SpecError, match="rate should be a tuple of 2, but is a tuple of 3"):
        Recurrent(cells.Zoneout(cells.LSTMCell(3, 4), (0.1, 0.1, 0.1)))(torch.zeros(2, 2, 3))
