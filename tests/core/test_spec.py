"""Specs: a matching tensor is accepted, and every fault of another one is listed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweft.core.spec import TensorSpec

shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool])


@given(shapes, dtypes, st.integers(0, 5), st.integers(0, 2))
def test_sample_of_a_spec_matches_it(shape: list[int], dtype: torch.dtype, batch: int, batch_axis: int) -> None:
    tensor = torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)
    spec = TensorSpec.of(tensor, batch_axis)
    sample = spec.empty(batch)
    assert spec.faults(tensor) == []
    assert spec.faults(sample) == []
    if batch_axis < len(shape):
        assert sample.shape[batch_axis] == batch
        assert (TensorSpec.of(tensor, None).faults(sample) == []) == (batch == shape[batch_axis])


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


def test_values_out_of_range_are_a_fault() -> None:
    spec = TensorSpec((None,), torch.int64, values=range(2, 5))
    assert spec.faults(torch.tensor([2, 4, 3])) == [] and spec.faults(torch.empty(0, dtype=torch.int64)) == []
    assert spec.faults(torch.tensor([2, 5])) == ["has values from 2 to 5, wanted range(2, 5)"]
    assert spec.faults(torch.tensor([-1, 4])) == ["has values from -1 to 4, wanted range(2, 5)"]
    assert spec.faults(torch.tensor([2.0, 9.0])) == ["has dtype torch.float32, wanted torch.int64"]


def test_sample_holds_values_of_the_range() -> None:
    assert TensorSpec((None,), torch.int64, values=range(2, 5)).empty(2).tolist() == [2, 2]
    assert TensorSpec((None,), torch.int64, values=range(-3, 5)).empty(2).tolist() == [0, 0]
