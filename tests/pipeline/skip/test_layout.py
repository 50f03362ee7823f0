"""A layout names the source of every skip and the partitions that read it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchweft.core.errors import SkipWiringError
from torchweft.pipeline.skip import Namespace, inspect_skip_layout, skippable


class Nothing(nn.Module):
    """Layer whose forward is never called."""


def layer(stash: str = "", pop: str = "") -> nn.Module:
    """A layer that declares a skip for every letter."""
    return skippable(stash=list(stash), pop=list(pop))(Nothing)()


def test_a_partition_may_be_a_layer_a_sequential_or_an_iterable() -> None:
    routes = [
        inspect_skip_layout([make([layer("a")]), make([nn.Identity(), layer(pop="a")])]).routes
        for make in (list, iter, lambda layers: layers[-1], lambda layers: nn.Sequential(*layers), nn.ModuleList)
    ]
    assert routes == [{(None, "a"): (0, (1,))}] * 5


def test_skips_deep_inside_a_layer_are_found() -> None:
    block = nn.Module()
    block.parts = nn.ModuleList([nn.Sequential(layer(pop="a"))])
    assert inspect_skip_layout([layer("a"), [block]]).routes == {(None, "a"): (0, (1,))}


def test_wiring_that_does_not_fit_is_refused_with_every_fault() -> None:
    with pytest.raises(SkipWiringError) as caught:
        inspect_skip_layout([layer(pop="a"), [nn.Identity(), layer("b")]])
    assert "layer 'partition 0' (Nothing) pops 'a' before any stash" in str(caught.value)
    assert "layer 'partition 1.1' (Nothing) stashes 'b', which no layer pops" in str(caught.value)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=4)), max_size=5),
)
def test_routes_are_those_of_the_layers(count, skips) -> None:
    ns = Namespace()
    parts: list[list[nn.Module]] = [[] for _ in range(count)]
    expected = {}
    for number, (start, steps) in enumerate(skips):
        source = start % count
        readers = sorted(source + step % (count - source) for step in steps)
        space = ns if number % 2 else None
        name = "abcde"[number]
        parts[source].insert(0, layer(name).isolate(space))
        for j in readers:
            parts[j].append(layer(pop=name).isolate(space))
        expected[space, name] = (source, tuple(sorted(set(readers))))
    assert inspect_skip_layout(parts).routes == expected
