"""Contract of Caffe2's LSTM: all states, rows of any length, one product for all inputs, weights to and from torch."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from tests.recurrent.layers.layer_cases import everything
from tests.recurrent.recurrent_cases import close, fault_lines
from torchweft.core.errors import SpecError, UsageError
from torchweft.recurrent.layers import Caffe2LSTM


def reference(layer: Caffe2LSTM, x: Any, lengths: list[int], state: Any) -> tuple[Any, ...]:
    """Run every row alone, step by step, by the formulas."""
    size, per_row = layer.dim_out, []
    for n, length in enumerate(lengths):
        h, c = (part[n] for part in state)
        hs, cs = [], []
        for t in range(len(x)):
            if t < length:
                gates = layer.i2h_w @ x[t, n] + layer.i2h_b + layer.gates_t_w @ h + layer.gates_t_b
                i, f, o, g = gates.split(size)
                c = torch.sigmoid(f + layer.forget_bias) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            hs.append(h)
            cs.append(c)
        per_row.append((torch.stack(hs), h, torch.stack(cs), c))
    columns = list(zip(*per_row, strict=True))
    return tuple(torch.stack(column, 1 if column[0].dim() > 1 else 0) for column in columns)


def case(steps: int, rows: int, **options: Any) -> tuple[Caffe2LSTM, Any, Any]:
    layer = Caffe2LSTM(3, 4, dtype=torch.float64, **{"backend": "eager", **options})
    for weight in layer.parameters():
        nn.init.normal_(weight)
    state = tuple(torch.randn(rows, 4).double().requires_grad_() for _ in range(2))
    return layer, torch.randn(steps, rows, 3).double(), state


@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([0.0, 1.5]), st.data())
def test_rows_keep_last_states_and_padding_has_no_gradient(
    steps: int, rows: int, forget_bias: float, data: st.DataObject
) -> None:
    layer, x, state = case(steps, rows, forget_bias=forget_bias)
    lengths = data.draw(st.lists(st.integers(0, steps), min_size=rows, max_size=rows))
    clean = x.clone().requires_grad_()
    for n, length in enumerate(lengths):
        x[length:, n] = torch.nan
    x.requires_grad_()
    expected = everything(layer, reference(layer, clean, lengths, state), [clean, *state])
    close(everything(layer, layer(x, lengths, state), [x, *state]), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_convert_from_and_to_torch(bias: bool) -> None:
    theirs = nn.LSTM(3, 4, bias=bias).double()
    layer = Caffe2LSTM.from_torch(theirs, forget_bias=0.7, backend="eager")
    x = torch.randn(5, 2, 3).double()
    expected, (h, c) = theirs(x)
    for seen in (layer(x), layer(x, [5, 5], None)):
        close([seen.hidden_all, seen.hidden_last, seen.cell_last], [expected, h[0], c[0]])
        close([seen.cell_all[-1]], [c[0]])
    back = layer.to_torch()
    close([back(x)[0]], [expected])
    if bias:
        close(list(back.parameters()), list(theirs.parameters()), 1e-15)
    assert layer.forget_bias == 0.7 and layer.how == {"backend": "eager"}


def test_unsupported_features_are_listed_together() -> None:
    with pytest.raises(UsageError) as caught:
        Caffe2LSTM.from_torch(nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2))
    assert fault_lines(caught) == [
        "num_layers is 2, wanted 1",
        "bidirectional is True, wanted False",
        "proj_size is 2, wanted 0",
    ]
    with pytest.raises(UsageError, match="dim_out is 0"):
        Caffe2LSTM(3, 0)


class Products(TorchDispatchMode):
    """Records the number of rows of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.rows.append(args[-2].shape[0])
        return func(*args, **(kwargs or {}))


def test_inputs_take_one_product_before_the_loop() -> None:
    layer, x, state = case(7, 5)
    with Products() as seen, torch.no_grad():
        layer(x, [7, 5, 3, 0, 7], state)
    assert seen.rows == [7 * 5] + [5] * 7


def test_states_in_caffe2_form_and_default_zeros() -> None:
    layer, x, (h, c) = case(3, 2)
    close(list(layer(x, None, (h[None], c[None]))), list(layer(x, None, (h, c))))
    zeros = torch.zeros(2, 4).double()
    close(list(layer(x)), list(layer(x, None, (zeros, zeros))))


def test_faults_of_a_call_are_listed_together() -> None:
    layer, x, (h, _) = case(3, 2)
    with pytest.raises(SpecError) as caught:
        layer(x.float()[..., :2], [1, 4], (h, h[:, :1]))
    assert fault_lines(caught) == [
        "lengths go from 0 to T = 3, but row 1 has 4",
        "input has shape (3, 2, 2), wanted T x N x 3 (dim_in)",
        "input is torch.float32, the parameters are torch.float64; convert one with .to()",
        "initial cell state has shape (2, 1), wanted N x H = (2, 4)",
    ]


def test_caffe2_names_and_independent_copies() -> None:
    layer, x, state = case(3, 2, backend="python")
    expected = list(layer(x, None, state))
    assert list(layer.state_dict()) == ["i2h_w", "i2h_b", "gates_t_w", "gates_t_b"]
    assert "loop_back" in layer.explain()
    again = copy.deepcopy(layer)
    nn.init.zeros_(layer.gates_t_w)
    close(list(again(x, None, state)), expected)
    assert "backend='python'" in repr(again)


def test_parametrized_weight_is_trained() -> None:
    layer, x, state = case(3, 2, backend="python")
    plain = copy.deepcopy(layer)
    parametrizations.weight_norm(layer, "gates_t_w")
    close(list(layer(x, [3, 1], state)), list(plain(x, [3, 1], state)))
    layer(x, None, state).hidden_all.sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())
