"""Wrappers hold any cell as their child, use its initial state, and are cells themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, equal, grid
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.validation import Validator
from torchweft.recurrent import Recurrent, cells
from torchweft.recurrent.cells.wrappers import check_rates, rates_for


class Stateless(nn.Module):
    """A cell without an initial state."""

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
    h, c = torch.zeros(1, 4), torch.zeros(1, 4)
    for x_t in x:
        _, (new_h, new_c) = cell(x_t, (h, c))
        h, c = (h + new_h) / 2, (c + new_c) / 2
    close(nested(x).last.cell, (h, c), 1e-6)
    close(nested(x).outputs[-1], h + x[-1], 1e-6)


@pytest.mark.parametrize("wrap", [cells.Residual, lambda cell: cells.Zoneout(cell, 0.5)])
def test_a_missing_initial_state_is_still_missing(wrap: Any) -> None:
    net = Recurrent(wrap(Stateless()).eval())
    x = torch.ones(3, 2, 4)
    with pytest.raises(UsageError, match="there is no initial state: give state="):
        net(x)
    assert net(x, torch.zeros(2, 4), reset=torch.ones(3, 2, dtype=torch.bool)).last.shape == (2, 4)
    dropout = cells.SequenceDropout(Stateless(), inputs=0.5)
    with pytest.raises(UsageError, match=r"Stateless in SequenceDropout has no initial state: .*initial_state\(x"):
        Recurrent(dropout)(x)
    last = Recurrent(dropout)(x, dropout.initial_state(x[0], torch.zeros(2, 4))).last
    assert equal(last.cell, last.masks[0] * 3)


class FixedOutput(nn.Module):
    """A cell whose output is fixed."""

    def __init__(self, y: Any) -> None:
        super().__init__()
        self.y = y

    def forward(self, x: Any, state: Tensor) -> tuple[Any, Tensor]:
        return self.y, state + 1


def test_residual_adds_leaf_by_leaf_and_never_broadcasts() -> None:
    x = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    y, state = cells.Residual(FixedOutput({"a": torch.full((2, 3), 5.0), "b": torch.zeros(2)}))(x, torch.zeros(2))
    assert equal(y, {"a": torch.full((2, 3), 6.0), "b": torch.ones(2)})
    assert equal(state, torch.ones(2))
    for wrong, message in (
        (torch.ones(2, 1), r"the output is \(2, 1\), the input \(2, 3\)"),
        (None, r"the output is NoneType, the input \(2, 3\)"),
        ((torch.ones(2, 3),), "is not nested as"),
    ):
        with pytest.raises(SpecError, match=message):
            cells.Residual(FixedOutput(wrong))(torch.ones(2, 3), torch.zeros(2))


class Identity(nn.Module):
    """A cell whose output is its input and state."""

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(x), torch.ones_like(x)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        return (x, *state), (torch.ones_like(x), torch.ones_like(x))


def test_dropout_masks_differ_by_row_but_not_by_step() -> None:
    torch.manual_seed(0)
    net = Recurrent(cells.SequenceDropout(Identity(), inputs=0.2, states=(0.5, 0.0)))
    x, h, c = net(torch.ones(6, 40, 50)).outputs
    for values, rate in ((x, 0.2), (h, 0.5)):
        assert equal(values, values[:1].expand_as(values))
        assert not torch.equal(values[0, 0], values[0, 1])
        close(values.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
        assert abs((values[0] == 0).double().mean() - rate) < 0.04
    assert (c == 1).all()
    assert not torch.equal(x, net(torch.ones(6, 40, 50)).outputs[0])
    everything = cells.SequenceDropout(Identity(), inputs=1.0, states=(0.0, 1.0))
    x, h, c = Recurrent(everything)(torch.ones(2, 3, 4)).outputs
    assert not x.any() and (h == 1).all() and not c.any()


def test_chunks_continue_with_their_masks() -> None:
    net = Recurrent(cells.SequenceDropout(cells.LSTMCell(3, 4), inputs=0.5, states=(0.5, 0)))
    x = torch.randn(6, 2, 3)
    torch.manual_seed(0)
    whole = net(x)
    torch.manual_seed(0)
    first = net(x[:2])
    second = net(x[2:], first.last)
    assert equal(first.last.masks, second.last.masks)
    assert equal(torch.cat([first.outputs, second.outputs]), whole.outputs)


@pytest.mark.long
def test_eval_mode_drops_and_draws_nothing() -> None:
    cell = cells.LSTMCell(3, 4)
    dropout = Recurrent(cells.SequenceDropout(cell, inputs=0.5, states=0.5))
    x = torch.randn(6, 2, 3)
    trained = dropout(x)
    before = torch.random.get_rng_state()
    dropout.eval()
    assert equal(dropout(x).outputs, Recurrent(cell)(x).outputs)
    assert equal(dropout(x, trained.last).outputs, Recurrent(cell)(x, trained.last.cell).outputs)
    assert torch.equal(before, torch.random.get_rng_state())


class Ones(nn.Module):
    """A cell whose new states are ones. It also counts steps, and passes a constant through."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        h = torch.ones_like(state["h"])
        new = {"h": h, "c": torch.ones_like(state["c"]), "count": state["count"] + 1, "constant": state["constant"]}
        return (h, 2 * h, None), new


X = torch.zeros(100, 1)


def zero_state() -> dict[str, Tensor]:
    h, c = torch.zeros(100, 50), torch.zeros(100, 50)
    return {"h": h, "c": c, "count": torch.zeros(100, dtype=torch.int64), "constant": torch.rand(100, 3)}


def test_zoneout_keeps_old_entries_at_the_rate_of_a_state() -> None:
    torch.manual_seed(0)
    cell = cells.Zoneout(Ones(), {"h": 0.5, "c": 0.1, "count": 0, "constant": 0})
    _, new = cell(X, zero_state())
    for name, rate in {"h": 0.5, "c": 0.1}.items():
        assert set(new[name].unique().tolist()) == {0.0, 1.0}
        assert abs((new[name] == 0).double().mean() - rate) < 0.03
    assert not torch.equal(new["h"], cell(X, zero_state())[1]["h"])


@pytest.mark.parametrize("training", [True, False])
def test_zoneout_at_rates_zero_and_one(training: bool) -> None:
    """Rate one keeps all entries. Rate zero keeps none, and draws nothing."""
    for rate, level in ((0.0, 1.0), (1.0, 0.0)):
        state, before = zero_state(), torch.random.get_rng_state()
        _, new = cells.Zoneout(Ones(), rate).train(training)(X, state)
        assert (new["h"] == level).all()
        assert rate or torch.equal(before, torch.random.get_rng_state())


def test_zoneout_changes_outputs_that_are_states() -> None:
    """A state that the cell returns unchanged stays unchanged."""
    state = zero_state()
    for cell in (cells.Zoneout(Ones(), 0.5), cells.Zoneout(Ones(), 0.5).eval()):
        (h, double, nothing), new = cell(X, state)
        assert h is new["h"] and (h < 1).any()
        assert (double == 2).all() and nothing is None
        assert (new["count"] == 1).all() and new["constant"] is state["constant"]


def test_rates_and_states_have_one_nesting() -> None:
    class Nesting(nn.Module):
        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return x, (state, state)

    with pytest.raises(SpecError, match="state should be a leaf, but is a tuple of 2"):
        cells.Zoneout(Nesting(), 0.5)(torch.zeros(2, 1), torch.zeros(2, 1))
    for wrapped in (
        cells.Zoneout(cells.LSTMCell(3, 4), (0.1, 0.1, 0.1)),
        cells.SequenceDropout(cells.LSTMCell(3, 4), states=[0.5]),
    ):
        with pytest.raises(SpecError, match=r"(rate|states) should be a tuple of 2"):
            Recurrent(wrapped)(torch.zeros(2, 2, 3))


STATE = {"h": torch.zeros(2), "count": torch.zeros(2, dtype=torch.int64)}


def test_rates_apply_to_floating_point_tensors() -> None:
    assert rates_for("rate", 0.5, STATE) == [0.5, 0.0]
    assert rates_for("rate", 0, STATE["count"]) == [0.0]
    assert rates_for("rate", {"h": 0.25, "count": 0}, STATE) == [0.25, 0.0]
    with pytest.raises(UsageError, match=r"rate is 0\.5, but there are no floating-point numbers"):
        rates_for("rate", 0.5, STATE["count"])
    with pytest.raises(UsageError, match=r"rate\['count'\]: not 0"):
        rates_for("rate", {"h": 0.25, "count": 0.1}, STATE)
    with pytest.raises(SpecError, match=r"rate should be a dict with keys .* but is a tuple of 2"):
        rates_for("rate", (0.25, 0.1), STATE)


def test_every_rate_that_is_not_a_probability_is_named() -> None:
    check = Validator("rates")
    check_rates("rate", (0, 1, 0.5), check)
    assert check.faults == []
    check_rates("rate", (1.5, {"a": None, "b": float("nan")}), check)
    assert check.faults == [
        "rate[0] is 1.5, wanted a number from 0 to 1",
        "rate[1]['a'] is None, wanted a number from 0 to 1",
        "rate[1]['b'] is nan, wanted a number from 0 to 1",
    ]
