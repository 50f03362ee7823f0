"""A grid gives names to places, and finds those that live in a snapshot."""

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


def test_names_of_others_are_passed_over(subtests: pytest.Subtests) -> None:
    strange = [
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
    for uid in [*strange, "", "ffn. 1.0", "ffn.0." + "9" * 10000]:
        with subtests.test(uid=uid):
            assert Grid("ffn", [4, 32]).place(uid) is None
            crowd = Grid("ffn", [4, 32]).live_experts(Snapshot(1, {uid: ("a:1",), "ffn.3.17": ("b:1",)}))
            assert crowd.uids == ("ffn.3.17",) and crowd.places.tolist() == [[3, 17]]


def test_a_crowd_is_sorted_by_place_and_may_be_empty() -> None:
    grid = Grid("ffn", [12])
    crowd = grid.live_experts(Snapshot(1, {"ffn.10": ("a",), "ffn.2": ("a",)}))
    assert crowd.uids == ("ffn.2", "ffn.10") and len(crowd) == 2
    nobody = grid.live_experts(Snapshot())
    assert nobody.places.shape == (0, 1) and nobody.places.dtype == torch.int64
