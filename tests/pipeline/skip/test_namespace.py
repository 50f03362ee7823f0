"""Namespaces keep equal names apart, keep their identity in copies, and are totally ordered."""

import copy
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.skip.namespace import Namespace, describe, order_of

CLONES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda ns, protocol=protocol: pickle.loads(pickle.dumps(ns, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}

indices = st.integers(0, 4)


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_a_clone_is_the_same_namespace(clone) -> None:
    ns = Namespace()
    assert clone(ns) == ns
    assert hash(clone(ns)) == hash(ns)
    assert {ns: "found"}[clone(ns)] == "found"
    assert Namespace() != clone(ns) != Namespace()


def test_namespaces_differ_from_each_other_and_from_none() -> None:
    assert len({Namespace(), Namespace(), None}) == 3


@given(st.lists(indices))
def test_the_order_is_the_order_of_creation_with_none_first(picks: list[int]) -> None:
    places = [None, *(Namespace() for _ in range(4))]
    keys = [(places[i], "name") for i in picks]
    wanted = [(places[i], "name") for i in sorted(picks)]
    assert sorted(keys) == wanted
    assert sorted(keys, key=order_of) == wanted


def test_the_order_is_total() -> None:
    places = [None, Namespace(), Namespace()]
    for left, right in itertools.combinations(places, 2):
        assert left < right and right > left and left <= right and right >= left
        assert not (left > right or right < left or left >= right or right <= left)
    for ns in places[1:]:
        same = copy.copy(ns)
        assert ns <= same and ns >= same and not ns < same and not ns > same


def test_a_namespace_has_no_order_with_other_things() -> None:
    with pytest.raises(TypeError, match="not supported"):
        _ = Namespace() < 3


def test_a_namespace_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Namespace().serial = 3


def test_messages_name_the_namespace_only_if_there_is_one() -> None:
    ns = Namespace()
    assert describe((None, "a")) == "'a'"
    assert describe((ns, "a")) == f"'a' in {ns!r}"
