"""Helpers for the tests of Pipe: its executors and schedules, small models, and comparisons of two models."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft import Pipe, pop, skippable, stash

CHECKPOINTS = ("always", "except_last", "never")
CUTS = ("serial", "threads")
"""The executors that cut stages out of autograd, one segment per stage."""
EXECUTORS = ("serial", "threads", "graph")


def runs(*executors: str) -> list[Any]:
    """All pairs of executor and checkpoint mode. Without --all, half of them run, with every executor and mode."""
    quick = {
        "serial": ("always", "never"),
        "threads": ("always", "except_last"),
        "graph": ("except_last",),
        "auto": ("never",),
    }
    return [
        pytest.param(executor, mode, id=f"{executor}-{mode}", marks=() if mode in quick[executor] else pytest.mark.long)
        for executor in executors
        for mode in CHECKPOINTS
    ]


every_run = pytest.mark.parametrize(("executor", "checkpoint"), runs(*EXECUTORS, "auto"))
every_cut_run = pytest.mark.parametrize(("executor", "checkpoint"), runs(*CUTS, "auto"))

# For tests of models and of calls of which a Pipe warns.
with_batch_norm = pytest.mark.filterwarnings("ignore:batch norm in a Pipe")
without_target = pytest.mark.filterwarnings("ignore:the pipe has a loss, but no target= was given")

TABLE = "0F0,0F1,,0B0,0F2,0B2,0B1\n1F0,1B0,1F1,1F2,1B2,1B1"
"""A valid custom schedule."""
SPLIT = "0F0,0F1,0F2,0I0,0W0,0I1,0I2,0W2,0W1\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"
every_schedule = pytest.mark.parametrize(
    "schedule", ("gpipe", "1f1b", TABLE, SPLIT), ids=("gpipe", "1f1b", "table", "split")
)


@skippable(stash=["early"])
class Early(nn.Module):
    """Stashes its input."""

    def forward(self, x: Tensor) -> Any:
        yield stash("early", x)
        return x


@skippable(pop=["early"])
class Late(nn.Module):
    """Adds the stashed tensor."""

    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("early"))


def chain(*widths: int) -> nn.Sequential:
    """Linear layers with a tanh between them, in float64, with fixed weights."""
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def rows(count: int, *shape: int, seed: int = 0) -> Tensor:
    """`count` random rows of the given shape, in float64."""
    return torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def piped(model: nn.Sequential, **settings: Any) -> tuple[Pipe, nn.Sequential]:
    """A Pipe of the model, by default with two CPU stages, and a plain copy of the model."""
    plain = copy.deepcopy(model)
    settings = {"chunks": 3, "devices": ["cpu", "cpu"], **settings}
    return Pipe(model, **settings), plain


def pickle_copy(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def torch_save_copy(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def backward(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Run one step with the sum of squares as loss, and return its output."""
    output = model(*args, **kwargs)
    output.square().sum().backward()
    return output


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of all parameters by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients_equal(model: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    """Check that both models have the same parameters and gradients. None must match None."""
    seen, expected = gradients(model), gradients(plain)
    assert list(seen) == list(expected)
    for name, gradient in expected.items():
        if gradient is None:
            assert seen[name] is None, f"{name} should have no gradient"
        else:
            torch.testing.assert_close(
                seen[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )


def assert_alike(pipe: nn.Module, plain: nn.Module, act: Callable[[nn.Module], Any] | None = None) -> None:
    """Check that a call, by default a step on 7 rows of 4, gives the same values and gradients for both models."""
    act = act or (lambda model: backward(model, rows(7, 4)))
    assert_close(act(pipe), act(plain))
    assert_gradients_equal(pipe, plain)


def assert_close(seen: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare up to rounding, because operators round differently for another number of rows."""
    torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)
