"""The anchor of a mixture freezes the experts, is not saved, and changes no result."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.mixture.mixture_cases import GRID, WIDTH, World, numbers, routed
from torchweft.core.errors import UsageError
from torchweft.experts.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from torchweft.experts.wire import Kind

OLD_KEYS = ["proj.weight", "proj.bias"]
kinds = pytest.mark.parametrize("kind", [RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts])
Make = Callable[..., RemoteMixtureOfExperts]


def make_mixture(kind: Make, world: World, **more: Any) -> RemoteMixtureOfExperts:
    return routed(kind, world, k_best=2, **more).eval()


def sum_of_squares(mixture: nn.Module, x: Tensor) -> Tensor:
    outputs = mixture(x)
    return sum(output.square().sum() for output in (outputs if isinstance(outputs, tuple) else [outputs]))


@kinds
def test_only_unfrozen_parts_get_gradients(kind: Make) -> None:
    for experts in (False, True):
        for router in (False, True):
            with World(GRID) as world:
                mixture = make_mixture(kind, world)
                expected = sum_of_squares(mixture, numbers(8, WIDTH))
                mixture.requires_grad_(False)
                mixture.anchor.requires_grad_(experts)
                mixture.proj.requires_grad_(router)
                seen = sum_of_squares(mixture, numbers(8, WIDTH))
                assert torch.equal(seen, expected) and seen.requires_grad == (experts or router)
                (seen + torch.zeros((), requires_grad=True)).backward()
                assert bool(world.servers.called(Kind.BACKWARD)) == experts
                assert [weight.grad is not None for weight in mixture.proj.parameters()] == [router] * 2
                assert mixture.anchor.grad is None if not experts else mixture.anchor.grad.tolist() == [0.0]


@kinds
def test_frozen_experts_refuse_inputs_with_gradients(kind: Make) -> None:
    with World(GRID) as world:
        mixture = make_mixture(kind, world).requires_grad_(False)
        x = numbers(8, WIDTH).requires_grad_()
        with pytest.raises(UsageError, match=r"ffn\.\* are frozen here(.|\n)*under no_grad, or unfreeze"):
            mixture(x)
        assert not world.servers.called(Kind.FORWARD)
        with torch.no_grad():
            sum_of_squares(mixture, x)
        sum_of_squares(mixture.requires_grad_(True), x).backward()
        assert world.servers.called(Kind.BACKWARD) and x.grad is not None


@kinds
def test_frozen_untrained_experts_return_gradients(world: World, kind: Make) -> None:
    world.servers.trained = False
    mixture = make_mixture(kind, world)
    x = numbers(8, WIDTH).requires_grad_()
    expected = torch.autograd.grad(sum_of_squares(mixture, x), x)[0]
    mixture.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(sum_of_squares(mixture, x), x)[0], expected)


@kinds
def test_state_dict_holds_the_router_alone(world: World, kind: Make) -> None:
    mixture, other = make_mixture(kind, world), make_mixture(kind, world)
    with torch.no_grad():
        other.proj.weight.zero_()
    assert list(mixture.state_dict()) == OLD_KEYS
    other.load_state_dict(mixture.state_dict(), strict=True)
    assert torch.equal(other.proj.weight, mixture.proj.weight)
    whole = nn.Sequential(nn.Tanh(), mixture)
    assert list(whole.state_dict()) == [f"1.{key}" for key in OLD_KEYS]
    nn.Sequential(nn.Tanh(), other).load_state_dict(whole.state_dict(), strict=True, assign=True)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "proj.bias"(.|\n)*Unexpected.*"more"'):
        other.load_state_dict({"proj.weight": mixture.proj.weight, "more": mixture.proj.weight})


@kinds
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_and_conversions_keep_what_is_frozen(world: World, kind: Make, frozen: bool) -> None:
    mixture = make_mixture(kind, world).requires_grad_(not frozen)
    for other in (copy.deepcopy(mixture), copy.deepcopy(mixture).to(torch.float32), mixture.half().double()):
        assert {p.requires_grad for p in other.parameters()} == {not frozen}
        assert {p.dtype for p in other.parameters()} == {other.proj.weight.dtype}
        sum_of_squares(other, numbers(8, WIDTH))
    assert make_mixture(kind, world, device="meta").anchor.is_meta
    assert copy.deepcopy(mixture).anchor is not mixture.anchor
