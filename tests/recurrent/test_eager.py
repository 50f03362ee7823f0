"""The eager loop: values and all kinds of gradients equal a plain loop, and faults are reported."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, equal, fault_lines, gradients, random_case
from torchweft.core.errors import SpecError


def test_output_that_is_a_state_is_stacked_once() -> None:
    cell, x, state = random_case(3, 2, 0)
    result = eagerly(cell)(x, state)
    assert result.outputs["h"] is result.states[0]
    assert result.outputs["n"] is result.states[1]["n"]
    assert result.all is result.states
    # In masked rows they differ: outputs are zero, and states keep their values.
    result = eagerly(cell)(x, state, lengths=[3, 1])
    assert result.outputs["h"] is not result.states[0]


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    cell = nn.Linear(4, 2).double()

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sigmoid(cell(torch.cat([x, h], -1)))
        return h * x, h

    return eagerly(step), torch.randn(3, 2, 2).double(), torch.randn(2, 2).double()


def test_first_and_second_derivatives_pass_gradcheck() -> None:
    net, x, h = small()
    mask, reset = torch.tensor([[True, False], [True, True], [False, True]]), torch.tensor([[False, True]] * 3)

    def run(x: Tensor, h: Tensor) -> Any:
        return tuple(net(x, h, mask=mask, reset=reset))

    arguments = (x.requires_grad_(), h.requires_grad_())
    assert torch.autograd.gradcheck(run, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, arguments)


def test_vmap_over_rows_equals_the_batch() -> None:
    net, x, h = small()
    mapped = torch.func.vmap(lambda x, h: tuple(net(x, h)), in_dims=(1, 0), out_dims=(1, 0, 1))
    close(mapped(x, h), tuple(net(x, h)))
    per_sample = torch.func.vmap(torch.func.grad(lambda h, x: net(x, h).outputs.sum()), in_dims=(0, 1))(h, x)
    learned = h.clone().requires_grad_()
    close(per_sample, torch.autograd.grad(net(x, learned).outputs.sum(), learned)[0])


def test_autocast_and_no_grad_equal_a_plain_loop() -> None:
    cell = nn.GRUCell(3, 4)
    x = torch.randn(4, 2, 3)

    def plain() -> list[Tensor]:
        h, hs = torch.zeros(2, 4), []
        for step in x:
            h = cell(step, h)
            hs.append(h)
        return hs

    with torch.autocast("cpu", torch.bfloat16):
        seen = eagerly(cell)(x)
        assert equal(seen.outputs, torch.stack(plain()))
        masked = eagerly(cell)(x, lengths=[4, 2])
        assert masked.last.dtype == seen.last.dtype
        assert equal(masked.last[1], plain()[1][1])
    with torch.no_grad():
        assert not eagerly(cell)(x).outputs.requires_grad
        assert equal(eagerly(cell)(x).outputs, torch.stack(plain()))


@given(st.integers(1, 7), st.integers(1, 8), st.integers(0, 5))
def test_truncation_equals_detaching_in_a_loop(steps: int, every: int, start: int) -> None:
    torch.manual_seed(steps)
    cell = nn.RNNCell(2, 3).double()
    x = torch.randn(steps, 2, 2).double().requires_grad_()
    first = torch.randn(2, 3).double().requires_grad_()
    h, hs = first, []
    for t in range(start, start + steps):
        h = h.detach() if t > 0 and t % every == 0 else h
        h = cell(x[t - start], h)
        hs.append(h)
    seen = eagerly(cell, truncate=every)(x, first, start=start)
    learn = [x, first, *cell.parameters()]
    close(gradients(seen.outputs, learn), gradients(torch.stack(hs), learn))


def test_error_of_the_cell_gets_a_note_with_the_step() -> None:
    def breaks(x: Tensor, s: Tensor, t: int) -> Any:
        if t == 7:
            raise ZeroDivisionError("mine")
        return x, s

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        eagerly(breaks, time_step=True)(torch.ones(5, 2, 3), (torch.ones(2), torch.ones(2).int()), start=4)
    note = "torchweft: in step 7 of cell breaks, called as cell(x, state, t) -> (y, new_state): x float32 (2, 3), "
    assert caught.value.__notes__ == [f"{note}state [float32 (2,), int32 (2,)]"]


@pytest.mark.parametrize(
    ("returned", "word"), [(None, "NoneType"), (torch.ones(2), "Tensor"), ((1, 2, 3), "int, int, int")]
)
def test_result_that_is_not_a_pair_is_rejected(returned: Any, word: str) -> None:
    with pytest.raises(SpecError, match=rf"returned \({word}\) at step 0, wanted a pair \(y, new_state\)"):
        eagerly(lambda x, s: returned)(torch.ones(5, 2, 3), torch.ones(2))


def test_changing_outputs_are_reported_by_path() -> None:
    def changes(x: Tensor, s: Tensor, t: int) -> Any:
        return {"a": x[: 2 - t], "b": x if t else None, "c": x.double() if t else x}, s

    with pytest.raises(SpecError, match="the output that step 1 returned") as caught:
        eagerly(changes, time_step=True)(torch.ones(3, 2), torch.ones(2))
    assert fault_lines(caught) == [
        "output['a'] has shape (1,), wanted (2,)",
        "output['b'] is of type Tensor, wanted None",
        "output['c'] has dtype torch.float64, wanted torch.float32; convert it, or begin with torch.float64",
    ]
    with pytest.raises(SpecError, match="output is of type int, wanted a tensor"):
        eagerly(lambda x, s: (3, s))(torch.ones(3, 2), torch.ones(2))
    with pytest.raises(SpecError, match="output should be a leaf, but is a tuple of 1"):
        eagerly(lambda x, s, t: ((x,) if t else x, s), time_step=True)(torch.ones(3, 2), torch.ones(2))


def test_cell_without_a_state() -> None:
    result = eagerly(lambda x, s: (x * 2, s))(torch.ones(3, 2), ())
    assert equal(tuple(result), (torch.full((3, 2), 2.0), (), ()))
