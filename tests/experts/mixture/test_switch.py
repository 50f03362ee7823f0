"""The switch mixture weights by probability, drops rows beyond its capacity and balances its router."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.mixture.mixture_cases import GRID, WIDTH, World, fails, hangs, numbers, routed
from torchweft import Pipe
from torchweft.experts.mixture import RemoteSwitchMixtureOfExperts, load_balancing_loss
from torchweft.experts.wire import Kind


def make_mixture(world: World, **more: Any) -> RemoteSwitchMixtureOfExperts:
    return routed(RemoteSwitchMixtureOfExperts, world, **more)


def probabilities(mixture: RemoteSwitchMixtureOfExperts, read: Tensor) -> Tensor:
    logits = nn.functional.linear(read, mixture.proj.weight, mixture.proj.bias)
    return torch.stack([logits[:, a] + logits[:, 2 + b] for a, b in GRID], 1).softmax(1)


def local_output(
    world: World, mixture: RemoteSwitchMixtureOfExperts, x: Tensor, gone: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor]:
    weights = probabilities(mixture, x)
    chosen = weights.detach().topk(mixture.options.k_best, dim=1).indices
    mask = torch.zeros_like(weights).scatter(1, chosen, 1.0)
    mask[:, [i for i, uid in enumerate(sorted(world.here)) if uid in gone]] = 0
    outputs = torch.stack([world.here[uid](x) for uid in sorted(world.here)], 1)
    return ((weights * mask)[..., None] * outputs).sum(1), load_balancing_loss(weights, chosen)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("gone", [(), ("ffn.0.1",), ("ffn.0.0", "ffn.1.0", "ffn.0.1", "ffn.1.1")])
def test_outputs_loss_and_gradients_equal_the_local_mixture(world: World, k: int, gone: tuple[str, ...]) -> None:
    mixture = make_mixture(world, k_best=k).eval()
    mixture(numbers(1, WIDTH))
    world.servers.faults = dict.fromkeys(gone, fails)
    x = numbers(12, WIDTH).requires_grad_()
    local, local_loss = local_output(world, mixture, x, gone)
    seen, loss = mixture(x)
    torch.testing.assert_close(seen, local, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss, local_loss, rtol=0, atol=1e-12)
    (alone,) = torch.autograd.grad(loss, mixture.proj.weight, retain_graph=True)
    assert bool((alone != 0).any()) and world.servers.called(Kind.BACKWARD) == []
    leaves = [x, *mixture.proj.parameters()]
    expected = torch.autograd.grad((local**2).sum() + local_loss, leaves)
    for a, b in zip(torch.autograd.grad((seen**2).sum() + loss, leaves), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_jitter_affects_the_router_in_training_only(world: World) -> None:
    mixture = make_mixture(world, jitter_eps=0.5, k_best=4)
    x = numbers(8, WIDTH)
    before = x.clone()
    torch.manual_seed(5)
    jittered, _ = mixture(x)
    assert torch.equal(x, before)
    torch.manual_seed(5)
    read = x * torch.empty_like(x).uniform_(0.5, 1.5)
    outputs = torch.stack([world.here[uid](x) for uid in sorted(world.here)], 1)
    torch.testing.assert_close(jittered, (probabilities(mixture, read)[..., None] * outputs).sum(1))
    mixture.eval()
    state = torch.get_rng_state()
    torch.testing.assert_close(mixture(x)[0], local_output(world, mixture, x)[0])
    assert torch.equal(torch.get_rng_state(), state)
    still = make_mixture(world, jitter_eps=0.0, k_best=4)
    torch.testing.assert_close(still(x)[0], local_output(world, still, x)[0])


def test_rows_beyond_the_capacity_are_dropped(world: World) -> None:
    mixture = make_mixture(world, capacity_factor=0.5, k_min=1, allow_zero_outputs=False).eval()
    x = numbers(32, WIDTH)
    free = make_mixture(world).eval()
    world.servers.rows.clear()
    y, _ = mixture(x)
    assert max(world.servers.rows) == 4  # half of 32 samples / 4 experts
    whole, _ = free(x)
    dropped = (y == 0).all(1)
    assert int(dropped.sum()) == 32 - sum(world.servers.rows[:4]) == mixture.statistics().dropped > 0
    torch.testing.assert_close(y[~dropped], whole[~dropped])
    chosen = probabilities(mixture, x).argmax(1)
    for expert in range(4):
        mine = (chosen == expert).nonzero()[:, 0].tolist()
        assert [i for i in mine if not dropped[i]] == mine[:4]


def test_hanging_expert_costs_only_its_own_samples(world: World) -> None:
    mixture = make_mixture(world, timeout_after_k_min=0.05).eval()
    x = numbers(32, WIDTH).requires_grad_()
    mixture(x)
    world.servers.faults = {"ffn.0.0": hangs}
    y, loss = mixture(x)
    torch.testing.assert_close(y, local_output(world, mixture, x, ("ffn.0.0",))[0])
    (y.sum() + loss).backward()
    assert mixture.statistics().failed == {"deadline": 1}


def test_recomputed_stage_keeps_its_jitter() -> None:
    class Residual(nn.Module):
        def __init__(self, mixture: nn.Module) -> None:
            super().__init__()
            self.mixture = mixture

        def forward(self, x: Tensor) -> Tensor:
            y, loss = self.mixture(x)
            return x + y + loss

    with World(GRID) as world:
        mixture = make_mixture(world, jitter_eps=0.3, accumulate=True)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Residual(mixture))
        x, gradients = numbers(8, WIDTH), dict[str, list[Tensor]]()
        for checkpoint in ("never", "always"):
            torch.manual_seed(1)
            layers.zero_grad()
            pipe = Pipe(layers, balance=[1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint=checkpoint)
            pipe(x).pow(2).sum().backward()
            gradients[checkpoint] = [p.grad.clone() for p in layers.parameters()]
        for a, b in zip(*gradients.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
