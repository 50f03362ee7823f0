"""A layout tells for every skip where it comes from and which partitions read it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.core.errors import SkipWiringError
from weft.pipeline.skip import Namespace, SkipLayout, inspect_skip_layout, skippable


class Nothing(nn.Module):
    """Its forward never runs here."""


def layer(stash: str = "", pop: str = "") -> nn.Module:
    """Every letter is a name."""
    return skippable(stash=list(stash), pop=list(pop))(Nothing)()


def policies(layout: SkipLayout) -> list[list]:
    return [list(layout.copy_policy(j)) for j in range(len(layout.by_partition))]


def test_without_skips_there_are_no_routes() -> None:
    layout = inspect_skip_layout([nn.Sequential(nn.Identity()), nn.Identity()])
    assert layout.routes == layout.by_ns_name == {}
    assert layout.by_partition == policies(layout) == [[], []]


def test_a_skip_inside_one_partition_is_not_copied() -> None:
    layout = inspect_skip_layout([nn.Sequential(layer("a"), layer(pop="a"))])
    assert layout.by_ns_name == {(None, "a"): (0, 0)}
    assert layout.by_partition == [[(0, None, "a")]]
    assert policies(layout) == [[]]
    assert not layout.requires_copy(None, "a")


def test_a_skip_goes_from_its_source_straight_to_each_reader() -> None:
    parts = [layer("a"), nn.Identity(), [layer(pop="a"), layer(pop="a")], nn.Sequential(layer(pop="a"))]
    layout = inspect_skip_layout(parts)
    assert layout.routes == {(None, "a"): (0, (2, 3))}
    assert layout.by_ns_name == {(None, "a"): (0, 3)}
    assert policies(layout) == [[], [], [(0, None, "a")], [(0, None, "a")]]
    assert layout.requires_copy(None, "a")


def test_one_reader_at_home_and_one_abroad() -> None:
    layout = inspect_skip_layout([[layer("a"), layer(pop="a")], layer(pop="a")])
    assert layout.routes == {(None, "a"): (0, (0, 1))}
    assert policies(layout) == [[], [(0, None, "a")]]
    assert layout.requires_copy(None, "a")


def test_an_unknown_skip_requires_no_copy() -> None:
    layout = inspect_skip_layout([layer("a"), layer(pop="a")])
    assert not layout.requires_copy(Namespace(), "a")
    assert not layout.requires_copy(None, "b")


def test_arrivals_are_ordered_by_source_then_namespace_then_name() -> None:
    first, second = Namespace(), Namespace()
    parts = [
        [layer("d"), layer("a").isolate(second), layer("a").isolate(first)],
        layer("cb"),
        [layer(pop="bcd"), layer(pop="a").isolate(first), layer(pop="a").isolate(second)],
    ]
    wanted = [(0, None, "d"), (0, first, "a"), (0, second, "a"), (1, None, "b"), (1, None, "c")]
    layout = inspect_skip_layout(parts)
    assert list(layout.copy_policy(2)) == layout.by_partition[2] == wanted


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
    assert "layer 'partition 1.1' (Nothing) stashes 'b', which nobody pops" in str(caught.value)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=4)), max_size=5),
)
def test_the_views_of_a_layout_agree(count, skips) -> None:
    ns = Namespace()
    parts: list[list[nn.Module]] = [[] for _ in range(count)]
    wanted = {}
    for number, (start, steps) in enumerate(skips):
        source = start % count
        readers = sorted(source + step % (count - source) for step in steps)
        place = ns if number % 2 else None
        name = "abcde"[number]
        parts[source].insert(0, layer(name).isolate(place))
        for j in readers:
            parts[j].append(layer(pop=name).isolate(place))
        wanted[place, name] = (source, tuple(sorted(set(readers))))
    layout = inspect_skip_layout(parts)
    assert layout.routes == wanted
    assert layout.by_ns_name == {key: (source, max(readers)) for key, (source, readers) in wanted.items()}
    for j in range(count):
        ends = [(source, *key) for key, (source, readers) in wanted.items() if j in readers]
        assert layout.by_partition[j] == sorted(ends, key=lambda end: (end[0], end[1] is not None, end[1] or 0, end[2]))
        assert list(layout.copy_policy(j)) == [end for end in layout.by_partition[j] if end[0] != j]
    for key, (source, readers) in wanted.items():
        assert layout.requires_copy(*key) == (set(readers) != {source})
