"""Operators that C does not know run by PyTorch beside the loops, whole chunks at once; never in what is carried."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, gradients, needs_compiler, planned, run_by
from weft.recurrent import Recurrent
from weft.recurrent.backends import NoPlanWarning
from weft.recurrent.bulk import summed_at_once
from weft.recurrent.cpp.backend import NativeEngine

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
    monkeypatch.setattr(NativeEngine, "chunk_steps", lambda self: 2)
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
        assert choice.engine is not None and isinstance(choice.engine, NativeEngine)
        halves = choice.engine.program.build.halves
        assert halves.summed and all(map(summed_at_once, halves.summed))
