"""Lengths, masks and resets: as if every row ran alone, and padding is never read."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import (
    at_once,
    close,
    eagerly,
    equal,
    floats,
    gradients,
    per_row,
    random_case,
    told,
)
from weft.core.errors import SpecError, UsageError
from weft.core.pytree import map_leaves
from weft.core.validation import Validator
from weft.recurrent import Recurrent
from weft.recurrent.masking import read_rows
from weft.recurrent.sequence import read_inputs


@st.composite
def tables(draw: st.DrawFn, steps: int, rows: int) -> Tensor:
    bits = st.lists(st.booleans(), min_size=steps * rows, max_size=steps * rows)
    return torch.tensor(draw(bits), dtype=torch.bool).view(steps, rows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    steps, rows = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    arguments: dict[str, Any] = {}
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, steps), min_size=rows, max_size=rows))
        arguments["lengths"] = draw(st.sampled_from([lengths, torch.tensor(lengths), tuple(lengths)]))
    for name in ("mask", "reset"):
        if draw(st.booleans()):
            arguments[name] = draw(tables(steps, rows))
    return steps, rows, arguments


def poisoned(x: Any, valid: Tensor) -> Any:
    """The same inputs with NaN wherever they do not count."""
    with torch.no_grad():
        spoiled = map_leaves(
            lambda leaf: leaf.masked_fill(~valid.view(*valid.shape, *[1] * (leaf.dim() - 2)), torch.nan), x
        )
    return map_leaves(lambda leaf: leaf.requires_grad_(), spoiled)


@given(cases(), st.integers(0, 99), st.booleans())
def test_every_row_runs_as_if_alone_and_padding_of_nan_leaks_nowhere(
    case: tuple[int, int, dict[str, Any]], seed: int, own: bool
) -> None:
    steps, rows, arguments = case
    cell, x, state = random_case(steps, rows, seed)
    fresh = random_case(steps, rows, seed + 1)[2] if own else state
    within = torch.arange(steps)[:, None] < torch.as_tensor(arguments.get("lengths", [steps] * rows))
    valid = within & arguments.get("mask", torch.tensor(True))
    reset = within & arguments["reset"] if "reset" in arguments else None
    net = eagerly(cell, initial=(lambda first: fresh) if own else None)

    wanted = per_row(cell, x, state, valid, reset, fresh)
    padded = poisoned(x, valid)
    seen = net(padded, state, **arguments)

    close(seen.outputs, wanted[0])
    close(seen.last, wanted[1])
    close(seen.states, wanted[2])
    for leaf in floats(seen.outputs):
        assert torch.equal(leaf[~valid], torch.zeros_like(leaf[~valid]))
    learn = [*cell.parameters(), *floats(state), *floats(fresh)]
    close(gradients(tuple(seen), [*learn, *floats(padded)]), gradients(wanted, [*learn, *floats(x)]))


def test_rows_that_never_count_leave_all_gradients_finite() -> None:
    cell, x, state = random_case(3, 2, 0)  # the cell divides by the norm of its input
    for lengths in ([0, 0], [0, 3], [3, 0]):
        padded = poisoned(x, torch.arange(3)[:, None] < torch.tensor(lengths))
        result = eagerly(cell)(padded, state, lengths=lengths)
        grads = gradients(tuple(result), [*cell.parameters(), *floats(padded), *floats(state)])
        assert all(torch.isfinite(grad).all() for grad in grads)


def test_a_reset_counts_in_a_hole_but_not_past_the_end() -> None:
    net = eagerly(lambda x, s: (s + x, s + x), initial=torch.zeros(()))
    x = torch.ones(4, 2)
    hole = torch.tensor([True, True, False, False])[:, None].expand(4, 2)
    reset = torch.tensor([False, False, True, False])[:, None].expand(4, 2)
    assert net(x, mask=hole, reset=reset).last.tolist() == [0, 0]
    assert net(x, lengths=[2, 4], reset=reset).last.tolist() == [2, 2]


def test_a_reset_brings_back_the_networks_own_state_so_that_chunks_agree_with_the_whole() -> None:
    net = eagerly(nn.LSTMCell(3, 4))
    x, reset = torch.randn(6, 5, 3), torch.rand(6, 5) < 0.4
    whole = net(x, reset=reset)
    first = net(x[:2], reset=reset[:2])
    second = net(x[2:], first.last, reset=reset[2:])
    assert equal(torch.cat([first.outputs, second.outputs]), whole.outputs)
    assert equal(second.last, whole.last)


def test_a_mask_that_is_true_everywhere_changes_no_bit() -> None:
    cell, x, state = random_case(4, 3, 1)
    plain = eagerly(cell)(x, state)
    masked = eagerly(cell)(x, state, mask=torch.ones(4, 3, dtype=torch.bool), lengths=[4, 4, 4])
    assert all(equal(a, b) for a, b in zip(plain, masked, strict=True))


def test_batch_first_tables_are_rows_by_steps() -> None:
    cell, x, state = random_case(4, 3, 2)
    mask, reset = torch.rand(4, 3) < 0.5, torch.rand(4, 3) < 0.5
    wanted = eagerly(cell)(x, state, mask=mask, reset=reset)
    turned = map_leaves(lambda leaf: leaf.transpose(0, 1), x)
    seen = eagerly(cell, batch_first=True)(turned, state, mask=mask.t(), reset=reset.t())
    assert torch.equal(seen.outputs["h"].transpose(0, 1), wanted.outputs["h"])
    assert equal(seen.last, wanted.last)


def test_all_faults_of_lengths_mask_and_reset_are_told_at_once() -> None:
    cell, x, state = random_case(3, 2, 0)
    with pytest.raises(SpecError) as caught:
        eagerly(cell)(x, state, lengths=[4, -1], mask=torch.ones(2, 3), reset=torch.ones(3, dtype=torch.bool))
    assert told(caught) == [
        "lengths go from 0 to T = 3, but row 0 has 4, row 1 has -1",
        "mask has dtype torch.float32, wanted torch.bool",
        "mask has shape (2, 3), wanted T x N = (3, 2)",
        "reset has shape (3,), wanted T x N = (3, 2)",
    ]
    for lengths, word in [
        (torch.tensor([1.0, 2.0]), "lengths has dtype torch.float32, wanted integers"),
        ([1, 2, 3], "lengths has shape (3,), wanted (2,): one for each row"),
    ]:
        with pytest.raises(SpecError) as caught:
            eagerly(cell)(x, state, lengths=lengths)
        assert told(caught) == [word]
    with pytest.raises(SpecError) as caught:
        eagerly(lambda x, s: (x, s))(torch.ones(4), torch.ones(1), lengths=[4])
    assert told(caught) == ["lengths, mask and reset are per row, but no input has two axes, T x N"]


def test_what_is_chosen_by_row_must_have_rows() -> None:
    x = torch.ones(3, 2, 3)
    with pytest.raises(SpecError, match="output has shape \\(\\), wanted 2 rows first"):
        eagerly(lambda x, s: (x.sum(), s))(x, torch.ones(2, 1), lengths=[1, 2])
    with pytest.raises(SpecError, match="wanted 2 rows"):
        eagerly(lambda x, s: (x, s.mean(0)))(x, torch.ones(2, 4), lengths=[1, 2])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lengths is a number": ({"lengths": 3}, "lengths"),
    "lengths are words": (
        {"lengths": ["a", "b"]},
        "lengths is ['a', 'b'], wanted a tensor or a sequence of 2 integers",
    ),
    "lengths are ragged": ({"lengths": [[1], [1, 2]]}, "lengths is [[1], [1, 2]]"),
    "lengths are too large for any integer": ({"lengths": [2**70, 1]}, "lengths is ["),
    "a mask is a list": ({"mask": [[True]]}, "mask is of type list, wanted a tensor of torch.bool"),
    "a reset is a flag": ({"reset": True}, "reset is of type bool, wanted a tensor of torch.bool"),
}


@at_once(("given", "words"), WRONG.values(), ids=WRONG)
def test_what_is_no_table_at_all_is_told_too(given: dict[str, Any], words: str) -> None:
    check = Validator("tables")
    inputs = read_inputs(torch.zeros(3, 2, 1), batch_first=False, certain=True, check=check)
    tables = {"lengths": None, "mask": None, "reset": None, **given}
    read_rows(inputs, **tables, batch_first=False, check=check)
    assert len(check.faults) == 1 and check.faults[0].startswith(words)


@pytest.mark.parametrize("truncate", [0, True])
def test_a_window_that_is_no_number_of_steps_is_told(truncate: Any) -> None:
    with pytest.raises(UsageError, match=f"truncate is {truncate!r}, wanted at least 1 step, or None"):
        Recurrent(nn.GRUCell(2, 2), truncate=truncate)
