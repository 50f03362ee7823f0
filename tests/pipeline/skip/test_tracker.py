"""Each thread has a tracker, which may be replaced; the plain one frees what nobody reads any more."""

import copy
import pickle
import threading
import weakref
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.core.errors import SkipError, SkipWiringError
from weft.pipeline.skip import (
    Namespace,
    SkipTracker,
    current_skip_tracker,
    pop,
    readers,
    skippable,
    stash,
    use_skip_tracker,
)


@skippable(stash=["a"])
class Stash(nn.Module):
    """Stashes a tensor that lives nowhere else and remembers it weakly."""

    def forward(self, x):
        skip = x + 1
        self.last = weakref.ref(skip)
        yield stash("a", skip)
        return x

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key != "last"}


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("a")
        return x + skip


ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def own_tracker():
    # A layer of another test that is still alive would count as a reader, hence an empty list of readers.
    with patch.object(readers, "_readers", {}), use_skip_tracker(SkipTracker()) as tracker:
        yield tracker


def kept(model: nn.Sequential) -> bool:
    """Is the tensor that the model's first layer stashed last still alive?"""
    return model[0].module.last() is not None


def settled(*layers: nn.Module) -> nn.Sequential:
    """A model that has run once, and so has shown how often its layers read."""
    model = nn.Sequential(*layers)
    model(ONE)
    return model


# --- the current tracker


def test_a_thread_has_one_tracker_and_no_other_thread_has_it() -> None:
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


@pytest.mark.parametrize("fails", [False, True])
def test_the_former_tracker_comes_back(own_tracker, fails) -> None:
    tracker = SkipTracker()
    try:
        with use_skip_tracker(tracker) as given_tracker:
            assert given_tracker is current_skip_tracker() is tracker
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert current_skip_tracker() is own_tracker


def test_layers_talk_to_the_tracker_in_place() -> None:
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


# --- the plain tracker


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(0, 9)), max_size=12))
def test_a_load_gives_the_last_save_of_its_key(calls) -> None:
    tracker, spaces, wanted = SkipTracker(), (None, Namespace()), {}
    for isolated, name, number in calls:
        wanted[spaces[isolated], name] = torch.tensor(number) if number else None
        tracker.save(spaces[isolated], name, wanted[spaces[isolated], name])
    for key, value in wanted.items():
        assert tracker.load(*key) is value


def test_a_load_without_a_save_names_what_is_missing() -> None:
    ns = Namespace()
    with pytest.raises(SkipError, match=f"'a' in {ns!r} was popped but never stashed"):
        SkipTracker().load(ns, "a")


def test_the_plain_tracker_refuses_to_copy() -> None:
    with pytest.raises(SkipWiringError, match="cannot copy 'a' to cpu: only a pipeline's tracker"):
        SkipTracker().copy(None, "a", torch.device("cpu"))


# --- how long it keeps a tensor


def test_one_reader_frees_the_tensor_at_its_pop() -> None:
    after_pop = []
    look = nn.Identity()
    model = settled(Stash(), Pop(), look)
    look.register_forward_hook(lambda *_: after_pop.append(kept(model)))
    for _ in range(3):
        assert model(ONE) == 3
    assert after_pop == [False] * 3


def test_the_last_of_several_readers_frees_the_tensor() -> None:
    alive = []
    model = settled(Stash(), Pop(), Pop(), Pop())
    for layer in model:
        layer.register_forward_hook(lambda *_: alive.append(kept(model)))
    assert model(ONE) == 7
    assert alive == [True, True, True, False]


def test_until_a_reader_is_known_its_tensor_stays_to_the_next_stash() -> None:
    model = settled(Stash(), Pop())
    first = model[0].module.last
    assert first() is not None
    model(ONE)
    assert first() is None


def test_a_layer_that_stands_twice_reads_twice_every_time() -> None:
    twice = Pop()
    model = nn.Sequential(Stash(), twice, nn.Identity(), twice)
    for _ in range(4):
        assert model(ONE) == 5


def test_a_block_that_stands_twice_reads_twice_every_time() -> None:
    block = nn.Sequential(nn.Identity(), Pop())
    model = nn.Sequential(Stash(), block, block)
    for _ in range(4):
        assert model(ONE) == 5


def test_a_block_with_stash_and_pop_that_stands_twice_is_freed_each_time() -> None:
    block = settled(Stash(), Pop())
    assert nn.Sequential(block, block)(ONE) == 2 * 3 + 1
    assert not kept(block)


def test_a_tensor_stays_while_another_living_layer_may_read_it() -> None:
    model, other = settled(Stash(), Pop()), Pop()
    model(ONE)
    assert kept(model)
    assert other(ONE) == 3
    del other
    model(ONE)
    assert not kept(model)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_clones_count_as_readers(clone) -> None:
    model = settled(Stash(), Pop())
    twin = clone(model)
    model(ONE)
    assert kept(model)
    assert twin[1](ONE) == 3


def test_isolated_layers_read_nothing_outside_their_namespace() -> None:
    model, other = settled(Stash(), Pop()), Pop().isolate(Namespace())
    model(ONE)
    assert not kept(model)
    other.isolate(None)
    model(ONE)
    assert kept(model)


@given(st.lists(st.integers(0, 2), max_size=12))
def test_models_with_the_same_names_take_turns_in_any_order(turns) -> None:
    again = Pop()
    models = [
        nn.Sequential(Stash(), Pop()),
        nn.Sequential(Stash(), Pop(), Pop()),
        nn.Sequential(Stash(), again, again),
    ]
    for turn in turns:
        assert models[turn](ONE) == [3, 5, 5][turn]


def test_a_reader_may_be_left_out() -> None:
    first, second = Pop(), Pop()
    stasher = Stash()
    for layers in ([first], [first, second], [second], [second, first], [first], [first, second]):
        assert nn.Sequential(stasher, *layers)(ONE) == 1 + 2 * len(layers)


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


def test_a_tensor_freed_too_early_says_so_and_the_next_run_works() -> None:
    reader = Pop()
    once = settled(Stash(), reader)
    once(ONE)
    twice = nn.Sequential(once[0], reader, reader)
    with pytest.raises(SkipError, match=r"Pop: 'a' was popped, but its tensor was freed .*run the layer"):
        twice(ONE)
    for _ in range(3):
        assert twice(ONE) == 5


def test_a_dropped_model_leaves_no_tensor_behind() -> None:
    model = settled(Stash(), Pop())
    last = model[0].module.last
    assert last() is not None
    del model
    assert last() is None


def test_a_dropped_model_takes_only_its_own_tensors_along() -> None:
    old, new = settled(Stash(), Pop()), nn.Sequential(Stash(), Pop())
    new(ONE)
    del old
    assert kept(new)


def test_a_layer_that_pops_and_stashes_one_name_does_not_free_its_own_stash(own_tracker) -> None:
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
