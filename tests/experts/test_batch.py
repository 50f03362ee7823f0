"""Batches are joined in memory that is used again, and dealt back as views."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.expert_cases import task
from weft.core.spec import TensorSpec
from weft.experts.executor import BatchBuffers, _released
from weft.experts.schema import Column, FlatSchema
from weft.experts.task import split_rows

COLUMNS = FlatSchema(
    [Column("x", TensorSpec((None, None), torch.float32)), Column("g", TensorSpec((None,), torch.float32), casts=True)]
)


@given(st.lists(st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3)), max_size=6))
def test_rows_come_out_as_they_went_in_and_buffers_only_grow(history: list[tuple[list[int], int]]) -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    seen = 0
    for rows, width in history:
        tasks = [task(torch.randn(width, n).T, torch.randn(n, dtype=torch.float64)) for n in rows]
        joined = buffers.gather(tasks)
        assert [tensor.dtype for tensor in joined] == [torch.float32] * 2
        dealt = split_rows(joined, rows)
        for each, (x, g) in zip(tasks, dealt, strict=True):
            assert torch.equal(x, each.tensors[0]) and torch.equal(g, each.tensors[1].float())
        assert buffers.nbytes >= max(seen, sum(tensor.nbytes for tensor in joined))
        seen = buffers.nbytes
        addresses = [tensor.data_ptr() for tensor in joined if tensor.numel()]
        again = [tensor.data_ptr() for tensor in buffers.gather(tasks) if tensor.numel()]
        assert addresses == again and buffers.nbytes == seen


def test_what_looks_into_a_buffer_is_copied_out_and_nothing_else() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    one = task(torch.ones(2, 3), torch.ones(2))
    x, _ = buffers.gather([one])
    other = torch.ones(2)
    copied, same = _released([x.T, other], buffers.owners())
    assert copied.data_ptr() != x.data_ptr() and torch.equal(copied, x.T)
    assert same.data_ptr() == other.data_ptr()
    fresh, _ = buffers.gather([one], fresh=True)
    assert fresh.untyped_storage().data_ptr() not in buffers.owners()


def test_what_a_module_does_to_the_shape_of_its_input_does_not_reach_the_next_batch() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    one = task(torch.arange(4.0).view(2, 2), torch.ones(2))
    for _ in range(3):
        x, _ = buffers.gather([one])
        assert torch.equal(x, one.tensors[0]) and not x.requires_grad
        x.t_()
        x.requires_grad_()


@pytest.mark.cuda
def test_on_a_gpu_buffers_are_pinned_and_results_come_back_to_the_cpu() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cuda", 0))
    for size in (1000, 10, 2000):
        tasks = [task(torch.randn(size, 7), torch.randn(size, dtype=torch.float64)) for _ in range(3)]
        joined = buffers.gather(tasks)
        assert all(tensor.is_cuda for tensor in joined)
        back = _released(joined, buffers.owners())
        assert torch.equal(back[0], torch.cat([each.tensors[0] for each in tasks]))
    assert all(flat.is_pinned() for flat in buffers._flat)
