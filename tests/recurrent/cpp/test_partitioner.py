"""Partition: operators that run by PyTorch beside the loops, and rows that need no products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, gradients, needs_compiler, planned, run_by
from weft.recurrent import Recurrent, cells
from weft.recurrent.cpp.backend import CppBackend
from weft.recurrent.cpp.partitioner import ForwardBackwardSplit
from weft.recurrent.plan import summed_at_once
from weft.recurrent.plan_cache import NoPlanWarning

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


def results(net: Recurrent, x: Tensor, h: Tensor, **options: Any) -> tuple[Any, Any]:
    found = net(x, h, **options)
    ends = found.outputs, found.last
    return ends, gradients(ends, [*([x] if x.requires_grad else []), h, *net.cell.parameters()])


@pytest.mark.parametrize("lengths", [None, (5, 2, 4)], ids=["whole", "padded"])
@pytest.mark.parametrize("name", AROUND)
def test_what_c_does_not_know_runs_beside_the_loops(name: str, lengths: tuple[int, ...] | None) -> None:
    options = {} if lengths is None else {"lengths": torch.tensor(lengths)}
    net = planned(Beside(AROUND[name]), "c", verify="never")
    seen, wanted = (results(each, *sequence(name), **options) for each in (net, eagerly(net.cell)))
    assert run_by(net) == {"c"}
    close(seen, wanted, 1e-10)


@pytest.mark.parametrize("name", ["both ends", "a tied embedding"])
def test_every_memory_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.recurrent.cpp.backend.chunk_length", lambda *_: 2)
    cell = Beside(AROUND[name])
    full, *others = (
        results(planned(cell, "c", verify="never", memory=memory), *sequence(name))
        for memory in ("full", "states", "sqrt")
    )
    for other in others:
        close(other, full, 0.0)


def test_what_is_carried_needs_operators_that_c_knows() -> None:
    net = planned(Beside(lambda net, x, h: both(ordered(net.step(x, h)))), "c")
    with pytest.warns(NoPlanWarning, match=r"aten.sort.default; .* carried from step to step needs it"):
        net(*sequence("an input"))
    assert run_by(net) == {"eager"}


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
        ((choice,),) = [list(net._plans._known.values())]
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
        return x.new_zeros(len(x), D)


def found(net: Recurrent, **call: Tensor) -> tuple[int, int]:
    """How many products skip rows, and how many sums of them."""
    net(torch.randn(T, N, D, dtype=torch.float64).requires_grad_(), **call)
    (choice,) = net._plans._known.values()
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
    net = planned(make().double(), "c")
    assert found(net, lengths=torch.tensor([7, 3, 0, 5, 1])) == wanted


def test_where_rows_meet_only_the_gradient_of_padding_is_skipped() -> None:
    net = planned(Step(lambda z, h: torch.tanh(z - z.mean(0))).double(), "c", verify="never")
    assert found(net, lengths=torch.tensor([7, 3, 0, 5, 1])) == (1, 0)


def test_without_padding_and_with_resets_alone_nothing_is_skipped() -> None:
    assert found(planned(cells.LSTMCell(D, D).double(), "c")) == (0, 0)
    resets = torch.rand(T, N) < 0.3
    resets[0, 0] = True
    assert found(planned(cells.LSTMCell(D, D).double(), "c"), reset=resets) == (0, 0)


@pytest.mark.parametrize(("memory", "mask"), [("full", "lengths"), ("sqrt", "holes"), ("states", "nothing counts")])
@pytest.mark.parametrize("make", [each for each, _ in CELLS.values()], ids=CELLS)
def test_with_rows_skipped_all_is_as_in_the_eager_loop(make: Callable[[], nn.Module], mask: str, memory: str) -> None:
    cell = make().double()
    valid = torch.arange(T)[:, None] < torch.tensor([7, 3, 0, 5, 1]) if mask == "lengths" else torch.rand(T, N) < 0.5
    valid = valid & (mask != "nothing counts")
    x = torch.randn(T, N, D, dtype=torch.float64).masked_fill(~valid[..., None], torch.nan).requires_grad_()
    results = []
    for net in (planned(cell, "c", memory=memory), eagerly(cell)):
        result = net(x, mask=valid)
        ends = [result.outputs, *(result.last if isinstance(result.last, tuple) else [result.last])]
        gradients = torch.autograd.grad(sum(each.sin().sum() for each in ends), [x, *cell.parameters()])
        results.append((ends, gradients))
    close(results[0], results[1], 1e-11)
    net = planned(cell, "c", memory=memory)
    net(x, mask=valid)
    assert run_by(net) == {"c"}


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_infinite_where_nothing_was_computed_leaks_nowhere(bias: bool) -> None:
    cell = Step(lambda z, h: h / (z * z + h * h).sqrt() + torch.log(z * z), bias).double()
    x = torch.randn(T, N, D, dtype=torch.float64).requires_grad_()
    results = []
    for net in (planned(cell, "c"), eagerly(cell)):
        outputs = net(x, torch.ones(N, D).double(), lengths=torch.tensor([7, 3, 0, 5, 1])).outputs
        results.append((outputs, torch.autograd.grad(outputs.sum(), [x, *cell.parameters()])))
    assert all(each.isfinite().all() for each in results[0][1])
    close(results[0], results[1], 1e-9)


def test_an_axis_as_long_as_there_are_rows_is_not_taken_for_the_rows() -> None:
    """A row of numbers, one for each row of the batch, is added to the columns: every row wants all of it."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.u = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))

        def forward(self, x: Tensor, h: Tensor) -> Pair:
            h = torch.tanh(torch.addmm((h @ self.u).sum(1), x, self.w))
            return h, h

    cell, found_by = Mixing().double(), []
    x, h = torch.randn(T, D, D, dtype=torch.float64).requires_grad_(), torch.randn(D, D, dtype=torch.float64)
    for net in (planned(cell, "c"), eagerly(cell)):
        outputs = net(x, h, lengths=torch.tensor([7, 3, 0, 5])).outputs
        found_by.append((outputs, torch.autograd.grad(outputs.sin().sum(), [x, cell.w, cell.u])))
    close(found_by[0], found_by[1], 1e-11)
