"""Cutting in time and joining again are inverse to each other, and so are they for gradients."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.recurrent.layers.chunks import Chunks, Tables
from weft.recurrent.layers.reverse import Axes


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_joining_inverts_cutting(steps: int, rows: int, length: int, batch_first: bool) -> None:
    x = torch.randn(*((rows, steps) if batch_first else (steps, rows)), 2)
    dt = torch.randn(steps)
    chunks = Chunks(Axes.of(x, batch_first), min(length, steps))
    pieces = chunks.cut({"x": x, "dt": dt, "name": "run"})
    assert len(pieces) == len(chunks.bounds) == -(-steps // chunks.length)
    assert {piece["name"] for piece in pieces} == {"run"}
    assert torch.equal(torch.cat([piece["dt"] for piece in pieces]), dt)
    xs = [piece["x"] for piece in pieces]
    assert torch.equal(chunks.join(xs), x)
    assert chunks.join([None, None]) is None
    assert all(torch.equal(one, other) for one, other in zip(chunks.split(x), xs, strict=True))
    joined = chunks.join_gradients(xs, x)
    assert joined is not None and torch.equal(joined, x)
    assert chunks.join_gradients([None] * len(xs), x) is None
    if len(xs) > 1:
        partial = chunks.join_gradients([None, *xs[1:]], x)
        assert partial is not None and torch.equal(partial, chunks.join([torch.zeros_like(xs[0]), *xs[1:]]))


def test_every_chunk_gets_what_is_left_of_its_rows() -> None:
    chunks = Chunks(Axes(10, 3, False), 4)
    mask = torch.rand(10, 3) < 0.5
    seen = chunks.tables(Tables([10, 5, 0], mask, 7))
    assert [torch.as_tensor(each.lengths).tolist() for each in seen] == [[4, 4, 0], [4, 1, 0], [2, 0, 0]]
    assert torch.equal(torch.cat([each.mask for each in seen if each.mask is not None]), mask)
    assert [each.start for each in seen] == [7, 11, 15]
    assert chunks.tables(Tables())[0] == Tables(None, None, 0)
