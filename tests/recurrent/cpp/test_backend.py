"""The C++ backend: threads, NaN and infinity, memory, explanations, and where it hands a cell to another backend."""

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, equal, gradients, grid, needs_compiler, planned, run_by
from weft.core.errors import UsageError
from weft.core.pytree import flatten
from weft.recurrent import Recurrent, cells
from weft.recurrent.cpp import cpp_backend as backend

pytestmark = needs_compiler


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for a while."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads every call of a compiled function was given."""
    seen: list[int] = []
    call = backend.CompiledFunction.call

    def noted(self: backend.CompiledFunction, steps: int, threads: int, *rest: Any) -> None:
        seen.append(threads)
        call(self, steps, threads, *rest)

    monkeypatch.setattr(backend.CompiledFunction, "call", noted)
    return seen


WIDE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM, rows shared": (lambda: nn.LSTMCell(64, 64), 16),
    "LSTM, products shared": (lambda: nn.LSTMCell(64, 64), 1),
    "GRU, products shared": (lambda: nn.GRUCell(64, 64), 1),
    "layer norm LSTM, rows shared": (lambda: cells.LayerNormLSTMCell(64, 64), 16),
    "rows that do not divide": (lambda: nn.GRUCell(64, 64), 13),
}


@pytest.mark.parametrize(("make", "rows"), WIDE.values(), ids=WIDE)
def test_results_are_the_same_bits_on_any_number_of_threads(
    make: Callable[[], nn.Module], rows: int, threads: Callable[[int], None], used: list[int]
) -> None:
    net = planned(make(), "c", verify="never")
    x = torch.randn(100, rows, 64, requires_grad=True)
    found: list[Any] = []
    for count in (1, 2, 3):
        threads(count)
        used.clear()
        result = tuple(net(x))
        found.append((result, gradients(result, [x, *net.parameters()])))
        assert count in used, "the work is worth as many threads"
    assert equal(found[1], found[0]) and equal(found[2], found[0])
    assert run_by(net) == {"c"}


def test_without_openmp_the_callers_thread_computes_the_same_bits(threads: Callable[[int], None]) -> None:
    net = planned(nn.LSTMCell(64, 64), "c", verify="never")
    x = torch.randn(100, 16, 64, requires_grad=True)
    threads(2)
    found: list[Any] = []
    try:
        for openmp in (backend._openmp(), [None] * 3):
            backend.kernels().weft_bind_openmp((ctypes.c_void_p * 3)(*openmp))
            result = tuple(net(x))
            found.append((result, gradients(result, [x, *net.parameters()])))
    finally:
        backend.kernels().weft_bind_openmp((ctypes.c_void_p * 3)(*backend._openmp()))
    assert equal(found[1], found[0])


def test_little_work_is_done_by_one_thread(threads: Callable[[int], None], used: list[int]) -> None:
    threads(2)
    planned(nn.GRUCell(3, 4), "c")(torch.randn(20, 2, 3)).outputs.sum().backward()
    assert set(used) == {1}


@grid(bad=[torch.nan, torch.inf, -torch.inf], dtype=[torch.float32, torch.float64])
def test_nan_and_infinity_go_where_the_eager_loop_sends_them(bad: float, dtype: torch.dtype) -> None:
    cell = nn.LSTMCell(3, 4).to(dtype)
    x = torch.randn(6, 3, 3, dtype=dtype)
    x[2, 1, 0] = bad
    x.requires_grad_()
    net = planned(cell, "c")
    seen, wanted = (tuple(each(x)) for each in (net, eagerly(cell)))
    learn = [x, *cell.parameters()]
    for one, other in zip(
        [*flatten(seen)[0], *gradients(seen, learn)], [*flatten(wanted)[0], *gradients(wanted, learn)], strict=True
    ):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert seen[0][:, 1].isnan().any() == wanted[0][:, 1].isnan().any() and not seen[0][:, 0].isnan().any()
    assert run_by(net) == {"c"}


def test_a_result_is_right_to_a_few_digits_less_than_its_dtype_over_many_steps() -> None:
    cell, x = nn.GRUCell(8, 16), torch.randn(500, 4, 8)
    seen = planned(cell, "c")(x).outputs
    exact = eagerly(cell.double())(x.double()).outputs
    assert float((seen - exact).detach().abs().max()) < 1e-5


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], torch.dtype, str]] = {
    "an operator": (lambda x, h: (x, torch.fft.fft(h).real), torch.float32, "_fft"),
    "complex numbers": (lambda x, h: (x + h, h + x), torch.complex64, "complex64"),
}


@pytest.mark.parametrize(("cell", "dtype", "words"), REFUSED.values(), ids=REFUSED)
def test_what_the_loops_do_not_know_is_named_and_run_by_another_backend(
    cell: Callable[[Tensor, Tensor], Any], dtype: torch.dtype, words: str
) -> None:
    x, h = torch.randn(4, 2, 3).to(dtype), torch.zeros(2, 3, dtype=dtype)
    net = planned(cell, "c")
    with pytest.raises(UsageError, match=words):
        net(x, h)
    net.backend = "auto"
    close(net(x, h).outputs, eagerly(cell)(x, h).outputs)
    assert run_by(net) <= {"python", "eager"} and words in net.why()[0][2]


def test_the_worth_of_threads_is_that_of_a_chunk_not_of_a_step() -> None:
    net = planned(nn.LSTMCell(64, 64), "c", verify="never")
    net(torch.randn(2, 16, 64))
    (choice,) = net._plans.choices()
    work = choice.engine.compiled.forward.work
    assert work < backend.MIN_PARALLEL_OPERATIONS < work * choice.engine.chunk_steps


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


@grid(make=[cells.LSTMCell, cells.LayerNormLSTMCell], threads=[1, 3])
def test_nothing_is_written_beyond_the_memory_that_was_asked_for(
    make: type[torch.nn.Module], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Guarded()
    monkeypatch.setattr(backend, "pool", pool)
    monkeypatch.setattr(backend, "rounded", lambda size: size)
    monkeypatch.setattr(backend, "MIN_PARALLEL_OPERATIONS", -1.0)
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
    forward, recompute, backward = re.split(r"\n\n(?=\w+: )", text)[1:]
    assert forward.splitlines()[:5] == [
        "forward: 2 passes over memory and 480 bytes of workspace a step",
        "  bulk, all steps at once",
        "    product    6 x 20        z0 = x0 @ c1[3 x 20] + c0[6 x 20]",
        "  main loop, step by step; each thread takes some of 6 rows",
        "    product    6 x 20        z1 = h0 @ c3[5 x 20] + c2[6 x 20]",
    ]
    assert "    pass       6 x 5         z3 = z0[6 x 5]+z1[6 x 5]" in forward
    assert "h0' = v3*v4" in forward and "h1' = z9+z11" in forward
    assert "main loop" not in recompute and "loop, steps in any order, shared by threads" in recompute
    assert "main loop, step by step, last one first" in backward
    assert "    total      20 x 3        dp0 += z13[20 x 6] @ x0, over all steps" in backward
    assert max(map(len, text.splitlines())) <= 120
