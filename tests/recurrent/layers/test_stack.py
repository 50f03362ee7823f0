"""A stack is its layers, one upon the other."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pack_padded_sequence

from tests.recurrent.layers.layer_cases import WIDTH, agree, everything, layers
from tests.recurrent.recurrent_cases import close, told
from weft.core.errors import SpecError, UsageError
from weft.recurrent import Recurrent
from weft.recurrent.layers import Bidirectional, Stack


def by_hand(stack: Stack, x: Tensor, **tables: Any) -> tuple[Tensor, list[Any], list[Any]]:
    """The layers one by one."""
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
def test_it_gives_what_its_layers_give_one_by_one(options: dict[str, Any]) -> None:
    stack = Stack(layers(3), **options)
    x = torch.randn(6, 4, WIDTH).double().requires_grad_()
    for tables in (
        {},
        {"lengths": [6, 3, 0, 2]},
        {"mask": torch.rand(6, 4) < 0.7, "reset": torch.rand(6, 4) < 0.3},
    ):
        found = []
        for run in (stack, lambda *a, **k: by_hand(stack, *a, **k)):
            torch.manual_seed(2)
            found.append(everything(stack, tuple(run(x, **tables)), [x]))
        agree(*found)


def test_the_state_is_a_list_and_carries_a_stream_on() -> None:
    stack = Stack(layers(3, truncate=2), residual=True)
    x = torch.randn(7, 2, WIDTH).double()
    whole = stack(x)
    first = stack(x[:3])
    second = stack(x[3:], first.last, start=3)
    agree([torch.cat([first.outputs, second.outputs])], [whole.outputs], 0)
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


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_sequences_and_batches_first(batch_first: bool) -> None:
    stack = Stack(layers(2, batch_first=batch_first))
    x = torch.randn(5, 3, WIDTH).double()
    given = x.transpose(0, 1) if batch_first else x
    wanted = stack(given, lengths=[2, 5, 3])
    packed = pack_padded_sequence(x, torch.tensor([2, 5, 3]), enforce_sorted=False)
    seen = stack(packed)
    outputs = wanted.outputs.transpose(0, 1) if batch_first else wanted.outputs
    again = pack_padded_sequence(outputs, torch.tensor([2, 5, 3]), enforce_sorted=False)
    assert torch.equal(seen.outputs.data, again.data)
    close(seen.last, wanted.last, 0)
    close(seen.states, wanted.states, 0)


def test_stacks_and_both_directions_may_be_layers() -> None:
    one, two, three, four = layers(4)
    x = torch.randn(5, 2, WIDTH).double()
    stack = Stack([Stack([one, two]), Bidirectional(three, four, merge="sum")])
    inner = by_hand(Stack([one, two]), x)[0]
    agree([stack(x).outputs], [Bidirectional(three, four, merge="sum")(inner).outputs])
    assert "layer 0" in stack.explain()
    assert next(iter(stack.state_dict())) == "layers.0.layers.0.cell.weight_ih"


def test_all_that_is_wrong_is_told_at_once() -> None:
    one, two = layers(2)
    with pytest.raises(UsageError) as caught:
        Stack([Recurrent(one.cell, batch_first=True), Bidirectional(one, two), nn.LSTM(3, 3)], dropout=1.5)
    assert told(caught) == [
        "layers 0 have batch_first=True, the others have not",
        "dropout is 1.5, wanted a number from 0 to 1",
        "layer 2 is a LSTM, which is called otherwise; wrap a cell in Recurrent",
    ]
    with pytest.raises(UsageError, match="there are no layers"):
        Stack([])


def test_an_input_that_cannot_be_added_is_told() -> None:
    narrow = Recurrent(nn.GRUCell(WIDTH, 2).double(), backend="eager")
    with pytest.raises(SpecError) as caught:
        Stack([layers(1)[0], narrow], residual=True)(torch.randn(4, 2, WIDTH).double())
    assert told(caught) == ["output is of shape (4, 2, 2), the other of shape (4, 2, 3)"]


def test_an_error_tells_the_layer() -> None:
    stack = Stack([layers(1)[0], Recurrent(nn.GRUCell(2, 2).double(), backend="eager")])
    x = torch.randn(4, 2, WIDTH).double()
    for run in (lambda: stack(x), lambda: stack.step(x[0])):
        with pytest.raises(RuntimeError) as caught:
            run()
        assert "weft: in layer 1 (Recurrent) of a Stack" in caught.value.__notes__


def test_copies_compute_alike() -> None:
    stack = Stack(layers(2))
    x = torch.randn(6, 2, WIDTH).double()
    wanted = stack(x).outputs
    for again in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        for _ in range(2):
            assert torch.equal(again(x).outputs, wanted)
