"""The C++ backend: threads, NaN and infinity, memory, explanations, and cells that another backend must run."""

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, equal, gradients, grid, needs_compiler, planned, run_by
from torchweft.core.errors import UsageError
from torchweft.core.pytree import flatten
from torchweft.recurrent import Recurrent, cells
from torchweft.recurrent.cpp import cpp_backend

pytestmark = [needs_compiler, pytest.mark.usefixtures("optimized_cells")]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Function that sets the number of threads until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def thread_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of every call of a compiled function."""
    counts: list[int] = []
    call = cpp_backend.CompiledFunction.call

    def counted(self: cpp_backend.CompiledFunction, steps: int, threads: int, *rest: Any) -> None:
        counts.append(threads)
        call(self, steps, threads, *rest)

    monkeypatch.setattr(cpp_backend.CompiledFunction, "call", counted)
    return counts


def results_and_gradients(net: Recurrent, x: Tensor) -> tuple[Any, list[Tensor]]:
    result = tuple(net(x))
    return result, gradients(result, [x, *net.parameters()])


WIDE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM, rows shared": (lambda: nn.LSTMCell(64, 64), 16),
    "LSTM, products shared": (lambda: nn.LSTMCell(64, 64), 1),
    "GRU, products shared": (lambda: nn.GRUCell(64, 64), 1),
    "layer norm LSTM, rows shared": (lambda: cells.LayerNormLSTMCell(64, 64), 16),
    "rows that do not divide": (lambda: nn.GRUCell(64, 64), 13),
}


@pytest.mark.long
@pytest.mark.parametrize(("make", "rows"), WIDE.values(), ids=WIDE)
def test_any_number_of_threads_gives_the_same_bits(
    make: Callable[[], nn.Module], rows: int, set_threads: Callable[[int], None], thread_counts: list[int]
) -> None:
    """One thread without OpenMP gives the same bits too. The work of a chunk, not of a step, decides on threads."""
    net = planned(make(), "c", verify="never")
    x = torch.randn(100, rows, 64, requires_grad=True)
    set_threads(1)
    single = results_and_gradients(net, x)
    for threads in (2, 3):
        set_threads(threads)
        net(x[:2])
        assert set(thread_counts) == {1}, "two steps have too little work for more threads"
        assert equal(results_and_gradients(net, x), single)
        assert threads in thread_counts, "a hundred steps have enough work"
        thread_counts.clear()
    bind, pointers = cpp_backend.kernels().torchweft_bind_openmp, ctypes.c_void_p * 3
    try:
        bind(pointers(None, None, None))
        assert equal(results_and_gradients(net, x), single)
    finally:
        bind(pointers(*cpp_backend.openmp_addresses()))
    assert run_by(net) == {"c"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_and_infinity_spread_as_in_the_eager_loop(dtype: torch.dtype) -> None:
    cell = nn.LSTMCell(3, 4).to(dtype)
    net = planned(cell, "c")
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(6, 3, 3, dtype=dtype)
        x[2, 1, 0] = bad
        x.requires_grad_()
        ours, reference = (flatten(results_and_gradients(run, x))[0] for run in (net, eagerly(cell)))
        for tensor, other in zip(ours, reference, strict=True):
            torch.testing.assert_close(tensor, other, equal_nan=True, rtol=1e-4, atol=1e-5)
        assert not ours[0][:, 0].isnan().any()
    assert run_by(net) == {"c"}


def test_errors_do_not_grow_over_many_steps() -> None:
    cell, x = nn.GRUCell(8, 16), torch.randn(500, 4, 8)
    outputs = planned(cell, "c")(x).outputs
    exact = eagerly(cell.double())(x.double()).outputs
    assert float((outputs - exact).detach().abs().max()) < 1e-5


UNKNOWN: dict[str, tuple[Callable[[Tensor, Tensor], Any], torch.dtype, str]] = {
    "an operator": (lambda x, h: (x, torch.fft.fft(h).real), torch.float32, "_fft"),
    "a carried value": (
        lambda x, h: ((x + h).sort(1).values,) * 2,
        torch.float32,
        "sort.default; .* carried",
    ),
    "complex numbers": (lambda x, h: (x + h, h + x), torch.complex64, "complex64"),
}


@pytest.mark.parametrize(("cell", "dtype", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_operators_are_named_and_run_elsewhere(
    cell: Callable[[Tensor, Tensor], Any], dtype: torch.dtype, words: str
) -> None:
    x, h = torch.randn(4, 2, 3).to(dtype), torch.zeros(2, 3, dtype=dtype)
    net = planned(cell, "c")
    for _ in range(2):
        with pytest.raises(UsageError, match=f'backend="c" cannot run .*{words}.*backend="auto"'):
            net(x, h)
    net.backend = "auto"
    close(net(x, h).outputs, eagerly(cell)(x, h).outputs)
    assert run_by(net) <= {"python", "eager"} and words.split(";", maxsplit=1)[0] in net.why()[0][2]


def test_faults_of_a_cell_are_raised_before_those_of_the_backend() -> None:
    x = torch.randn(3, 2, 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        planned(lambda x, h: (x @ h,) * 2, "c")(x, torch.zeros(2, 8))
    net = planned(lambda x, h: (x + h,) * 2, "c")  # a dtype that only the first step shows
    close(net(x, torch.zeros(2, 3, dtype=torch.int64)).outputs, x.cumsum(0), 1e-6)
    assert run_by(net) == {"eager", "c"}


GUARD, MARK = 256, 0xA5


class GuardedPool:
    """A pool whose buffers have exactly the requested size, with marks on both sides."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def acquire(self, size: int, kind: str = "") -> Tensor:
        whole = torch.full((GUARD + size + GUARD,), MARK, dtype=torch.uint8)
        self.buffers.append((whole, size))
        return whole[GUARD : GUARD + size]

    def give(self, memory: Tensor, kind: str = "") -> None:
        pass

    def is_intact(self) -> bool:
        marks = [torch.cat([whole[:GUARD], whole[GUARD + size :]]) for whole, size in self.buffers]
        return all(bool((mark == MARK).all()) for mark in marks)


@pytest.mark.long
@grid(make=[cells.LSTMCell, cells.LayerNormLSTMCell], threads=[1, 3])
def test_nothing_is_written_beyond_the_workspace(
    make: type[torch.nn.Module], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = GuardedPool()
    monkeypatch.setattr(cpp_backend, "pool", pool)
    monkeypatch.setattr(cpp_backend, "rounded", lambda size: size)
    monkeypatch.setattr(cpp_backend, "_SMALL", 0)
    monkeypatch.setattr(cpp_backend, "MIN_PARALLEL_OPERATIONS", -1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cell, x = make(3, 5), torch.randn(9, 7, 3, requires_grad=True)
    for memory in ("full", "states"):
        net = Recurrent(cell, backend="c", memory=memory, verify="never")
        torch.autograd.grad(net(x).outputs.sum(), [x, *cell.parameters()])
        assert run_by(net) == {"c"}
    assert pool.buffers and pool.is_intact()


def test_explanation_lists_phases_passes_and_formulas() -> None:
    net = Recurrent(cells.LSTMCell(3, 5), backend="c")
    net(torch.randn(4, 6, 3, requires_grad=True))
    head = r"^(?=chunks of \d+ steps; kept for backward: 5 values, 600 bytes a step$)"
    _, program = re.split(head, net.explain(), flags=re.M)
    forward, recompute, backward = re.split(r"\n\n(?=\w+: )", program)[1:]
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
    assert max(map(len, program.splitlines())) <= 120
