"""Partition: operators that run by PyTorch beside the loops, and rows that need no products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, equal, gradients, needs_compiler, outcome, planned
from weft.core.errors import UsageError
from weft.recurrent import Recurrent, cells
from weft.recurrent.cpp.cpp_backend import CppBackend
from weft.recurrent.cpp.partitioner import ForwardBackwardSplit
from weft.recurrent.step_plan import summed_at_once

pytestmark = needs_compiler


F = nn.functional
ROWS, WIDTH, WORDS = 3, 4, 7


def ordered(x: Tensor) -> Tensor:
    """Known to C neither forward nor backward."""
    return x.sort(1).values


class Beside(nn.Module):
    """A plain recurrent step, and something beside it: (parameters, x, h) to (output, new state)."""

    def __init__(self, around: Callable[["Beside", Tensor, Tensor], tuple[Any, Tensor]]) -> None:
        super().__init__()
        self.around = around
        draw = torch.Generator().manual_seed(0)
        self.table, self.w, self.u = (
            nn.Parameter(0.4 * torch.randn(rows, WIDTH, dtype=torch.float64, generator=draw))
            for rows in (WORDS, WIDTH, WIDTH)
        )

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(x @ self.w + h @ self.u)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
        return self.around(self, x, h)


def both(new: Tensor) -> tuple[Tensor, Tensor]:
    return new, new


def read(net: Beside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    new = net.step(F.embedding(x, net.table, padding_idx=0), h)
    return F.log_softmax(new @ net.table.t(), 1).gather(1, x[:, None]), new


def through(net: Beside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    """Before and after the loops, with views between, an output that is no state, and one that is an input."""
    new = net.step(ordered(x @ net.u)[:, :2].repeat(1, 2), h)
    return (ordered(torch.cat([new, x], 1))[:, 1:5] * h, new, x, ordered(x)), new


def wide(net: Beside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    new = net.step(torch.fft.rfft(x, dim=1).abs().repeat(1, 2)[:, :WIDTH], h)
    return torch.fft.fft(new).real, new


def aside(net: Beside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    """The gradient of half of the input is known before the loop backward, and a view of what is made before is read
    after it."""
    early = ordered(x)
    new = net.step(early[:, :2].repeat(1, 2), h)
    return (ordered(x[:, 2:] * net.u[:1, 2:]), ordered(torch.cat([new, early[:, 1:3]], 1))), new


AROUND: dict[str, Callable[[Beside, Tensor, Tensor], tuple[Any, Tensor]]] = {
    "an input": lambda net, x, h: both(net.step(ordered(x), h)),
    "a factor of the carry": lambda net, x, h: both(net.step(x, h * ordered(x))),
    "an output": lambda net, x, h: (ordered(h[:, 1:]) @ net.w[:3], net.step(x, h)),
    "both ends": through,
    "complex numbers": wide,
    "outputs of inputs": aside,
    "rows in outputs only": lambda net, x, h: (ordered(F.embedding(x, net.table)), torch.tanh(h @ net.u)),
    "what backward only reads": lambda net, x, h: (ordered(new := net.step(x, h)).detach() * new, new),
    "a state": lambda net, x, h: both(ordered(x) + 0 * h.detach()),
    "weights": lambda net, x, h: both(torch.tanh(x @ ordered(net.w) + h @ net.u)),
    "an embedding": lambda net, x, h: both(net.step(F.embedding(x, net.table), h)),
    "rows of a table": lambda net, x, h: both(net.step(net.table[x], h)),
    "a tied embedding": read,
}
with_words = ("an embedding", "rows in outputs only", "rows of a table", "a tied embedding")


def sequence(name: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    h = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw).requires_grad_()
    if name in with_words:
        return torch.randint(WORDS, (5, ROWS), generator=draw), h
    return torch.randn(5, ROWS, WIDTH, dtype=torch.float64, generator=draw).requires_grad_(), h


@pytest.mark.parametrize("lengths", [None, (5, 2, 4)], ids=["whole", "padded"])
@pytest.mark.parametrize("name", AROUND)
def test_what_c_does_not_know_runs_beside_the_loops(name: str, lengths: tuple[int, ...] | None) -> None:
    options = {} if lengths is None else {"lengths": torch.tensor(lengths)}
    as_the_loop(Beside(AROUND[name]), "c", *sequence(name), verify="never", **options)


@pytest.mark.parametrize("name", ["both ends", "a tied embedding"])
def test_every_memory_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.recurrent.cpp.cpp_backend.chunk_length", lambda *_: 2)
    cell, (x, h) = Beside(AROUND[name]), sequence(name)
    found = []
    for memory in ("full", "states", "sqrt"):
        ends = tuple(planned(cell, "c", verify="never", memory=memory)(x, h)[:2])
        found.append((ends, gradients(ends, [h, *cell.parameters()])))
    assert equal(found[1], found[0]) and equal(found[2], found[0])


LENGTHS = torch.tensor([7, 3, 0, 5, 1])


def test_what_is_carried_needs_operators_that_c_knows() -> None:
    net = planned(Beside(lambda net, x, h: both(ordered(net.step(x, h)))), "c")
    with pytest.raises(UsageError, match=r"aten.sort.default; .* carried from step to step needs it"):
        net(*sequence("an input"))


def test_the_explanation_tells_what_pytorch_runs() -> None:
    net = planned(Beside(read), "c", verify="never")
    net(*sequence("a tied embedding"))
    text = net.explain()
    told = text[text.index("by PyTorch, all steps of a chunk at once") :]
    assert "before forward: embedding" in told and "over all steps" in told


def test_the_gradient_of_an_embedding_is_never_made_for_every_step() -> None:
    for name in ("an embedding", "rows in outputs only", "rows of a table"):
        net = planned(Beside(AROUND[name]), "c", verify="never")
        net(*sequence(name))
        ((choice,),) = [net._plans.choices()]
        assert choice.engine is not None and isinstance(choice.engine, CppBackend)
        halves = choice.engine.compiled.lowered.split
        assert halves.summed and all(map(summed_at_once, halves.summed))


T, N, D = 7, 5, 4
Pair = tuple[Tensor, Tensor]


class Step(nn.Module):
    """``h' = function(x W + h U, h)``, which is also the output."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.w, self.u = nn.Linear(D, D, bias=bias), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Pair:
        h = self.function(self.w(x) + self.u(h), h)
        return h, h

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], D)


def found(net: Recurrent, **call: Tensor) -> tuple[int, int]:
    """How many products skip rows, and how many sums of them."""
    net(torch.randn(T, N, D, dtype=torch.float64).requires_grad_(), **call)
    (choice,) = net._plans.choices()
    assert isinstance(choice.engine, CppBackend), choice.why
    live = ForwardBackwardSplit(choice.engine.captured).sparsity
    return len(live.products), len(live.totals)


CELLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "LSTM": (lambda: cells.LSTMCell(D, D), (4, 2)),
    "GRU": (lambda: cells.GRUCell(D, D), (4, 2)),
    "reset before GRU": (lambda: cells.ResetBeforeGRUCell(D, D), (6, 3)),
    "a gate": (lambda: Step(lambda z, h: torch.tanh(z)), (4, 2)),
    "a gate that may be infinite": (lambda: Step(lambda z, h: h + 1 / (z + 9)), (2, 2)),
}


@pytest.mark.parametrize(("make", "wanted"), CELLS.values(), ids=CELLS)
def test_products_skip_rows_past_their_length_where_nobody_wants_them(
    make: Callable[[], nn.Module], wanted: tuple[int, int]
) -> None:
    assert found(planned(make().double(), "c"), lengths=LENGTHS) == wanted


def test_only_padding_is_skipped_and_only_its_gradient_where_rows_meet() -> None:
    meeting = Step(lambda z, h: torch.tanh(z - z.mean(0))).double()
    assert found(planned(meeting, "c", verify="never"), lengths=LENGTHS) == (1, 0)
    assert found(planned(cells.LSTMCell(D, D).double(), "c")) == (0, 0)
    resets = torch.rand(T, N) < 0.3
    resets[0, 0] = True
    assert found(planned(cells.LSTMCell(D, D).double(), "c"), reset=resets) == (0, 0)


MASKS = {
    "full": torch.arange(T)[:, None] < LENGTHS,
    "states": torch.rand(T, N) < 0.5,
    "nothing counts": torch.zeros(T, N, dtype=torch.bool),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("make", [each for each, _ in CELLS.values()], ids=CELLS)
def test_with_rows_skipped_all_is_as_in_the_eager_loop(make: Callable[[], nn.Module], name: str) -> None:
    x = torch.randn(T, N, D, dtype=torch.float64).masked_fill(~MASKS[name][..., None], torch.nan).requires_grad_()
    as_the_loop(make().double(), "c", x, mask=MASKS[name], memory="full" if name == "full" else "states")


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_infinite_where_nothing_was_computed_leaks_nowhere(bias: bool) -> None:
    cell = Step(lambda z, h: h / (z * z + h * h).sqrt() + torch.log(z * z), bias).double()
    x, h = torch.randn(T, N, D, dtype=torch.float64).requires_grad_(), torch.ones(N, D).double()
    net = as_the_loop(cell, "c", x, h, 1e-9, lengths=LENGTHS)
    assert all(each.isfinite().all() for each in outcome(net, x, h, lengths=LENGTHS)[1])


def test_an_axis_as_long_as_there_are_rows_is_not_taken_for_the_rows() -> None:
    """A row of numbers, one for each row of the batch, is added to the columns: every row wants all of it."""
    net = Beside(lambda net, x, h: both(torch.tanh(torch.addmm((h @ net.u).sum(1), x, net.w))))
    x, h = torch.randn(T, D, D, dtype=torch.float64).requires_grad_(), torch.randn(D, D, dtype=torch.float64)
    as_the_loop(net, "c", x, h, lengths=torch.tensor([7, 3, 0, 5]))
