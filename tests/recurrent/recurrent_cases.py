"""Cells and helpers for the tests of recurrent networks, and the reference loop."""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.core.pytree import flatten, map_leaves
from torchweft.recurrent import Recurrent
from torchweft.recurrent.cpp.compiler import find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
by_plan = pytest.mark.parametrize("backend", ["python", pytest.param("c", marks=needs_compiler)])
by_any = pytest.mark.parametrize("backend", ["eager", "python", pytest.param("c", marks=needs_compiler)])


def grid(**axes: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by a grid. Points are `long`, except one value of the last and shortest axis for each of the others.

    With two axes every value still occurs, with three every pair. The axis ``backend`` can hold "c".
    """
    choices = [
        list(axis.items())
        if isinstance(axis, Mapping)
        else [(getattr(value, "__name__", str(value)), value) for value in axis]
        for axis in axes.values()
    ]
    rows = []
    for point in product(*map(enumerate, choices)):
        (*others, last), named = zip(*point, strict=True)
        values = [value for _, value in named]
        marks = [] if last == sum(others) % len(choices[-1]) else [pytest.mark.long]
        marks += [needs_compiler] if ("backend", "c") in zip(axes, values, strict=True) else []
        rows.append(pytest.param(*values, marks=marks, id="-".join(name for name, _ in named)))
    return pytest.mark.parametrize(tuple(axes), rows)


def at_once(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Iterable[object] = ()
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """``pytest.mark.parametrize`` as one test, for cheap points. A note names the failed point."""
    several = not isinstance(names, str)

    def decorated(test: Callable[..., None]) -> Callable[[], None]:
        points = list(values)
        labels = list(ids) or points

        def every() -> None:
            for label, point in zip(labels, points, strict=True):
                try:
                    test(*point) if several else test(point)
                except Exception as error:
                    error.add_note(f"at {label}")
                    raise

        every.__name__, every.__qualname__, every.__module__ = test.__name__, test.__qualname__, test.__module__
        return every

    return decorated


BACKENDS = ("python", "c")
WIDTH, HIDDEN = 3, 4


def eagerly(cell: Any, **options: Any) -> Recurrent:
    """A network that runs every step by plain autograd, for laws of the loop itself."""
    return Recurrent(cell, backend="eager", **options)


def planned(cell: Any, backend: str, **options: Any) -> Recurrent:
    """A network by a plan of this backend. `run_by` shows whether a plan ran it."""
    return Recurrent(cell, backend=backend, **options)


def run_by(net: Recurrent) -> set[str]:
    """The backends that ran the sequences of this network so far."""
    return {backend for _, backend, _ in net.why()}


class Awkward(nn.Module):
    """A cell with nested values, an integer state, and an output that is not a state. Singular where x is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH + HIDDEN, HIDDEN)
        self.score = nn.Linear(HIDDEN, 2)
        self.double()

    def forward(self, x: dict[str, Tensor], state: tuple[Tensor, dict[str, Tensor]]) -> Any:
        h, more = state
        unit = x["x"] / x["x"].norm(dim=-1, keepdim=True)
        h = torch.tanh(self.mix(torch.cat([unit * x["gate"][..., None], h], -1))) + 0.5 * h
        n = more["n"] + 1
        return {"score": self.score(h), "h": h, "n": n, "nothing": None}, (h, {"n": n})


def random_case(steps: int, rows: int, seed: int) -> tuple[Awkward, dict[str, Tensor], Any]:
    """A cell, inputs and an initial state. All floats require gradients."""
    torch.manual_seed(seed)
    x = {"x": torch.randn(steps, rows, WIDTH).double() + 3, "gate": torch.rand(steps, rows).double()}
    state = (torch.randn(rows, HIDDEN).double(), {"n": torch.randint(9, (rows,))})
    return Awkward(), map_leaves(learned, x), map_leaves(learned, state)


def learned(leaf: Tensor) -> Tensor:
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def per_row(
    cell: Any, x: Any, state: Any, valid: Tensor, reset: Tensor | None = None, fresh: Any = None
) -> tuple[Any, Any, Any]:
    """Outputs, last states and all states of every row, run alone, step by step, without padding."""
    per = [_one_row(cell, n, x, state, valid, reset, state if fresh is None else fresh) for n in range(valid.shape[1])]
    outputs = map_leaves(lambda *leaves: None if leaves[0] is None else torch.cat(leaves, 1), *[p[0] for p in per])
    last = map_leaves(lambda *leaves: torch.cat(leaves, 0), *[p[1] for p in per])
    return outputs, last, map_leaves(lambda *leaves: torch.cat(leaves, 1), *[p[2] for p in per])


def _one_row(cell: Any, n: int, x: Any, state: Any, valid: Tensor, reset: Tensor | None, fresh: Any) -> Any:
    now = map_leaves(lambda leaf: leaf[n : n + 1], state)
    likes = map_leaves(lambda leaf: torch.ones_like(leaf[0, :1]), x)
    like_y, _ = cell(likes, map_leaves(torch.detach, now))
    ys, states = [], []
    for t in range(len(valid)):
        if reset is not None and reset[t, n]:
            now = map_leaves(lambda leaf: leaf[n : n + 1], fresh)
        y = map_leaves(lambda leaf: None if leaf is None else torch.zeros_like(leaf), like_y)
        if valid[t, n]:
            y, now = cell(map_leaves(lambda leaf, t=t: leaf[t, n : n + 1], x), now)
        ys.append(y)
        states.append(now)
    return (
        map_leaves(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *ys),
        now,
        map_leaves(lambda *leaves: torch.stack(leaves), *states),
    )


def floats(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def weighed(value: Any) -> Tensor:
    """A sum in which every entry of every tensor has another weight."""
    return sum((leaf * torch.arange(1.0, leaf.numel() + 1).view(leaf.shape).sin()).sum() for leaf in floats(value))


def gradients(value: Any, wrt: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(weighed(value), wrt, allow_unused=True, materialize_grads=True)) if wrt else []


def outcome(net: Recurrent, x: Any, state: Any = None, **call: Any) -> tuple[Any, list[Tensor]]:
    """The result, and the gradients of all trainable tensors, with the same random numbers each time."""
    torch.manual_seed(5)
    result = tuple(net(x, state, **call))
    return result, gradients(result, [*(leaf for leaf in floats((x, state)) if leaf.requires_grad), *net.parameters()])


def as_the_loop(
    cell: Any, backend: str, x: Any, state: Any = None, tolerance: float = 1e-10, **options: Any
) -> Recurrent:
    """A network by a plan, after comparing its results and gradients with the eager loop.

    Options of a call go to the call, the others to the network.
    """
    call = {name: options.pop(name) for name in ("lengths", "mask", "reset", "start") if name in options}
    net = planned(cell, backend, **options)
    options = {name: value for name, value in options.items() if name not in ("verify", "memory")}
    close(outcome(net, x, state, **call), outcome(eagerly(cell, **options), x, state, **call), tolerance)
    assert run_by(net) == {backend}, net.why()
    return net


def spoiled(x: Any, valid: Tensor) -> Any:
    """The same inputs with NaN in padding."""
    with torch.no_grad():
        results = map_leaves(
            lambda leaf: leaf.masked_fill(~valid.view(*valid.shape, *[1] * (leaf.dim() - 2)), torch.nan), x
        )
    return map_leaves(lambda leaf: leaf.requires_grad_(), results)


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(flatten(a)[0], flatten(b)[0], rtol=tolerance, atol=tolerance)


def equal(a: Any, b: Any) -> bool:
    """The same nesting, dtypes and bits."""
    one, other = flatten(a), flatten(b)
    return one[1] == other[1] and all(
        x is y or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in zip(one[0], other[0], strict=True)
    )


def fault_lines(caught: Any) -> list[str]:
    """The faults that a message lists."""
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]
