"""Each thread has a replaceable tracker. The default one keeps a tensor as long as a layer can read it.

Namespaces keep equal names apart, and keep their identity in copies.
"""

import copy
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchweft.core.errors import SkipError
from torchweft.pipeline.skip import (
    Namespace,
    SkipTracker,
    current_skip_tracker,
    pop,
    skippable,
    stash,
    use_skip_tracker,
)

CLONES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda ns, protocol=protocol: pickle.loads(pickle.dumps(ns, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}


@skippable(stash=["a"])
class Stash(nn.Module):
    """Stashes a tensor that has no other owner, and keeps a weak reference to it."""

    def forward(self, x):
        skip = x + 1
        self.last = weakref.ref(skip)
        yield stash("a", skip)
        return x


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("a")
        return x + skip


ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def own_tracker():
    with use_skip_tracker(SkipTracker()) as tracker:
        yield tracker


def stash_is_alive(model: nn.Sequential) -> bool:
    """Whether the last stash of the first layer is still alive."""
    return model[0].module.last() is not None


# --- the current tracker


def test_every_thread_has_its_own_tracker() -> None:
    seen = []

    def look() -> None:
        seen.append(current_skip_tracker())
        seen.append(current_skip_tracker())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen[0] is seen[1]
    assert seen[0] is not current_skip_tracker()
    assert current_skip_tracker() is current_skip_tracker()


def test_layers_use_the_active_tracker_until_it_ends(own_tracker) -> None:
    """The former tracker is active again afterwards."""

    class Spy(SkipTracker):
        def __init__(self) -> None:
            super().__init__()
            self.calls = []

        def save(self, ns, name, value) -> None:
            self.calls.append(("save", ns, name, value))

        def load(self, ns, name):
            self.calls.append(("load", ns, name))
            return torch.full((1,), 5.0)

    ns = Namespace()
    with use_skip_tracker(Spy()) as spy:
        assert nn.Sequential(Stash().isolate(ns), Pop().isolate(ns))(ONE) == 6
    assert spy.calls == [("save", ns, "a", torch.full((1,), 2.0)), ("load", ns, "a")]
    with pytest.raises(KeyError), use_skip_tracker(spy):
        assert current_skip_tracker() is spy
        raise KeyError
    assert current_skip_tracker() is own_tracker


# --- the plain tracker


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(0, 9)), max_size=12))
def test_a_load_gives_the_last_save_of_its_key(calls) -> None:
    tracker, spaces, expected = SkipTracker(), (None, Namespace()), {}
    for isolated, name, number in calls:
        expected[spaces[isolated], name] = torch.tensor(number) if number else None
        tracker.save(spaces[isolated], name, expected[spaces[isolated], name])
    for key, value in expected.items():
        assert tracker.load(*key) is value


def test_load_without_a_save_names_the_missing_key() -> None:
    ns = Namespace()
    with pytest.raises(SkipError, match=f"'a' in {ns!r} was popped but never stashed"):
        SkipTracker().load(ns, "a")


# --- lifetime of a tensor


@given(st.lists(st.integers(0, 3), max_size=12))
def test_models_with_the_same_names_take_turns_in_any_order(turns) -> None:
    again, block = Pop(), nn.Sequential(nn.Identity(), Pop())
    models = [
        nn.Sequential(Stash(), Pop()),
        nn.Sequential(Stash(), Pop(), Pop()),
        nn.Sequential(Stash(), again, nn.Identity(), again),  # a layer that occurs twice reads twice
        nn.Sequential(Stash(), block, block),
    ]
    for turn in turns:
        assert models[turn](ONE) == [3, 5, 5, 5][turn]


def test_a_block_with_stash_and_pop_may_stand_twice() -> None:
    block = nn.Sequential(Stash(), Pop())
    assert nn.Sequential(block, block)(ONE) == 2 * 3 + 1


def test_a_reader_may_be_left_out() -> None:
    first, second = Pop(), Pop()
    stasher = Stash()
    for layers in ([first], [first, second], [second], [second, first], [first], [first, second]):
        assert nn.Sequential(stasher, *layers)(ONE) == 1 + 2 * len(layers)


def test_a_reader_may_be_run_again_in_backward() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = nn.Sequential(nn.Linear(1, 1), Pop(), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.reader, x, use_reentrant=False)

    torch.manual_seed(0)
    again = Again()
    head = nn.Sequential(nn.Linear(1, 1), Stash())
    parameters = list(again.parameters())
    x = ONE.expand(3, 1)
    for _ in range(3):
        expected = torch.autograd.grad(again.reader(head(x)).sum(), parameters)
        again.zero_grad()
        again(head(x)).sum().backward()
        torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected))


def test_after_an_error_in_the_middle_the_model_runs_again() -> None:
    def broken(*_):
        raise KeyError

    twice = Pop()
    model = nn.Sequential(Stash(), Pop(), nn.Identity(), Pop())
    again = nn.Sequential(Stash(), twice, twice)
    for _ in range(3):
        handle = model[2].register_forward_hook(broken)
        with pytest.raises(KeyError):
            model(ONE)
        handle.remove()
        assert model(ONE) == 5
        assert again(ONE) == 5


def test_stashed_tensor_lives_until_the_next_stash_of_its_key() -> None:
    """It is also freed with its model."""
    model, other = nn.Sequential(Stash(), Pop()), nn.Sequential(Stash(), Pop())
    model(ONE)
    first = model[0].module.last
    assert first() is not None
    model(ONE)
    second = model[0].module.last
    assert first() is None and second() is not None
    other(ONE)
    del model
    assert second() is None and stash_is_alive(other)


def test_dropped_layer_that_failed_leaves_no_tensor() -> None:
    @skippable(stash=["a"])
    class Fails(nn.Module):
        def forward(self, x):
            skip = x + 1
            seen.append(weakref.ref(skip))
            yield stash("a", skip)
            del skip
            raise KeyError

    seen = []
    layer = Fails()
    with pytest.raises(KeyError):
        layer(ONE)
    assert seen[0]() is not None
    del layer
    assert seen[0]() is None


def test_late_finalizer_of_a_layer_removes_no_newer_value(own_tracker) -> None:
    old, new = Stash(), nn.Sequential(Stash(), Pop())
    old(ONE)
    (former,) = own_tracker._kept.values()  # as if another thread still held it while the layer is freed
    new(ONE)
    del old
    own_tracker._forget(weakref.ref(own_tracker), (None, "a"), weakref.ref(former), None)
    assert stash_is_alive(new)


def test_custom_tracker_frees_all_at_the_end_of_its_block() -> None:
    model = nn.Sequential(Stash(), Pop())
    with use_skip_tracker(SkipTracker()):
        assert model(ONE) == 3
    assert not stash_is_alive(model)


def test_layer_pops_the_former_value_of_a_name_it_stashes(own_tracker) -> None:
    @skippable(stash=["a"], pop=["a"])
    class Add(nn.Module):
        def forward(self, x):
            total = yield pop("a")
            yield stash("a", total + x)
            return x

    add = Add()
    model = nn.Sequential(Stash(), add, add)
    for _ in range(3):
        model(ONE)
        assert own_tracker.load(None, "a") == 4


# --- namespaces


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_a_clone_is_the_same_namespace(clone) -> None:
    ns = Namespace()
    assert clone(ns) == ns
    assert hash(clone(ns)) == hash(ns)
    assert {ns: "found"}[clone(ns)] == "found"
    assert Namespace() != clone(ns) != Namespace()


def test_a_namespace_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Namespace().serial = 3


def test_namespaces_are_ordered_by_creation_with_none_first() -> None:
    places = [None, Namespace(), Namespace()]
    assert sorted([(place, "name") for place in reversed(places)]) == [(place, "name") for place in places]
    for left, right in itertools.combinations(places, 2):
        assert left < right and right > left and left <= right and right >= left
        assert not (left > right or right < left or left >= right or right <= left)
    for ns in places[1:]:
        same = copy.copy(ns)
        assert ns <= same and ns >= same and not ns < same and not ns > same
    with pytest.raises(TypeError, match="not supported"):
        _ = Namespace() < 3
