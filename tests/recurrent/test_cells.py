"""Torch's own cells as they are, and where a network begins."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import at_once, close, eagerly, equal, gradients, grid, told
from weft.core.errors import SpecError, UsageError
from weft.recurrent import LSTM, Recurrent
from weft.recurrent.cells import ElmanCell, GRUCell

KINDS = {"LSTM": (nn.LSTM, nn.LSTMCell), "GRU": (nn.GRU, nn.GRUCell), "RNN": (nn.RNN, nn.RNNCell)}


def copied(cell: nn.RNNCellBase, whole: nn.RNNBase) -> nn.RNNCellBase:
    """The cell in double precision, with the weights of the first layer."""
    cell.double().load_state_dict({name.removesuffix("_l0"): value for name, value in whole.state_dict().items()})
    return cell


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_torchs_cells_give_what_its_networks_give(kind: str, steps: int, rows: int, batch_first: bool) -> None:
    torch.manual_seed(steps)
    network, cell = KINDS[kind]
    whole = network(3, 4, batch_first=batch_first).double()
    net = eagerly(copied(cell(3, 4), whole), batch_first=batch_first)
    x = torch.randn(*((rows, steps) if batch_first else (steps, rows)), 3).double().requires_grad_()
    wanted, last = whole(x)
    last = (last[0][0], last[1][0]) if kind == "LSTM" else last[0]
    seen = net(x)
    close(seen.outputs, wanted)
    close(seen.last, last)
    close(gradients(seen[:2], [x, *net.cell.parameters()]), gradients((wanted, last), [x, *whole.parameters()]))


def test_the_first_state_has_the_dtype_of_the_weights() -> None:
    net = eagerly(nn.GRUCell(3, 4).double())
    assert net(torch.zeros(1, 2, 3).double()).last.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert eagerly(nn.GRUCell(3, 4))(torch.randn(2, 2, 3)).outputs.shape == (2, 2, 4)


@grid(make=[nn.LSTMCell, nn.GRUCell, GRUCell, ElmanCell], backend=["eager", "python"])
def test_an_input_of_another_width_is_told_with_the_cells(make: Any, backend: str) -> None:
    net = Recurrent(make(3, 8), backend=backend)
    words = re.escape(f"x has shape (2, 4), but cell {make.__name__} wants 3 (input_size) as its last size")
    with pytest.raises(SpecError, match=words):
        net(torch.randn(5, 2, 4))
    with pytest.raises(SpecError, match=words):
        net.step(torch.randn(2, 4))


@at_once("layer", [nn.LSTM, nn.GRU, nn.RNN, LSTM])
def test_a_layer_is_no_cell_and_the_error_names_the_cell(layer: Any) -> None:
    kind = layer.__name__
    with pytest.raises(UsageError, match=rf"(?s)runs over time by itself.* nn.{kind}Cell, or weft.recurrent.{kind} in"):
        Recurrent(layer(3, 8))


def test_the_keys_of_a_cell_do_not_depend_on_how_it_is_run() -> None:
    assert list(eagerly(nn.LSTMCell(3, 4)).state_dict()) == [f"cell.{key}" for key in nn.LSTMCell(3, 4).state_dict()]
    assert "cell=plus" in repr(eagerly(plus, truncate=3)) and "truncate=3" in repr(eagerly(plus, truncate=3))


def plus(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return s + x, s + x


def test_an_initial_state_of_tensors_is_saved_moved_and_learned() -> None:
    learned = nn.Parameter(torch.ones(2))
    net = eagerly(lambda x, s: (x + s[0], s), initial=(learned, torch.zeros(1, 2)))
    assert list(net.state_dict()) == ["initial.0", "initial.1"]
    assert list(net.parameters()) == [learned]
    assert net.double()(torch.zeros(3, 5, 2).double()).last[1].dtype == torch.float64
    net(torch.zeros(3, 5, 2).double()).outputs.sum().backward()
    assert learned.grad.tolist() == [15, 15]


def test_a_network_can_be_copied_and_pickled() -> None:
    net = eagerly(nn.LSTMCell(3, 4), initial=(torch.ones(4), nn.Parameter(torch.ones(1, 4))))
    x = torch.randn(2, 3, 3)
    wanted = net(x).outputs
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert equal(other(x).outputs, wanted)
        assert other.initial.get_parameter("1") is not net.initial.get_parameter("1")


class Begins(nn.Module):
    def initial_state(self, x: Tensor) -> Tensor:
        return x * 10

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return plus(x, s)


def test_who_says_where_a_network_begins() -> None:
    x = torch.ones(2, 3)
    assert eagerly(Begins())(x).last.tolist() == [12] * 3
    assert eagerly(Begins(), initial=lambda first: first * 100)(x).last.tolist() == [102] * 3
    assert eagerly(Begins(), initial=torch.tensor([1.0]))(x).last.tolist() == [3] * 3
    assert eagerly(Begins(), initial=torch.tensor([1.0]))(x, torch.zeros(3)).last.tolist() == [2] * 3
    assert eagerly(plus, initial=nn.Linear(2, 2, bias=False))(torch.ones(1, 3, 2)).last.shape == (3, 2)


def test_the_first_input_is_no_padding() -> None:
    x = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])
    mask = ~x.isnan()
    assert eagerly(Begins())(x, mask=mask).last.tolist() == [22, 14]


def test_a_network_that_does_not_know_where_to_begin_says_so() -> None:
    with pytest.raises(UsageError) as caught:
        eagerly(plus)(torch.ones(2, 3))
    assert told(caught) == [
        "there is no initial state: give state=, or initial= to the network, or give plus a method "
        "initial_state(first input)"
    ]
    with pytest.raises(UsageError, match="give plus a method"):
        eagerly(plus).step(torch.ones(3))


def test_all_faults_of_a_networks_arguments_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        eagerly(nn.GRUCell(3, 4), links={"h": "y"}, time_step=True, truncate=0, initial=(torch.ones(1), "zeros"))
    assert told(caught) == [
        "links want a step net over dicts, but cell is torch's GRUCell",
        "time_step=True, but torch's GRUCell takes no step number",
        "truncate is 0, wanted at least 1 step, or None",
        "initial holds str, wanted nested tensors, or a function of the first input",
    ]
