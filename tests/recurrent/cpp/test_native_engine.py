"""The compiled plan on threads, with NaN and infinity, and where it hands a cell on to another backend."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, equal, floats, gradients, needs_compiler, planned, run_by
from weft.core.tree import flatten
from weft.recurrent import cells
from weft.recurrent.backends import NoPlanWarning
from weft.recurrent.cpp import backend as engine
from weft.recurrent.cpp import backend as program

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
    call = program.Routine.call

    def noted(self: program.Routine, steps: int, threads: int, arguments: Any, workspace: Tensor) -> None:
        seen.append(threads)
        call(self, steps, threads, arguments, workspace)

    monkeypatch.setattr(program.Routine, "call", noted)
    return seen


WIDE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM, rows shared": (lambda: nn.LSTMCell(64, 64), 16),
    "LSTM, products shared": (lambda: nn.LSTMCell(64, 64), 1),
    "GRU, products shared": (lambda: nn.GRUCell(64, 64), 1),
    "layer norm LSTM, rows shared": (lambda: cells.LayerNormLSTMCell(64, 64), 16),
    "rows that do not divide": (lambda: nn.GRUCell(64, 64), 13),
}


@pytest.fixture(params=["of torch", "own"])
def pool(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whose threads they are."""
    nobody = (ctypes.c_void_p * 3)()
    if request.param == "own":
        program.kernels().weft_team(nobody)
    elif None in program._team():
        pytest.skip("this torch has no OpenMP")
    yield
    program.kernels().weft_team((ctypes.c_void_p * 3)(*program._team()))


@pytest.mark.usefixtures("pool")
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


def test_little_work_is_done_by_one_thread(threads: Callable[[int], None], used: list[int]) -> None:
    threads(2)
    planned(nn.GRUCell(3, 4), "c")(torch.randn(20, 2, 3)).outputs.sum().backward()
    assert set(used) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
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


class Extremes(nn.Module):
    """Reductions and choices, which must not lose a NaN."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        after = 0.5 * h + x.amax(1, keepdim=True) - x.amin(1, keepdim=True) + torch.maximum(x, h)
        return torch.stack([after.relu(), after.abs(), after.clamp(-1, 1), torch.sign(after) + after]).sum(0), after


def test_a_nan_is_lost_nowhere() -> None:
    x, h = torch.randn(5, 3, 4).double(), torch.zeros(3, 4).double()
    x[1, 0, 2] = torch.nan
    x.requires_grad_()
    net, found = planned(Extremes(), "c", verify="never"), []
    for each in (net, eagerly(Extremes())):
        result = tuple(each(x, h))
        found.append((result, gradients(result, [x])))
    torch.testing.assert_close(floats(found[0]), floats(found[1]), equal_nan=True, rtol=1e-12, atol=1e-12)
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
    with pytest.warns(NoPlanWarning, match=words):
        close(net(x, h).outputs, eagerly(cell)(x, h).outputs)
    assert run_by(net) == {"eager"}


def test_the_worth_of_threads_is_that_of_a_chunk_not_of_a_step() -> None:
    net = planned(nn.LSTMCell(64, 64), "c", verify="never")
    net(torch.randn(2, 16, 64))
    (choice,) = net._plans._known.values()
    work = choice.engine.program.forward.work
    assert work < engine.WORTH < work * choice.engine.chunk_steps()
