"""Serialized state restores every value and type, and training continues to the same bits."""

import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import nn
from torch.optim import lr_scheduler

from tests.experts.wire_cases import formed, random_tensor, same_bytes
from torchweft.core.errors import UsageError
from torchweft.experts.errors import DamagedError, FormatError
from torchweft.experts.serialization import deserialize, serialize
from torchweft.experts.wire.frame import CODES

KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, max_size=3)
    named = st.dictionaries(KEYS, inner, max_size=3)
    return some | some.map(tuple) | named | named.map(OrderedDict)


VALUES = st.recursive(LEAVES, containers, max_leaves=12)


def same(a: Any, b: Any) -> bool:
    """Whether types, values and key order are equal at every level. NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_bytes(a, b)
    if isinstance(a, dict):
        return same(list(a.keys()), list(b.keys())) and same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


@given(VALUES)
def test_every_value_keeps_its_type(value: Any) -> None:
    assert same(deserialize(serialize(value)), value)


def test_every_tensor_keeps_its_bits(subtests: pytest.Subtests) -> None:
    for dtype in sorted(CODES, key=str):
        with subtests.test(dtype=dtype):
            shapes = [(), (0, 3), (1,), (4, 6)]
            forms = ["plain", "transposed", "strided", "expanded"]
            tensors = [formed(random_tensor(dtype, shape, 9), form) for shape in shapes for form in forms]
            odd = torch.ones(3, dtype=torch.int8)  # an odd number of bytes must not misalign later tensors
            restored = deserialize(serialize([odd, *tensors, odd.clone()]))
            assert all(map(same_bytes, restored[1:-1], tensors))


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    w = torch.randn(100)
    data = serialize({"a": w, "b": w, "half": w[:50]})
    restored = deserialize(data)
    assert restored["a"] is restored["b"] and torch.equal(restored["half"], w[:50])
    assert len(load(bytes(data))) == 2


def test_tensors_have_readable_and_distinct_names() -> None:
    assert set(load(bytes(serialize({"state": nn.Linear(2, 3).state_dict()})))) == {"state/weight", "state/bias"}
    restored = deserialize(serialize({0: torch.zeros(1), "0": torch.ones(1), ("0",): {"x": 1}}))
    assert (restored[0].add_(2).item(), restored["0"].item()) == (2, 1), "loaded tensors are writable"
    saved = nn.Sequential(nn.BatchNorm1d(3)).state_dict()
    assert deserialize(serialize(saved))._metadata == saved._metadata  # the versions of modules


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TRAINING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adam": (
        partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, fused=True),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40),
    ),
    "steps": (SGD, partial(lr_scheduler.MultiStepLR, milestones=[3, 5, 5])),  # holds a Counter
    "plateau": (SGD, partial(lr_scheduler.ReduceLROnPlateau, patience=1)),
}


def train(steps: int, resume_at: int | None, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    data = torch.randn(20, 4, 6)

    def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        optimizer = TRAINING[kind][0](model.parameters())
        return model, optimizer, TRAINING[kind][1](optimizer)

    model, optimizer, schedule = make_parts()
    for step in range(steps):
        if step == resume_at:
            states = {"m": model.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()}
            states = deserialize(serialize(states))
            model, optimizer, schedule = make_parts()
            model.load_state_dict(states["m"])
            optimizer.load_state_dict(states["o"])
            schedule.load_state_dict(states["s"])
        optimizer.zero_grad()
        loss = model(data[step]).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step(*([loss.item()] if kind == "plateau" else []))
    return [*model.state_dict().values()]


@pytest.mark.parametrize("kind", TRAINING)
def test_training_continues_to_the_same_bits(kind: str) -> None:
    assert all(map(same_bytes, train(12, None, kind), train(12, 5, kind)))


def test_all_values_that_cannot_be_stored_are_listed() -> None:
    value = {"a": [1, {2}], "fn": print, "s": torch.ones(2, 2).to_sparse(), "c": Counter(x=1)}
    with pytest.raises(UsageError, match=r"a/1, of type builtins.set(.|\n)*fn, (.|\n)*s, .*sparse") as caught:
        serialize(value)
    assert str(caught.value).count("\n") == 3


@given(st.binary(max_size=60) | st.integers(0, 10_000))
def test_other_bytes_raise_only_checkpoint_errors(data: bytes | int) -> None:
    if isinstance(data, int):
        whole = bytearray(serialize({"w": torch.ones(3), "n": [1, (2.5, None)]}))
        place = data % len(whole)
        whole[place] ^= 1 + data % 255
        data = bytes(whole[: len(whole) - data % 3])
    with contextlib.suppress(DamagedError, FormatError):
        deserialize(data)
