"""Modules with edge cases, and helpers shared by tests of experts."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.experts import ExpertBackend, TensorSpec
from torchweft.experts.task import Answer, Results, Task

WIDTH = 4
X = TensorSpec((None, WIDTH), torch.float64)
TROUBLE = 1e6
"""Input or gradient value that makes a `Fussy` module raise."""


class Troubled(Exception):
    """Raised by a `Fussy` module."""


class RaisesInBackward(torch.autograd.Function):
    """Identity whose backward raises if the gradient contains `TROUBLE`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if (gradients[0] == TROUBLE).any():
            raise Troubled("in backward")
        return gradients[0]


class Fussy(nn.Module):
    """Two layers, optionally with dropout and batch norm. Raises in forward or backward at `TROUBLE`."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.side = nn.Linear(8, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(8, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.first(x)).tanh())
        if (x == TROUBLE).any():
            raise Troubled("in forward")
        side = RaisesInBackward.apply(self.side(hidden))
        return self.last(hidden) + side  # the backward reaches `last` before `side`


class Formula(nn.Module):
    """Module that computes ``formula(self, *inputs)``. Members become attributes, plain tensors become buffers."""

    def __init__(self, formula: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.formula = formula
        for name, member in members.items():
            (self.register_buffer if type(member) is Tensor else self.__setattr__)(name, member)

    def forward(self, *inputs: Tensor) -> Any:
        return self.formula(self, *inputs)


def double_layer(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


class Nested(nn.Module):
    """Takes and returns nested values, with one unused input and one integer output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = double_layer()
        self.table = nn.Embedding(5, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, pair: Sequence[Tensor], *, options: dict[str, Any]) -> dict[str, Any]:
        y = self.layer(x) * options["scale"] + self.table(pair[0])
        return {"y": (y, y.sum(1)), "best": y.argmax(1), "none": None}


NESTED_SCHEMAS = {
    "args_schema": (X, [TensorSpec((None,), torch.int64), TensorSpec((None, 2), torch.float64)]),
    "kwargs_schema": {"options": {"scale": TensorSpec((None, 1), torch.float64), "mode": "plain"}},
}


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Create a module from this seed alone. The caller's random generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def fussy_backend(name: str = "fussy", **options: Any) -> ExpertBackend:
    """Expert with a `Fussy` module, which receives ``dropout`` and ``norm``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Fussy(dropout=options.pop("dropout", 0.0), norm=options.pop("norm", False))
        return ExpertBackend(name, module, options.pop("optimizer", adam), args_schema=(X,), **options)


def task(*tensors: Tensor, **more: Any) -> Task:
    """Task without waiters, for an executor that is called directly."""
    return Task(tensors, tensors[0].shape[0], **more)


def rows(count: int, seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are tensors that are equal up to rounding."""
    return a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=1e-12)


def fingerprint(value: Any) -> list[Any]:
    """Convert a nested state to comparable lists. Tensors are represented by their bytes."""
    if isinstance(value, Tensor):
        return [tuple(value.shape), str(value.dtype), value.detach().contiguous().view(-1).view(torch.uint8).tolist()]
    if isinstance(value, dict):
        return [[key, fingerprint(one)] for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [fingerprint(one) for one in value]
    return [value]


def weights(backend: ExpertBackend) -> list[Any]:
    state = backend.state_dict()
    return fingerprint([state["module"], state["optimizer"], state["schedule"], state["steps"]])


def good(answers: Sequence[Answer]) -> list[list[Tensor]]:
    """Return the results among the answers. Raises the first error."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, list)]


def spoiled_gradient() -> tuple[Tensor, Tensor]:
    gradient = rows(2, 1)
    gradient[1, 2] = float("nan")
    return rows(2, 0), gradient


def work(backend: ExpertBackend) -> None:
    """Run all waiting tasks of an expert in this thread, oldest first."""
    while True:
        heads = [(pool.oldest_ready(float("inf"))[0], pool) for pool in backend.pools]
        ready = [(number, pool) for number, pool in heads if number is not None]
        if not ready:
            return
        pool = min(ready, key=lambda number_and_pool: number_and_pool[0])[1]
        pool.run_batch()


def backward(backend: ExpertBackend, seed: int = 0, size: int = 2, **more: Any) -> "Future[Results]":
    return backend.backward_pool.submit_task(rows(size, seed), rows(size, seed + 50), **more)


def answered(backend: ExpertBackend, *futures: "Future[Results]") -> list[Any]:
    """Run all waiting tasks, then return the result or error of each future."""
    work(backend)
    return [future.exception(0) or future.result(0) for future in futures]


def send_step(backend: ExpertBackend, seed: int = 0, mini_batch: bool = False) -> list[Any]:
    """Run one step and return its results or errors. With ``mini_batch``: two backwards and their commit."""
    name = f"m{seed}" if mini_batch else None
    sent = [backward(backend, seed + part, client="ann", mini_batch=name) for part in range(1 + mini_batch)]
    answers = answered(backend, *sent)
    return answers + (answered(backend, backend.commit(name, client="ann")) if name else [])


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    """Assert that parameters and buffers are equal up to rounding."""
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, rtol=0, atol=1e-12, msg=lambda s, n=name: n + s)
