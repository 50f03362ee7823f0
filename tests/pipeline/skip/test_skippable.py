"""Skippable layers must follow their declarations, and are ordinary modules otherwise."""

import copy
import gc
import traceback
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.pipeline.pipe_cases import pickle_copy, torch_save_copy
from tests.processes import python
from torchweft.core.errors import SkipError, SkipWiringError
from torchweft.pipeline.skip import Namespace, Skippable, SkipTracker, pop, skippable, stash, use_skip_tracker


@pytest.fixture(autouse=True)
def own_tracker():
    with use_skip_tracker(SkipTracker()):
        yield


@skippable(stash=["early"])
class Early(nn.Module):
    def __init__(self, width: int = 2, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        yield stash("early", x)
        return self.linear(x)


@skippable(pop=["early"])
class Late(nn.Module):
    def forward(self, x):
        early = yield pop("early")
        return x if early is None else x * early


class Plain(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.factor * x


class Bare(nn.Module):
    """Class that is decorated by a call below, so that this name stays undecorated."""

    def forward(self, x):
        yield stash("early", x)
        return x


Called = skippable(stash=["early"])(Bare)


class Rebound(nn.Module):
    def forward(self, x):
        yield stash("early", x)
        return x


Rebound = skippable(stash=["early"])(Rebound)


class Nest:
    @skippable(stash=["early"])
    class Inner(nn.Module):
        def forward(self, x):
            yield stash("early", x)
            return x


class Derived(Early):
    """Subclass of a skippable class."""


STASHERS = [Early, Called, Rebound, Nest.Inner, Derived]


def layer_of(*, stash=(), pop=()):
    """Decorator that makes a layer with these declarations from a generator function."""

    def decorate(forward):
        return skippable(stash=stash, pop=pop)(type("Layer", (nn.Module,), {"forward": forward}))()

    return decorate


# --- the class and the layer


def test_the_class_lists_its_declarations() -> None:
    assert issubclass(Early, Skippable) and issubclass(Early, nn.Module)
    assert (Early.stashable_names, Early.poppable_names) == ({"early"}, frozenset())
    assert (Late.stashable_names, Late.poppable_names) == (frozenset(), {"early"})
    assert Early.module_cls.__name__ == Early.__name__ == "Early"
    assert isinstance(Early().module, Early.module_cls)
    linear = Early(3, bias=False).module.linear
    assert linear.weight.shape == (3, 3) and linear.bias is None
    assert repr(Late()) == "@skippable(Late())"


def test_one_class_and_one_declaration_give_one_class() -> None:
    assert skippable(stash=["early"])(Bare) is Called
    assert skippable(stash=["other"])(Bare) is not Called


def test_class_is_freed_although_its_methods_see_its_shell() -> None:
    program = "class Local(nn.Module):\n    def forward(self, x):\n        return Shell, pipe"
    scope = {"nn": nn, "pipe": nn.Linear(1, 1)}
    exec(program, scope)
    scope["Shell"] = skippable(stash=["early"])(scope["Local"])
    freed = weakref.ref(scope["pipe"])
    del scope
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("words", [{"stash": "early"}, {"pop": "early"}])
def test_bare_string_instead_of_a_list_is_refused(words) -> None:
    with pytest.raises(SkipWiringError, match=r"'early' is one string; give .*\['early'\]"):
        skippable(**words)


@pytest.mark.parametrize("thing", [Plain(), torch.relu, int], ids=["instance", "function", "int"])
def test_only_module_classes_can_be_skippable(thing) -> None:
    with pytest.raises(TypeError, match="apply it to a subclass of nn"):
        skippable(stash=["early"])(thing)


# --- permitted in a forward


def test_skip_has_value_and_gradient_of_plain_code() -> None:
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(Early(), nn.Tanh(), Late()).double()
    result = model(x)
    plain = torch.tanh(model[0].module.linear(x)) * x
    assert torch.equal(result, plain)
    [seen], [expected] = (torch.autograd.grad(y.sum(), x) for y in (result, plain))
    assert torch.equal(seen, expected)


def test_none_can_be_stashed() -> None:
    @layer_of(stash=["early"])
    def none(self, x):
        yield stash("early", None)
        return x

    x = torch.ones(1)
    assert nn.Sequential(none, Late(), Late())(x) is x


def test_second_pop_in_one_forward_gives_the_same_tensor() -> None:
    class Fresh(SkipTracker):
        """Returns a new tensor at every load."""

        def load(self, ns, name):
            return torch.ones(1)

    @layer_of(pop=["early"])
    def twice(self, x):
        first = yield pop("early")
        second = yield pop("early")
        assert first is second
        return first + second

    with use_skip_tracker(Fresh()):
        assert twice(torch.ones(1)) == 2


def test_stash_gives_none_and_a_layer_may_do_both() -> None:
    @layer_of(stash=["b"], pop=["early"])
    def both(self, x):
        early = yield pop("early")
        assert (yield stash("b", early + x)) is None
        return x

    @layer_of(pop=["b"])
    def last(self, x):
        return (yield pop("b"))

    assert nn.Sequential(Called(), both, last)(torch.ones(1)) == 2


def test_a_forward_that_declares_nothing_may_be_a_plain_function() -> None:
    layer = skippable()(Plain)(3.0)
    assert layer(torch.ones(1)) == 3


def test_forward_takes_several_and_named_arguments() -> None:
    @layer_of(stash=["early"])
    def add(self, x, y, *, scale):
        yield stash("early", x)
        return scale * (x + y), x

    one = torch.ones(1)
    assert add(one, one, scale=2) == (4, one)


# --- refused in a forward


def undeclared_stash(self, x):
    yield stash("early", x)
    yield stash("other", x)
    return x


def undeclared_pop(self, x):
    yield pop("other")
    return x


def stash_twice(self, x):
    yield stash("early", x)
    yield stash("early", x)
    return x


def output_yielded(self, x):
    yield x


def pop_of_nothing(self, x):
    yield pop("early")
    return x


def stash_of_a_list(self, x):
    command = stash("early", x)
    object.__setattr__(command, "tensor", [x])  # bypasses the run-time type checks of this suite
    yield command


FAULTS = {
    undeclared_stash: ("stash", SkipError, "stashed 'other', which it does not declare: its stash= has 'early'"),
    undeclared_pop: ("pop", SkipError, "popped 'other', which it does not declare: its pop= has 'early'"),
    stash_twice: ("stash", SkipError, "stashed 'early' twice"),
    output_yielded: ("stash", TypeError, r"yielded Tensor; yield stash\(name, tensor\) or pop\(name\)"),
    pop_of_nothing: ("pop", SkipError, "Layer: 'early' was popped but never stashed"),
    stash_of_a_list: ("stash", SkipError, "stashed a list as 'early'; stash a tensor or None"),
}


@pytest.mark.parametrize("forward", FAULTS, ids=lambda forward: forward.__name__)
def test_a_fault_is_raised_at_its_yield(forward) -> None:
    word, kind, message = FAULTS[forward]
    layer = layer_of(**{word: ["early"]})(forward)
    with pytest.raises(kind, match=f"Layer.*{message.removeprefix('Layer')}") as caught:
        layer(torch.ones(1))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert forward.__name__ in [frame.name for frame in frames]


def test_a_missing_stash_names_the_namespace() -> None:
    ns = Namespace()
    with pytest.raises(RuntimeError, match=f"Late: 'early' in {ns!r} was popped but never stashed"):
        nn.Sequential(Called(), Late().isolate(ns))(torch.ones(1))


def test_all_broken_declarations_are_named_at_once() -> None:
    @layer_of(stash=["a", "b", "c"], pop=["d", "e"])
    def lazy(self, x):
        yield stash("b", x)
        return x

    with pytest.raises(RuntimeError) as caught:
        lazy(torch.ones(1))
    message = str(caught.value)
    assert all(f"'{name}' was declared as stashable but not stashed" in message for name in "ac")
    assert all(f"'{name}' was declared as poppable but not popped" in message for name in "de")
    assert "'b' was" not in message


def test_a_plain_forward_breaks_a_declaration() -> None:
    with pytest.raises(RuntimeError, match="declared as stashable but not stashed"):
        skippable(stash=["early"])(Plain)()(torch.ones(1))


def test_an_error_of_the_users_forward_passes_unchanged() -> None:
    error = KeyError("mine")

    @layer_of(stash=["early"])
    def breaks(self, x):
        yield stash("early", x)
        raise error

    with pytest.raises(KeyError) as caught:
        breaks(torch.ones(1))
    assert caught.value is error


# --- namespaces


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.sampled_from("abc"), min_size=1)), max_size=4))
def test_the_last_isolation_of_a_name_holds(moves) -> None:
    places = [None, Namespace(), Namespace()]
    layer = skippable(stash=["a", "b"], pop=["c"])(Plain)()
    expected = dict.fromkeys("abc")
    for place, names in moves:
        assert layer.isolate(places[place], only=sorted(names)) is layer
        expected.update(dict.fromkeys(names, places[place]))
    assert list(layer.stashable()) == [(expected["a"], "a"), (expected["b"], "b")]
    assert list(layer.poppable()) == [(expected["c"], "c")]


def test_isolate_takes_all_names_if_none_are_given() -> None:
    ns = Namespace()
    layer = skippable(stash=["a"], pop=["c"])(Plain)().isolate(ns)
    assert [*layer.stashable(), *layer.poppable()] == [(ns, "a"), (ns, "c")]


@pytest.mark.parametrize("only", [["early", "x", "y"], "early"])
def test_isolate_refuses_names_that_are_not_declared(only) -> None:
    with pytest.raises(SkipWiringError, match=r"\['x', 'y'\].*declares \['early'\]|one string"):
        Early().isolate(Namespace(), only)


def test_one_name_in_two_namespaces_is_two_skips() -> None:
    inner, x = Namespace(), torch.tensor([3.0])
    double = Plain(2.0)
    model = nn.Sequential(Called(), double, Called().isolate(inner), double, Late().isolate(inner), Late())
    assert model(x) == (4 * 3) * (2 * 3) * 3


def test_an_isolated_layer_leaves_its_shallow_copy_alone() -> None:
    layer = Early()
    twin = copy.copy(layer)
    layer.isolate(Namespace())
    assert list(twin.stashable()) == [(None, "early")]


# --- an ordinary module


CLONES = {"deepcopy": copy.deepcopy, "pickle": pickle_copy, "save": torch_save_copy}


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
@pytest.mark.parametrize("first", STASHERS, ids=lambda cls: cls.__qualname__)
def test_a_clone_is_the_same_model_with_the_same_wiring(clone, first) -> None:
    ns, x = Namespace(), torch.randn(3, 2)
    model = nn.Sequential(first().isolate(ns), nn.Tanh(), Late().isolate(ns))
    twin = clone(model)
    assert [type(layer) for layer in twin] == [type(layer) for layer in model]
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert list(twin[0].stashable()) == [(ns, "early")]
    assert torch.equal(twin(x), model(x))
    assert type(pickle_copy(Bare())) is Bare, "a decorating call must not change the class"


def test_forward_hooks_see_the_output_of_the_layer() -> None:
    seen = []
    layer = Called()
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.ones(1)
    layer(x)
    assert seen == [x]


def test_the_layer_takes_no_tensor_of_its_own() -> None:
    layer = skippable()(Plain)()
    with pytest.raises(SkipWiringError, match=r"'factor'.*Plain.*'module\.factor'"):
        layer.factor = nn.Parameter(torch.ones(1))


def test_functional_call_takes_parameter_names_only() -> None:
    """Keys of the state dict are refused."""
    model, x = nn.Sequential(skippable()(Plain)()), torch.ones(1)
    new = {name: 5 * torch.ones(()) for name, _ in model.named_parameters()}
    assert torch.func.functional_call(model, new, x) == 5
    with pytest.raises(SkipWiringError, match="'factor'"):
        torch.func.functional_call(model, model.state_dict(), x)


def test_inner_modules_can_be_compiled() -> None:
    layer, x = Early(), torch.randn(3, 2)
    expected = layer(x)
    layer.module.linear.compile(backend="eager")
    assert torch.equal(layer(x), expected)


COMPILED = """
import torch
from torch import nn
from torchweft.pipeline.skip import pop, skippable, stash

@skippable(stash=["early"])
class Early(nn.Linear):
    def forward(self, x):
        yield stash("early", x)
        return super().forward(x)

@skippable(pop=["early"])
class Late(nn.Module):
    def forward(self, x):
        return x * (yield pop("early"))

model, x = nn.Sequential(Early(2, 2), nn.Tanh(), Late()), torch.randn(3, 2)
compiled = torch.compile(model, backend="eager")
for _ in range(3):
    assert torch.equal(compiled(x), model(x))
"""


@pytest.mark.long
def test_skips_work_under_a_compiled_model() -> None:
    # In a separate process, because the compiler cannot trace through the run-time type checks of this suite.
    seen = python(COMPILED)
    assert seen.returncode == 0, seen.stderr
