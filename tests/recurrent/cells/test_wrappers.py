"""Wrappers hold any cell as their child, begin where it begins, and are cells themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, equal, grid
from weft.core.errors import SpecError, UsageError
from weft.core.validation import Validator
from weft.recurrent import Recurrent, cells
from weft.recurrent.cells.wrappers import check_rates, rates_for


class Homeless(nn.Module):
    """A cell that must be given its state."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state + x, state + x


WRAPPERS: dict[str, Any] = {
    "residual": cells.Residual,
    "zoneout": lambda cell: cells.Zoneout(cell, 0.0),
    "dropout": cells.SequenceDropout,
}


@grid(wrap=WRAPPERS, make=[nn.LSTMCell, nn.GRUCell, cells.SLSTMCell])
def test_any_cell_can_be_wrapped_and_keeps_its_keys(wrap: Any, make: Any) -> None:
    cell = make(4, 4).double()
    x = torch.randn(5, 2, 4).double()
    plain, wrapped = Recurrent(cell)(x), Recurrent(wrap(cell))(x)
    close(wrapped.outputs, plain.outputs + x if wrap is cells.Residual else plain.outputs)
    assert list(wrap(cell).state_dict()) == [f"cell.{key}" for key in cell.state_dict()]


def test_wrappers_can_be_wrapped() -> None:
    cell = cells.LSTMCell(4, 4)
    x = torch.randn(5, 2, 4)
    nested = Recurrent(cells.Residual(cells.Zoneout(cells.SequenceDropout(cell, inputs=0.5), 0.5)).eval())
    state = (torch.zeros(1, 4), torch.zeros(1, 4))
    h, c = state
    for x_t in x:
        _, (new_h, new_c) = cell(x_t, (h, c))
        h, c = (h + new_h) / 2, (c + new_c) / 2
    close(nested(x).last.cell, (h, c), 1e-6)
    close(nested(x).outputs[-1], h + x[-1], 1e-6)


@pytest.mark.parametrize("wrap", [cells.Residual, lambda cell: cells.Zoneout(cell, 0.5)])
def test_a_cell_that_must_be_given_its_state_must_be_so_when_wrapped(wrap: Any) -> None:
    net = Recurrent(wrap(Homeless()).eval())
    with pytest.raises(UsageError, match="there is no initial state: give state="):
        net(torch.ones(3, 2, 4))
    assert net(torch.ones(3, 2, 4), torch.zeros(2, 4), reset=torch.ones(3, 2, dtype=torch.bool)).last.shape == (2, 4)


def test_dropout_of_a_cell_that_must_be_given_its_state_says_how() -> None:
    dropout = cells.SequenceDropout(Homeless(), inputs=0.5)
    net = Recurrent(dropout)
    x = torch.ones(3, 2, 4)
    with pytest.raises(UsageError, match=r"Homeless in SequenceDropout has no initial state: .*initial_state\(x"):
        net(x)
    last = net(x, dropout.initial_state(x[0], torch.zeros(2, 4))).last
    assert equal(last.cell, last.masks[0] * 3)


class Same(nn.Module):
    """A cell that returns what it is told to."""

    def __init__(self, y: Any) -> None:
        super().__init__()
        self.y = y

    def forward(self, x: Any, state: Tensor) -> tuple[Any, Tensor]:
        return self.y, state + 1


def test_nested_values_are_added_leaf_by_leaf() -> None:
    x = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    y, state = cells.Residual(Same({"a": torch.full((2, 3), 5.0), "b": torch.zeros(2)}))(x, torch.zeros(2))
    assert equal(y, {"a": torch.full((2, 3), 6.0), "b": torch.ones(2)})
    assert equal(state, torch.ones(2))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.ones(2, 1), r"the output is \(2, 1\), the input \(2, 3\)"),
        (None, r"the output is NoneType, the input \(2, 3\)"),
        ((torch.ones(2, 3),), "is not nested as"),
    ],
)
def test_what_cannot_be_added_is_an_error_and_never_broadcast(y: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        cells.Residual(Same(y))(torch.ones(2, 3), torch.zeros(2))


class Shows(nn.Module):
    """A cell whose output is what it got."""

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(x), torch.ones_like(x)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        return (x, *state), (torch.ones_like(x), torch.ones_like(x))


def test_the_same_entries_are_dropped_at_every_step_and_others_in_every_row() -> None:
    torch.manual_seed(0)
    net = Recurrent(cells.SequenceDropout(Shows(), inputs=0.2, states=(0.5, 0.0)))
    x, h, c = net(torch.ones(6, 40, 50)).outputs
    for values, rate in ((x, 0.2), (h, 0.5)):
        assert equal(values, values[:1].expand_as(values))
        assert not torch.equal(values[0, 0], values[0, 1])
        close(values.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
        assert abs((values[0] == 0).double().mean() - rate) < 0.04
    assert (c == 1).all()
    assert not torch.equal(x, net(torch.ones(6, 40, 50)).outputs[0])


def test_chunks_go_on_with_their_masks() -> None:
    net = Recurrent(cells.SequenceDropout(cells.LSTMCell(3, 4), inputs=0.5, states=(0.5, 0)))
    x = torch.randn(6, 2, 3)
    first = net(x[:2])
    second = net(x[2:], first.last)
    assert equal(first.last.masks, second.last.masks)
    torch.manual_seed(0)
    whole = net(x)
    torch.manual_seed(0)
    first = net(x[:2])
    assert equal(torch.cat([first.outputs, net(x[2:], first.last).outputs]), whole.outputs)


def test_in_eval_mode_nothing_is_dropped_and_nothing_drawn() -> None:
    cell = cells.LSTMCell(3, 4)
    dropout = Recurrent(cells.SequenceDropout(cell, inputs=0.5, states=0.5))
    x = torch.randn(6, 2, 3)
    trained = dropout(x)
    before = torch.random.get_rng_state()
    dropout.eval()
    assert equal(dropout(x).outputs, Recurrent(cell)(x).outputs)
    assert equal(dropout(x, trained.last).outputs, Recurrent(cell)(x, trained.last.cell).outputs)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_rate_of_one_drops_all_and_one_of_zero_nothing() -> None:
    x, h, c = Recurrent(cells.SequenceDropout(Shows(), inputs=1.0, states=(0.0, 1.0)))(torch.ones(2, 3, 4)).outputs
    assert not x.any() and (h == 1).all() and not c.any()


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
    for wrapped in (
        cells.Zoneout(cells.LSTMCell(3, 4), (0.1, 0.1, 0.1)),
        cells.SequenceDropout(cells.LSTMCell(3, 4), states=[0.5]),
    ):
        with pytest.raises(SpecError, match=r"(rate|states) should be a tuple of 2"):
            Recurrent(wrapped)(torch.zeros(2, 2, 3))


@pytest.mark.parametrize("training", [True, False])
def test_a_rate_of_one_keeps_all_and_one_of_zero_nothing_and_draws_nothing(training: bool) -> None:
    for rate, level in ((0.0, 1.0), (1.0, 0.0)):
        state, before = begun(), torch.random.get_rng_state()
        _, new = cells.Zoneout(Ones(), rate).train(training)(torch.zeros(100, 1), state)
        assert (new["h"] == level).all()
        assert rate or torch.equal(before, torch.random.get_rng_state())


def test_outputs_that_are_states_go_with_them_and_what_is_untouched_stays_untouched() -> None:
    state = begun()
    for cell in (cells.Zoneout(Ones(), 0.5), cells.Zoneout(Ones(), 0.5).eval()):
        (h, double, nothing), new = cell(torch.zeros(100, 1), state)
        assert h is new["h"] and (h < 1).any()
        assert (double == 2).all() and nothing is None
        assert (new["count"] == 1).all() and new["constant"] is state["constant"]


STATE = {"h": torch.zeros(2), "count": torch.zeros(2, dtype=torch.int64)}


def test_one_rate_is_for_all_that_has_floating_point_numbers() -> None:
    assert rates_for("rate", 0.5, STATE) == [0.5, 0.0]
    assert rates_for("rate", 0, STATE["count"]) == [0.0]
    with pytest.raises(UsageError, match=r"rate is 0\.5, but there are no floating-point numbers"):
        rates_for("rate", 0.5, STATE["count"])


def test_nested_rates_are_for_each_tensor_its_own() -> None:
    assert rates_for("rate", {"h": 0.25, "count": 0}, STATE) == [0.25, 0.0]
    with pytest.raises(UsageError, match=r"rate\['count'\]: not 0"):
        rates_for("rate", {"h": 0.25, "count": 0.1}, STATE)
    with pytest.raises(SpecError, match=r"rate should be a dict with keys .* but is a tuple of 2"):
        rates_for("rate", (0.25, 0.1), STATE)


def test_every_leaf_that_is_no_probability_is_named() -> None:
    check = Validator("rates")
    check_rates("rate", (0, 1, 0.5), check)
    assert check.faults == []
    check_rates("rate", (1.5, {"a": None, "b": float("nan")}), check)
    assert check.faults == [
        "rate[0] is 1.5, wanted a number from 0 to 1",
        "rate[1]['a'] is None, wanted a number from 0 to 1",
        "rate[1]['b'] is nan, wanted a number from 0 to 1",
    ]
