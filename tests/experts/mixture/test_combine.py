"""`CombineBuffer` writes rows of any dtype at their pairs, and leaves zeros for missing answers."""

import pytest
import torch
from torch import Tensor

from torchweft.core.errors import SpecError
from torchweft.experts.mixture.routing import CombineBuffer

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool]


def counted(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def test_rows_are_written_at_their_pairs(subtests: pytest.Subtests) -> None:
    for dtype in DTYPES:
        for inner in [(), (1,), (3,), (2, 0), (2, 3)]:
            with subtests.test(dtype=dtype, inner=inner):
                buffer = CombineBuffer(3, 2, finite=False)
                assert buffer.rows() is None
                first, second = counted((2, *inner), dtype), counted((3, *inner), dtype)
                buffer.write(torch.tensor([5, 0]), [first, first.bool()])
                buffer.write(torch.tensor([1, 4, 2]), [second, second.bool()])
                expected = torch.zeros(6, *inner, dtype=dtype)
                expected[torch.tensor([5, 0])], expected[torch.tensor([1, 4, 2])] = first, second
                seen = buffer.rows()
                assert seen is not None
                assert torch.equal(seen[0], expected.view(3, 2, *inner)) and torch.equal(seen[1], seen[0].bool())
                assert buffer.alive.tolist() == [True, True, True, False, True, True]


def test_dropped_and_infinite_rows_are_zero() -> None:
    buffer = CombineBuffer(2, 1, finite=True)
    good = buffer.write(torch.tensor([0, 1]), [torch.tensor([[1.0], [float("nan")]])])
    assert good is not None and good.tolist() == [True, False]
    buffer.write(torch.tensor([1]), [torch.tensor([[float("inf")]])])  # no finite row remains
    assert buffer.rows()[0].flatten().tolist() == [1.0, 0.0]
    buffer, strided = CombineBuffer(2, 2, finite=False), counted((4, 4), torch.float32).t()[:, :2]
    buffer.write(torch.tensor([1, 0, 2, 3]), [strided])
    assert torch.equal(buffer.rows()[0].flatten(0, 1), strided[[1, 0, 2, 3]])
    buffer.drop_samples(torch.tensor([False, True]))
    assert not buffer.rows()[0][1].any() and buffer.alive.tolist() == [True, True, False, False]


def test_answer_of_another_shape_is_not_written_at_all() -> None:
    buffer = CombineBuffer(2, 1, finite=False)
    buffer.write(torch.tensor([0]), [torch.ones(1, 2), torch.ones(1, 3)])
    with pytest.raises(SpecError, match="tensor 1 has shape"):
        buffer.write(torch.tensor([1]), [torch.ones(1, 2), torch.ones(1, 4)])
    assert buffer.alive.tolist() == [True, False] and buffer.rows()[0][1].sum() == 0
