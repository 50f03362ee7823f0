"""The classifier's parts: experts placed so that either server may die, weights by seed, digits for two."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("grpc", reason="the act needs the extra `experts`")
pytest.importorskip("sklearn", reason="the demo needs scikit-learn (the extra `demo`)")

from weft.demo.machines_model import (
    GRID,
    SERVERS,
    UIDS,
    Labelled,
    accuracy,
    digit_expert,
    load_labelled,
    read_labelled,
    write_labelled,
)
from weft.experts.mixture.grid import Grid
from weft.experts.mixture.routing import choose


@given(st.lists(st.floats(-10, 10), min_size=4, max_size=4))
def test_of_the_two_best_experts_one_is_at_each_server(scores: list[float]) -> None:
    rows, columns = scores[:2], scores[2:]
    if abs(rows[0] - rows[1]) < 1e-3 or abs(columns[0] - columns[1]) < 1e-3:
        return  # of experts with equal scores any may be taken
    places = torch.tensor([[int(part) for part in uid.split(".")[1:]] for uid in UIDS])
    chosen = choose(torch.tensor([scores]), places, GRID, 2)
    names = {UIDS[index] for index in chosen[0].tolist()}
    assert all(len(names & set(uids)) == 1 for uids in SERVERS)


def test_the_servers_have_all_of_the_grid_and_none_twice() -> None:
    assert len(UIDS) == len(set(UIDS)) == GRID[0] * GRID[1]
    grid = Grid("digits", GRID)
    assert sorted(grid.uid(place) for place in [(0, 0), (0, 1), (1, 0), (1, 1)]) == list(UIDS)


def test_an_experts_first_weights_are_those_of_its_seed_and_the_callers_numbers_stay() -> None:
    state = torch.get_rng_state()
    one, same, other = (digit_expert(8, seed).module.state_dict() for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(p.dtype == torch.float64 for p in digit_expert(8, 1, double=True).module.parameters())


def test_the_trainers_share_no_image_and_miss_none_and_files_keep_them(tmp_path: Path) -> None:
    digits = load_labelled(3)
    assert len(digits.images) + len(digits.held_out) == 1797
    write_labelled(digits, tmp_path / "digits.pt")
    again = read_labelled(tmp_path / "digits.pt")
    assert all(torch.equal(a, b) for a, b in zip(digits, again, strict=True))
    first, second = digits.half(0), digits.half(1)
    assert len(first.images) + len(second.images) == len(digits.images)
    assert torch.equal(torch.cat([first.digits, second.digits]).bincount(), digits.digits.bincount())
    assert torch.equal(first.images[1], digits.images[2]) and torch.equal(second.images[1], digits.images[3])


def test_accuracy_is_the_share_of_held_out_digits_that_are_right() -> None:
    class Sure(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.eye(10)[images[:, 0].long()], torch.zeros(())

    held_out = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    digits = Labelled(held_out, torch.arange(4), held_out, torch.tensor([0, 1, 2, 9]))
    assert accuracy(Sure(), digits) == 0.75
