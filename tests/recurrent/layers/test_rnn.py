"""A drop-in layer has the interface of torch's layer, and its results for all options."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence

from tests.recurrent.layers.layer_cases import DROP_INS, HIDDEN, WIDTH, everything, first_state, pair
from tests.recurrent.recurrent_cases import close, fault_lines, grid
from torchweft.core.errors import SpecError, UsageError
from torchweft.recurrent import GRU, LSTM
from torchweft.recurrent.layers.rnn import LayerInputError, WeightKeyedCache

KINDS = sorted(DROP_INS)


@st.composite
def options(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    names = ("bias", "batch_first", "bidirectional")
    chosen: dict[str, Any] = {name: draw(st.booleans()) for name in names}
    chosen["num_layers"] = draw(st.integers(1, 3))
    if kind == "LSTM":
        chosen["proj_size"] = draw(st.sampled_from([0, 2]))
    if kind == "RNN":
        chosen["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    return chosen


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_drop_in_equals_torch(kind: str, data: st.DataObject) -> None:
    chosen = data.draw(options(kind))
    form = data.draw(st.sampled_from(["rows", "one row", "packed", "packed in order"]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    theirs, ours = pair(kind, **chosen)
    steps, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    shape = (rows, steps) if chosen["batch_first"] else (steps, rows)
    x = torch.randn(*(shape if form != "one row" else (steps,)), WIDTH).double().requires_grad_()
    hx = first_state(theirs, None if form == "one row" else rows) if data.draw(st.booleans()) else None
    wrt = [x, *(hx if isinstance(hx, tuple) else [] if hx is None else [hx])]
    if not form.startswith("packed"):
        close(everything(ours, ours(x, hx), wrt), everything(theirs, theirs(x, hx), wrt))
        return
    lengths = data.draw(st.lists(st.integers(1, steps), min_size=rows, max_size=rows))
    lengths[0] = steps
    order, first = form == "packed in order", chosen["batch_first"]
    lengths = torch.tensor(sorted(lengths, reverse=True) if order else lengths)
    packed = [pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=order) for _ in range(2)]
    (expected, expected_last), (seen, last) = theirs(packed[0], hx), ours(packed[1], hx)
    for one, other in zip(seen[1:], expected[1:], strict=True):
        assert one is other is None or torch.equal(one, other)
    close(everything(ours, (seen.data, last), wrt), everything(theirs, (expected.data, expected_last), wrt))


@grid(kind=KINDS, packed=[False, True])
def test_dropout_between_layers_draws_torchs_numbers(kind: str, packed: bool) -> None:
    theirs, ours = pair(kind, num_layers=3, dropout=0.4, bidirectional=True)
    x: Any = torch.randn(6, 3, WIDTH).double()
    x = pack_padded_sequence(x, torch.tensor([4, 6, 1]), enforce_sorted=False) if packed else x
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(5)
        out = layer(x)[0]
        results.append(everything(layer, out.data if packed else out, []))
    close(results[1], results[0])
    assert not torch.equal(ours(x)[0].data, ours.eval()(x)[0].data)
    close([ours(x)[0].data], [theirs.eval()(x)[0].data])


@pytest.mark.parametrize("kind", KINDS)
def test_constructor_keys_and_initial_weights_equal_torch(kind: str) -> None:
    theirs, ours = DROP_INS[kind]
    states = []
    for layer in (theirs, ours):
        torch.manual_seed(3)
        states.append(layer(WIDTH, HIDDEN, num_layers=2, bidirectional=True).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert isinstance(ours(WIDTH, HIDDEN), theirs)
    for arguments in ({"hidden_size": 0}, {"hidden_size": HIDDEN, "dropout": 2.0}):
        with pytest.raises(ValueError) as expected:
            theirs(WIDTH, **arguments)
        with pytest.raises(ValueError) as seen:
            ours(WIDTH, **arguments)
        assert str(seen.value) == str(expected.value)


def test_options_of_the_network_are_checked_and_shown() -> None:
    with pytest.raises(UsageError, match="truncate is 0"):
        DROP_INS["GRU"][1](WIDTH, HIDDEN, truncate=0)
    with pytest.raises(UsageError) as caught:
        DROP_INS["LSTM"][1](WIDTH, HIDDEN, initial=(torch.ones(HIDDEN),) * 2, links={}, time_step=True)
    assert [line[4:].partition(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "initial",
        "links",
        "time_step",
    ]
    assert "backend='python'" in repr(DROP_INS["GRU"][1](WIDTH, HIDDEN, backend="python"))


def cast(layer: nn.Module) -> nn.Module:
    return layer.float().double()


def assigned(layer: nn.Module) -> nn.Module:
    layer.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()}, assign=True)
    return layer


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "cast": cast, "assign": assigned}


@grid(way=list(WAYS), kind_and_backend=[("LSTM", "eager"), ("GRU", "python"), ("RNN", "eager")])
def test_copy_computes_with_its_own_weights(way: str, kind_and_backend: tuple[str, str]) -> None:
    kind, backend = kind_and_backend
    _, ours = pair(kind, {"backend": backend})
    x = torch.randn(4, 2, WIDTH).double()
    ours(x)
    again = WAYS[way](ours)
    theirs = DROP_INS[kind][0](WIDTH, HIDDEN).double()
    with torch.no_grad():
        for weight in again.parameters():
            weight.mul_(1.5)
    theirs.load_state_dict(again.state_dict())
    close(everything(again, again(x), []), everything(theirs, theirs(x), []))
    if again is not ours:
        assert not {id(p) for p in again.parameters()} & {id(p) for p in ours.parameters()}
        assert not torch.equal(again(x)[0], ours(x)[0])
    assert list(again.state_dict()) == list(theirs.state_dict())
    assert b"Recurrent" not in pickle.dumps(ours), "networks are rebuilt, not pickled"


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_weights_use_torchs_forward(kind: str) -> None:
    for change in (
        lambda layer: parametrizations.weight_norm(layer, "weight_hh_l0"),
        lambda layer: prune.l1_unstructured(layer, "weight_hh_l0", 0.5),
    ):
        theirs, ours = map(change, pair(kind, {"backend": "python"}))
        for _ in range(2):
            x = torch.randn(4, 2, WIDTH).double().requires_grad_()
            close(everything(ours, ours(x), [x]), everything(theirs, theirs(x), [x]))
        assert "torch's own forward" in ours.explain()


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_uses_its_weights(kind: str) -> None:
    theirs, ours = pair(kind)
    x = torch.randn(4, 2, WIDTH).double()
    expected = theirs(x)[0]
    others = {key: 2 * value.detach().requires_grad_() for key, value in ours.named_parameters()}
    seen = torch.func.functional_call(ours, others, (x,))[0]
    close([ours(x)[0]], [expected])
    theirs.load_state_dict(others)
    close([seen], [theirs(x)[0]])


@grid(kind=KINDS, chosen=[{}, {"num_layers": 2, "batch_first": True}, {"bidirectional": True}])
def test_output_and_last_state_can_be_overwritten(kind: str, chosen: dict[str, Any]) -> None:
    theirs, ours = pair(kind, {"backend": "python", "verify": "never"}, **chosen)
    x = torch.randn(4, 2, WIDTH).double().requires_grad_()
    results = []
    for layer in (theirs, ours):
        out, last = layer(x)
        for state in last if isinstance(last, tuple) else (last,):
            state.mul_(2)
        results.append(everything(layer, (nn.functional.relu_(out), last), [x]))
    close(results[1], results[0])
    assert "loop_back" in ours.explain()


def test_no_steps_return_the_initial_state() -> None:
    _, ours = pair("LSTM")
    hx = first_state(ours, 2)
    out, (h, c) = ours(torch.zeros(0, 2, WIDTH).double(), hx)
    assert out.shape == (0, 2, HIDDEN) and torch.equal(h, hx[0]) and torch.equal(c, hx[1])


def test_error_of_a_layer_names_it() -> None:
    _, ours = pair("GRU", num_layers=2, bidirectional=True)
    ours._layer_networks()[1].backward_net.cell.forward = None
    with pytest.raises(TypeError) as caught:
        ours(torch.randn(4, 2, WIDTH).double())
    assert "torchweft: in layer 1" in caught.value.__notes__
    assert any("backward network" in note for note in caught.value.__notes__)


def test_faults_of_a_call_are_listed_together() -> None:
    _, ours = pair("LSTM", proj_size=2)
    with pytest.raises(LayerInputError) as caught:
        ours(torch.zeros(5, 2, 7), (torch.zeros(1, 3, 2), "c"))
    assert fault_lines(caught) == [
        "input has shape (5, 2, 7), wanted 3 (input_size) as its last size",
        "input is torch.float32, the weights are torch.float64; convert the input with .to(torch.float64) or the layer "
        "with .to(torch.float32)",
        "hx[0] has shape (1, 3, 2), wanted layers * directions x N x H = (1, 2, 2)",
        "hx[1] is 'c', wanted a tensor",
    ]


def test_initial_state_is_checked_against_the_input() -> None:
    _, ours = pair("GRU", batch_first=True)
    state = torch.zeros(1, 5, HIDDEN).double()
    with pytest.raises(LayerInputError, match=r"wanted layers \* directions x N x H = \(1, 2, 4\)"):
        ours(torch.zeros(2, 5, WIDTH).double(), state)
    with pytest.raises(LayerInputError, match=r"wanted layers \* directions x H = \(1, 4\)"):
        ours(torch.zeros(5, WIDTH).double(), state)
    packed = pack_padded_sequence(torch.zeros(5, 3, WIDTH).double(), torch.tensor([5, 2, 1]))
    with pytest.raises(LayerInputError, match=r"\(1, 3, 4\)"):
        ours(packed, state)
    with pytest.raises(LayerInputError, match=r"input is of type list, wanted a tensor.*torch.stack\(steps\)"):
        ours([1.0])
    with pytest.raises(LayerInputError, match="wanted the pair"):
        pair("LSTM")[1](torch.zeros(5, 2, WIDTH).double(), torch.zeros(1, 2, HIDDEN).double())
    with pytest.raises(LayerInputError, match="wanted T x N x D, or T x D for one row"):
        pair("GRU")[1](torch.zeros(2, 2, 2, WIDTH).double())
    for kind in (SpecError, TypeError, ValueError, RuntimeError):  # the classes of torch's own errors
        assert issubclass(LayerInputError, kind)


def test_dtypes_can_differ_under_autocast() -> None:
    _, ours = pair("LSTM")
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.float()(torch.randn(3, 2, WIDTH, dtype=torch.bfloat16))[0].shape == (3, 2, HIDDEN)


def test_cache_is_refreshed_only_for_replaced_tensors() -> None:
    made, cache = [], WeightKeyedCache[int]()
    weights = [torch.zeros(1), torch.ones(1)]

    def make() -> int:
        made.append(1)
        return len(made)

    assert [cache.get(weights, make), cache.get(list(weights), make)] == [1, 1]
    weights[1].add_(1)
    assert cache.get(weights, make) == 1
    assert cache.get([weights[0], weights[1].clone()], make) == 2
    assert cache.get(weights[:1], make) == 3


def test_misspelled_option_suggests_a_similar_one() -> None:
    with pytest.raises(SpecError, match=r"num_layer is not an option of LSTM; did you mean 'num_layers'\?"):
        LSTM(3, 4, num_layer=2)
    with pytest.raises(SpecError, match=r"quite_other is not an option of GRU$"):
        GRU(3, 4, quite_other=2)
