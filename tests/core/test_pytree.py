"""Nested values: flatten and unflatten are inverse, paths are readable, and differences are reported."""

import json
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweft.core import pytree as tree
from torchweft.core.errors import SpecError

Point = namedtuple("Point", ["x", "y"])

leaves = st.none() | st.integers() | st.text(max_size=3) | st.sampled_from([torch.ones(2), torch.zeros(1)])
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal containers with identical leaves, compared without the code under test."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b


@given(values)
def test_unflatten_is_the_inverse_of_flatten(value: Any) -> None:
    flat, structure = tree.flatten(value)
    assert same(tree.unflatten(structure, flat), value)
    assert same(tree.nested_pack(tree.nested_flatten(value), value), value)
    assert same(tree.map_leaves(lambda leaf: leaf, value), value)


@given(values)
def test_every_leaf_is_found_at_its_path(value: Any) -> None:
    """A path is a Python expression that evaluates to its leaf."""
    flat = tree.flatten(value)[0]
    at_paths = [eval(path, {"root": value}) for path in tree.structure_paths(tree.flatten(value)[1], "root")]
    assert all(a is b for a, b in zip(at_paths, flat, strict=True))


@given(values, values)
def test_structures_are_equal_exactly_if_no_difference_is_named(a: Any, b: Any) -> None:
    first, second = tree.flatten(a)[1], tree.flatten(b)[1]
    assert (first == second) == (tree.difference(first, second) is None) == tree.nested_compare(a, b)
    assert tree.nested_compare(a, a)
    if first == second:
        assert hash(first) == hash(second)


def test_bare_tensor_is_one_leaf() -> None:
    x = torch.ones(2)
    assert tree.flatten(x) == ([x], tree.LEAF)
    assert tree.unflatten(tree.LEAF, [x]) is x
    assert tree.flatten(torch.nn.Parameter(x))[1] == tree.LEAF == tree.flatten(None)[1]


def test_paths_are_readable() -> None:
    value = ({"mask": 1, 3: [2]}, Point(3, None), OrderedDict(a=4), defaultdict(list, b=5))
    names = ["in[0]['mask']", "in[0][3][0]", "in[1].x", "in[1].y", "in[2]['a']", "in[3]['b']"]
    assert tree.structure_paths(tree.flatten(value)[1], "in") == names


def test_dicts_keep_their_order_and_differ_by_it() -> None:
    assert list(tree.map_leaves(str, {"b": 1, "a": 2})) == ["b", "a"]
    assert not tree.nested_compare({"b": 1, "a": 2}, {"a": 1, "b": 2})


def test_map_takes_leaves_of_several_values_together() -> None:
    assert tree.nested_map(lambda a, b: a + b, {"x": [1, 2]}, {"x": [10, 20]}) == {"x": [11, 22]}


@pytest.mark.parametrize(
    ("wanted", "seen", "words"),
    [
        ([1, (2, 3)], [1, [2, 3]], r"in\[1\] should be a tuple of 2, but is a list of 2"),
        ({"a": Point(1, 2)}, {"a": Point(1, (2,))}, r"in\['a'\]\.y should be a leaf, but is a tuple of 1"),
        ({"a": 1}, {"b": 1}, r"in should be a dict with keys \['a'\], but is a dict with keys \['b'\]"),
        ((Point(1, 2),), (1,), r"in\[0\] should be a Point with fields \['x', 'y'\], but is a leaf"),
    ],
)
def test_first_difference_is_named(wanted: Any, seen: Any, words: str) -> None:
    fault = tree.difference(tree.flatten(wanted)[1], tree.flatten(seen)[1], "in")
    with pytest.raises(SpecError, match=words):
        raise SpecError(fault)
    with pytest.raises(SpecError, match="value 1 is not nested as value 0"):
        tree.map_leaves(lambda a, b: a, wanted, seen)


def test_wrong_number_of_leaves_is_an_error() -> None:
    with pytest.raises(SpecError, match="has 2 leaves, but 3 were given"):
        tree.nested_pack([1, 2, 3], like=(0, 0))
    with pytest.raises(SpecError, match="has 1 leaves, but 0 were given"):
        tree.unflatten(tree.LEAF, [])
    with pytest.raises(SpecError, match="at least one value"):
        tree.map_leaves(str)


@given(values)
def test_prefix_stands_for_all_leaves_below_it(value: Any) -> None:
    leaves, structure = tree.flatten(value)
    assert tree.broadcast_prefix(None, structure) == [None] * len(leaves)
    numbers = list(range(len(leaves)))
    assert tree.broadcast_prefix(tree.unflatten(structure, numbers), structure) == numbers


def test_first_mismatch_of_a_prefix_is_named() -> None:
    structure = tree.flatten({"a": [1, 2], "b": 3})[1]
    assert tree.broadcast_prefix({"b": 5, "a": 4}, structure) == [4, 4, 5]
    for prefix, place in (
        ({"a": [4], "b": 5}, r"x\['a'\] is a list of 2, but \[4\] is given for it"),
        ({"a": 4, "b": [5]}, r"x\['b'\] is a leaf, but \[5\]"),
        ({"a": {}, "b": 5}, r"x\['a'\] is a list of 2, but {}"),
        ([4, 5], "x is a dict with keys"),
        ({"a": 4}, "x is a dict with keys"),
        ({}, "x is a dict with keys"),
    ):
        with pytest.raises(SpecError, match=place):
            tree.broadcast_prefix(prefix, structure, "x")


@given(values)
def test_structure_round_trips_through_plain_data(value: Any) -> None:
    structure = tree.flatten(value)[1]
    plain = tree.to_plain(structure)
    assert tree.from_plain(plain) == structure
    json.dumps(plain)


@pytest.mark.parametrize(
    ("value", "words"), [(defaultdict(int, a=1), "a defaultdict cannot"), ({(1, 2): 0}, r"a key \(1, 2\) cannot")]
)
def test_unsupported_structure_is_rejected(value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        tree.to_plain(tree.flatten(value)[1])


@pytest.mark.parametrize("name", ["os:system", "nowhere:Point", f"{__name__}:Gone", "builtins:tuple", "odd"])
def test_plain_data_names_only_named_tuples(name: str) -> None:
    with pytest.raises(SpecError, match="is not a named tuple of 1 fields"):
        tree.from_plain([name, None, [None]])
