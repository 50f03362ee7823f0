"""Specs: a value that fits passes, and everything that does not fit is reported at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import SpecError
from weft.core.spec import TensorSpec, check

shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool])


@given(shapes, dtypes, st.integers(0, 5), st.integers(0, 2))
def test_a_sample_of_a_spec_matches_it(shape: list[int], dtype: torch.dtype, batch: int, batch_axis: int) -> None:
    tensor = torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)
    spec = TensorSpec.of(tensor, batch_axis)
    sample = spec.empty(batch)
    assert spec.matches(tensor)
    assert spec.matches(sample)
    if batch_axis < len(shape):
        assert sample.shape[batch_axis] == batch
        assert TensorSpec.of(tensor, None).matches(sample) == (batch == shape[batch_axis])


def test_specs_are_values() -> None:
    spec = TensorSpec.of(torch.ones(4, 3))
    assert spec == TensorSpec((None, 3), torch.float32)
    assert len({spec, TensorSpec((None, 3), torch.float32)}) == 1
    assert TensorSpec.of(torch.ones(4, 3), None) == TensorSpec((4, 3), torch.float32)
    assert TensorSpec.of(torch.tensor(1.0)) == TensorSpec((), torch.float32)


def test_every_fault_of_a_tensor_is_named() -> None:
    spec = TensorSpec((None, 3, 5), torch.float32, requires_grad=True)
    faults = spec.faults(torch.ones(2, 4, 6, dtype=torch.float64))
    assert faults == [
        "axis 1 has size 4, wanted 3",
        "axis 2 has size 6, wanted 5",
        "has dtype torch.float64, wanted torch.float32",
        "has requires_grad=False, wanted True",
    ]
    assert "has shape (2,), wanted 3 axes: (None, 3, 5)" in spec.faults(torch.ones(2))


def test_a_value_that_fits_passes() -> None:
    spec = {"x": TensorSpec((None, 3), torch.float32), "y": (TensorSpec((None,), torch.int64), None, 2)}
    check(spec, {"x": torch.ones(4, 3), "y": (torch.ones(4, dtype=torch.int64), None, 2)})


def test_all_mismatches_come_in_one_error() -> None:
    plain = TensorSpec((None, 3), torch.float32)
    spec = {"a": plain, "b": plain, "c": plain, "d": plain, "e": 7, "f": plain}
    value = {
        "a": torch.ones(4, 2),
        "b": torch.ones(4, 3, dtype=torch.float64),
        "c": "text",
        "e": 8,
        "f": torch.ones(5, 3),
        "g": None,
    }
    with pytest.raises(SpecError) as caught:
        check(spec, value, "call")
    assert str(caught.value).splitlines() == [
        "call is not as its spec says:",
        f"  - call['d'] is missing, wanted {plain}",
        "  - call['g'] is too much, nothing is wanted there",
        "  - call['a'] axis 1 has size 2, wanted 3",
        "  - call['b'] has dtype torch.float64, wanted torch.float32",
        f"  - call['c'] is of type str, wanted a tensor ({plain})",
        "  - call['e'] is 8, wanted 7",
        "  - axis 0 is the batch and must have one size everywhere: call['a'] has 4, call['b'] has 4, call['f'] has 5",
    ]


def test_other_containers_are_a_mismatch() -> None:
    spec = TensorSpec((None,), torch.float32)
    with pytest.raises(SpecError, match="input should be a tuple of 1, but is a list of 1"):
        check((spec,), [torch.ones(2)])


def test_only_the_batch_axis_must_agree() -> None:
    spec = (TensorSpec((None, None), torch.float32), TensorSpec((None, None), torch.float32))
    check(spec, (torch.ones(2, 3), torch.ones(2, 4)))
    check(spec, (torch.ones(3, 2), torch.ones(4, 2)), batch_axis=1)
    check(TensorSpec((None,), torch.float32), torch.ones(2), batch_axis=1)
    with pytest.raises(SpecError, match=r"axis 1 is the batch.*input\[0\] has 3, input\[1\] has 4"):
        check(spec, (torch.ones(2, 3), torch.ones(2, 4)), batch_axis=1)


def test_a_tensor_where_a_constant_is_wanted_is_a_mismatch() -> None:
    with pytest.raises(SpecError, match=r"input is tensor.*, wanted 1"):
        check(1, torch.ones(3))
