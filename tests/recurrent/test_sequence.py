"""Input sequences: time and batch axes, T = 0, packed sequences, and their faults."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.recurrent.recurrent_cases import at_once, close, eagerly, equal, fault_lines
from tests.recurrent.test_recurrent import copied
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.pytree import map_leaves
from torchweft.core.validation import Validator
from torchweft.recurrent.sequence import read_inputs


def total(x: Any, state: Tensor) -> tuple[Any, Tensor]:
    return x, state + x["x"].sum(-1)


@given(st.integers(0, 4), st.integers(1, 3), st.booleans())
def test_steps_get_slices_of_tensors_and_other_leaves_whole(steps: int, rows: int, batch_first: bool) -> None:
    value = {"x": torch.randn(steps, rows, 2), "gate": torch.randn(steps, rows), "dt": torch.rand(steps), "name": "a"}
    given_value = map_leaves(
        lambda leaf: leaf.transpose(0, 1) if batch_first and isinstance(leaf, Tensor) and leaf.dim() > 1 else leaf,
        value,
    )
    with Validator("no fault expected") as check:
        read = read_inputs(given_value, batch_first=batch_first, certain=batch_first, check=check)
    assert (read.steps, read.rows, read.axes) == (steps, rows, 2)
    seen = list(read.each_step())
    assert len(seen) == steps
    for t, (x, gate, dt, name) in enumerate(seen):
        assert torch.equal(x, value["x"][t]) and torch.equal(gate, value["gate"][t])
        assert torch.equal(dt, value["dt"][t]) and name == "a"


@at_once("dtype", [torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_no_steps_give_empty_results_and_the_same_state(dtype: torch.dtype) -> None:
    state = torch.ones(3, dtype=torch.float64)
    result = eagerly(lambda x, s: (x * 2, s + 1))(torch.zeros(0, 3, dtype=dtype), state)
    assert result.outputs.shape == result.states.shape == (0, 3)
    assert equal(result.last, state)


def test_no_steps_have_zero_gradients_and_draw_nothing() -> None:
    class Noisy(nn.LSTMCell):
        def forward(self, x: Tensor, state: Any) -> Any:
            return super().forward(x + torch.randn_like(x), state)

    net = eagerly(Noisy(3, 4))
    x = torch.zeros(0, 2, 3, requires_grad=True)
    torch.manual_seed(0)
    result = net(x, lengths=[0, 0], mask=torch.zeros(0, 2, dtype=torch.bool))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert equal(drawn, torch.rand(1))
    (result.outputs.sum() + result.last[0].sum()).backward()
    assert x.grad.shape == (0, 2, 3)
    assert all(not p.grad.any() for p in net.parameters())


@at_once(
    ("value", "faults"),
    [
        (
            {"x": torch.ones(4, 2, 3), "y": [torch.ones(5, 2)]},
            ["time (axis 0) must have one size everywhere: inputs['x'] has 4, inputs['y'][0] has 5"],
        ),
        (
            {"x": torch.ones(4, 2, 3), "y": torch.ones(4, 3)},
            ["the batch (axis 1) must have one size everywhere: inputs['x'] has 2, inputs['y'] has 3"],
        ),
        (
            {"x": torch.ones(4, 2, 3), "y": torch.ones(5, 3)},
            [
                "time (axis 0) must have one size everywhere: inputs['x'] has 4, inputs['y'] has 5",
                "the batch (axis 1) must have one size everywhere: inputs['x'] has 2, inputs['y'] has 3",
            ],
        ),
        ((torch.tensor(1.0), torch.ones(2)), ["inputs[0] has no axes, wanted T x N x ..., time first"]),
        ({"a": 3, "b": None}, ["inputs hold no tensor (saw NoneType, int), wanted T x N x ..., time first"]),
        ((), ["inputs hold no tensor (saw nothing), wanted T x N x ..., time first"]),
    ],
)
def test_faults_of_inputs_are_listed_by_path(value: Any, faults: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        eagerly(total)(value, torch.zeros(2))
    assert fault_lines(caught) == faults


def test_faults_of_inputs_state_and_tables_are_listed() -> None:
    with pytest.raises(SpecError) as caught:
        eagerly(total)({"x": torch.ones(4, 2, 3)}, (torch.zeros(3, 1), "b"), lengths=[9, 1], start=-1)
    assert fault_lines(caught) == [
        "lengths go from 0 to T = 4, but row 0 has 9",
        "start is -1, wanted the number of the first step, 0 or more",
        "state[0] has shape (3, 1), wanted 2 rows, or 1 for all of them",
        "state[1] is of type str, wanted a tensor",
    ]


def test_batch_first_names_its_own_axes() -> None:
    with pytest.raises(SpecError, match=r"time \(axis 1\) must have one size everywhere"):
        eagerly(total, batch_first=True)({"x": torch.ones(2, 4, 3), "y": torch.ones(2, 5)}, torch.zeros(2))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_packed_sequence_equals_torch(lengths: list[int], presorted: bool, given_state: bool) -> None:
    if presorted:
        lengths = sorted(lengths, reverse=True)
    torch.manual_seed(len(lengths))
    whole = nn.LSTM(3, 4).double()
    net = eagerly(copied(nn.LSTMCell(3, 4), whole))
    x = torch.randn(max(lengths), len(lengths), 3).double()
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=presorted)
    state = (torch.randn(len(lengths), 4).double(), torch.randn(len(lengths), 4).double()) if given_state else None
    expected, (h, c) = whole(packed, None if state is None else (state[0][None], state[1][None]))
    seen = net(packed, state)
    close(seen.outputs.data, expected.data)
    close(seen.last, (h[0], c[0]))
    assert torch.equal(seen.outputs.batch_sizes, expected.batch_sizes)
    if presorted:
        assert seen.outputs.sorted_indices is seen.outputs.unsorted_indices is None
    else:
        assert torch.equal(seen.outputs.sorted_indices, expected.sorted_indices)
        assert torch.equal(seen.outputs.unsorted_indices, expected.unsorted_indices)
    close(seen.states[0][-1], h[0])  # a row keeps its state after its length


def test_packed_outputs_by_leaf() -> None:
    packed = pack_padded_sequence(torch.randn(3, 2, 1), torch.tensor([3, 1]))
    seen = eagerly(lambda x, s: ((x, None), s + x))(packed, torch.zeros(2, 1))
    assert seen.outputs[1] is None
    assert torch.equal(seen.outputs[0].data, packed.data)
    with pytest.raises(UsageError, match="which has its own"):
        eagerly(nn.GRUCell(1, 4))(packed, lengths=[3, 1])


def test_batch_first_with_a_packed_sequence() -> None:
    packed = pack_padded_sequence(torch.randn(3, 2, 3), torch.tensor([3, 1]))
    cell, mask = nn.GRUCell(3, 4), torch.tensor([[True, True], [False, True], [True, True]])
    expected = eagerly(cell)(packed, mask=mask)
    seen = eagerly(cell, batch_first=True)(packed, mask=mask.t())
    assert torch.equal(seen.outputs.data, expected.outputs.data)
    assert torch.equal(seen.last, expected.last)
    assert torch.equal(seen.states, expected.states.transpose(0, 1))
