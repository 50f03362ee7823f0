"""Streams: single steps and chunks give the very numbers of the whole sequence."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import Awkward, eagerly, equal, random_case, told
from weft.core.errors import SpecError
from weft.core.pytree import map_leaves
from weft.recurrent import Result


class Timed(Awkward):
    def forward(self, x: Any, state: Any, t: int) -> Any:
        y, (h, more) = super().forward(x, state)
        return y, (h * (1 + t), more)


@given(st.integers(1, 6), st.integers(1, 3), st.data())
def test_steps_and_chunks_give_the_bits_of_the_whole(steps: int, rows: int, data: st.DataObject) -> None:
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


def test_a_step_begins_where_a_sequence_begins() -> None:
    net = eagerly(nn.LSTMCell(3, 4), initial=(nn.Parameter(torch.ones(4)), torch.zeros(1, 4)))
    x = torch.randn(1, 2, 3)
    y, state = net.step(x[0])
    assert equal(y, net(x).outputs[0])
    assert equal(state, net(x).last)
    assert equal(net.step(x[0], (torch.ones(1, 4), torch.zeros(4)))[0], y)


def test_truncation_holds_for_single_steps_too() -> None:
    net = eagerly(lambda x, s: (s + x, s + x), truncate=2)
    state = torch.zeros(2, requires_grad=True)
    x = torch.ones(2)
    assert net.step(x, state, t=0)[0].requires_grad
    assert net.step(x, state, t=1)[0].requires_grad
    assert not net.step(x, state, t=2)[0].requires_grad


def test_faults_of_a_single_step_are_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        eagerly(nn.LSTMCell(3, 4)).step(torch.ones(2, 3), (torch.ones(3, 4), "c"))
    assert told(caught) == [
        "state[0] has shape (3, 4), wanted 2 rows, or 1 for all of them",
        "state[1] is of type str, wanted a tensor",
    ]


@given(st.integers(0, 4), st.integers(1, 3))
def test_batch_first_turns_inputs_outputs_and_states_but_not_the_last_one(steps: int, rows: int) -> None:
    cell, x, state = random_case(steps, rows, 3)
    wanted = eagerly(cell)(x, state)
    seen = eagerly(cell, batch_first=True)(map_leaves(lambda leaf: leaf.transpose(0, 1), x), state)

    def turned(leaf: Any) -> Any:
        return leaf if leaf is None else leaf.transpose(0, 1)

    assert equal(seen.last, wanted.last)
    assert equal(map_leaves(turned, seen.outputs), wanted.outputs)
    assert equal(map_leaves(turned, seen.states), wanted.states)


def test_a_cell_closes_over_what_else_it_reads() -> None:
    scale = torch.tensor(2.0, requires_grad=True)

    def step(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return s * scale, x * scale

    result = eagerly(step)(torch.ones(3, 2), torch.ones(2))
    assert isinstance(result, Result)
    result.outputs.sum().backward()
    assert scale.grad.item() == 2 * (1 + 4 + 4)


def test_a_network_is_a_module_whose_cell_is_its_child() -> None:
    cell = Awkward()
    net = eagerly(cell)
    assert dict(net.named_children()) == {"cell": cell}
    assert eagerly(lambda x, s: (x, s)).state_dict() == {}
