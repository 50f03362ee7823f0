"""A grid maps places to names, and finds the live experts of a snapshot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweft.experts.discovery import Snapshot
from torchweft.experts.mixture.routing import Grid


@given(st.lists(st.integers(1, 1200), min_size=1, max_size=4), st.data())
def test_a_name_and_its_place_belong_together(sizes: list[int], data: st.DataObject) -> None:
    grid = Grid("ffn.", sizes)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    assert grid.place(grid.uid(place)) == place
    assert Grid("ffn", sizes).uid(place) == grid.uid(place)


def test_foreign_names_are_ignored(subtests: pytest.Subtests) -> None:
    foreign = [
        "ffn.4.0",
        "ffn.0.32",
        "ffn.0",
        "ffn.0.0.0",
        "ffn.00.1",
        "ffn.-1.0",
        "ffn.a.0",
        "ffn.٣.0",
        "att.0.0",
        "ffn.0.",
        "ffn0.0",
        "ffn.+1.0",
    ]
    for uid in [*foreign, "", "ffn. 1.0", "ffn.0." + "9" * 10000]:
        with subtests.test(uid=uid):
            assert Grid("ffn", [4, 32]).place(uid) is None
            live = Grid("ffn", [4, 32]).live_experts(Snapshot(1, {uid: ("a:1",), "ffn.3.17": ("b:1",)}))
            assert live.uids == ("ffn.3.17",) and live.places.tolist() == [[3, 17]]


def test_live_experts_are_sorted_by_place() -> None:
    grid = Grid("ffn", [12])
    live = grid.live_experts(Snapshot(1, {"ffn.10": ("a",), "ffn.2": ("a",)}))
    assert live.uids == ("ffn.2", "ffn.10") and len(live) == 2
    empty = grid.live_experts(Snapshot())
    assert empty.places.shape == (0, 1) and empty.places.dtype == torch.int64
