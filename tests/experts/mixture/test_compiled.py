"""A mixture inside a compiled model runs eagerly: the compiled graph breaks before and after it."""

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


class AroundMixture(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.mixture(self.before(x).tanh())
        tensors: list[Tensor] = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def take_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = [x, *model.parameters()]
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


@pytest.fixture(autouse=True)
def reset_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_values_and_gradients_are_those_of_the_plain_model(kind: Callable[..., nn.Module], backend: str) -> None:
    with World(GRID) as world:
        torch.manual_seed(0)
        model = AroundMixture(kind(**world.options(grid_size=[2, 2], retry=NEVER, k_best=2))).eval()
        compiled = torch.compile(model, backend=backend)
        for rows in (4, 5, 7):
            x = numbers(rows, WIDTH, seed=rows).requires_grad_()
            results: list[list[Tensor]] = []
            for function in (model, compiled):
                value = function(x)
                value.backward()
                results.append([value.detach(), *take_gradients(model, x)])
            for plain, traced in zip(*results, strict=True):
                torch.testing.assert_close(plain, traced, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_compiler_sees_no_calls_and_does_not_recompile(kind: Callable[..., nn.Module]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with World(GRID) as world:
        model = AroundMixture(kind(**world.options(grid_size=[2, 2], retry=NEVER)))
        compiled = torch.compile(model, backend=backend, dynamic=True)
        for rows in (4, 5, 6, 7, 8, 9):
            compiled(numbers(rows, WIDTH)).backward()
        nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
        assert not [name for name in nodes if "topk" in name or "softmax" in name]
        assert 1 <= len(graphs) <= 3, "one graph before and one after the mixture, without recompilation"
