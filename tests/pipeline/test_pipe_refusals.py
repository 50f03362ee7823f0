"""What a cut cannot carry is refused, not lost: tensors that leave by another door, containers nobody knows."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.pipeline.pipe_cases import CHECKPOINTS, CUTS, assert_gradients_equal, backward, chain, piped, rows
from weft.core.errors import BatchError, SpecError, UsageError

every_cut = pytest.mark.parametrize(("executor", "checkpoint"), [(e, c) for e in CUTS for c in CHECKPOINTS])


class Balanced(nn.Module):
    """Keeps a loss of its own, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.router = nn.Linear(4, 4), nn.Linear(4, 4)
        self.aux: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.aux.append(self.router(x).square().sum())
        return self.line(x)


def with_aux(model: nn.Module, layer: Balanced, x: Tensor) -> None:
    """One step whose loss has what the layer kept."""
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


def test_a_tensor_that_leaves_by_another_door_is_right_where_nothing_is_cut() -> None:
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
def test_a_container_that_hides_tensors_between_stages_is_refused(executor: str, checkpoint: str, make: Any) -> None:
    pipe, plain = piped(wrapped(make), executor=executor, checkpoint=checkpoint, balance=[2, 2])
    with torch.no_grad():
        assert torch.equal(pipe(rows(2, 4)), torch.cat([plain(row) for row in rows(2, 4).split(1)]))
    with pytest.raises(
        SpecError, match=r"a result is a (Slim|Features|Holder) with tensors inside.*register_dataclass"
    ):
        backward(pipe, rows(7, 4))


@every_cut
@pytest.mark.parametrize("make", [Known, *HIDING])
def test_a_container_may_hide_tensors_inside_of_a_stage_or_be_known(executor: str, checkpoint: str, make: Any) -> None:
    pipe, plain = piped(
        wrapped(make), executor=executor, checkpoint=checkpoint, balance=[2, 2] if make is Known else [3, 1]
    )
    backward(pipe, rows(7, 4))
    backward(plain, rows(7, 4))
    assert_gradients_equal(pipe, plain)


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
    backward(pipe, rows(7, 4), make(shift))  # every micro-batch gets it whole, like any other object
    with pytest.raises(SpecError, match=r"an argument is a (Slim|Features|Holder) with tensors inside"):
        backward(pipe, rows(7, 4), make(shift.requires_grad_()))
