"""What holds for every cell of the zoo."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recurrent.cells.zoo_cases import ZOO, ZooCase, every_cell, sampled
from tests.recurrent.recurrent_cases import close, equal, floats, gradients, learned, per_row
from weft.core.pytree import flatten, map_leaves
from weft.recurrent import Recurrent

STEPS, ROWS = 5, 3
deterministic = sampled([each for each in ZOO if not each.random])


def begun(case: ZooCase, cell: Any, x: Tensor) -> Any:
    """A state for the cell, its own or a given one, each tensor a leaf with a gradient."""
    given = case.state(cell, x)
    state = cell.initial_state(x[0]) if given is None else given
    return map_leaves(lambda leaf: learned(leaf.detach().clone()), state)


@every_cell
def test_gradients_are_those_of_finite_differences(case: ZooCase) -> None:
    cell, x = case.cell(), case.inputs(3, 2)
    net = Recurrent(cell)
    state = begun(case, cell, x)
    with torch.no_grad():
        for leaf in floats(state):
            leaf.add_(0.3 * torch.rand_like(leaf))

    def run(*_: Tensor) -> list[Tensor]:  # gradcheck moves the very tensors that the network reads
        torch.manual_seed(0)
        return [leaf for leaf in flatten(net(x, state)[:2])[0] if leaf.requires_grad]

    assert torch.autograd.gradcheck(run, (x, *floats(state), *cell.parameters()), fast_mode=True)


@sampled()
def test_steps_give_the_bits_of_the_whole(case: ZooCase) -> None:
    cell, x = case.cell(), case.inputs(STEPS, ROWS)
    net = Recurrent(cell, backend="eager")  # a plan gives the same but for rounding
    state = case.state(cell, x)
    torch.manual_seed(0)
    whole = net(x, state)
    torch.manual_seed(0)
    for t in range(STEPS):
        y, state = net.step(x[t], state)
        assert equal(y, map_leaves(lambda leaf, t=t: leaf[t], whole.outputs))
    assert equal(state, whole.last)


@deterministic
def test_rows_of_different_length_are_as_if_alone(case: ZooCase) -> None:
    cell, x = case.cell(), case.inputs(STEPS, 4)
    state = begun(case, cell, x)
    lengths = torch.tensor([5, 2, 0, 3])
    valid = torch.arange(STEPS)[:, None] < lengths
    net = Recurrent(cell)
    seen, wanted = net(x, state, lengths=lengths), per_row(cell, x, state, valid)
    for one, other in zip(seen, wanted, strict=True):
        close(one, other)
    wrt = [x, *floats(state), *cell.parameters()]
    close(gradients(tuple(seen), wrt), gradients(wanted, wrt), 1e-10)


@sampled()
def test_a_cell_can_be_copied_saved_and_loaded(case: ZooCase) -> None:
    cell, x = case.cell(), case.inputs(STEPS, ROWS)
    other = copy.deepcopy(cell)
    with torch.no_grad():
        for each in other.parameters():
            each.add_(1.0)
    results = []
    for each in (cell, other):
        each.load_state_dict(cell.state_dict())
        torch.manual_seed(0)
        results.append(Recurrent(each)(x, case.state(each, x)))
    assert equal(tuple(results[0]), tuple(results[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@sampled()
def test_a_cell_keeps_to_the_dtype_of_its_weights(case: ZooCase, dtype: torch.dtype) -> None:
    cell, x = case.cell(dtype), case.inputs(STEPS, ROWS, dtype)
    leaves = flatten(Recurrent(cell)(x, case.state(cell, x))[:2])[0]
    assert {leaf.dtype for leaf in leaves} - {torch.bool} == {dtype}
    assert all(leaf.isfinite().all() for leaf in leaves)


# The loop may run instead: in bfloat16 a plan may round beyond what the first check allows.
@pytest.mark.filterwarnings("ignore::weft.recurrent.NoPlanWarning")
@sampled()
def test_under_autocast_a_cell_runs_and_its_state_goes_round(case: ZooCase) -> None:
    cell, x = case.cell(torch.float32), case.inputs(STEPS, ROWS, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = Recurrent(cell)(x, case.state(cell, x))
    sum(leaf.float().sum() for leaf in flatten(result.outputs)[0]).backward()
    assert x.grad is not None and x.grad.isfinite().all()
