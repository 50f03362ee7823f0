"""Streams, torch's own cells, initial states, and faults of arguments."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import (
    Awkward,
    at_once,
    by_any,
    close,
    eagerly,
    equal,
    fault_lines,
    gradients,
    grid,
    random_case,
)
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.pytree import map_leaves
from torchweft.recurrent import LSTM, Recurrent
from torchweft.recurrent.cells import ElmanCell, GRUCell


class Timed(Awkward):
    def forward(self, x: Any, state: Any, t: int) -> Any:
        y, (h, more) = super().forward(x, state)
        return y, (h * (1 + t), more)


@given(st.integers(1, 6), st.integers(1, 3), st.data())
def test_steps_and_chunks_equal_the_whole_bit_by_bit(steps: int, rows: int, data: st.DataObject) -> None:
    _, x, state = random_case(steps, rows, steps)
    net = eagerly(Timed(), time_step=True, truncate=data.draw(st.sampled_from([None, 2])))
    whole = net(x, state)
    cut = data.draw(st.integers(0, steps))
    first = net(map_leaves(lambda leaf: leaf[:cut], x), state)
    second = net(map_leaves(lambda leaf: leaf[cut:], x), first.last, start=cut)
    for name in ("outputs", "states"):
        joined = map_leaves(
            lambda *parts: None if parts[0] is None else torch.cat(parts), getattr(first, name), getattr(second, name)
        )
        assert equal(joined, getattr(whole, name))
    assert equal(second.last, whole.last)
    now = state
    for t in range(steps):
        y, now = net.step(map_leaves(lambda leaf, t=t: leaf[t], x), now, t=t)
        assert equal(y, map_leaves(lambda leaf, t=t: None if leaf is None else leaf[t], whole.outputs))
    assert equal(now, whole.last)


def test_first_step_equals_a_sequence_of_one() -> None:
    net = eagerly(nn.LSTMCell(3, 4), initial=(nn.Parameter(torch.ones(4)), torch.zeros(1, 4)))
    x = torch.randn(1, 2, 3)
    y, state = net.step(x[0])
    assert equal(y, net(x).outputs[0])
    assert equal(state, net(x).last)
    assert equal(net.step(x[0], (torch.ones(1, 4), torch.zeros(4)))[0], y)
    cut, first = eagerly(plus, truncate=2), torch.zeros(2, requires_grad=True)
    assert [cut.step(torch.ones(2), first, t=t)[0].requires_grad for t in range(3)] == [True, True, False]


def test_faults_of_a_single_step_are_listed() -> None:
    with pytest.raises(SpecError) as caught:
        eagerly(nn.LSTMCell(3, 4)).step(torch.ones(2, 3), (torch.ones(3, 4), "c"))
    assert fault_lines(caught) == [
        "state[0] has shape (3, 4), wanted 2 rows, or 1 for all of them",
        "state[1] is of type str, wanted a tensor",
    ]


@given(st.integers(0, 4), st.integers(1, 3))
def test_batch_first_transposes_all_but_the_last_state(steps: int, rows: int) -> None:
    cell, x, state = random_case(steps, rows, 3)
    expected = eagerly(cell)(x, state)
    seen = eagerly(cell, batch_first=True)(map_leaves(lambda leaf: leaf.transpose(0, 1), x), state)

    def turned(leaf: Any) -> Any:
        return leaf if leaf is None else leaf.transpose(0, 1)

    assert equal(seen.last, expected.last)
    assert equal(map_leaves(turned, seen.outputs), expected.outputs)
    assert equal(map_leaves(turned, seen.states), expected.states)


KINDS = {"LSTM": (nn.LSTM, nn.LSTMCell), "GRU": (nn.GRU, nn.GRUCell), "RNN": (nn.RNN, nn.RNNCell)}


def copied(cell: nn.RNNCellBase, whole: nn.RNNBase) -> nn.RNNCellBase:
    """The cell in double precision, with the weights of the first layer."""
    cell.double().load_state_dict({name.removesuffix("_l0"): value for name, value in whole.state_dict().items()})
    return cell


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_torch_cells_equal_torch_networks(kind: str, steps: int, rows: int, batch_first: bool) -> None:
    torch.manual_seed(steps)
    network, cell = KINDS[kind]
    whole = network(3, 4, batch_first=batch_first).double()
    net = eagerly(copied(cell(3, 4), whole), batch_first=batch_first)  # the initial state has the dtype of the weights
    x = torch.randn(*((rows, steps) if batch_first else (steps, rows)), 3).double().requires_grad_()
    expected, last = whole(x)
    last = (last[0][0], last[1][0]) if kind == "LSTM" else last[0]
    seen = net(x)
    close(seen.outputs, expected)
    close(seen.last, last)
    close(gradients(seen[:2], [x, *net.cell.parameters()]), gradients((expected, last), [x, *whole.parameters()]))


@grid(make=[nn.LSTMCell, nn.GRUCell, GRUCell, ElmanCell], backend=["eager", "python"])
def test_wrong_input_width_is_reported_with_the_cell(make: Any, backend: str) -> None:
    net = Recurrent(make(3, 8), backend=backend)
    words = re.escape(f"x has shape (2, 4), but cell {make.__name__} wants 3 (input_size) as its last size")
    with pytest.raises(SpecError, match=words):
        net(torch.randn(5, 2, 4))
    with pytest.raises(SpecError, match=words):
        net.step(torch.randn(2, 4))


@at_once("layer", [nn.LSTM, nn.GRU, nn.RNN, LSTM])
def test_layer_as_a_cell_is_rejected_with_a_hint(layer: Any) -> None:
    kind = layer.__name__
    with pytest.raises(UsageError, match=rf"(?s)runs over time by itself.* nn.{kind}Cell, or weft.recurrent.{kind} in"):
        Recurrent(layer(3, 8))


def test_state_dict_keys_and_repr() -> None:
    assert list(eagerly(nn.LSTMCell(3, 4)).state_dict()) == [f"cell.{key}" for key in nn.LSTMCell(3, 4).state_dict()]
    assert "cell=plus" in repr(eagerly(plus, truncate=3)) and "truncate=3" in repr(eagerly(plus, truncate=3))


def plus(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return s + x, s + x


def add_first(x: Tensor, s: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    return x + s[0], s


def test_initial_tensors_are_saved_moved_and_trained() -> None:
    learned = nn.Parameter(torch.ones(2))
    net = eagerly(add_first, initial=(learned, torch.zeros(1, 2)))
    assert list(net.state_dict()) == ["initial.0", "initial.1"]
    assert list(net.parameters()) == [learned]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.initial.get_parameter("0") is not learned
    assert net.double()(torch.zeros(3, 5, 2).double()).last[1].dtype == torch.float64
    net(torch.zeros(3, 5, 2).double()).outputs.sum().backward()
    assert learned.grad.tolist() == [15, 15]


class Begins(nn.Module):
    def initial_state(self, x: Tensor) -> Tensor:
        return x * 10

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return plus(x, s)


def test_sources_of_the_initial_state() -> None:
    x = torch.ones(2, 3)
    assert eagerly(Begins())(x).last.tolist() == [12] * 3
    assert eagerly(Begins(), initial=lambda first: first * 100)(x).last.tolist() == [102] * 3
    assert eagerly(Begins(), initial=torch.tensor([1.0]))(x).last.tolist() == [3] * 3
    assert eagerly(Begins(), initial=torch.tensor([1.0]))(x, torch.zeros(3)).last.tolist() == [2] * 3
    assert eagerly(plus, initial=nn.Linear(2, 2, bias=False))(torch.ones(1, 3, 2)).last.shape == (3, 2)


def test_initial_state_does_not_read_padding() -> None:
    x = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])
    mask = ~x.isnan()
    assert eagerly(Begins())(x, mask=mask).last.tolist() == [22, 14]


def test_missing_initial_state_is_reported() -> None:
    with pytest.raises(UsageError) as caught:
        eagerly(plus)(torch.ones(2, 3))
    assert fault_lines(caught) == [
        "there is no initial state: give state=, or initial= to the network, or give plus a method "
        "initial_state(first input)"
    ]
    with pytest.raises(UsageError, match="give plus a method"):
        eagerly(plus).step(torch.ones(3))


def test_faults_of_arguments_are_listed_together() -> None:
    with pytest.raises(UsageError) as caught:
        eagerly(nn.GRUCell(3, 4), links={"h": "y"}, time_step=True, truncate=0, initial=(torch.ones(1), "zeros"))
    assert fault_lines(caught) == [
        "links need a step net over dicts, but cell is torch's GRUCell",
        "time_step=True, but torch's GRUCell takes no step number",
        "truncate is 0, wanted at least 1 step, or None",
        "initial holds str, wanted nested tensors, or a function of the first input",
    ]


class Concatenating(nn.Module):
    """A cell whose operators would not broadcast a state by themselves."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width + hidden, hidden).double()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.mix(torch.cat([x, h], -1)))
        return h, h


@given(st.integers(1, 4), st.integers(2, 4), st.booleans(), st.booleans(), st.booleans())
def test_shared_state_gets_the_sum_of_gradients(rows: int, hidden: int, axis: bool, own: bool, by_row: bool) -> None:
    torch.manual_seed(rows)
    net = eagerly(Concatenating(3, hidden))
    x = torch.randn(4, rows, 3).double()
    one = nn.Parameter(torch.randn(*([1] if axis else []), hidden).double())
    full = one.detach().expand(rows, hidden).clone().requires_grad_()
    expected = net(x, full)
    more = {"lengths": [4] * rows} if by_row else {}
    if own:
        seen = eagerly(net.cell, initial=one)(x, **more)
    elif not axis and hidden == rows:
        return  # ambiguous: with N = H rows, the call reads H numbers as one per row
    else:
        seen = net(x, one, **more)
    assert all(equal(a, b) for a, b in zip(seen, expected, strict=True))
    close(gradients(tuple(seen), [one])[0].view(hidden), gradients(tuple(expected), [full])[0].sum(0))


def test_tokens_with_fewer_axes_than_states() -> None:
    table = nn.Embedding(9, 4)
    net = eagerly(lambda token, h: (None, torch.cat([table(token)[:, :2], h[:, :2]], 1)))
    tokens = torch.randint(9, (5, 3))
    assert net(tokens, torch.zeros(1, 4)).last.shape == (3, 4)
    assert net(tokens, torch.zeros(4), lengths=[5, 4, 0]).last.shape == (3, 4)


def test_sequence_without_rows_keeps_its_state() -> None:
    net = eagerly(Concatenating(3, 1))
    x = torch.randn(4, 3).double()
    assert net(x, torch.zeros(1).double()).last.shape == (1,)
    mapped = torch.func.vmap(lambda x, h: tuple(net(x, h)), in_dims=(1, 0), out_dims=(1, 0, 1))
    batch = torch.randn(4, 5, 3).double()
    state = torch.randn(5, 1).double()
    close(mapped(batch, state), tuple(net(batch, state)))


def test_first_step_settles_shape_and_dtype() -> None:
    net = eagerly(lambda x, s: (s + x, s + x), initial=lambda first: torch.zeros((), dtype=torch.int64))
    x = torch.ones(3, 2, 2, dtype=torch.float64)
    assert net(x).last.dtype == torch.float64
    flags = torch.tensor([[False, True]] * 3)
    last = net(x, mask=flags).last
    assert equal(last, torch.tensor([[0.0, 0.0], [3.0, 3.0]], dtype=torch.float64))
    with pytest.raises(SpecError, match=r"(?s)step 1 returned.*state has shape \(4, 2, 2\), wanted \(2, 2, 2\)"):
        eagerly(lambda x, s: (x, torch.stack([s, s]) if s.dim() < 3 else torch.cat([s, s])))(x, torch.ones(2, 2))


@at_once(
    ("returned", "faults"),
    [
        (lambda s: (s[0], s[1], s[0]), ["state should be a tuple of 2, but is a tuple of 3"]),
        (lambda s: [s[0], s[1]], ["state should be a tuple of 2, but is a list of 2"]),
        (lambda s: (s[0][:1], s[1].long()), [
            "state[0] has shape (1, 3), wanted (2, 3)",
            "state[1] has dtype torch.int64, wanted torch.float32; convert it, or begin with torch.int64",
        ]),
        (lambda s: (s[0].double(), s[1].bfloat16()), [
            "state[0] has dtype torch.float64, wanted torch.float32; convert it, or begin with torch.float64",
            "state[1] has dtype torch.bfloat16, wanted torch.float32; convert it, or begin with torch.bfloat16",
        ]),
        (lambda s: (None, s[1]), ["state[0] is of type NoneType, wanted a tensor"]),
    ],
)  # fmt: skip
def test_state_that_does_not_fit_is_reported_by_path(returned: Any, faults: list[str]) -> None:
    with pytest.raises(SpecError, match="the state that step 0 returned") as caught:
        eagerly(lambda x, s: (x, returned(s)))(torch.ones(3, 2, 3), (torch.ones(2, 3), torch.ones(2, 3)))
    assert fault_lines(caught) == faults


def test_state_must_be_nested_like_the_initial_state() -> None:
    net = eagerly(nn.GRUCell(3, 4))
    with pytest.raises(SpecError, match="is not nested as its initial state: state should be a leaf"):
        net(torch.ones(2, 2, 3), (torch.ones(2, 4),), reset=torch.ones(2, 2, dtype=torch.bool))


@by_any
def test_steps_with_reset_equal_the_sequence(backend: str) -> None:
    """Single steps with `reset=` have the results and gradients of a sequence with `reset=`."""
    torch.manual_seed(0)
    x, reset = torch.randn(6, 4, 3).double().requires_grad_(), torch.rand(6, 4) < 0.4
    cell = nn.LSTMCell(3, 5).double()
    first = nn.Parameter(torch.randn(5).double()), nn.Parameter(torch.randn(5).double())
    net = Recurrent(cell, initial=first, truncate=4, backend=backend)
    state, ys = None, []
    for t in range(6):
        y, state = net.step(x[t], state, t=t, reset=reset[t])
        ys.append(y)
    whole = net(x, reset=reset)
    ends = ((torch.stack(ys), state), (whole.outputs, whole.last))
    close(*ends)
    close(*(gradients(end, [x, *net.parameters()]) for end in ends))


def test_reset_of_a_step_drops_nan() -> None:
    """The old state of a reset row is ignored, even if it is NaN. A reset needs an initial state."""
    net = Recurrent(nn.GRUCell(3, 2))
    x, reset = torch.randn(4, 3), torch.tensor([True, False, True, False])
    y, _ = net.step(x, torch.full((4, 2), torch.nan), reset=reset)
    assert equal(y[reset], net.step(x)[0][reset]) and y[~reset].isnan().all()
    with pytest.raises(UsageError, match=r"reset was given, but neither the network nor .* has an initial state"):
        Recurrent(lambda x, h: (x, h)).step(x, x, reset=reset)
    with pytest.raises(SpecError, match=r"reset has dtype torch.int64.*\n.*reset has shape \(1, 3\)"):
        net.step(x, reset=torch.ones(3, dtype=torch.int64))


class Joining(nn.Module):
    """Requires a batch axis."""

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.cat([h, x], -1)[:, -2:]


def test_unusual_input_forms_get_a_hint() -> None:
    """Some cells accept these forms, so the hint is given only when the cell fails."""
    x = torch.randn(5, 4, 3)
    for cell in (Joining(), nn.GRUCell(3, 2)):
        with pytest.raises(SpecError, match=r"a list of 5, wanted one tensor of T x N.*torch.stack\(steps\)"):
            Recurrent(cell)(list(x))
    with pytest.raises(SpecError, match=r"x float32 \(3,\).*no batch axis.*T x N x D.*unsqueeze\(1\)"):
        Recurrent(Joining())(x[:, 0])
    assert Recurrent(lambda x, h: (x[0] + h, x[1]))([x, x], x[0]).outputs.shape == x.shape
    assert Recurrent(nn.GRUCell(3, 2))(x[:, 0]).outputs.shape == (5, 2)
