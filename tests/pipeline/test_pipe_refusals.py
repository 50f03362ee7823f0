"""Gradients that a cut would lose raise an error: side channels, opaque containers, other transforms."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tests.pipeline.pipe_cases import (
    CUTS,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    piped,
    rows,
    runs,
)
from torchweft import Pipe
from torchweft.core.errors import BatchError, SpecError, UsageError

every_cut = pytest.mark.parametrize(("executor", "checkpoint"), runs(*CUTS))


class Balanced(nn.Module):
    """Stores an auxiliary loss, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.router = nn.Linear(4, 4), nn.Linear(4, 4)
        self.aux: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.aux.append(self.router(x).square().sum())
        return self.line(x)


def with_aux(model: nn.Module, layer: Balanced, x: Tensor) -> None:
    """Take one step whose loss includes the stored auxiliary losses."""
    (model(x).square().sum() + torch.stack(layer.aux).sum()).backward()


@pytest.mark.parametrize("executor", [*CUTS, "auto"])
@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_gradient_that_would_end_at_a_cut_is_refused(executor: str, checkpoint: str, needs_gradient: bool) -> None:
    layer = Balanced()
    layers = [nn.Identity(), layer] if needs_gradient else [nn.Linear(4, 4), layer]
    pipe, _ = piped(nn.Sequential(*layers).double(), executor=executor, checkpoint=checkpoint, balance=[1, 1])
    with pytest.raises(UsageError, match=r"is used outside.*\(., 4\).*executor='graph'"):
        with_aux(pipe, layer, rows(7, 4).requires_grad_(needs_gradient))


def test_escaped_tensor_is_exact_without_a_cut() -> None:
    pipe, plain = piped(nn.Sequential(nn.Linear(4, 4), Balanced()).double(), executor="graph", checkpoint="never")
    with_aux(pipe, pipe[1], rows(7, 4))
    with_aux(plain, plain[1], rows(7, 4))
    assert_gradients_equal(pipe, plain)


@dataclass
class Known:
    x: Tensor


pytree.register_dataclass(Known)


@dataclass(slots=True)
class Slim:
    x: Tensor


class Features(dict[str, Tensor]):
    @property
    def x(self) -> Tensor:
        return self["x"]


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.rest = {"x": [x]}

    @property
    def x(self) -> Tensor:
        return self.rest["x"][0]


HIDING = [Slim, lambda x: Features(x=x), Holder]


class Wrap(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Open(nn.Module):
    def forward(self, wrapped: Any) -> Tensor:
        return wrapped.x


def wrapped(make: Any) -> nn.Sequential:
    return nn.Sequential(*chain(4, 5), Wrap(make), Open(), nn.Linear(5, 2)).double()


@every_cut
@pytest.mark.parametrize("make", HIDING)
def test_opaque_container_between_stages_is_refused(executor: str, checkpoint: str, make: Any) -> None:
    pipe, plain = piped(wrapped(make), executor=executor, checkpoint=checkpoint, balance=[2, 2])
    with torch.no_grad():
        assert torch.equal(pipe(rows(2, 4)), torch.cat([plain(row) for row in rows(2, 4).split(1)]))
    with pytest.raises(
        SpecError, match=r"a result is a (Slim|Features|Holder) with tensors inside.*register_dataclass"
    ):
        backward(pipe, rows(7, 4))


@every_cut
@pytest.mark.parametrize("make", [Known, *HIDING])
def test_opaque_container_inside_a_stage_is_accepted(executor: str, checkpoint: str, make: Any) -> None:
    """A container that is registered with pytree is accepted between stages too."""
    pipe, plain = piped(
        wrapped(make), executor=executor, checkpoint=checkpoint, balance=[2, 2] if make is Known else [3, 1]
    )
    assert_alike(pipe, plain)


@pytest.mark.parametrize("make", HIDING)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("executor", CUTS)
def test_an_output_that_hides_tensors_is_refused(executor: str, chunks: int, make: Any) -> None:
    pipe, _ = piped(nn.Sequential(*chain(4, 5), Wrap(make)), executor=executor, chunks=chunks, checkpoint="never")
    with pytest.raises(SpecError, match="with tensors inside"):
        pipe(rows(7, 4))
    graph, _ = piped(nn.Sequential(*chain(4, 5), Wrap(make)), executor="graph", chunks=3)
    with pytest.raises(BatchError, match="with tensors inside, which cannot be joined"):
        graph(rows(7, 4))


class Shift(nn.Module):
    def forward(self, x: Tensor, by: Any) -> Tensor:
        return x + by.x


@every_cut
@pytest.mark.parametrize("make", HIDING)
def test_an_argument_that_hides_a_trainable_tensor_is_refused(executor: str, checkpoint: str, make: Any) -> None:
    pipe, _ = piped(nn.Sequential(Shift(), nn.Linear(4, 2)).double(), executor=executor, checkpoint=checkpoint)
    shift = torch.ones(4, dtype=torch.float64)
    backward(pipe, rows(7, 4), make(shift))  # every micro-batch gets the same object
    with pytest.raises(SpecError, match=r"an argument is a (Slim|Features|Holder) with tensors inside"):
        backward(pipe, rows(7, 4), make(shift.requires_grad_()))


dual: Any = forward_ad


def tangent(model: nn.Module, x: Tensor) -> Tensor:
    with dual.dual_level():
        return dual.unpack_dual(model(dual.make_dual(x, torch.ones_like(x)))).tangent


def tangent_of_a_parameter(model: nn.Module, x: Tensor) -> Tensor:
    with dual.dual_level():
        duals = {name: dual.make_dual(value, torch.ones_like(value)) for name, value in model.named_parameters()}
        return dual.unpack_dual(torch.func.functional_call(model, duals, (x,))).tangent


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: model(x).sum())(x)


def vectorized(model: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, jacobian(model, x, vectorize=True))


TRANSFORMS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], str]] = {
    "forward mode": (tangent, "has a tangent"),
    "forward mode over parameters": (tangent_of_a_parameter, "has a tangent"),
    "jvp": (lambda model, x: torch.func.jvp(model, (x,), (x,))[1], r"torch\.func"),
    "vjp": (lambda model, x: torch.func.vjp(model, x)[1](torch.ones(7, 3).double())[0], r"torch\.func"),
    "grad": (gradient, r"torch\.func"),
    "vmap": (lambda model, x: torch.func.vmap(model)(torch.stack([x, 2 * x])), r"torch\.func"),
    "vectorized jacobian": (vectorized, "several gradients were asked for at once"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("tracked", [True, False])
def test_transforms_that_miss_a_cut_are_refused(name: str, tracked: bool) -> None:
    """They are exact with executor="graph", which does not cut."""
    transform, why = TRANSFORMS[name]
    for executor in (*CUTS, "auto", "graph"):
        pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint="never")
        with nullcontext() if tracked else torch.no_grad():
            if executor != "graph":
                with pytest.raises(UsageError, match=f"{why}.*executor='graph'"):
                    transform(pipe, rows(7, 4))
            else:
                assert_close(transform(pipe, rows(7, 4)), transform(plain, rows(7, 4)))


def test_inside_of_a_dual_level_a_step_without_tangents_is_run() -> None:
    pipe, plain = piped(chain(4, 5, 3))
    with dual.dual_level():
        assert_alike(pipe, plain)


def test_vectorized_jacobian_is_refused_after_the_choice_too() -> None:
    pipe, _ = piped(chain(4, 5, 3), executor="auto", checkpoint="never")
    for _ in range(20):
        backward(pipe, rows(7, 4).requires_grad_())
    assert pipe.statistics()["chosen"]
    with pytest.raises(UsageError, match="several gradients"):
        jacobian(pipe, rows(7, 4), vectorize=True)


RECORDERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jit.trace": torch.jit.trace,
    "export": lambda pipe, x: torch.export.export(pipe, (x,)),
    "export strictly": lambda pipe, x: torch.export.export(pipe, (x,), strict=True),
    "make_fx": lambda pipe, x: make_fx(pipe)(x),
    "symbolic_trace": lambda pipe, x: torch.fx.symbolic_trace(pipe),
    "symbolic_trace of more": lambda pipe, x: torch.fx.symbolic_trace(nn.Sequential(nn.Tanh(), pipe)),
}


@pytest.mark.parametrize("executor", [*CUTS, "auto", "graph"])
@pytest.mark.parametrize("record", RECORDERS)
def test_tracing_a_pipe_suggests_the_sequential(record: str, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("forward", "_forward"):  # without the type checks of the tests, which symbolic_trace cannot pass
        monkeypatch.setattr(Pipe, method, unwrap(getattr(Pipe, method)))
    (pipe, plain), x = piped(chain(3, 4, 2), executor=executor), rows(4, 3)
    error = Unsupported if record == "export strictly" else UsageError  # Dynamo wraps the error
    with warnings.catch_warnings(), pytest.raises(error, match=r"the nn.Sequential .* or nn.Sequential\(\*pipe\)"):
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
        RECORDERS[record](pipe, x)
    assert_close(torch.export.export(nn.Sequential(*pipe), (x,)).module()(x), plain(x))


def test_a_step_inside_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _ = piped(chain(4, 4))
    capturing: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.append(True) or True)
    pipe(rows(4, 4))
    assert torch.cuda.is_initialized() or not capturing, "without a GPU, the pipe must not call it"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match=r"while a CUDA graph is captured.*outside of torch\.cuda\.graph"):
        pipe(rows(4, 4))


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_gpu_that_captures_a_graph_refuses_a_step() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=2, devices=["cuda:0"] * 2)
    x = torch.ones(4, 4, device="cuda:0")
    with pytest.raises(UsageError, match="while a CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pipe(x)
    assert pipe(x).shape == (4, 4)


def test_layers_replaced_in_the_sequential_are_refused() -> None:
    """The pipe would go on with the former layers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    pipe = Pipe(model, chunks=2, balance=[2, 1], devices=["cpu"] * 2)
    pipe(torch.randn(4, 4))
    model[2] = nn.Linear(4, 2)
    with pytest.raises(UsageError, match="were replaced after the Pipe was made"):
        pipe(torch.randn(4, 4))
