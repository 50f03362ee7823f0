"""verify_skippables finds every fault of the wiring, wherever the layer is, and reports all at once."""

import re

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.pipeline.skip import Namespace, skippable, verify_skippables


class Nothing(nn.Module):
    """Its forward never runs here."""


def layer(stash: str = "", pop: str = "") -> nn.Module:
    """Every letter is a name."""
    return skippable(stash=list(stash), pop=list(pop))(Nothing)()


def faults(*layers: nn.Module, one_to_one: bool = False) -> list[str]:
    """What is said of a Sequential of these layers, one text per fault."""
    try:
        verify_skippables(nn.Sequential(*layers), one_to_one=one_to_one)
    except TypeError as error:
        return re.findall(r"^  - (.*)$", str(error), re.MULTILINE)
    return []


def test_what_fits_together_passes() -> None:
    assert not faults(layer("a"), nn.Identity(), layer("b", "a"), layer(pop="b"))
    assert not faults(nn.Identity())


def test_several_pops_are_a_fault_only_if_asked_for() -> None:
    layers = layer("a"), layer(pop="a"), layer(pop="a")
    assert not faults(*layers)
    assert faults(*layers, one_to_one=True) == [
        "layer '2' (Nothing) pops 'a' again after layer '1' (Nothing), wanted one pop"
    ]


def test_a_layer_that_declares_a_name_both_ways() -> None:
    assert faults(layer("ab", "ba")) == [
        "layer '0' (Nothing) declares 'a' both as stash and as pop, wanted one of them",
        "layer '0' (Nothing) declares 'b' both as stash and as pop, wanted one of them",
    ]


def test_a_second_stash() -> None:
    assert faults(layer("a"), layer("a"), layer(pop="a")) == [
        "layer '1' (Nothing) stashes 'a' again after layer '0' (Nothing), wanted one stash"
    ]


def test_a_pop_before_any_stash() -> None:
    assert faults(layer(pop="ab"), layer("a"), layer(pop="a")) == [
        "layer '0' (Nothing) pops 'a' before any stash: layer '1' (Nothing) stashes it only later",
        "layer '0' (Nothing) pops 'b' before any stash: nobody stashes it",
    ]


def test_a_stash_that_nobody_pops() -> None:
    assert faults(layer("ab"), layer(pop="b")) == ["layer '0' (Nothing) stashes 'a', which nobody pops"]


def test_all_faults_are_reported_at_once() -> None:
    seen = faults(layer("ab"), layer("a", "c"), layer(pop="a"), layer("d", "d"))
    assert len(seen) == 4
    assert all(any(word in fault for fault in seen) for word in ("again", "before any", "nobody pops", "both"))


def test_namespaces_keep_equal_names_apart() -> None:
    ns = Namespace()
    assert not faults(layer("a"), layer("a").isolate(ns), layer(pop="a"), layer(pop="a").isolate(ns))
    [early, unread] = faults(layer("a"), layer(pop="a").isolate(ns))
    assert f"'a' in {ns!r} before any stash" in early
    assert "stashes 'a', which nobody pops" in unread


def test_a_layer_that_stands_twice_counts_twice() -> None:
    reader, writer = layer(pop="a"), layer("a")
    assert not faults(writer, reader, reader)
    assert len(faults(writer, reader, reader, one_to_one=True)) == 1
    assert "stashes 'a' again" in faults(writer, writer, reader)[0]


def test_layers_have_their_place_in_the_model_as_their_name() -> None:
    inner = nn.Sequential()
    inner.add_module("head", layer("a"))
    block = nn.Module()
    block.parts = nn.ModuleList([nn.Identity(), layer("b")])
    unread = "(Nothing) stashes {}, which nobody pops"
    assert faults(inner, block) == [
        "layer '0.head' " + unread.format("'a'"),
        "layer '1.parts.1' " + unread.format("'b'"),
    ]


def test_a_skippable_layer_inside_another_is_found() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer("a")

    assert faults(skippable()(Outer)()) == ["layer '0.module.inner' (Nothing) stashes 'a', which nobody pops"]


@st.composite
def nestings(draw: st.DrawFn, layers: list[nn.Module]) -> nn.Sequential:
    """The layers in their order, with some runs of them put into a Sequential of their own."""
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
def test_a_model_passes_exactly_if_every_pop_follows_the_only_stash(plan) -> None:
    layers = [layer(name, "") if stashes else layer("", name) for stashes, name in plan]
    fits = True
    for name in "abc":
        steps = [stashes for stashes, each in plan if each == name]
        fits &= steps in ([], [True, *[False] * (len(steps) - 1)]) and len(steps) != 1
    assert (not faults(*layers)) == fits
