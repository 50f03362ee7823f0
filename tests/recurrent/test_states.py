"""Initial states are broadcast over the batch; new states must fit the old ones."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import at_once, close, eagerly, equal, gradients, told
from weft.core.errors import SpecError


class Concatenating(nn.Module):
    """A cell whose operators would not broadcast a state by themselves."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width + hidden, hidden).double()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.mix(torch.cat([x, h], -1)))
        return h, h


@given(st.integers(1, 4), st.integers(2, 4), st.booleans(), st.booleans(), st.booleans())
def test_one_state_for_all_rows_gets_the_sum_of_their_gradients(
    rows: int, hidden: int, axis: bool, own: bool, by_row: bool
) -> None:
    torch.manual_seed(rows)
    net = eagerly(Concatenating(3, hidden))
    x = torch.randn(4, rows, 3).double()
    one = nn.Parameter(torch.randn(*([1] if axis else []), hidden).double())
    full = one.detach().expand(rows, hidden).clone().requires_grad_()
    wanted = net(x, full)
    more = {"lengths": [4] * rows} if by_row else {}
    if own:
        seen = eagerly(net.cell, initial=one)(x, **more)
    elif not axis and hidden == rows:
        return  # H numbers for N = H rows: a state given with the call is then taken to have rows
    else:
        seen = net(x, one, **more)
    assert all(equal(a, b) for a, b in zip(seen, wanted, strict=True))
    close(gradients(tuple(seen), [one])[0].view(hidden), gradients(tuple(wanted), [full])[0].sum(0))


def test_tokens_have_one_axis_and_states_more() -> None:
    table = nn.Embedding(9, 4)
    net = eagerly(lambda token, h: (None, torch.cat([table(token)[:, :2], h[:, :2]], 1)))
    tokens = torch.randint(9, (5, 3))
    assert net(tokens, torch.zeros(1, 4)).last.shape == (3, 4)
    assert net(tokens, torch.zeros(4), lengths=[5, 4, 0]).last.shape == (3, 4)


def test_a_sequence_without_rows_keeps_its_state_as_it_is() -> None:
    net = eagerly(Concatenating(3, 1))
    x = torch.randn(4, 3).double()
    assert net(x, torch.zeros(1).double()).last.shape == (1,)
    mapped = torch.func.vmap(lambda x, h: tuple(net(x, h)), in_dims=(1, 0), out_dims=(1, 0, 1))
    batch = torch.randn(4, 5, 3).double()
    state = torch.randn(5, 1).double()
    for seen, wanted in zip(mapped(batch, state), net(batch, state), strict=True):
        close(seen, wanted)


def test_the_first_step_may_settle_shape_and_dtype_as_a_plain_loop_would() -> None:
    net = eagerly(lambda x, s: (s + x, s + x), initial=lambda first: torch.zeros((), dtype=torch.int64))
    x = torch.ones(3, 2, 2, dtype=torch.float64)
    assert net(x).last.dtype == torch.float64
    flags = torch.tensor([[False, True]] * 3)
    last = net(x, mask=flags).last
    assert equal(last, torch.tensor([[0.0, 0.0], [3.0, 3.0]], dtype=torch.float64))


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
def test_a_state_that_does_not_fit_is_told_by_path(returned: Any, faults: list[str]) -> None:
    with pytest.raises(SpecError, match="the state that step 0 returned") as caught:
        eagerly(lambda x, s: (x, returned(s)))(torch.ones(3, 2, 3), (torch.ones(2, 3), torch.ones(2, 3)))
    assert told(caught) == faults


def test_a_state_may_not_grow() -> None:
    with pytest.raises(SpecError, match=r"step 1 returned") as caught:
        eagerly(lambda x, s: (x, torch.stack([s, s]) if s.dim() < 3 else torch.cat([s, s])))(
            torch.ones(3, 2, 2), torch.ones(2, 2)
        )
    assert told(caught) == ["state has shape (4, 2, 2), wanted (2, 2, 2)"]


def test_a_state_nested_otherwise_than_the_one_that_a_reset_brings_back_is_refused() -> None:
    net = eagerly(nn.GRUCell(3, 4))
    with pytest.raises(SpecError, match="is not nested as its initial state: state should be a leaf"):
        net(torch.ones(2, 2, 3), (torch.ones(2, 4),), reset=torch.ones(2, 2, dtype=torch.bool))
