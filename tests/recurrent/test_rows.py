"""Lengths, masks, resets, truncation and step numbers: each row runs as if alone, on every backend."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.recurrent.recurrent_cases import (
    Awkward,
    as_the_loop,
    at_once,
    by_any,
    by_plan,
    close,
    eagerly,
    equal,
    fault_lines,
    floats,
    gradients,
    outcome,
    per_row,
    planned,
    random_case,
    run_by,
    spoiled,
)
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.pytree import map_leaves
from torchweft.core.validation import Validator
from torchweft.recurrent import Recurrent
from torchweft.recurrent.masking import read_rows
from torchweft.recurrent.plan_cache import NoPlanWarning
from torchweft.recurrent.sequence import read_inputs

STEPS, ROWS = 6, 3
tables = st.lists(st.booleans(), min_size=STEPS * ROWS, max_size=STEPS * ROWS).map(
    lambda bits: torch.tensor(bits).view(STEPS, ROWS)
)


class Timed(Awkward):
    """Reads the step number."""

    def forward(self, x: Any, state: Any, t: int) -> Any:
        y, (h, more) = super().forward(x, state)
        return y, (h * (1 + t), {"n": more["n"] + t})


@cache
def network(kind: type[Awkward], backend: str) -> Recurrent:
    """One network for all examples, so that its plans are made once."""
    return Recurrent(kind(), backend=backend, **({"time_step": True, "truncate": 2} if kind is Timed else {}))


@by_any
@settings(max_examples=10)
@given(
    lengths=st.none() | st.lists(st.integers(0, STEPS), min_size=ROWS, max_size=ROWS),
    mask=st.none() | tables,
    reset=st.none() | tables,
    seed=st.integers(0, 99),
    own=st.booleans(),
    form=st.sampled_from([list, tuple, torch.tensor]),
)
def test_each_row_runs_as_if_alone_despite_nan_padding(
    lengths: Any, mask: Tensor | None, reset: Tensor | None, seed: int, own: bool, form: Any, backend: str
) -> None:
    net, (_, x, state) = network(Awkward, backend), random_case(STEPS, ROWS, seed)
    fresh = random_case(STEPS, ROWS, seed + 1)[2] if own else state
    net.initial = (lambda first: fresh) if own else None
    within = torch.arange(STEPS)[:, None] < torch.tensor([STEPS] * ROWS if lengths is None else lengths)
    valid = within if mask is None else within & mask
    expected = per_row(net.cell, x, state, valid, None if reset is None else within & reset, fresh)
    padded = spoiled(x, valid)
    seen = net(padded, state, lengths=None if lengths is None else form(lengths), mask=mask, reset=reset)
    close(tuple(seen), tuple(expected))
    for leaf in floats(seen.outputs):
        assert torch.equal(leaf[~valid], torch.zeros_like(leaf[~valid]))
    learn = [*net.cell.parameters(), *floats(state), *floats(fresh)]
    close(gradients(tuple(seen), [*learn, *floats(padded)]), gradients(expected, [*learn, *floats(x)]), 1e-10)
    assert run_by(net) == {backend}


@by_plan
@settings(max_examples=8)
@given(start=st.integers(0, 3), every=st.integers(1, 7), seed=st.integers(0, 99), reset=st.none() | tables)
def test_truncation_step_number_and_resets_equal_the_loop(
    start: int, every: int, seed: int, reset: Tensor | None, backend: str
) -> None:
    net, (_, x, state) = network(Timed, backend), random_case(STEPS, ROWS, seed)
    fresh = map_leaves(lambda leaf: leaf.detach().clone() + 1, state)
    net.truncate, net.initial = every, lambda first: fresh
    loop = eagerly(net.cell, time_step=True, truncate=every, initial=net.initial)
    close(*(outcome(network, x, state, reset=reset, start=start) for network in (net, loop)), 1e-10)
    assert run_by(net) == {backend}


@by_plan
@pytest.mark.parametrize("own", [True, False])
def test_restored_state_keeps_its_gradient_at_a_cut(own: bool, backend: str) -> None:
    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h.sin(), (x + h).tanh()

    torch.manual_seed(0)
    x, first = torch.randn(STEPS, ROWS, 3).double(), torch.randn(ROWS, 3).double().requires_grad_()
    reset = torch.arange(STEPS)[:, None] % 4 == torch.arange(ROWS)
    options: dict[str, Any] = {"truncate": 2, "initial": (lambda _: first) if own else None}
    results: list[Any] = []
    for net in (planned(cell, backend, **options), eagerly(cell, **options)):
        results.append(gradients(tuple(net(x, None if own else first, reset=reset)), [first]))
    close(*results)


@by_plan
def test_cell_that_mixes_rows_sees_the_same_padding_values(backend: str) -> None:
    torch.manual_seed(0)
    x, h = torch.randn(STEPS, ROWS, 3).double().requires_grad_(), torch.randn(ROWS, 3).double()
    x.data[4:, 1] = torch.nan
    as_the_loop(lambda x, h: ((h + x - x.mean(0)).tanh(),) * 2, backend, x, h, lengths=[6, 4, 0])


@by_plan
def test_step_number_that_a_plan_would_round_runs_eagerly(backend: str) -> None:
    """This holds even if the first steps do not show the rounding."""

    def cell(x: Tensor, h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return x + h * (1e-4 * t), h

    def exact(x: Tensor, h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return x + h * (1e-4 * torch.as_tensor(t, dtype=x.dtype)), h

    x, h = torch.randn(4, 2, 3).double(), torch.ones(2, 3).double()
    expected = eagerly(cell, time_step=True)(x, h, start=9999).outputs
    net = planned(cell, backend, time_step=True)
    words = "float64 with the number t.*as_tensor"
    if backend == "c":
        with pytest.raises(UsageError, match=words):
            net(x, h)
        net.backend = "auto"
    with pytest.warns(NoPlanWarning, match=words):
        net(x, h)
    close(net(x, h, start=9999).outputs, expected, 1e-14)
    assert run_by(net) == {"eager"}
    net = planned(exact, backend, time_step=True)
    net(x, h)
    close(net(x, h, start=9999).outputs, expected, 1e-14)
    assert run_by(net) == {backend}


def test_reset_counts_in_a_hole_but_not_past_the_end() -> None:
    net = eagerly(lambda x, s: (s + x, s + x), initial=torch.zeros(()))
    x = torch.ones(4, 2)
    hole = torch.tensor([True, True, False, False])[:, None].expand(4, 2)
    reset = torch.tensor([False, False, True, False])[:, None].expand(4, 2)
    assert net(x, mask=hole, reset=reset).last.tolist() == [0, 0]
    assert net(x, lengths=[2, 4], reset=reset).last.tolist() == [2, 2]


def test_all_true_mask_changes_no_bit() -> None:
    cell, x, state = random_case(4, 3, 1)
    plain = eagerly(cell)(x, state)
    masked = eagerly(cell)(x, state, mask=torch.ones(4, 3, dtype=torch.bool), lengths=[4, 4, 4])
    assert all(equal(a, b) for a, b in zip(plain, masked, strict=True))


def test_faults_of_lengths_mask_and_reset_are_listed() -> None:
    cell, x, state = random_case(3, 2, 0)
    with pytest.raises(SpecError) as caught:
        eagerly(cell)(x, state, lengths=[4, -1], mask=torch.ones(2, 3), reset=torch.ones(3, dtype=torch.bool))
    assert fault_lines(caught) == [
        "lengths go from 0 to T = 3, but row 0 has 4, row 1 has -1",
        "mask has dtype torch.float32, wanted torch.bool",
        "mask has shape (2, 3), wanted T x N = (3, 2)",
        "reset has shape (3,), wanted T x N = (3, 2)",
    ]
    with pytest.raises(SpecError) as caught:
        eagerly(lambda x, s: (x, s))(torch.ones(4), torch.ones(1), lengths=[4])
    assert fault_lines(caught) == ["lengths, mask and reset are per row, but no input has two axes, T x N"]


def test_masked_results_must_have_rows() -> None:
    x = torch.ones(3, 2, 3)
    with pytest.raises(SpecError, match="output has shape \\(\\), wanted 2 rows first"):
        eagerly(lambda x, s: (x.sum(), s))(x, torch.ones(2, 1), lengths=[1, 2])
    with pytest.raises(SpecError, match="wanted 2 rows"):
        eagerly(lambda x, s: (x, s.mean(0)))(x, torch.ones(2, 4), lengths=[1, 2])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lengths are floats": ({"lengths": torch.tensor([1.0, 2.0])}, "lengths has dtype torch.float32, wanted integers"),
    "too many lengths": ({"lengths": [1, 2, 3]}, "lengths has shape (3,), wanted (2,): one for each row"),
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
def test_arguments_that_are_not_tables_are_reported(given: dict[str, Any], words: str) -> None:
    check = Validator("tables")
    inputs = read_inputs(torch.zeros(3, 2, 1), batch_first=False, certain=True, check=check)
    tables = {"lengths": None, "mask": None, "reset": None, **given}
    read_rows(inputs, **tables, batch_first=False, check=check)
    assert len(check.faults) == 1 and check.faults[0].startswith(words)
