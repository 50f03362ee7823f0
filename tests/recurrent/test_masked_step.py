"""Lengths, masks with holes, resets, truncation and the step number: on every backend, the eager loop's numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import (
    WIDTH,
    Awkward,
    by_plan,
    close,
    eagerly,
    floats,
    gradients,
    learned,
    per_row,
    planned,
    run_by,
)
from weft.core.pytree import map_leaves
from weft.recurrent import Recurrent
from weft.recurrent.plan_cache import NoPlanWarning

STEPS, ROWS = 6, 3


class Timed(Awkward):
    """Reads the number of the step as an int may be read."""

    def forward(self, x: Any, state: Any, t: int) -> Any:
        y, (h, more) = super().forward(x, state)
        del y["nothing"]
        return y, (h * (1 + t), {"n": more["n"] + t})


class Plain(Awkward):
    """Without the output that is None, which no plan knows."""

    def forward(self, x: Any, state: Any) -> Any:
        y, after = super().forward(x, state)
        del y["nothing"]
        return y, after


NETS: dict[tuple[str, str], Recurrent] = {}


def network(kind: str, backend: str) -> Recurrent:
    """One network for all examples, so that its plans are made once; its weights are fixed."""
    if (kind, backend) not in NETS:
        torch.manual_seed(3)
        options: dict[str, Any] = {"time_step": True, "truncate": 2} if kind == "timed" else {}
        cell = Timed() if kind == "timed" else Plain()
        NETS[kind, backend] = planned(cell, backend, **options)
    return NETS[kind, backend]


def sequence(seed: int) -> tuple[Any, Any]:
    """Inputs and an initial state, all that can be learned with gradients."""
    torch.manual_seed(seed)
    x = {"x": torch.randn(STEPS, ROWS, WIDTH).double() + 3, "gate": torch.rand(STEPS, ROWS).double()}
    state = (torch.randn(ROWS, 4).double(), {"n": torch.randint(9, (ROWS,))})
    return map_leaves(learned, x), map_leaves(learned, state)


def spoiled(x: Any, valid: Tensor) -> Any:
    """NaN wherever inputs do not count."""
    with torch.no_grad():
        found = map_leaves(
            lambda leaf: leaf.masked_fill(~valid.view(*valid.shape, *[1] * (leaf.dim() - 2)), torch.nan), x
        )
    return map_leaves(lambda leaf: leaf.requires_grad_(), found)


tables = st.lists(st.booleans(), min_size=STEPS * ROWS, max_size=STEPS * ROWS).map(
    lambda bits: torch.tensor(bits).view(STEPS, ROWS)
)


@by_plan
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, STEPS), min_size=ROWS, max_size=ROWS),
    mask=tables,
    reset=st.none() | tables,
    seed=st.integers(0, 99),
)
def test_every_row_runs_as_if_alone_and_padding_of_nan_leaks_nowhere(
    lengths: list[int], mask: Tensor, reset: Tensor | None, seed: int, backend: str
) -> None:
    net, (x, state) = network("plain", backend), sequence(seed)
    within = torch.arange(STEPS)[:, None] < torch.tensor(lengths)
    valid = within & mask
    wanted = per_row(net.cell, x, state, valid, None if reset is None else within & reset)
    padded = spoiled(x, valid)
    seen = net(padded, state, lengths=lengths, mask=mask, reset=reset)
    close(tuple(seen), tuple(wanted))
    for leaf in floats(seen.outputs):
        assert torch.equal(leaf[~valid], torch.zeros_like(leaf[~valid]))
    learn = [*net.cell.parameters(), *floats(state)]
    close(gradients(tuple(seen), [*learn, *floats(padded)]), gradients(wanted, [*learn, *floats(x)]), 1e-10)
    assert run_by(net) == {backend}


@by_plan
@settings(max_examples=8)
@given(start=st.integers(0, 3), every=st.integers(1, 7), seed=st.integers(0, 99), reset=st.none() | tables)
def test_truncation_the_step_number_and_resets_are_as_in_the_loop(
    start: int, every: int, seed: int, reset: Tensor | None, backend: str
) -> None:
    net, (x, state) = network("timed", backend), sequence(seed)
    net.truncate = every
    loop = eagerly(net.cell, time_step=True, truncate=every)
    fresh = map_leaves(lambda leaf: leaf.detach().clone() + 1, state)
    wrt = [*net.parameters(), *floats(x), *floats(state)]
    found: list[Any] = []
    for each in (net, loop):
        each.initial = lambda first: fresh
        result = tuple(each(x, state, reset=reset, start=start))
        found.append((result, gradients(result, wrt)))
    close(found[0], found[1], 1e-10)
    assert run_by(net) == {backend}


@by_plan
@pytest.mark.parametrize("own", [True, False])
def test_what_a_reset_brings_back_keeps_its_gradient_where_others_are_cut(own: bool, backend: str) -> None:
    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h.sin(), (x + h).tanh()

    torch.manual_seed(0)
    x, first = torch.randn(STEPS, ROWS, 3).double(), torch.randn(ROWS, 3).double().requires_grad_()
    reset = torch.arange(STEPS)[:, None] % 4 == torch.arange(ROWS)
    options: dict[str, Any] = {"truncate": 2, "initial": (lambda _: first) if own else None}
    found: list[Any] = []
    for net in (planned(cell, backend, **options), eagerly(cell, **options)):
        found.append(gradients(tuple(net(x, None if own else first, reset=reset)), [first]))
    close(*found)


@by_plan
def test_a_cell_that_looks_at_all_rows_sees_the_same_in_place_of_padding(backend: str) -> None:
    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = (h + x - x.mean(0)).tanh()
        return h, h

    torch.manual_seed(0)
    x, h = torch.randn(STEPS, ROWS, 3).double().requires_grad_(), torch.randn(ROWS, 3).double()
    x.data[4:, 1] = torch.nan
    loop, net = (each(x, h, lengths=[6, 4, 0]).outputs for each in (eagerly(cell), planned(cell, backend)))
    close(net, loop)
    close(gradients(net, [x]), gradients(loop, [x]))


class OneOver(nn.Module):
    """Divides by the step's number, which in float64 has more digits as a number than as a tensor of integers."""

    def forward(self, x: Tensor, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        after = state + x / (1 - 0.9 ** (t + 1))
        return after, after


@by_plan
@pytest.mark.filterwarnings("ignore:cell OneOver runs by the eager loop")
def test_a_step_number_that_a_plan_would_round_is_left_to_the_loop(backend: str) -> None:
    net = planned(OneOver(), backend, time_step=True)
    x, state = torch.randn(4, 2, 3).double(), torch.zeros(2, 3).double()
    close(net(x, state).outputs, eagerly(OneOver(), time_step=True)(x, state).outputs, 1e-14)
    assert run_by(net) == {"eager"}


@by_plan
def test_a_step_number_is_not_rounded_either_where_the_first_steps_do_not_show_it(backend: str) -> None:
    def cell(x: Tensor, h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return x + h * (1e-4 * t), h

    def exact(x: Tensor, h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return x + h * (1e-4 * torch.as_tensor(t, dtype=x.dtype)), h

    x, h = torch.randn(4, 2, 3).double(), torch.ones(2, 3).double()
    wanted = eagerly(cell, time_step=True)(x, h, start=9999).outputs
    net = planned(cell, backend, time_step=True)
    with pytest.warns(NoPlanWarning, match="float64 with the number t.*as_tensor"):
        net(x, h)
    close(net(x, h, start=9999).outputs, wanted, 1e-14)
    net = planned(exact, backend, time_step=True)
    net(x, h)
    close(net(x, h, start=9999).outputs, wanted, 1e-14)
    assert run_by(net) == {backend}
