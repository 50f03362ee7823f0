"""Segments: the state that a forward keeps, detached values, leaves, and sums of gradients."""

import weakref
from collections import UserDict
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchweft.core.context import ExecutionContext, is_checkpointing, is_recomputing
from torchweft.core.errors import InPlaceError, UsageError
from torchweft.core.segment import (
    GradientSum,
    Keep,
    MicroBatchContext,
    Segment,
    detach_leaves,
    detached_leaf,
    hidden_tensors,
)


def context(index: int = 0) -> MicroBatchContext:
    """The context of one micro-batch, captured here."""
    return MicroBatchContext(index, ExecutionContext.capture(["cpu"]))


def leaf(*values: float) -> Tensor:
    """A float64 leaf that requires a gradient."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


HIDDEN = torch.ones(2)


class ListSubclass(list[Any]):
    pass


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        SimpleNamespace(x=HIDDEN),
        SimpleNamespace(x={"deep": (HIDDEN,)}),
        UserDict(x=HIDDEN),
        ListSubclass([HIDDEN]),
        {HIDDEN},
        torch.distributions.Normal(HIDDEN, 1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_found_inside_unknown_containers(value: Any) -> None:
    assert any(torch.equal(tensor, HIDDEN) for tensor in hidden_tensors(value))


@pytest.mark.parametrize(
    "value", [None, 1, 2.5, "text", b"", torch.float32, Colour.RED, nn.Linear(2, 2), len, range(3)]
)
def test_plain_values_and_modules_hide_nothing(value: Any) -> None:
    assert hidden_tensors(value) == []


def test_leaf_has_a_gradient_but_rejects_accumulation() -> None:
    x = detached_leaf(torch.ones(3, requires_grad=True), True)
    result = (2 * x).sum()
    assert torch.autograd.grad(result, x, retain_graph=True)[0].tolist() == [2, 2, 2]
    with pytest.raises(UsageError, match=r"shape \(3,\)"):
        result.backward()
    assert not detached_leaf(x, False).requires_grad


def test_detached_leaves_share_storage_and_requires_grad() -> None:
    y, plain, count = leaf(1, 2) * 2, torch.zeros(2), torch.tensor([1])
    value = {"y": y, "rest": (plain, None, count, 7)}
    piece = detach_leaves(value)
    assert piece["y"].is_leaf and piece["y"].requires_grad and piece["y"].data_ptr() == y.data_ptr()
    assert not piece["rest"][0].requires_grad
    assert piece["rest"][1] is None and piece["rest"][3] == 7
    tracked = detach_leaves(value, True)
    assert tracked["rest"][0].requires_grad, "floating-point leaves can carry gradients"
    assert not tracked["rest"][2].requires_grad, "integers cannot"
    assert not detach_leaves(value, False)["y"].requires_grad


class Calls:
    """A function that records the phase of each call, and whether it builds a graph."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.seen: list[tuple[bool, bool, bool]] = []

    def __call__(self, context: MicroBatchContext, x: Tensor, pair: tuple[Tensor, None]) -> tuple[Any, ...]:
        self.seen.append((is_checkpointing(), is_recomputing(), torch.is_grad_enabled()))
        return {"y": (x * self.weight).sin() + pair[0], "n": 3}, x.exp()


@pytest.mark.parametrize("keep", ["graph", "inputs"])
def test_backward_returns_gradients_of_leaves_and_parameters(keep: Keep) -> None:
    weight, x, z = leaf(3, 4), leaf(0.5, 0.25), leaf(1, 1)
    function = Calls(weight)
    segment = Segment(function, [weight])
    with torch.no_grad():  # as in a worker
        outputs, tape = segment.forward(context(), [detach_leaves(x), (detach_leaves(z), None)], keep)
        assert tape is not None
        gradients = [[torch.ones_like(x), None], [torch.full_like(x, 2.0)]]
        if keep == "inputs":
            assert not outputs[0]["y"].requires_grad
            tape.prepare()
            tape.prepare()  # does nothing the second time
        assert [len(edges) for edges in tape.edges or ()] == [2, 1]
        walks = [tape.backward(gradients, retain=retain) for retain in (True, False)]
    expected = torch.autograd.grad(
        [(x * weight).sin() + z, x.exp()], [x, z, weight], [gradients[0][0], gradients[1][0]]
    )
    for inputs, parameters in walks:
        torch.testing.assert_close([inputs[0][0], inputs[1][0], parameters[0]], list(expected))
        assert inputs[1][1] is None
    calls = {"graph": [(False, False, True)], "inputs": [(True, False, False)] + [(False, True, True)] * 2}
    assert function.seen == calls[keep]


def test_keep_nothing_leaves_no_tape_and_no_graph() -> None:
    weight = leaf(3, 4)
    function = Calls(weight)
    outputs, tape = Segment(function, [weight]).forward(context(), [leaf(1, 2), (leaf(1, 1), None)], "nothing")
    assert tape is None
    assert not outputs[1].requires_grad
    assert function.seen == [(False, False, False)]


@pytest.mark.parametrize("keep", ["graph", "inputs"])
def test_no_gradient_in_gives_no_gradient_out(keep: Keep) -> None:
    weight, x = leaf(3), leaf(2)
    _, tape = Segment(lambda context, x: (x * weight, 7), [weight]).forward(context(), [detach_leaves(x)], keep)
    assert tape is not None
    tape.prepare()
    assert tape.backward([[None], [None]]) == ([[None]], [None])


@pytest.mark.parametrize("keep", ["graph", "inputs"])
def test_kept_graph_does_not_keep_the_outputs(keep: Keep) -> None:
    segment = Segment(lambda context, x: (x + 1,))
    outputs, tape = segment.forward(context(), [leaf(1, 2)], keep)
    gone = weakref.ref(outputs[0].untyped_storage())
    del outputs
    assert gone() is None
    assert tape is not None


def test_write_into_an_input_of_a_recomputation_is_rejected() -> None:
    segment = Segment(lambda context, x: (x.mul_(2),))
    with pytest.raises(InPlaceError, match="out-of-place"):
        segment.forward(context(), [torch.ones(2)], "inputs")
    segment.forward(context(), [torch.ones(2)], "graph")
    segment.forward(context(), [torch.ones(2)], "nothing")


def test_write_before_the_recomputation_is_rejected() -> None:
    weight, buffer = leaf(3), torch.ones(1, dtype=torch.float64)
    segment = Segment(lambda context, x: (weight * x,), [weight])
    tapes = [segment.forward(context(), [buffer], "inputs")[1] for _ in range(2)]
    assert tapes[0] is not None and tapes[1] is not None
    assert tapes[0].backward([[torch.ones_like(weight)]])[1][0] == 1
    buffer.fill_(7)  # overwritten by the next mini-batch before backward
    with pytest.raises(InPlaceError, match="between its forward and its recomputation"):
        tapes[1].backward([[torch.ones_like(weight)]])


def test_inference_tensor_enters_a_recomputed_segment() -> None:
    weight = leaf(3)
    with torch.inference_mode():
        x = torch.ones(1, dtype=torch.float64)
    _, tape = Segment(lambda context, x: (weight + x,), [weight]).forward(context(), [x], "inputs")
    assert tape is not None
    assert tape.backward([[torch.ones_like(weight)]])[1][0] == 1


@given(st.integers(1, 6), st.booleans())
def test_gradient_sum_never_writes_into_tensors_of_autograd(count: int, unused: bool) -> None:
    """In y = x + p the gradients of x and p are one tensor."""
    p, xs = leaf(1, 2), [leaf(i, -i) for i in range(count)]
    seeds = [torch.full_like(p, i + 1.0) for i in range(count)]
    sums = GradientSum(2)
    of_inputs: list[Tensor] = []
    for x, seed in zip(xs, seeds, strict=True):
        of_x, of_p = torch.autograd.grad(x + p, [x, p], seed)
        assert of_x.data_ptr() == of_p.data_ptr(), "otherwise this test proves nothing"
        of_inputs.append(of_x)
        sums.add([of_p, None if unused else of_p])
    for i, (gradient, seed) in enumerate(zip(of_inputs, seeds, strict=True)):
        assert torch.equal(gradient, torch.full_like(p, i + 1.0))
        assert torch.equal(seed, torch.full_like(p, i + 1.0))
    total = torch.full_like(p, count * (count + 1) / 2)
    assert torch.equal(sums.totals[0], total)
    assert sums.totals[1] is None if unused else torch.equal(sums.totals[1], total)


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_sparse_and_dense_gradients_add_up(sparse: list[bool]) -> None:
    weight = leaf(0, 0, 0).detach().reshape(3, 1).requires_grad_()
    sums, expected = GradientSum(1), torch.zeros(3, 1, dtype=torch.float64)
    for number, is_sparse in enumerate(sparse):
        rows = nn.functional.embedding(torch.tensor([number % 3, 1]), weight, sparse=is_sparse)
        (gradient,) = torch.autograd.grad(rows.sum() * (number + 1), weight)
        assert gradient.is_sparse == is_sparse
        sums.add([gradient])
        expected += gradient.to_dense()
    total = sums.totals[0]
    assert total is not None
    assert torch.equal(total.to_dense(), expected)
