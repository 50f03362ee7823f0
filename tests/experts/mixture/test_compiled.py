"""A mixture inside of a compiled model is called as it is: the compiled graph ends before it, and begins after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.mixture.mixture_cases import GRID, WIDTH, World, numbers
from torchweft.experts.client.retry import NEVER
from torchweft.experts.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # by the type checks of this suite, which are traced too
KINDS = [RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts]


class Around(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        found = self.mixture(self.before(x).tanh())
        tensors: list[Tensor] = [found] if isinstance(found, Tensor) else list(found)
        return torch.stack([each.square().sum() for each in tensors]).sum()


def left(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = [x, *model.parameters()]
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]
    for each in leaves:
        each.grad = None
    return found


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_values_and_gradients_are_those_of_the_plain_model(kind: Callable[..., nn.Module], backend: str) -> None:
    with World(GRID) as world:
        torch.manual_seed(0)
        model = Around(kind(**world.options(grid_size=[2, 2], retry=NEVER, k_best=2))).eval()
        compiled = torch.compile(model, backend=backend)
        for rows in (4, 5, 7):
            x = numbers(rows, WIDTH, seed=rows).requires_grad_()
            found: list[list[Tensor]] = []
            for each in (model, compiled):
                value = each(x)
                value.backward()
                found.append([value.detach(), *left(model, x)])
            for seen, wanted in zip(*found, strict=True):
                torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_compiler_sees_no_calls_and_does_not_recompile(kind: Callable[..., nn.Module]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with World(GRID) as world:
        model = Around(kind(**world.options(grid_size=[2, 2], retry=NEVER)))
        compiled = torch.compile(model, backend=backend, dynamic=True)
        for rows in (4, 5, 6, 7, 8, 9):
            compiled(numbers(rows, WIDTH)).backward()
        nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
        assert not [name for name in nodes if "topk" in name or "softmax" in name]
        assert 1 <= len(graphs) <= 3, "before and behind, each once"
