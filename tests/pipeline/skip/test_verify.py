"""verify_skippables finds every fault of the wiring, wherever the layer is, and reports all at once."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchweft.pipeline.skip import Namespace, skippable, verify_skippables


class Nothing(nn.Module):
    """Layer whose forward is never called."""


def layer(stash: str = "", pop: str = "") -> nn.Module:
    """A layer that declares a skip for every letter."""
    return skippable(stash=list(stash), pop=list(pop))(Nothing)()


def faults(*layers: nn.Module, one_to_one: bool = False) -> list[str]:
    """The faults of a Sequential of these layers, one text per fault."""
    try:
        verify_skippables(nn.Sequential(*layers), one_to_one=one_to_one)
    except TypeError as error:
        return re.findall(r"^  - (.*)$", str(error), re.MULTILINE)
    return []


def deep() -> list[nn.Module]:
    """Nested layers with a stash that is never popped."""
    inner, block, outer = nn.Sequential(), nn.Module(), skippable()(Nothing)()
    inner.add_module("head", layer("a"))
    block.parts = nn.ModuleList([nn.Identity(), layer("b")])
    outer.module.inner = layer("c")
    return [inner, block, outer]


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        (
            [layer("ab", "ba")],
            [
                f"layer '0' (Nothing) declares '{name}' both as stash and as pop, but it can only be one of them"
                for name in "ab"
            ],
        ),
        (
            [layer("a"), layer("a"), layer(pop="a")],
            ["layer '1' (Nothing) stashes 'a' again after layer '0' (Nothing), but one stash is allowed"],
        ),
        (
            [layer(pop="ab"), layer("a"), layer(pop="a")],
            [
                "layer '0' (Nothing) pops 'a' before any stash: layer '1' (Nothing) stashes it only later",
                "layer '0' (Nothing) pops 'b' before any stash: no layer stashes it",
            ],
        ),
        (
            deep(),
            [
                f"layer '{at}' (Nothing) stashes '{name}', which no layer pops"
                for at, name in (("0.head", "a"), ("1.parts.1", "b"), ("2.module.inner", "c"))
            ],
        ),
    ],
)
def test_faults_name_the_places_of_their_layers(layers: list[nn.Module], wanted: list[str]) -> None:
    assert faults(*layers) == wanted


def test_namespaces_keep_equal_names_apart() -> None:
    ns = Namespace()
    assert not faults(layer("a"), layer("a").isolate(ns), layer(pop="a"), layer(pop="a").isolate(ns))
    [early, unread] = faults(layer("a"), layer(pop="a").isolate(ns))
    assert f"'a' in {ns!r} before any stash" in early
    assert "stashes 'a', which no layer pops" in unread


def test_a_layer_that_stands_twice_counts_twice() -> None:
    reader, writer = layer(pop="a"), layer("a")
    assert not faults(writer, reader, reader)
    assert faults(writer, reader, layer(pop="a"), one_to_one=True) == [
        "layer '2' (Nothing) pops 'a' again after layer '1' (Nothing), but one pop is allowed"
    ]
    assert len(faults(writer, reader, reader, one_to_one=True)) == 1
    assert "stashes 'a' again" in faults(writer, writer, reader)[0]


@st.composite
def nestings(draw: st.DrawFn, layers: list[nn.Module]) -> nn.Sequential:
    """The layers in their order, with some consecutive ones in a nested Sequential."""
    for _ in range(draw(st.integers(0, 3))):
        ends = sorted(draw(st.tuples(*[st.integers(0, len(layers))] * 2)))
        layers = [*layers[: ends[0]], nn.Sequential(*layers[slice(*ends)]), *layers[ends[1] :]]
    return nn.Sequential(*layers)


@given(st.data(), st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc"))), max_size=5))
def test_nesting_changes_no_verdict(data, declared) -> None:
    layers = [layer("".join(stash), "".join(pop - stash)) for stash, pop in declared]
    nested = data.draw(nestings(layers))
    assert len(faults(*nested)) == len(faults(*layers))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=8))
def test_model_passes_exactly_if_pops_follow_the_only_stash(plan) -> None:
    layers = [layer(name, "") if stashes else layer("", name) for stashes, name in plan]
    fits = True
    for name in "abc":
        steps = [stashes for stashes, key in plan if key == name]
        fits &= steps in ([], [True, *[False] * (len(steps) - 1)]) and len(steps) != 1
    assert (not faults(*layers)) == fits
