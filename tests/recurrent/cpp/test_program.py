"""A compiled program: it keeps within its workspace, and can be told to a person."""

import re

import pytest
import torch
from torch import Tensor

from tests.recurrent.recurrent_cases import needs_compiler
from weft.recurrent import Recurrent, cells
from weft.recurrent.cpp import backend as engine

pytestmark = needs_compiler
GUARD, MARK = 256, 0xA5


class Guarded:
    """A pool whose memory ends where it was said to end: around it are marks."""

    def __init__(self) -> None:
        self.taken: list[tuple[Tensor, int]] = []

    def take(self, size: int, kind: str = "") -> Tensor:
        whole = torch.full((GUARD + size + GUARD,), MARK, dtype=torch.uint8)
        self.taken.append((whole, size))
        return whole[GUARD : GUARD + size]

    def give(self, memory: Tensor, kind: str = "") -> None:
        pass

    def whole(self) -> bool:
        marks = [torch.cat([whole[:GUARD], whole[GUARD + size :]]) for whole, size in self.taken]
        return all(bool((each == MARK).all()) for each in marks)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("make", [cells.LSTMCell, cells.LayerNormLSTMCell], ids=lambda make: make.__name__)
def test_nothing_is_written_beyond_the_memory_that_was_asked_for(
    make: type[torch.nn.Module], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Guarded()
    monkeypatch.setattr(engine, "pool", pool)
    monkeypatch.setattr(engine, "rounded", lambda size: size)
    monkeypatch.setattr(engine, "WORTH", -1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cell, x = make(3, 5), torch.randn(9, 7, 3, requires_grad=True)
    for memory in ("full", "states"):
        net = Recurrent(cell, backend="c", memory=memory, verify="never")
        torch.autograd.grad(net(x).outputs.sum(), [x, *cell.parameters()])
        assert net.why()[0][1] == "c"
    assert pool.taken and pool.whole()


def test_a_program_is_explained_as_a_table_of_phases_passes_and_formulas() -> None:
    net = Recurrent(cells.LSTMCell(3, 5), backend="c")
    net(torch.randn(4, 6, 3, requires_grad=True))
    text = net.explain()
    text = text[
        re.search(r"^chunks of \d+ steps; kept for backward: 5 values, 600 bytes a step$", text, re.M).start() :
    ]  # type: ignore[union-attr]
    forward, again, backward = re.split(r"\n\n(?=\w+: )", text)[1:]
    assert forward.splitlines()[:5] == [
        "forward: 2 passes over memory and 480 bytes of workspace a step",
        "  bulk, all steps at once",
        "    product    6 x 20        z0 = x0 @ c1[3 x 20] + c0[6 x 20]",
        "  main loop, step by step; each thread takes some of 6 rows",
        "    product    6 x 20        z1 = h0 @ c3[5 x 20] + c2[6 x 20]",
    ]
    assert "    pass       6 x 5         z3 = z0[6 x 5]+z1[6 x 5]" in forward
    assert "h0' = v3*v4" in forward and "h1' = z9+z11" in forward
    assert "main loop" not in again and "loop, steps in any order, shared by threads" in again
    assert "main loop, step by step, last one first" in backward
    assert "    total      20 x 3        dp0 += z13[20 x 6] @ x0, over all steps" in backward
    assert max(map(len, text.splitlines())) <= 120
