"""Descriptions of experts survive encoding, however their schemas nest."""

import contextlib
import json
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.expert_cases import NESTED_SCHEMAS, Nested, fussy_backend, seeded
from tests.type_checks import without_type_checks
from torchweft.core.errors import UsageError
from torchweft.core.spec import TensorSpec
from torchweft.experts import ExpertBackend
from torchweft.experts.errors import MalformedError
from torchweft.experts.wire.frame import CODES
from torchweft.experts.wire.service import StepReceipt, describe, read_description, read_receipt

specs = st.builds(
    TensorSpec,
    st.lists(st.none() | st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(sorted(CODES, key=str)),
    st.booleans(),
)
constants = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
trees = st.recursive(
    specs | constants,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def info(args: Any = (), kwargs: Any = None, outputs: Any = None) -> dict[str, Any]:
    schemas = {"forward_schema": (args, kwargs or {}), "outputs_schema": outputs}
    return {"name": "x", **schemas, "trained": True, "max_batch_size": 8, "steps": 3}


@given(st.lists(trees, max_size=3), st.dictionaries(st.text(max_size=3), trees, max_size=2), trees)
def test_schemas_survive(args: list[Any], kwargs: dict[str, Any], outputs: Any) -> None:
    actual = read_description(describe(info(tuple(args), kwargs, outputs), 2, 77))
    assert (actual.args, actual.kwargs, actual.outputs) == (tuple(args), kwargs, outputs)
    assert list(actual.kwargs) == list(kwargs)
    assert (actual.name, actual.steps, actual.durable, actual.incarnation, actual.trained) == ("x", 3, 2, 77, True)


@pytest.mark.parametrize(
    "backend", [fussy_backend(), ExpertBackend("nested", seeded(Nested), **NESTED_SCHEMAS)], ids=lambda each: each.name
)
def test_real_experts_survive(backend: ExpertBackend) -> None:
    actual, expected = read_description(describe(backend.get_info(), None, 1)), backend.get_info()
    assert (actual.args, actual.kwargs) == expected["forward_schema"] and actual.outputs == expected["outputs_schema"]
    assert actual.durable is None


def test_named_tuple_keeps_its_fields() -> None:
    """An ordered dict becomes a dict in the same order."""
    pair = namedtuple("pair", ["first", "second"])
    value = [pair(1, {"x": None}), OrderedDict(b=1, a=2)]
    named, ordered = read_description(describe(info(outputs=value), None, 1)).outputs
    assert named.first == 1 and named.second == {"x": None} and type(named).__name__ == "pair"
    assert type(ordered) is dict and list(ordered.items()) == [("b", 1), ("a", 2)]


def test_indescribable_schemas_are_listed() -> None:
    with pytest.raises(UsageError) as caught:
        describe(info((torch.float32,), {"k": {1.5: None}}, [object()]), None, 1)
    assert all(place in str(caught.value) for place in ("args[0]", "kwargs['k'] has the key 1.5", "outputs[0]"))


@given(st.binary(max_size=40))
def test_other_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        read_description(data)
    with contextlib.suppress(MalformedError):
        read_receipt(data)


GOOD = json.loads(describe(info(), None, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"args": {"tuple": [[1]]}},
        {"args": {"spec": [[None], "float31", True]}},
        {"args": {"tuple": [{"spec": [[-1], "float32", True]}]}},
        {"args": {"tuple": [{"spec": [["x"], "float32", True]}]}},
        {"outputs": {"set": []}},
        {"outputs": {"list": [], "tuple": []}},
        {"outputs": {"named": ["x", ["import os"], [1]]}},
        {"kwargs": 3},
        {"name": 3},
        {"durable": "x"},
        {"more": 1},
    ],
)
def test_contradictory_description_is_malformed(change: dict[str, Any]) -> None:
    with without_type_checks(), pytest.raises(MalformedError):
        read_description(json.dumps({**GOOD, **change}).encode())


@given(st.none() | st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_receipts_survive(durable: int | None, incarnation: int, token: int) -> None:
    receipt = StepReceipt(durable, max(1, incarnation), token)
    assert read_receipt(receipt.to_bytes()) == receipt
