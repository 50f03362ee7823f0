"""Schemas are nested for the module and flat for everyone else, and the edge lets through only what can be joined."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import SpecError
from weft.core.pytree import compare, nested_flatten
from weft.core.spec import TensorSpec
from weft.experts.schema import Column, FlatSchema, call_schema

specs = st.builds(
    lambda shape, dtype: TensorSpec((None, *shape), dtype),
    st.lists(st.none() | st.integers(0, 3), max_size=2),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
)
trees = st.recursive(
    specs | st.none() | st.integers(), lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=2), max_leaves=5
)


@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("abc"), trees, max_size=2))
def test_packing_is_the_inverse_of_flattening_with_constants_in_their_places(args: Any, kwargs: Any) -> None:
    leaves = nested_flatten((args, kwargs))
    wanted = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
    if not wanted:
        return
    nest = call_schema("e", args, kwargs)
    tensors = [spec.empty(2).detach() for spec in nest.specs]
    value = nest.pack(tensors)
    assert compare(value, (tuple(args), kwargs))
    assert all(a is b for a, b in zip(nest.flat(value), tensors, strict=True))
    for leaf, original in zip(nested_flatten(value), leaves, strict=True):
        assert isinstance(original, TensorSpec) or leaf is original
    assert all(spec.requires_grad == spec.dtype.is_floating_point for spec in nest.specs)
    assert FlatSchema(nest.columns()).check(tensors, "e") == 2


describe = st.tuples(
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from([torch.float32, torch.float16, torch.int64])
)


@given(
    st.lists(st.tuples(specs, st.booleans()), min_size=1, max_size=3),
    st.lists(st.lists(describe, min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_whatever_passes_the_edge_with_one_batch_key_can_be_joined(columns: Any, tasks: Any) -> None:
    columns = [(spec, casts and spec.dtype.is_floating_point) for spec, casts in columns]
    edge = FlatSchema([Column(str(i), spec, casts) for i, (spec, casts) in enumerate(columns)])
    lanes: dict[Any, list[Any]] = {}
    for shapes_of_task in tasks:
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes_of_task]
        fits = len(tensors) == len(columns) and all(
            len(t.shape) == len(spec.shape)
            and all(size in (None, seen) for size, seen in zip(spec.shape, t.shape, strict=True))
            and (t.dtype == spec.dtype or (casts and t.is_floating_point()))
            for t, (spec, casts) in zip(tensors, columns, strict=True)
        )
        fits = fits and len({t.shape[0] for t in tensors}) == 1 and tensors[0].shape[0] > 0
        try:
            edge.check(tensors, "edge")
        except SpecError:
            assert not fits
        else:
            assert fits
            lanes.setdefault(edge.batch_key(tensors), []).append(tensors)
    for members in lanes.values():
        for (spec, _), *column in zip(columns, *members, strict=True):
            rows = sum(tensor.shape[0] for tensor in column)
            into = torch.empty((rows, *column[0].shape[1:]), dtype=spec.dtype)
            torch.cat(column, out=into)
