"""Partition: operators that PyTorch runs outside the loops, and rows that products can skip."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, equal, gradients, grid, needs_compiler, outcome, planned
from torchweft.recurrent import Recurrent, cells
from torchweft.recurrent.cpp.cpp_backend import CppBackend
from torchweft.recurrent.cpp.partitioner import ForwardBackwardSplit
from torchweft.recurrent.step_plan import summed_at_once

pytestmark = needs_compiler


F = nn.functional
ROWS, WIDTH, WORDS = 3, 4, 7


def unknown(x: Tensor) -> Tensor:
    """An operator that compiled loops support neither forward nor backward."""
    return x.sort(1).values


class Outside(nn.Module):
    """A plain recurrent step, and operators around it: (parameters, x, h) to (output, new state)."""

    def __init__(self, around: Callable[["Outside", Tensor, Tensor], tuple[Any, Tensor]]) -> None:
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


def twice(new: Tensor) -> tuple[Tensor, Tensor]:
    return new, new


def tied_embedding(net: Outside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    new = net.step(F.embedding(x, net.table, padding_idx=0), h)
    return F.log_softmax(new @ net.table.t(), 1).gather(1, x[:, None]), new


def at_both_ends(net: Outside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    """Unknown operators before and after the loops, views between, and outputs that are inputs or not states."""
    new = net.step(unknown(x @ net.u)[:, :2].repeat(1, 2), h)
    return (unknown(torch.cat([new, x], 1))[:, 1:5] * h, new, x, unknown(x)), new


def complex_numbers(net: Outside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    new = net.step(torch.fft.rfft(x, dim=1).abs().repeat(1, 2)[:, :WIDTH], h)
    return torch.fft.fft(new).real, new


def of_inputs_only(net: Outside, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    """The gradient of half of the input is known before the loop backward, which reads a view of an early value."""
    early = unknown(x)
    new = net.step(early[:, :2].repeat(1, 2), h)
    return (unknown(x[:, 2:] * net.u[:1, 2:]), unknown(torch.cat([new, early[:, 1:3]], 1))), new


AROUND: dict[str, Callable[[Outside, Tensor, Tensor], tuple[Any, Tensor]]] = {
    "an input": lambda net, x, h: twice(net.step(unknown(x), h)),
    "a factor of the carry": lambda net, x, h: twice(net.step(x, h * unknown(x))),
    "an output": lambda net, x, h: (unknown(h[:, 1:]) @ net.w[:3], net.step(x, h)),
    "both ends": at_both_ends,
    "complex numbers": complex_numbers,
    "outputs of inputs": of_inputs_only,
    "rows in outputs only": lambda net, x, h: (unknown(F.embedding(x, net.table)), torch.tanh(h @ net.u)),
    "an output that only backward reads": lambda net, x, h: (unknown(new := net.step(x, h)).detach() * new, new),
    "a state": lambda net, x, h: twice(unknown(x) + 0 * h.detach()),
    "weights": lambda net, x, h: twice(torch.tanh(x @ unknown(net.w) + h @ net.u)),
    "an embedding": lambda net, x, h: twice(net.step(F.embedding(x, net.table), h)),
    "rows of a table": lambda net, x, h: twice(net.step(net.table[x], h)),
    "a tied embedding": tied_embedding,
}
WITH_WORDS = ("an embedding", "rows in outputs only", "rows of a table", "a tied embedding")


def inputs_of(name: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    h = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw).requires_grad_()
    if name in WITH_WORDS:
        return torch.randint(WORDS, (5, ROWS), generator=draw), h
    return torch.randn(5, ROWS, WIDTH, dtype=torch.float64, generator=draw).requires_grad_(), h


@grid(name=list(AROUND), lengths={"whole": None, "padded": (5, 2, 4)})
def test_unknown_operators_run_outside_the_loops(name: str, lengths: tuple[int, ...] | None) -> None:
    options = {} if lengths is None else {"lengths": torch.tensor(lengths)}
    as_the_loop(Outside(AROUND[name]), "c", *inputs_of(name), verify="never", **options)


@pytest.mark.long
@pytest.mark.parametrize("name", ["both ends", "a tied embedding"])
def test_all_memory_modes_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.recurrent.cpp.cpp_backend.chunk_length", lambda *_: 2)
    cell, (x, h) = Outside(AROUND[name]), inputs_of(name)
    results = []
    for memory in ("full", "states", "sqrt"):
        ends = tuple(planned(cell, "c", verify="never", memory=memory)(x, h)[:2])
        results.append((ends, gradients(ends, [h, *cell.parameters()])))
    assert equal(results[1], results[0]) and equal(results[2], results[0])


def test_explanation_lists_pytorchs_operators() -> None:
    net = planned(Outside(tied_embedding), "c", verify="never")
    net(*inputs_of("a tied embedding"))
    _, listed = net.explain().split("by PyTorch, all steps of a chunk at once")
    assert "before forward: embedding" in listed and "over all steps" in listed


def test_embedding_gradients_are_summed_at_once() -> None:
    for name in ("an embedding", "rows in outputs only", "rows of a table"):
        net = planned(Outside(AROUND[name]), "c", verify="never")
        net(*inputs_of(name))
        summed = split_of(net).summed
        assert summed and all(map(summed_at_once, summed))


def split_of(net: Recurrent) -> ForwardBackwardSplit:
    """The split of the only plan of a network."""
    (choice,) = net._plans.choices()
    assert isinstance(choice.engine, CppBackend), choice.why
    return choice.engine.compiled.lowered.split


T, N, D = 7, 5, 4
LENGTHS = torch.tensor([7, 3, 0, 5, 1])
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


def skipping(net: Recurrent) -> tuple[int, int]:
    """The number of products that skip rows, and of sums of them."""
    sparsity = split_of(net).sparsity
    return len(sparsity.products), len(sparsity.totals)


CELLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "LSTM": (lambda: cells.LSTMCell(D, D), (4, 2)),
    "GRU": (lambda: cells.GRUCell(D, D), (4, 2)),
    "reset before GRU": (lambda: cells.ResetBeforeGRUCell(D, D), (6, 3)),
    "a gate": (lambda: Step(lambda z, h: torch.tanh(z)), (4, 2)),
    "a gate that may be infinite": (lambda: Step(lambda z, h: h + 1 / (z + 9)), (2, 2)),
}


@pytest.mark.long
def test_only_padding_is_skipped() -> None:
    """A step that mixes rows skips padding only in its gradient. Without padding, nothing is skipped."""
    x = torch.randn(T, N, D, dtype=torch.float64).requires_grad_()
    mixing = planned(Step(lambda z, h: torch.tanh(z - z.mean(0))).double(), "c", verify="never")
    mixing(x, lengths=LENGTHS)
    assert skipping(mixing) == (1, 0)
    resets = torch.rand(T, N) < 0.3
    resets[0, 0] = True
    for options in ({}, {"reset": resets}):
        net = planned(cells.LSTMCell(D, D).double(), "c")
        net(x, **options)
        assert skipping(net) == (0, 0)


MASKS = {
    "lengths": torch.arange(T)[:, None] < LENGTHS,
    "any rows": torch.rand(T, N) < 0.5,
    "no rows": torch.zeros(T, N, dtype=torch.bool),
}


@pytest.mark.long
@pytest.mark.parametrize(("make", "counts"), CELLS.values(), ids=CELLS)
def test_products_skip_rows_of_padding(make: Callable[[], nn.Module], counts: tuple[int, int]) -> None:
    """Results and gradients equal the eager loop."""
    for name, mask in MASKS.items():
        x = torch.randn(T, N, D, dtype=torch.float64).masked_fill(~mask[..., None], torch.nan).requires_grad_()
        net = as_the_loop(make().double(), "c", x, mask=mask, memory="full" if name == "lengths" else "states")
        assert skipping(net) == counts


@pytest.mark.parametrize("bias", [True, False])
def test_infinity_in_skipped_rows_does_not_leak(bias: bool) -> None:
    cell = Step(lambda z, h: h / (z * z + h * h).sqrt() + torch.log(z * z), bias).double()
    x, h = torch.randn(T, N, D, dtype=torch.float64).requires_grad_(), torch.ones(N, D).double()
    net = as_the_loop(cell, "c", x, h, 1e-9, lengths=LENGTHS)
    assert all(tensor.isfinite().all() for tensor in outcome(net, x, h, lengths=LENGTHS)[1])


def test_axis_of_equal_size_is_not_the_row_axis() -> None:
    """One number for each row of the batch is added to the columns, so every row reads all of them."""
    net = Outside(lambda net, x, h: twice(torch.tanh(torch.addmm((h @ net.u).sum(1), x, net.w))))
    x, h = torch.randn(T, D, D, dtype=torch.float64).requires_grad_(), torch.randn(D, D, dtype=torch.float64)
    as_the_loop(net, "c", x, h, lengths=torch.tensor([7, 3, 0, 5]))
