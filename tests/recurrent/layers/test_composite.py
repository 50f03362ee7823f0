"""Stacks of layers, and bidirectional networks, which reverse each row within its own length."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pack_padded_sequence

from tests.recurrent.layers.layer_cases import WIDTH, everything, layers
from tests.recurrent.recurrent_cases import Awkward, close, fault_lines, floats, gradients, per_row, random_case
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.pytree import map_leaves
from torchweft.recurrent import Recurrent
from torchweft.recurrent.layers import Bidirectional, Stack
from torchweft.recurrent.layers.composite import SequenceAxes, reverse


def by_hand(stack: Stack, x: Tensor, **tables: Any) -> tuple[Tensor, list[Any], list[Any]]:
    """Run the layers of a stack one by one."""
    last, states = [], []
    for i, layer in enumerate(stack.layers):
        result = layer(x, **tables)
        y = result.outputs
        if stack.training and stack.dropout and i < len(stack.layers) - 1:
            y = dropout(y, stack.dropout)
        x = y + x if stack.residual and i else y
        last.append(result.last)
        states.append(result.states)
    return x, last, states


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"dropout": 0.4}, {"dropout": 0.4, "residual": True}])
def test_stack_equals_its_layers_one_by_one(options: dict[str, Any]) -> None:
    stack = Stack(layers(3), **options)
    x = torch.randn(6, 4, WIDTH).double().requires_grad_()
    for tables in ({}, {"lengths": [6, 3, 0, 2]}, {"mask": torch.rand(6, 4) < 0.7, "reset": torch.rand(6, 4) < 0.3}):
        results = []
        for run in (stack, lambda *a, **k: by_hand(stack, *a, **k)):
            torch.manual_seed(2)
            results.append(everything(stack, tuple(run(x, **tables)), [x]))
        close(*results)


def test_stack_state_continues_a_stream() -> None:
    stack = Stack(layers(3, truncate=2), residual=True)
    x = torch.randn(7, 2, WIDTH).double()
    whole = stack(x)
    first = stack(x[:3])
    second = stack(x[3:], first.last, start=3)
    close([torch.cat([first.outputs, second.outputs])], [whole.outputs], 0)
    close(second.last, whole.last, 0)
    state = None
    for t in range(7):
        y, state = stack.step(x[t], state, t=t)
        assert torch.equal(y, whole.outputs[t])
    close(state, whole.last, 0)
    some = stack(x, [None, first.last[1], None])
    close(some.last[0], whole.last[0], 0)
    with pytest.raises(SpecError, match="one entry for each of its 3 layers; this one has 2 entries"):
        stack(x, [None, None])


def test_stacks_and_bidirectional_networks_as_layers() -> None:
    one, two, three, four = layers(4)
    x = torch.randn(5, 2, WIDTH).double()
    stack = Stack([Stack([one, two]), Bidirectional(three, four, merge="sum")])
    inner = by_hand(Stack([one, two]), x)[0]
    close([stack(x).outputs], [Bidirectional(three, four, merge="sum")(inner).outputs])
    assert "layer 0" in stack.explain()
    assert next(iter(stack.state_dict())) == "layers.0.layers.0.cell.weight_ih"


def test_faults_of_a_stack_are_listed_together() -> None:
    one, two = layers(2)
    with pytest.raises(UsageError) as caught:
        Stack([Recurrent(one.cell, batch_first=True), Bidirectional(one, two), nn.LSTM(3, 3)], dropout=1.5)
    assert fault_lines(caught) == [
        "layers 0 have batch_first=True, the others have not",
        "dropout is 1.5, wanted a number from 0 to 1",
        "layer 2 is a LSTM, which has another signature; wrap a cell in Recurrent",
    ]
    with pytest.raises(UsageError, match="there are no layers"):
        Stack([])


def test_residual_that_cannot_be_added_is_reported() -> None:
    narrow = Recurrent(nn.GRUCell(WIDTH, 2).double(), backend="eager")
    with pytest.raises(SpecError) as caught:
        Stack([layers(1)[0], narrow], residual=True)(torch.randn(4, 2, WIDTH).double())
    assert fault_lines(caught) == ["output is of shape (4, 2, 2), the other of shape (4, 2, 3)"]


def test_error_names_the_layer() -> None:
    stack = Stack([layers(1)[0], Recurrent(nn.GRUCell(2, 2).double(), backend="eager")])
    x = torch.randn(4, 2, WIDTH).double()
    for run in (lambda: stack(x), lambda: stack.step(x[0])):
        with pytest.raises(RuntimeError) as caught:
            run()
        assert "torchweft: in layer 1 (Recurrent) of a Stack" in caught.value.__notes__


def flip(value: Any) -> Any:
    return map_leaves(lambda leaf: None if leaf is None else leaf.flip(0), value)


@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_backward_network_gets_each_row_reversed(steps: int, rows: int, batch_first: bool, data: st.DataObject) -> None:
    one, x, state = random_case(steps, rows, steps)
    other, _, back = random_case(steps, rows, 9)
    options = {"batch_first": batch_first, "backend": "eager"}
    net = Bidirectional(Recurrent(one, **options), Recurrent(other, **options), merge=lambda y, z: (y, z))
    lengths = data.draw(st.lists(st.integers(0, steps), min_size=rows, max_size=rows))
    mask = torch.rand(steps, rows) < 0.8
    reset = torch.rand(steps, rows) < 0.3
    within = torch.arange(steps)[:, None] < torch.tensor(lengths)
    forward_rows = per_row(one, x, state, mask & within, reset & within, state)
    cuts = torch.cat([(reset & within)[1:], torch.zeros(1, rows, dtype=torch.bool)])  # after a step, not before it
    backward_rows = per_row(other, flip(x), back, flip(mask & within), flip(cuts), back)

    def first(value: Any) -> Any:
        return map_leaves(lambda leaf: leaf if leaf is None or not batch_first else leaf.transpose(0, 1), value)

    given = map_leaves(lambda leaf: leaf.transpose(0, 1) if batch_first else leaf, x)
    tables = {"mask": mask.t(), "reset": reset.t()} if batch_first else {"mask": mask, "reset": reset}
    seen = net(given, (state, back), lengths=lengths, **tables)
    close(seen.outputs, (first(forward_rows[0]), first(flip(backward_rows[0]))))
    close(seen.last, (forward_rows[1], backward_rows[1]))
    close(seen.states, (first(forward_rows[2]), first(flip(backward_rows[2]))))
    learned = [*floats((x, state, back)), *net.parameters()]
    expected = ((first(forward_rows[0]), first(flip(backward_rows[0]))), (forward_rows[1], backward_rows[1]))
    close(gradients((seen.outputs, seen.last), learned), gradients(expected, learned))


def two(**options: Any) -> Bidirectional:
    torch.manual_seed(1)
    one, _ = layers(2)
    return Bidirectional(one, Recurrent(nn.LSTMCell(WIDTH, WIDTH).double(), backend="eager"), **options)


def test_merge_by_cat_sum_or_a_function() -> None:
    x = torch.randn(5, 2, WIDTH).double()
    net = two()
    one, other = net.forward_net(x).outputs, net.backward_net(x.flip(0)).outputs.flip(0)
    assert torch.equal(net(x).outputs, torch.cat([one, other], -1))
    assert torch.equal(two(merge="sum")(x).outputs, one + other)
    assert torch.equal(two(merge=torch.maximum)(x).outputs, torch.maximum(one, other))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("make", [Stack, lambda both: Bidirectional(*both)], ids=["stack", "directions"])
def test_packed_inputs_give_packed_outputs(make: Any, batch_first: bool) -> None:
    net, x, lengths = make(layers(2, batch_first=batch_first)), torch.randn(5, 3, WIDTH).double(), [2, 5, 3]
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    seen, padded = net(packed), net(x.transpose(0, 1) if batch_first else x, lengths=lengths)
    again = pack_padded_sequence(padded.outputs, torch.tensor(lengths), batch_first, enforce_sorted=False)
    assert torch.equal(seen.outputs.data, again.data) and torch.equal(seen.outputs.batch_sizes, again.batch_sizes)
    close((seen.last, seen.states), (padded.last, padded.states), 0)
    with pytest.raises(UsageError, match="has its own"):
        net(packed, lengths=lengths)


def test_default_backward_network_has_its_own_weights() -> None:
    (one, _) = layers(2)
    net = Bidirectional(one)
    assert net.backward_net.cell.weight_hh is not one.cell.weight_hh
    assert not torch.equal(net.backward_net.cell.weight_hh, one.cell.weight_hh)
    assert len(list(Bidirectional(one, one).parameters())) == len(list(one.parameters()))
    plain = Bidirectional(Recurrent(Awkward(), backend="eager"))
    assert [key.split(".")[0] for key in plain.state_dict()] == ["forward_net"] * 4 + ["backward_net"] * 4


def test_faults_of_bidirectional_networks_are_reported() -> None:
    one, other = layers(2)
    with pytest.raises(UsageError) as usage:
        # Call the wrapped function, because the run-time type check of the tests would fail first.
        make = Bidirectional.__init__.__wrapped__
        make(Bidirectional.__new__(Bidirectional), one, Recurrent(other.cell, batch_first=True), "mean")
    assert fault_lines(usage) == [
        "merge is 'mean', wanted 'cat', 'sum' or a function of both outputs",
        "forward_net has batch_first=False, backward_net has batch_first=True",
    ]
    x = torch.randn(4, 2, WIDTH).double()
    with pytest.raises(SpecError, match="a pair, for the forward and the backward"):
        two()(x, torch.zeros(2, WIDTH).double())
    narrow = Recurrent(nn.GRUCell(WIDTH, 2).double(), backend="eager")
    with pytest.raises(SpecError) as caught:
        Bidirectional(one, narrow, merge="sum")(x)
    assert fault_lines(caught) == ["output is of shape (4, 2, 3), the other of shape (4, 2, 2)"]
    with pytest.raises(SpecError, match="have no cat"):
        Bidirectional(one, Recurrent(lambda x, s: ((x, x), s), initial=torch.zeros(1)))(x)


def test_reverse_finds_the_time_axis() -> None:
    inputs = {"x": torch.arange(6).view(2, 3, 1), "dt": torch.arange(3), "name": "run"}
    axes = SequenceAxes.of(inputs, batch_first=True)
    assert axes == SequenceAxes(3, 2, True, deep=True)
    seen = reverse(inputs, axes.time_of_input)
    assert seen["x"].flatten().tolist() == [2, 1, 0, 5, 4, 3]
    assert seen["dt"].tolist() == [2, 1, 0] and seen["name"] == "run"
    results = (torch.arange(6).view(2, 3), torch.arange(12).view(3, 4), None)  # N x T, and T x 4 without rows
    one, other, nothing = reverse(results, axes.time_of_result)
    assert one.tolist() == [[2, 1, 0], [5, 4, 3]] and other[0].tolist() == [8, 9, 10, 11] and nothing is None
